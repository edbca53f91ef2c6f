"""From `fedvlm run fedot data=… lr=…` to a setup. The dataclasses' fields are the keys; there is no second list.

What counts, weakest first: a field's default · the recipe (its paper's settings) · the recipe's settings for this
backbone, chosen on validation (`settings=paper` leaves them out) · the command line.
"""

from __future__ import annotations

import types
import typing
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

import yaml

from fedvlm import parts
from fedvlm.adapters.base import Adapter
from fedvlm.core import FedvlmError
from fedvlm.data.federation import Layout
from fedvlm.errors import nearest
from fedvlm.local.sgd import Sgd
from fedvlm.merge.mean import Mean

RECIPES = Path(__file__).parent / "recipes"


@dataclass(frozen=True)
class Config(Layout):
    """What a run is, beside its method's three parts."""

    data: str = "emoji"  # emoji (embedded), a folder of images (with domains, classes or masks), or a .jsonl file
    backbone: str = "mini-clip"  # mini-clip, a folder, a hub name, onnx:FILE, http(s)://…, python:…, or pixels:SIZE
    template: str = "a photo of a {}"  # how a class name becomes a phrase
    group: str = ""  # a regular expression: files whose first bracket agrees (a patient) stand on one side of a split
    domains: int = 0  # only so many of the domains (sites, roles), drawn by their names; 0 is all
    stride: int = 8  # text: characters from one example to the next
    outsiders: str = ""  # a folder of images of no class: how well models tell them is recorded (auroc, fpr95)
    corrupt: int = 0  # corrupted versions of each test image (of 75: 15 kinds × 5 severities); records cacc
    broken: Literal["skip", "refuse"] = "skip"  # unreadable images: leave out and name them, or stop
    settings: Literal["tuned", "paper"] = "tuned"  # paper: only what the method's paper states
    protocol: Literal["one", "leave-one-domain-out", "base-to-novel"] = "one"
    rounds: int = 50
    participation: float = 1.0  # share of clients asked each round
    dropout: float = 0.0  # rehearsal: share of asked clients that fail to answer
    quorum: float = 0.5  # share of asked clients that must answer
    engine: Literal["auto", "serial", "stacked", "loopback"] = "auto"
    device: Literal["auto", "cpu", "cuda"] = "auto"  # auto: a GPU, where there is one, for networks and prompts
    chunk: int = 0  # clients side by side; 0 follows the measured rule
    timeout: float = 300.0  # loopback: seconds a client may take to answer
    evaluate: int = 1  # score every so many rounds (and always the last)
    threads: int = 1  # for training; small steps gain nothing from more
    seed: int = 50
    seeds: tuple[int, ...] = ()  # several runs, one a seed
    jobs: int = 0  # runs at a time (bench, protocols); 0 is one a core
    out: str = ""  # run: the run's folder; several runs: the folder that holds them


@dataclass(frozen=True)
class Recipe:
    name: str
    title: str
    idea: str
    adapter: str
    local: str
    merge: str
    paper: str = ""
    settings: dict[str, Any] = field(default_factory=dict)  # as published
    tuned: dict[str, dict[str, Any]] = field(default_factory=dict)  # backbone → settings chosen on validation
    published: dict[str, dict[str, Any]] = field(default_factory=dict)  # data set → the paper's numbers
    path: str = ""  # where a recipe of the user's own lies


@dataclass(frozen=True)
class Setup:
    recipe: Recipe
    config: Config
    adapter: Adapter
    local: Sgd
    merge: Mean
    chosen: dict[str, str]  # axis → the name it was chosen by
    given: dict[str, Any]  # what the user asked for

    def record(self) -> dict[str, Any]:
        """All that was decided, as plain data: {axis: {name: settings}} and the run's own keys."""
        made = {axis: {name: asdict(getattr(self, axis))} for axis, name in self.chosen.items()}
        return {"method": self.recipe.name, **made, **asdict(self.config)}

    def with_(self, **changes: Any) -> Setup:
        return replace(self, config=replace(self.config, **changes))


def recipes() -> list[str]:
    return sorted(p.stem for p in RECIPES.glob("*.yaml"))


def recipe(name: str) -> Recipe:
    path = Path(name) if name.endswith((".yaml", ".yml")) else RECIPES / f"{name}.yaml"
    if not path.is_file():
        raise FedvlmError(f"method {name}: no such recipe; {nearest(name, recipes())} (`fedvlm ls methods`)")
    try:
        told = yaml.safe_load(path.read_text())
        if "like" in told:  # everything but what is said here, and but the other's published numbers
            other = recipe(told.pop("like"))
            settings = {k: told.pop(k, {}) for k in ("settings", "tuned")}
            base = {
                f.name: getattr(other, f.name) for f in fields(other) if f.name not in ("name", "path", "published")
            }
            told = base | told | {k: getattr(other, k) | v for k, v in settings.items()}
        return Recipe(path.stem, **told, path=str(path) if path.parent != RECIPES else "")
    except (yaml.YAMLError, TypeError) as error:
        raise FedvlmError(f"recipe {path}: {error}") from error


