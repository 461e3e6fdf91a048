"""What a person runs."""

# What the commands import, the extra `tools`; tests compare it with pyproject.toml.
NEEDED = "pip install typer rich omegaconf hydra-core pyyaml packaging msgspec numpy"

# The package of a module that is called otherwise.
NAMES = {"yaml": "pyyaml", "hydra": "hydra-core", "nemo": "nemo_toolkit[asr]", "sklearn": "scikit-learn"}
