"""Turn `fedvlm run fedot data=… lr=…` into a setup. The dataclasses' fields are the keys; each says beside it what it is
like (the traits of `core/ranges.py`), and no other list classifies keys.

What counts, weakest first: a field's default · the paper's settings (the recipe) · settings for this backbone, chosen on
validation (`values=paper` leaves them out) · the user's own recipe · the command line.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, cast

from fedvlm.config import catalogue, recipe
from fedvlm.config.key_files import with_files_read
from fedvlm.config.keys import Key, unknown
from fedvlm.core.ranges import Count, NotNegative, Positive, PositiveShare, Purpose, Range, Share, Trait, Whole, default
from fedvlm.core.records import MethodRecord, PartRecord, RunRecord, Settings, Value
from fedvlm.errors import FedvlmError
from fedvlm.parts import registry, user_code
from fedvlm.parts.failures import explained

if TYPE_CHECKING:
    from fedvlm.core.adapter import Adapter
    from fedvlm.core.local import Local
    from fedvlm.core.merge import Merge
    from fedvlm.core.metric import Metric
    from fedvlm.engines.base import Engine

COMMAND_LINE = "command line"
RECORDED = ("score", "loss", "corrupted", "auroc", "fpr95")  # metrics that need not be asked for (method.METRICS)
POOLED, POOL = "pooled", "pool"  # the partition in which one more client trains on the images of all, and its name
OPEN = "base-to-novel"  # the protocol that keeps half of the classes from everybody
Partition = Literal[
    "auto",
    "client",
    "domain",
    "iid",
    "dirichlet",
    "disjoint",
    "pathological",
    "domain-iid",
    "domain-dirichlet",
    "pooled",
]
Tracker = Literal["tensorboard", "wandb", "mlflow"]
Proportion = Annotated[float, Range(0, 1_000_000)]
Seed = Annotated[int, Range(0, 2**63 - 1)]
WEEKS = 1_000_000  # seconds; some systems cannot wait for more than 49 days


@dataclass(frozen=True)
class DataKeys:
    """Which examples there are, and how the frozen model encodes them."""

    purpose: ClassVar[Purpose] = "data"

    # emoji, a folder, zip or .csv table of images, .tar shards, .jsonl (text), .safetensors
    data: str = default("emoji", "free", "path", "site")
    # mini-clip, a folder, a hub name, onnx:FILE, http(s)://…, python:…, or pixels:SIZE
    backbone: str = default("mini-clip", "free", "path", "site")
    # precision of encoding images: float32, TF32, bfloat16; the last two are faster on a GPU
    encode: Literal["full", "tf32", "half"] = default("full", decisive=("tf32", "half"))
    template: str = "a photo of a {}"  # phrase for a class name; several (commas, FILE, clip) are averaged
    names: str = default("", "unbound", "path", "central")  # class names by folder, .json or .csv; "": the folders' own
    split_file: str = default("", "unbound", "path", "central")  # as split=FILE: CoOp's, with images, classes and split
    group: str = ""  # regular expression: files that agree in its first group (a patient) get the same split
    columns: tuple[str, ...] = default((), "unbound", "site")  # of a table: path:file,label:diagnosis,client:hospital
    domains: Whole = default(0, "free", "site")  # use so many domains (sites, roles), drawn by a hash of names; 0: all
    # use only these classes: classes=dog,cat, or a file of names; empty: all
    classes: tuple[str, ...] = default((), "free", "central", "classes")
    stride: Count = default(8, "free")  # text: characters from one example to the next
    # the same image more than once: all copies in the same part of the split, left out, or as any other image
    duplicates: Literal["group", "drop", "keep"] = default("group", "unbound")
    broken: Literal["skip", "refuse"] = default("skip", "free")  # unreadable images: leave out and list them, or stop


@dataclass(frozen=True)
class Layout:
    """Which client holds what."""

    purpose: ClassVar[Purpose] = "clients"

    partition: Partition = default("auto", "central")  # auto: the data's clients, else one per domain, else dirichlet
    clients: Annotated[int, Range(1, 1_000_000)] = 10  # number of clients; domain-iid, domain-dirichlet: per domain
    alpha: Annotated[float, Range(1e-9)] = 0.5  # dirichlet: concentration; smaller values are more skewed
    per_client: Whole = 0  # pathological: classes per client, which may overlap; 0: each class to one client
    shots: Whole = 0  # training images per class and client; 0: all
    split: tuple[Proportion, Proportion, Proportion] = (60, 20, 20)  # train, val, test in %; or split=FILE, CoOp's json
    unseen: tuple[str, ...] = default((), "varies", "site")  # domains (or clients) that are held out of training
    unseen_split: Literal["test", "all"] = default("test", "central")  # images of unseen domains that are scored
    centre: Literal["none", "own"] = "none"  # own: each client, also a new one, subtracts the mean of its embeddings
    # test images to score on: the client's own, its domain's, those of all clients that train, or of held-out ones
    score: Literal["own", "domain", "all", "unseen"] = default("own", "central")


@dataclass(frozen=True)
class EvaluationKeys:
    """What is held out and measured, over which seeds."""

    purpose: ClassVar[Purpose] = "evaluation"

    # a folder of images of no class: records how well models detect them (auroc, fpr95)
    outsiders: str = default("", "path", "central", "classes")
    # corrupted copies per test image (15 kinds × 5 severities); records cacc
    corrupt: Annotated[int, Range(0, 75)] = default(0, "classes")
    # further metrics to record: ece, macro_f1, or a file or module of your own
    metrics: tuple[str, ...] = default((), "free", "varies")
    # what is held out: what unseen= names, each domain in turn, or half of the classes
    protocol: Literal["one", "leave-one-domain-out", "base-to-novel"] = default(
        "one", "central", "classes", decisive=(OPEN,)
    )
    personal_split: Literal["test", "val"] = "test"  # images that P is measured on; val as in FFT-GP
    seed: Seed = default(50, "varies")  # draws splits, partitions, initial values and batches; same seed, same run
    seeds: tuple[Seed, ...] = default((), "unbound", "asker")  # several runs, one per seed


@dataclass(frozen=True)
class TrainingKeys:
    """The rounds, and who takes part in them; nothing of it concerns a method that trains nothing."""

    purpose: ClassVar[Purpose] = "training"

    values: Literal["tuned", "paper"] = default("tuned", "free")  # paper: ignore settings tuned for the backbone
    rounds: Whole = 50  # number of communication rounds; 0: no training
    participation: PositiveShare = 1.0  # share of clients that are asked per round
    # fixed: exactly that share of clients; poisson: each client independently
    sampling: Literal["fixed", "poisson"] = "fixed"
    dropout: Share = 0.0  # simulated failures: share of asked clients that do not answer
    quorum: Share = 0.5  # share of asked clients that must answer for a round to count
    # updates longer than this multiple of the round's median are scaled down to it; 0: never
    bound: NotNegative = default(5.0, "tuned")
    evaluate_every: Count = default(1, "selection")  # rounds between evaluations; the last round is always evaluated


@dataclass(frozen=True)
class PrivacyKeys:
    """Differential privacy."""

    purpose: ClassVar[Purpose] = "privacy"

    # differential privacy for each client or each example (docs/privacy.md)
    dp: Literal["none", "client", "example"] = "none"
    epsilon: Annotated[float, Range(0, 100)] = 0.0  # dp: target ε of the whole run; 0: none, noise_multiplier= is used
    # dp: δ; 0: 1/n^1.1 for n clients (dp=example: n examples of the smallest client)
    delta: Annotated[float, Range(0, 1, below=True)] = 0.0
    noise_multiplier: NotNegative = 0.0  # dp: standard deviation of the noise divided by clip_norm=; 0: from epsilon=
    # dp: norm to which a client's update (or an example's gradient) is clipped
    clip_norm: Positive = default(1.0, "tuned")
    # dp=client: clip_norm= follows this quantile; 0: fixed
    clip_quantile: Annotated[float, Range(0, 1, below=True)] = default(0.0, "tuned")
    # dp=client: who adds the noise; client: needs no trust in the server
    noise_at: Literal["server", "client"] = "server"


@dataclass(frozen=True)
class SecureKeys:
    """Secure aggregation."""

    purpose: ClassVar[Purpose] = "secure aggregation"

    secure: bool = False  # secure aggregation: the server sees only sums of updates (docs/secure.md)
    threshold: Annotated[float, Range(0.5, 1, above=True)] = 0.6  # secure: share of asked clients that must be in a sum
    secure_range: Positive = 64.0  # secure: values of an update are clipped to ± this; smaller ranges send fewer bytes


@dataclass(frozen=True)
class EngineKeys:
    """How the clients of a run are computed, which changes numbers by rounding at most."""

    purpose: ClassVar[Purpose] = "engine"
    traits: ClassVar[tuple[Trait, ...]] = ("free", "varies")

    engine: str = "auto"  # auto, serial, stacked, loopback, an installed engine, or a file or module of your own
    chunk: Whole = 0  # number of clients computed together; 0: chosen automatically
    threads: Annotated[int, Range(1, 1024)] = 1  # CPU threads for training; small steps do not get faster with more


@dataclass(frozen=True)
class OutputKeys:
    """The places where runs are computed and recorded, which change none of their numbers."""

    purpose: ClassVar[Purpose] = "output"
    traits: ClassVar[tuple[Trait, ...]] = ("unbound",)

    federation: str = default("", "asker")  # admin.zip of a federation: the run uses its sites (docs/federation.md)
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"  # auto: an NVIDIA GPU, if any, for networks and prompts
    # stacked, serial: processes that share the clients of a run, over all GPUs
    workers: Annotated[int, Range(1, 64)] = 1
    timeout: Annotated[float, Range(0, WEEKS, above=True)] = 300.0  # loopback: seconds a client may take to answer
    # loopback: seconds that the others still have once a quorum has answered
    grace: Annotated[float, Range(0, WEEKS)] = 60.0
    # runs at a time (bench, protocols); 0: one per core and, on a GPU, as many as its memory holds
    jobs: Whole = default(0, "asker")
    launcher: Literal["none", "slurm"] = "none"  # where runs execute; none: on this machine (docs/launchers.md)
    launch: tuple[str, ...] = ()  # launcher: resources of a job, NAME:VALUE each, such as gpus_per_node:1
    log: tuple[Tracker, ...] = ()  # trackers that also record the numbers of each round
    out: str = default("", "asker")  # run: the run's folder; several runs: the folder that holds them


TRAINING: tuple[Purpose, ...] = ("training", "privacy", "secure aggregation")  # of keys that say nothing without it


# dataclasses list the fields of the last base first
@dataclass(frozen=True)
class Config(OutputKeys, EngineKeys, SecureKeys, PrivacyKeys, TrainingKeys, EvaluationKeys, Layout, DataKeys):
    """What a run is, beside its method's three parts."""

    def changed(self, keys: Iterable[str]) -> list[str]:
        """Which of these keys do not have their defaults."""
        return [key for key in keys if getattr(self, key) != getattr(Config(), key)]


