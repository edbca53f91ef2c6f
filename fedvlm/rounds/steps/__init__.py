"""What a server may ask a client to do; nothing else crosses between them. One file, one step."""

from fedvlm.errors import FedvlmError, nearest
from fedvlm.rounds.steps.adjust import Adjust
from fedvlm.rounds.steps.base import Step
from fedvlm.rounds.steps.diagnose import Diagnose
from fedvlm.rounds.steps.novel import Novel
from fedvlm.rounds.steps.score import ScoreStep
from fedvlm.rounds.steps.train import Train
from fedvlm.rounds.steps.validate import Validate

STEPS: dict[str, Step] = {
    "train": Train(),
    "adjust": Adjust(),
    "validate": Validate(),
    "score": ScoreStep(),
    "novel.shared": Novel("shared"),
    "novel.personal": Novel("personal"),
    "diagnose": Diagnose(),
}


def step_of(name: str) -> Step:
    if name not in STEPS:
        raise FedvlmError(f"unknown step '{name}'; {nearest(name, STEPS)}")
    return STEPS[name]
