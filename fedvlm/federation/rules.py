"""A site's own rules (site.yaml): what it answers, whatever the server asks. Without a file, the defaults below hold."""

from __future__ import annotations

from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING

from fedvlm.core.records import build
from fedvlm.errors import FedvlmError, nearest

if TYPE_CHECKING:
    from fedvlm.config.config import Config
    from fedvlm.federation.plan import Agreed

STEPS = ("train", "adjust", "validate", "score", "diagnose", "secure.*")


@dataclass(frozen=True)
class Rules:
    methods: list[str] = field(default_factory=lambda: ["*"])  # names of methods, with * for any letters
    merges: list[str] = field(default_factory=lambda: ["*"])
    steps: list[str] = field(default_factory=lambda: list(STEPS))
    most_bytes: int = 1 << 30  # that one answer may have
    smallest_cohort: int = 1  # sites that must take part in a run
    epsilon: float = 0.0  # the most that a run may spend (dp=); 0: runs without differential privacy are answered, too
    secure: bool = False  # only runs with secure aggregation are answered
    counts: bool = True  # false: how many examples this site has is not told, and it counts as one
    reveals: bool = False  # true: also methods whose clients send more of their data than parameters and numbers

    @classmethod
    def read(cls, path: str) -> Rules:
        if not path:
            return cls()
        import yaml

        try:
            raw = yaml.safe_load(Path(path).read_text(encoding="utf-8")) or {}
            if isinstance(raw, dict) and (odd := [k for k in raw if k not in cls.__dataclass_fields__]):
                raise ValueError(f"unknown rule '{odd[0]}'; {nearest(str(odd[0]), cls.__dataclass_fields__)}")
            return build(cls, raw)
        except (OSError, ValueError, yaml.YAMLError) as error:
            raise FedvlmError(f"rules={path}: {error}") from error

    def check_run(self, method: str, merge: str, config: Config, reveals: str) -> None:
        """An error where this site does not take part in such a run."""
        for words, name, what in ((self.methods, method, "method"), (self.merges, merge, "merge")):
            if not any(fnmatch(name, w) for w in words):
                raise FedvlmError(f"this site's rules allow no {what} {name}, only {', '.join(words)}")
        if reveals and not self.reveals:
            raise FedvlmError(f"this site's rules allow no method whose clients send {reveals}")
        if self.secure and not config.secure:
            raise FedvlmError("this site's rules ask for secure=true")
        if self.epsilon and config.dp == "none":
            raise FedvlmError(
                f"this site's rules ask for differential privacy: dp=client epsilon={self.epsilon:g} or less"
            )
        if self.epsilon and not 0 < config.epsilon <= self.epsilon:
            raise FedvlmError(f"this site's rules allow epsilon={self.epsilon:g} at the most; give such a target")

    def check_cohort(self, agreed: Agreed) -> None:
        if agreed.sites < self.smallest_cohort:
            raise FedvlmError(f"{agreed.sites} sites take part, and this site's rules ask for {self.smallest_cohort}")

    def check_step(self, step: str) -> None:
        if not any(fnmatch(step, w) for w in self.steps):
            raise FedvlmError(f"this site's rules do not answer {step}")

    def check_privacy(self, step: str, private: bool) -> None:
        """A server that asked for a private run must have told how, before the site trains."""
        if self.epsilon and not private and (step == "train" or step.startswith("secure.")):
            raise FedvlmError("this site's rules ask for differential privacy, and the server has not said how")

    def check_answer(self, frame: bytes) -> None:
        if len(frame) > self.most_bytes:
            raise FedvlmError(f"an answer of {len(frame):,} bytes is over this site's rule of {self.most_bytes:,}")