@dataclass(frozen=True)
class Setup:
    """All that was decided about a run, as plain data; the parts are built when they are first used."""

    method: MethodRecord
    config: Config
    parts: dict[str, PartRecord]  # adapter, local, merge, engine, and metric-NAME for each of metrics=
    given: Settings = field(default_factory=dict)  # what the user asked for
    origins: dict[str, str] = field(default_factory=dict)  # home.key → where its value comes from; absent: the default
    codes: dict[str, user_code.Code] = field(default_factory=dict)  # of parts that are the user's own

    @cached_property
    def adapter(self) -> Adapter:
        return cast("Adapter", self._build("adapter", "adapter"))

    @cached_property
    def local(self) -> Local:
        return cast("Local", self._build("local", "local"))

    @cached_property
    def merge(self) -> Merge:
        return cast("Merge", self._build("merge", "merge"))

    @cached_property
    def metrics(self) -> dict[str, Metric]:
        homes = [h for h in self.parts if h.startswith("metric-")]
        return {h.removeprefix("metric-"): cast("Metric", self._build("metric", h)) for h in homes}

    def engine_class(self) -> type[Engine]:
        return self._class("engine", "engine")

    def _class(self, kind: str, home: str) -> type:
        part, what = self.parts[home], f"{kind}={self.parts[home].name}"
        if home in self.codes:
            return registry.only_part(kind, what, self.codes[home].load(what))
        return registry.find(kind, part.name)

    def _build(self, kind: str, home: str) -> object:
        settings = self.parts[home].settings
        with explained(f"making the {kind} from its settings"):
            return self._class(kind, home)(**{k: tuple(v) if isinstance(v, list) else v for k, v in settings.items()})

    def __getstate__(self) -> dict[str, object]:
        """Plain data only: parts of the user's own cannot be pickled, and are built again from their code."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    def with_(self, **changes: object) -> Setup:
        return replace(self, config=replace(self.config, **changes))  # type: ignore[arg-type]

    def with_defaults(self, keys: Iterable[str]) -> Setup:
        """The setup in which these keys of the run have their defaults."""
        return self.with_(**{key: getattr(Config(), key) for key in keys})

    def settings(self) -> Settings:
        """The run's own keys, as plain data."""
        return {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(self.config).items()}

    def binding(self) -> dict[str, object]:
        """What decides the numbers of a run, as plain data."""
        made = {home: [p.digest or p.name, p.settings] for home, p in self.parts.items()}
        if not self.parts["engine"].code:
            made.pop("engine")  # all engines of the package give the same numbers
        return {**made, **binding(self.settings())}

    @classmethod
    def from_record(cls, record: RunRecord, folder: Path) -> Setup:
        """The setup that a run folder holds; nothing is looked up in today's recipes."""
        known = catalogue.run_keys()
        homes = {"adapter": record.adapter, "local": record.local, "merge": record.merge, "engine": record.engine}
        homes |= {f"metric-{m.name}": PartRecord(m.name, m.settings, m.code, m.digest) for m in record.metrics}
        try:
            values = {k: known[k].coerce(v) for k, v in record.config.items() if k in known}
            for home, part in homes.items():
                check_settings(home.partition("-")[0], part)
        except FedvlmError as error:
            raise FedvlmError(f"{folder / 'run.json'}: {error}") from None
        config = Config(**{k: tuple(v) if isinstance(v, list) else v for k, v in values.items()})  # type: ignore[arg-type]
        codes = {h: user_code.stored_code(folder / "code" / h, p.code) for h, p in homes.items() if p.code}
        return cls(record.method, config, homes, record.given, {}, codes)


