"""What a server may ask a client to do; nothing else crosses between them. One file, one step."""

from fedvlm.errors import FedvlmError, nearest
from fedvlm.steps.adjust import Adjust
from fedvlm.steps.base import Step
from fedvlm.steps.diagnose import Diagnose
from fedvlm.steps.novel import Novel
from fedvlm.steps.score import Score
from fedvlm.steps.train import Train
from fedvlm.steps.validate import Validate

STEPS: dict[str, Step] = {
    "train": Train(),
    "adjust": Adjust(),
    "validate": Validate(),
    "score": Score(),
    "novel.shared": Novel("shared"),
    "novel.personal": Novel("personal"),
    "diagnose": Diagnose(),
}


def find(name: str) -> Step:
    if name not in STEPS:
        raise FedvlmError(f"unknown step '{name}'; {nearest(name, STEPS)}")
    return STEPS[name]
