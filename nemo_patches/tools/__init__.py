"""What a person runs."""

# What the commands import, the extra `tools`; tests compare it with pyproject.toml.
NEEDED = "pip install typer rich omegaconf hydra-core pyyaml packaging msgspec numpy"