def binding(settings: Mapping[str, Value]) -> dict[str, Value]:
    """The run's keys that change its numbers."""
    known = catalogue.run_keys()
    return {k: v for k, v in settings.items() if k not in known or known[k].binds(v)}


def key_values(words: list[str]) -> dict[str, str]:
    """`key=value` words as a dict."""
    out: dict[str, str] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or not key:
            raise FedvlmError(f"'{word}': expected key=value, such as rounds=20")
        if key in out:
            raise FedvlmError(f"{key}= is given twice")
        out[key] = value
    return out


def resolve(method: str, given: Mapping[str, object]) -> Setup:
    """A method's recipe and what the user gave, as a setup; an error names the key and the way out."""
    asked_for, given = given, with_files_read(given)
    plan = recipe.load(method, on=str(given.get("on", "")))
    backbone = str(given.get("backbone") or plan.backbone() or Config.backbone)
    asked = [layer.settings["values"] for layer in plan.layers(backbone, tuned=False) if "values" in layer.settings]
    tuned = str(given.get("values") or (asked or ["tuned"])[-1]) != "paper"
    names = {axis: str(given.get(axis) or getattr(plan, axis)) for axis in registry.AXES}
    keys: dict[str, list[Key]] = {"run": catalogue.load().run} | {a: catalogue.keys(a, n) for a, n in names.items()}
    layers = [*plan.layers(backbone, tuned), recipe.Layer(COMMAND_LINE, cast(recipe.Settings, dict(given)))]
    metrics = metric_homes(layers, next(k for k in keys["run"] if k.name == "metrics"))
    keys |= {home: catalogue.keys("metric", spec) for spec, home in metrics.items()}
    values: dict[str, Settings] = {home: {} for home in keys}
    origins: dict[str, str] = {}
    for origin, settings in layers:
        for key, value in settings.items():
            if origin == COMMAND_LINE and key in (*registry.AXES, "on"):
                continue
            homes = [h for h, known in keys.items() if _is(key, h, known)]
            if not homes and origin != COMMAND_LINE and _replaced(key, plan, names, origin):
                continue  # a setting for a part that is not in use
            where = "" if origin == COMMAND_LINE else f"{_place(plan, origin)}: "
            if not homes:
                raise _unknown(key, names, keys, where)
            for home in homes:
                name = key.rpartition(".")[2]
                found = next(k for k in keys[home] if k.name == name)
                try:
                    values[home][name] = found.coerce(value, shown=key)
                except FedvlmError as error:
                    raise FedvlmError(f"{where}{error}") from None
                origins[f"{home}.{name}"] = origin
    complete = {home: {k.name: values[home].get(k.name, k.default) for k in known} for home, known in keys.items()}
    config = Config(**{k: tuple(v) if isinstance(v, list) else v for k, v in complete["run"].items()})  # type: ignore[arg-type]
    codes = {a: user_code.read_code(f"{a}={n}", n) for a, n in names.items() if _is_users(a, n)}
    homes_ = {a: part_record(a, n, complete[a], codes.get(a)) for a, n in names.items()}
    for spec, home in metrics.items():
        if _is_users("metric", spec):
            codes[home] = user_code.read_code(f"metric={spec}", spec)
        homes_[home] = part_record("metric", home.removeprefix("metric-"), complete[home], codes.get(home))
    homes_["engine"] = _engine(config.engine, codes)
    about = MethodRecord(plan.name, plan.title, plan.paper, plan.idea, plan.on, plan.path)
    return Setup(about, config, homes_, cast(Settings, dict(asked_for)), origins, codes)


