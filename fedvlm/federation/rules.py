"""A site's own rules (site.yaml): what it answers, whatever the server asks. Without a file, the defaults below hold."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, is_dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING

from fedvlm.core.records import build
from fedvlm.errors import FedvlmError, Refused, nearest

if TYPE_CHECKING:
    from fedvlm.config.config import Config

# embeddings: of private images, or their class means. pixels: the gradients of whole networks, which hold images
REVEALS = ("embeddings", "pixels")
DEVICES = ("auto", "cpu", "cuda", "mps")
RAW = ("pixels", "text")  # views of adapters that are trained on the examples themselves
STEPS = ("train", "adjust", "validate", "score", "diagnose", "secure.*")


@dataclass(frozen=True)
class Rules:
    methods: list[str] = field(default_factory=lambda: ["*"])  # names of methods, with * for any letters
    merges: list[str] = field(default_factory=lambda: ["*"])
    steps: list[str] = field(default_factory=lambda: list(STEPS))
    most_bytes: int = 1 << 30  # that one answer may have
    smallest_cohort: int = 1  # sites that must take part in a run
    epsilon: float = 0.0  # the most that all runs together may spend (dp=); 0: runs without privacy are answered, too
    epsilon_per_run: float = 0.0  # the most that a run may spend; 0: all of epsilon
    delta: float = 0.0  # of epsilon; 0: 1/n^1.1 of this site's n training examples
    secure: bool = False  # only runs with secure aggregation are answered
    counts: bool = True  # false: how many examples this site has is not told, and it counts as one
    smallest_examples: int = 8  # behind any number that leaves: of training and of each class in it, of a scored split
    device: str = "auto"  # where runs train here, of DEVICES; auto: a GPU, if any, for networks and prompts
    memory: float = 0.0  # GB that the process of a run may take here, on Linux; 0: all that there are
    step_seconds: float = 0.0  # an answer that takes longer is not given; 0: however long it takes
    answers_every: float = (
        0.0  # seconds: an answer leaves at a multiple of them, so that its time tells less; 0: at once
    )
    reveals: list[str] = field(default_factory=list)  # what methods may show beside updates and scores, of REVEALS

    @classmethod
    def read(cls, path: str) -> Rules:
        if not path:
            return cls()
        import yaml

        try:
            raw = yaml.safe_load(Path(path).read_text(encoding="utf-8")) or {}
            if isinstance(raw, dict) and (odd := [k for k in raw if k not in cls.__dataclass_fields__]):
                raise ValueError(f"unknown rule '{odd[0]}'; {nearest(str(odd[0]), cls.__dataclass_fields__)}")
            if isinstance(raw, dict) and isinstance(raw.get("reveals"), bool | str):  # true: as before there were two
                raw["reveals"] = {True: ["embeddings"], False: []}.get(raw["reveals"], [raw["reveals"]])
            for name in ("epsilon", "epsilon_per_run", "delta"):  # YAML reads 1e-5 as text
                if isinstance(raw, dict) and isinstance(raw.get(name), str):
                    raw[name] = float(raw[name])
            rules = build(cls, raw)
            if odd := sorted({*rules.reveals} - {*REVEALS}):
                raise ValueError(f"reveals: '{odd[0]}'; {nearest(odd[0], REVEALS)}")
            if rules.device not in DEVICES:
                raise ValueError(f"device: '{rules.device}'; {nearest(rules.device, DEVICES)}")
            return rules
        except (OSError, ValueError, yaml.YAMLError) as error:
            raise FedvlmError(f"rules={path}: {error}") from error

    def check_run(self, method: str, merge: str, config: Config, reveals: str = "", view: str = "") -> None:
        """An error where this site does not take part in such a run. `reveals`: the merge's, `view`: what is trained on."""
        for words, name, what in ((self.methods, method, "method"), (self.merges, merge, "merge")):
            if not any(fnmatch(name, w) for w in words):
                raise Refused(f"this site's rules allow no {what} {name}, only {', '.join(words)}")
        if reveals and "embeddings" not in self.reveals:
            raise Refused(f"this site's rules allow no method whose clients send {reveals} (reveals: embeddings)")
        if view in RAW and "pixels" not in self.reveals:
            raise Refused("this site's rules allow no training of whole networks on images or text (reveals: pixels)")
        if self.secure and not config.secure:
            raise Refused("this site's rules ask for secure=true")
        if self.epsilon and not (config.dp == "example" or (config.dp == "client" and config.noise_at == "client")):
            raise Refused(
                "this site's rules ask for differential privacy by noise that it adds itself: dp=example, or dp=client "
                f"noise_at=client, with epsilon={self.epsilon:g} or less"
            )
        most = self.epsilon_per_run or self.epsilon
        if most and not 0 < config.epsilon <= most:
            raise Refused(f"this site's rules allow epsilon={most:g} a run at the most; give such a target")

    def check_examples(self, train: int, by_class: list[int]) -> None:
        """An error where too few examples are behind the numbers of training."""
        if 0 < min([train, *(n for n in by_class if n)]) < self.smallest_examples:
            raise Refused(
                f"there are fewer training examples here, in all or of a class, than the {self.smallest_examples} that "
                "this site's rules ask for (smallest_examples)"
            )

    def check_paths(self, parts: list[object]) -> None:
        """An error where a part would open a file: whether there is one must not be told."""
        for part in parts:
            for f in fields(part) if is_dataclass(part) else ():
                if "path" in f.metadata.get("traits", ()) and getattr(part, f.name):
                    raise Refused(f"{f.name}= names a file, and a plan names none at a site; leave it out")

    def check_cohort(self, sites: int) -> None:
        if sites < self.smallest_cohort:
            raise Refused(f"{sites} sites train, and this site's rules ask for {self.smallest_cohort}")

    def check_step(self, step: str) -> None:
        if not any(fnmatch(step, w) for w in self.steps):
            raise Refused(f"this site's rules do not answer {step}")

    def check_answer(self, frame: bytes) -> None:
        if len(frame) > self.most_bytes:
            raise Refused(f"an answer of {len(frame):,} bytes is over this site's rule of {self.most_bytes:,}")


