"""fedvlm: federated adaptation of frozen vision-language models."""

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fedvlm.use import Predictor

__version__ = "0.1.0"


def load(folder: str | Path) -> "Predictor":
    """What `fedvlm export` wrote, ready to predict."""
    from fedvlm import use

    return use.load(folder)
