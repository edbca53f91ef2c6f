"""Runs on other machines: one file per launcher (slurm, ray). See `base`."""

import importlib.util

from fedvlm.errors import FedvlmError

HERE = "none"
PACKAGES = {"slurm": "submitit", "ray": "ray"}


def check(name: str) -> None:
    """An error where the launcher's package is not installed."""
    if name != HERE and importlib.util.find_spec(PACKAGES[name]) is None:
        raise FedvlmError(f'launcher={name} needs {PACKAGES[name]}; install it with `pip install "fedvlm[{name}]"`')
