"""fedvlm: federated adaptation of frozen vision-language models.

import fedvlm
run = fedvlm.run("fedot", data="path/to/images", unseen="sketch", rounds=50)
run.table(), run.figure(), run.predict("image.jpg", client="photo")
fedvlm.bench(["fedot", "fedclip"], data="path/to/images", seeds=[50, 77, 98]).table()
"""

from typing import TYPE_CHECKING

from fedvlm.system.lazy import lazy

if TYPE_CHECKING:
    from fedvlm.api import Description as Description
    from fedvlm.api import Run as Run
    from fedvlm.api import Runs as Runs
    from fedvlm.api import describe as describe
    from fedvlm.api import load as load
    from fedvlm.api import methods as methods
    from fedvlm.api import run as run
    from fedvlm.api import runs as runs
    from fedvlm.data.formats.arrays import dataset as dataset
    from fedvlm.errors import FedvlmError as FedvlmError
    from fedvlm.predict.predictor import Predictor as Predictor
    from fedvlm.studies.choose import choose as choose
    from fedvlm.studies.comparison import bench as bench

__version__ = "0.2.0"

_HOMES = {
    "fedvlm.api": ("Description", "Run", "Runs", "describe", "load", "methods", "run", "runs"),
    "fedvlm.data.formats.arrays": ("dataset",),
    "fedvlm.errors": ("FedvlmError",),
    "fedvlm.predict.predictor": ("Predictor",),
    "fedvlm.studies.choose": ("choose",),
    "fedvlm.studies.comparison": ("bench",),
}
__all__ = sorted(name for names in _HOMES.values() for name in names)
__getattr__, __dir__ = lazy(__name__, _HOMES)