def keys_of_method(method: str, given: Mapping[str, object]) -> dict[str, list[Key]]:
    """The keys of a run and of a method's three parts, by home."""
    plan = recipe.load(method, on=str(given.get("on", "")))
    names = {axis: str(given.get(axis) or getattr(plan, axis)) for axis in registry.AXES}
    return {"run": catalogue.load().run} | {axis: catalogue.keys(axis, name) for axis, name in names.items()}


def part_record(kind: str, name: str, settings: Settings, code: user_code.Code | None) -> PartRecord:
    if code:
        return PartRecord(name, settings, code.entry, code.digest)
    return PartRecord(name, settings, digest=registry.installed_version(kind, name))


def check_settings(kind: str, part: PartRecord) -> None:
    """An error where a recorded part of the package does not have these settings, or not with these values."""
    if part.code or part.name not in catalogue.load().parts[kind]:  # others are imported only where trust.py allows it
        return
    known = {k.name: k for k in catalogue.keys(kind, part.name)}
    for name, value in part.settings.items():
        if name not in known:
            raise FedvlmError(f"{kind}={part.name} has no setting {name}; use the version of fedvlm that wrote it")
        known[name].coerce(value)


def _is_users(kind: str, name: str) -> bool:
    return user_code.is_own(name) and name not in registry.names(kind)


