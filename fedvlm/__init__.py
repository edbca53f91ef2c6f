"""fedvlm: federated adaptation of frozen vision-language models."""

__version__ = "0.1.0"
