"""What a person runs."""

# What the commands import or run, the extra `tools`; tests compare it with pyproject.toml.
NEEDED = "pip install typer rich omegaconf hydra-core pyyaml packaging msgspec py-spy"

# The package of a module that is called otherwise.
NAMES = {
    "yaml": "pyyaml",
    "hydra": "hydra-core",
    "nemo": "nemo_toolkit[asr]",
    "sklearn": "scikit-learn",
}


def counted(number: int, noun: str, plural: str = "s") -> str:
    """For sentences: "1 rank", "2 ranks"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}{plural}"