def metric_homes(layers: list[recipe.Layer], key: Key) -> dict[str, str]:
    """What `metrics=` names, as spec → home."""
    given = [layer.settings["metrics"] for layer in layers if "metrics" in layer.settings]
    specs = cast(list[str], key.coerce(given[-1])) if given else []
    found: dict[str, str] = {}
    for spec in specs:
        name = Path(spec).stem if spec.endswith(".py") else spec.rpartition(".")[2]
        if name in RECORDED:
            raise FedvlmError(
                f"metrics={spec}: {name} is recorded in any case where it applies; leave it out or rename it"
            )
        if f"metric-{name}" in found.values():
            raise FedvlmError(f"metrics={spec}: two metrics are called {name}; rename one of the files")
        found[spec] = f"metric-{name}"
    return found


def _engine(name: str, codes: dict[str, user_code.Code]) -> PartRecord:
    if _is_users("engine", name):
        codes["engine"] = user_code.read_code(f"engine={name}", name)
    elif name != "auto" and name not in registry.names("engine"):
        registry.find("engine", name)  # says what there is
    return part_record("engine", "stacked" if name == "auto" else name, {}, codes.get("engine"))


def _is(key: str, home: str, known: list[Key]) -> bool:
    """Whether a key is of this home: NAME or HOME.NAME; of metrics only METRIC.NAME, such as ece.bins."""
    axis, _, name = key.rpartition(".")
    fits = axis == home.removeprefix("metric-") if home.startswith("metric-") else axis in ("", home)
    return fits and any(k.name == name for k in known)


def _replaced(key: str, plan: recipe.Recipe, names: dict[str, str], origin: str) -> bool:
    """Whether a recipe's setting is for a part that is not in use: one that the command line replaced or, for settings
    inherited from a built-in recipe, any part of the package. A user's own line is never ignored otherwise."""
    name = key.rpartition(".")[2]
    gone = [axis for axis in registry.AXES if names[axis] != getattr(plan, axis)]
    if any(k.name == name for axis in gone for k in catalogue.keys(axis, getattr(plan, axis))):
        return True
    if plan.path and origin.startswith("recipe"):
        return False
    known = catalogue.load().parts
    return any(k.name == name for axis in registry.AXES for info in known[axis].values() for k in info.keys)


def _unknown(key: str, names: dict[str, str], keys: dict[str, list[Key]], where: str) -> FedvlmError:
    """An error that says which other part has this key, where one has."""
    for axis in registry.AXES:
        for other, info in catalogue.load().parts[axis].items():
            if any(k.name == key for k in info.keys):
                reason = f"{axis}={names[axis]} has none, {axis}={other} has"
                return FedvlmError(f"{where}{key}= is not a key here: {reason}")
    return unknown(key, _all_names(keys), where)


def _place(plan: recipe.Recipe, origin: str) -> str:
    return origin if origin.startswith("recipe") else f"recipe {plan.path or plan.name} ({origin})"


def _all_names(keys: dict[str, list[Key]]) -> list[str]:
    return [*registry.AXES, "on", *dict.fromkeys(k.name for known in keys.values() for k in known)]
