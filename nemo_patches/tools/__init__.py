"""What a person runs."""

# What the commands import, for whoever runs a checkout that is not installed; tests compare it with pyproject.toml.
NEEDED = "pip install typer rich omegaconf hydra-core pyyaml packaging msgspec numpy wrapt"