def pairs(words: list[str]) -> dict[str, str]:
    """key=value words as a dict."""
    out: dict[str, str] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or not key:
            raise FedvlmError(f"'{word}': expected key=value, such as rounds=20")
        if key in out:
            raise FedvlmError(f"{key}= is given twice")
        out[key] = value
    return out


def resolve(method: str, given: dict[str, Any]) -> Setup:
    plan = recipe(method)
    backbone = str(given.get("backbone", plan.settings.get("backbone", Config.backbone)))
    tuned = plan.tuned.get(backbone, {}) if given.get("settings", "tuned") == "tuned" else {}
    layers = [(f"recipe {plan.name}", plan.settings | tuned), ("", given)]
    kinds = {axis: getattr(plan, axis) for axis in parts.AXES}
    kinds |= {axis: str(given[axis]) for axis in parts.AXES if axis in given}
    classes = {"config": Config} | {axis: parts.find(axis, kinds[axis]) for axis in parts.AXES}
    values: dict[str, dict[str, Any]] = {k: {} for k in classes}
    for origin, layer in layers:
        for key, value in layer.items():
            if key in parts.AXES:
                continue
            homes = _homes(key, classes)
            if not homes and origin and any(key in _keys(parts.find(a, getattr(plan, a))) for a in parts.AXES):
                continue  # the recipe's setting for a part that the command line replaced
            if not homes:
                raise FedvlmError(f"{key}= is not a key here; {nearest(key, _known(classes))}")
            for home in homes:
                name = key.rpartition(".")[2]
                values[home][name] = coerce(key, value, typing.get_type_hints(classes[home])[name])
    made: dict[str, Any] = {k: cls(**values[k]) for k, cls in classes.items()}
    _check(made["config"], made["local"])
    return Setup(plan, **made, chosen=kinds, given=dict(given))


def _keys(cls: type) -> list[str]:
    return [f.name for f in fields(cls)]


def _homes(key: str, classes: dict[str, type]) -> list[str]:
    axis, _, name = key.rpartition(".")
    return [k for k, cls in classes.items() if name in _keys(cls) and axis in ("", k)]


def _known(classes: dict[str, type]) -> list[str]:
    return [*parts.AXES, *dict.fromkeys(name for cls in classes.values() for name in _keys(cls))]


def _check(config: Config, local: Sgd) -> None:
    for key, low, high in (("participation", 0, 1), ("dropout", 0, 1), ("quorum", 0, 1)):
        value = getattr(config, key)
        if not low <= value <= high or (key == "participation" and value == 0):
            raise FedvlmError(f"{key}={value:g} must be between {low} and {high}")
    for part, key, low in ((config, "rounds", 0), (config, "evaluate", 1), (local, "epochs", 1), (local, "batch", 1)):
        if getattr(part, key) < low:
            raise FedvlmError(f"{key}={getattr(part, key)} must be at least {low}")
    for seed in (config.seed, *config.seeds):
        if not 0 <= seed < 2**63:
            raise FedvlmError(f"seed={seed} must be between 0 and 2^63 − 1")
    if local.lr <= 0:
        raise FedvlmError(f"lr={local.lr:g} must be above 0")


def coerce(key: str, value: Any, hint: Any) -> Any:
    """A value as its field's type, or an error that says what would fit."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        args = tuple(a for a in args if a is not type(None))
        return coerce(key, value, args[0])
    if origin is Literal:
        if str(value) not in [str(a) for a in args]:
            raise FedvlmError(f"{key}={value}: {nearest(str(value), map(str, args))}")
        return next(a for a in args if str(a) == str(value))
    if origin is tuple:
        items = value.split(",") if isinstance(value, str) else list(value)
        items = [i for i in items if str(i).strip() not in ("", "none")]
        if len(args) == 2 and args[1] is not Ellipsis and len(items) != 2:
            raise FedvlmError(f"{key}={value}: expected two values, such as 0.9,0.999")
        return tuple(coerce(key, i.strip() if isinstance(i, str) else i, args[0]) for i in items)
    if hint is bool:
        words = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
        if str(value).lower() not in words:
            raise FedvlmError(f"{key}={value}: expected true or false")
        return words[str(value).lower()]
    try:
        if hint is int and float(value) != int(float(value)):
            raise ValueError
        number = int(float(value)) if hint is int else hint(value)
    except (ValueError, OverflowError, TypeError):
        raise FedvlmError(f"{key}={value}: expected {'a whole number' if hint is int else 'a number'}") from None
    if hint is float and number != number:
        raise FedvlmError(f"{key}={value}: expected a number")
    return number