def sentences(rules: Rules) -> list[str]:
    """What could leave under these rules, and with which of the installed methods."""
    from fedvlm.config.config import resolve
    from fedvlm.config.recipe import recipe_names

    private = {"dp": "example", "epsilon": rules.epsilon_per_run or rules.epsilon} if rules.epsilon else {}
    allowed, refused = list[str](), dict[str, list[str]]()
    for name in recipe_names():
        try:
            setup = resolve(name, private | ({"secure": True} if rules.secure else {}))
            merge = setup.parts["merge"].name
            rules.check_run(name, merge, setup.config, setup.merge.reveals, setup.adapter.view)
            allowed.append(name)
        except FedvlmError as error:
            refused.setdefault(str(error), []).append(name)
    told = [f"{len(allowed)} methods are allowed: {', '.join(allowed) or 'none'}."]
    told += [f"Not {', '.join(names)}: {why}." for why, names in refused.items()]
    shown = ["updates of the shared parameters, with numbers such as losses"] + [
        r for r in REVEALS if r in rules.reveals
    ]
    told.append(f"What can leave: {', '.join(shown)}; class names{', numbers of examples' if rules.counts else ''}.")
    if rules.secure:
        told.append("Updates leave only masked, and the server sees their sum.")
    if rules.epsilon:
        told.append(f"All runs together spend at most epsilon={rules.epsilon:g} of an example; no scores leave.")
    else:
        told.append("Updates and scores leave without noise: images may be reconstructed from updates (SECURITY.md).")
    few = rules.smallest_examples
    told.append(f"No training with fewer than {few} examples, in all or of a class, and no scores of fewer.")
    return told
