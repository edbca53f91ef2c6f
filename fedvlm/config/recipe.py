"""Recipes, presets and published numbers, read from YAML files without importing torch.

A recipe (`parts/recipes/NAME.yaml`, or a file of the user's own) names a method's adapter, local rule and merge, with its
settings. A preset (`parts/recipes/on/NAME.yaml`) is a network that a method can be put on: `ga on=unet`.
`published.json` holds the numbers that papers report.

Settings come in layers, weakest first. Without a preset, each recipe along `like` adds its `settings` and then what it has
under `tuned` for the backbone in use; the recipe itself comes last, so that what it says overrides what it inherits. With a
preset, the layers are the preset's `settings`, the preset's `tuned`, and what each recipe has under `on` for this preset:
a recipe's own `settings` and `tuned` were chosen for its own adapter and are not used. A built-in recipe without `on`
depends on its adapter and cannot be put on a preset.
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import yaml

from fedvlm.errors import FedvlmError, nearest

if TYPE_CHECKING:
    from yaml import SafeLoader as _SafeLoader
else:  # the loader in C is about ten times as fast, and not part of every build of PyYAML
    _SafeLoader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

Scalar = str | int | float | bool | None
Value = Scalar | list[Scalar]
Settings = dict[str, Value]

RECIPES = Path(__file__).parent.parent / "parts" / "recipes"
PRESETS = RECIPES / "on"
PUBLISHED = Path(__file__).parent / "published.json"  # written by `python benchmarks/reproduce.py --publish`

AXES = ("adapter", "local", "merge")
RECIPE_KEYS = ("title", "idea", "paper", "like", *AXES, "settings", "tuned", "on")
PRESET_KEYS = ("title", "adapter", "settings", "tuned")
ANY = "any"  # in a recipe's `on`: settings for every preset, weaker than those for the preset itself
SYNTAX = "indent with spaces, and put text that holds ': ' or starts with a special character in quotes"
LARGEST = 1 << 18  # bytes of a file
DEEPEST = 20  # brackets or indents inside each other
MOST_ALIASES = 10  # in a file: a few lines of aliases of aliases can stand for more than memory holds
LONGEST_CHAIN = 20  # recipes, each like the next


class Layer(NamedTuple):
    """Settings that come from one place."""

    origin: str  # where they come from, as shown to the user: "paper", "tuned for mini-clip", "on unet"
    settings: Settings


class Block(NamedTuple):
    """What one file adds to the layers."""

    origin: str
    tuned_origin: str  # appended to "tuned for BACKBONE"
    settings: Settings
    tuned: dict[str, Settings]  # backbone → settings chosen on validation


@dataclass(frozen=True)
class Recipe:
    name: str
    title: str
    idea: str
    paper: str
    adapter: str
    local: str
    merge: str
    on: str = ""  # the preset it is put on; "" is its own adapter
    path: str = ""  # of a recipe of the user's own; "" is built in
    blocks: tuple[Block, ...] = field(default=(), repr=False)  # weakest first; read them with `layers`

    def layers(self, backbone: str, tuned: bool = True) -> list[Layer]:
        """The settings, weakest first; tuned=False leaves out what was chosen on validation."""
        out = []
        for block in self.blocks:
            out.append(Layer(block.origin, dict(block.settings)))
            if tuned:
                out.append(Layer(f"tuned for {backbone}{block.tuned_origin}", dict(block.tuned.get(backbone, {}))))
        return [layer for layer in out if layer.settings]

    def backbone(self) -> str | None:
        """The backbone that the recipe or its preset asks for, if any; tuned settings depend on it and cannot set it."""
        asked = [layer.settings["backbone"] for layer in self.layers("", tuned=False) if "backbone" in layer.settings]
        return str(asked[-1]) if asked else None


def recipe_names() -> list[str]:
    """The built-in recipes."""
    return sorted(p.stem for p in RECIPES.glob("*.yaml"))


def presets() -> list[str]:
    """The networks that a method can be put on with `on=`."""
    return sorted(p.stem for p in PRESETS.glob("*.yaml"))


def load(name: str, on: str = "") -> Recipe:
    """A built-in recipe, or the user's own (a path that ends in .yaml or .yml), put on a preset if one is given."""
    path = _locate(name)
    chain = _chain(path, ())
    text = {key: _beside(file, key, value) for file in chain for key, value in file.text.items()}
    if missing := [axis for axis in AXES if axis not in text]:
        advice = f"add {missing[0]}: NAME, or like: RECIPE to start from another recipe"
        raise _wrong(path, f"{' and '.join(missing)} missing; {advice}")
    own = "" if path.parent == RECIPES else str(path)
    about = (path.stem, text.get("title", path.stem), text.get("idea", ""), text.get("paper", ""))
    recipe = Recipe(*about, text["adapter"], text["local"], text["merge"], path=own, blocks=_blocks(chain))
    if not on:
        return recipe
    preset = _preset(on)
    if all(file.on is None for file in chain) and any(file.built_in for file in chain):
        # without its adapter and its settings it would be another method under this one's name
        able = [n for n in recipe_names() if _built_in(RECIPES / f"{n}.yaml").on is not None]
        advice = f"on= works with {', '.join(able)}" + (", or where a recipe has a key on:" if own else "")
        raise FedvlmError(f"method {name}: it depends on its adapter, {recipe.adapter}; {advice}")
    title, adapter = f"{recipe.title} on {preset.text['title']}", preset.text["adapter"]
    return replace(recipe, title=title, adapter=adapter, on=on, blocks=_blocks_on(chain, on, preset))


def _beside(file: File, key: str, value: str) -> str:
    """A part given as a file is looked for beside the recipe first, then in the working directory."""
    return _located(file.path.parent, value) if key in AXES else value


def _located(folder: Path, word: str) -> str:
    """A .py file of this folder with its path; any other word as it is."""
    found = folder / word
    return str(found) if word.endswith(".py") and found.is_file() else word


def published(method: str, on: str, data: str, settings: Mapping[str, object] | None = None) -> dict[str, float | str]:
    """What a paper reports for a method on a data set: measures in %, and `source`; empty where nothing is known.

    A table that holds only under certain settings (a partition, a number of shots) counts where `settings` agrees with it.
    Of several tables the one with most measures counts, and the first of these.
    """
    given = settings or {}
    found: list[dict[str, float | str]] = [
        entry.numbers
        for entry in _published()
        if (entry.method, entry.on, entry.data) == (method, on, data)
        and all(given.get(key) == value for key, value in entry.settings.items())
    ]
    return dict(found[max(range(len(found)), key=lambda k: len(found[k]))]) if found else {}


def published_data(method: str, on: str) -> list[str]:
    """The data sets for which `published` has numbers without further settings."""
    found = [e.data for e in _published() if (e.method, e.on) == (method, on) and not e.settings]
    return list(dict.fromkeys(found))


class File(NamedTuple):
    """A recipe's or preset's file, checked."""

    path: Path
    text: dict[str, str]  # the keys whose value is text, where given
    settings: Settings
    tuned: dict[str, Settings]
    on: dict[str, Settings] | None  # None: the file has no such key

    @property
    def built_in(self) -> bool:
        return self.path.parent in (RECIPES, PRESETS)


def _locate(name: str) -> Path:
    if name.endswith((".yaml", ".yml")):
        if not _is_file(Path(name)):
            raise FedvlmError(f"method {name}: no such file; give a recipe's path, or a name of `fedvlm ls methods`")
        return Path(name)
    if name in recipe_names():
        return RECIPES / f"{name}.yaml"
    raise FedvlmError(f"method {name}: no such recipe; {nearest(name, recipe_names())} (`fedvlm ls methods`)")


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # a name that is too long, or a folder that may not be read
        return False


def _chain(path: Path, children: tuple[Path, ...]) -> list[File]:
    """A recipe's file after those it names by `like`, the base first."""
    file = _built_in(path) if path.parent == RECIPES else _read(path, RECIPE_KEYS)
    like = file.text.get("like")
    if like is None:
        return [file]
    children = (*children, path)
    parent = _parent(path, like)
    if parent.resolve() in [p.resolve() for p in children]:
        circle = " → ".join(p.name for p in (*children, parent))
        raise _wrong(path, f"like: {like}: circular ({circle}); remove one of these like: lines")
    if len(children) == LONGEST_CHAIN:
        raise _wrong(
            path, f"like: {like}: more than {LONGEST_CHAIN} recipes, each like the next; copy settings instead"
        )
    return [*_chain(parent, children), file]


def _parent(path: Path, like: str) -> Path:
    if like.endswith((".yaml", ".yml")):
        parent = path.parent / like
        if not _is_file(parent):
            raise _wrong(path, f"like: {like}: no such file; a path is relative to the recipe's folder")
        return parent
    if like in recipe_names():
        return RECIPES / f"{like}.yaml"
    raise _wrong(path, f"like: {like}: no such recipe; {nearest(like, recipe_names())} (`fedvlm ls methods`)")


def _preset(name: str) -> File:
    if name not in presets():
        raise FedvlmError(f"on={name}: no such preset; {nearest(name, presets())}")
    return _built_in(PRESETS / f"{name}.yaml")


def _blocks(chain: list[File]) -> tuple[Block, ...]:
    out, paper = [], ""
    for file in chain:
        paper = file.text.get("paper", paper)
        name = file.path.stem if file.built_in else file.path.name
        inherited = f", like {name}" if file is not chain[-1] else ""
        if not file.built_in:
            out.append(Block(f"recipe {name}", f", recipe {name}", file.settings, file.tuned))
        else:
            origin = f"paper{inherited}" if paper else f"recipe {name}"
            out.append(Block(origin, inherited, file.settings, file.tuned))
    return tuple(out)


def _blocks_on(chain: list[File], on: str, preset: File) -> tuple[Block, ...]:
    out = [Block(f"on {on}", f", on {on}", preset.settings, preset.tuned)]
    for file in chain:
        origin = f"{file.path.stem} on {on}" if file.built_in else f"recipe {file.path.name}, on {on}"
        needs = file.on or {}
        out.append(Block(origin, "", needs.get(ANY, {}) | needs.get(on, {}), {}))
    return tuple(out)


@cache
def _built_in(path: Path) -> File:
    return _read(path, PRESET_KEYS if path.parent == PRESETS else RECIPE_KEYS)


def _read(path: Path, keys: tuple[str, ...]) -> File:
    """A file whose every key and value is checked, so that no later code meets a wrong type."""
    content = parse(path)
    if content is None:
        raise _wrong(path, "the file is empty; it needs adapter:, local: and merge:, or like: RECIPE")
    if not isinstance(content, dict):
        raise _wrong(path, f"expected lines of key: value, found {_kind(content)}")
    for key in content:
        if key not in keys:
            raise _wrong(path, f"{key}: no such key; {nearest(key, keys)}")
    sections = ("settings", "tuned", "on")
    text = {key: _text(path, key, value) for key, value in content.items() if key not in sections}
    on = _sections(path, "on", content["on"]) if "on" in content else None
    for name in on or ():
        if name not in (*presets(), ANY):
            raise _wrong(path, f"on: {name}: no such preset; {nearest(name, (*presets(), ANY))}")
    settings = _settings(path, "settings", content.get("settings", {}))
    return File(path, text, settings, _sections(path, "tuned", content.get("tuned", {})), on)


def _text(path: Path, key: str, value: object) -> str:
    if value is None or value == "":
        raise _wrong(path, f"{key}: has no value; give it one, or remove the line")
    if not isinstance(value, str):
        advice = f'put it in quotes: {key}: "{value}"' if isinstance(value, int | float) else "write one line of text"
        raise _wrong(path, f"{key}: expected text, found {_kind(value)}; {advice}")
    return value


def _settings(path: Path, key: str, value: object) -> Settings:
    out: Settings = {}
    for name, item in _mapping(path, key, value, "{lr: 0.01, rounds: 50}").items():
        if name in AXES:
            raise _wrong(path, f"{key}: {name}: not a setting; write {name}: at the top level of the file")
        if not _is_value(item):
            advice = "a setting is a number, a word, true, false, or a list of these (put a date in quotes)"
            raise _wrong(path, f"{key}: {name}: found {_kind(item)}; {advice}")
        out[name] = _files_beside(path, name, cast(Value, item))
    return out


def _files_beside(path: Path, name: str, value: Value) -> Value:
    """Metrics and engines given as files are looked for as parts are; see `_beside`."""
    if name not in ("metrics", "engine"):
        return value
    words = value if isinstance(value, list) else str(value).split(",")
    found = [_located(path.parent, str(word)) for word in words]
    return cast(Value, found) if isinstance(value, list) else ",".join(found)


def _sections(path: Path, key: str, value: object) -> dict[str, Settings]:
    example = {"tuned": "{mini-clip: {lr: 0.03}}", "on": "{unet: {lr: 0.001}}"}[key]
    found = _mapping(path, key, value, example)
    return {name: _settings(path, f"{key}: {name}", settings) for name, settings in found.items()}


def _mapping(path: Path, key: str, value: object, example: str) -> dict[str, object]:
    if not isinstance(value, dict):
        problem = f"expected pairs such as {example}, found {_kind(value)}"
        raise _wrong(path, f"{key}: {problem}; write pairs, or remove the key")
    return value


def _is_value(value: object) -> bool:
    items = value if isinstance(value, list) else [value]
    return all(item is None or isinstance(item, str | int | float) for item in items)


def _kind(value: object) -> str:
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return f"the number {value}"
    if isinstance(value, dict | list):
        return "a mapping" if isinstance(value, dict) else "a list"
    return f"the text '{value}'" if isinstance(value, str) else f"a {type(value).__name__}"


def _wrong(path: Path, problem: str) -> FedvlmError:
    return FedvlmError(f"recipe {path}: {problem}")


class _Loader(_SafeLoader):
    """YAML whose keys are text, and given once. (YAML 1.1 reads the key `on` as true, and keeps the last of two.)"""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                key.tag = "tag:yaml.org,2002:str"
                if key.value in seen:
                    problem = f"the key {key.value} is given twice"
                    raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
                seen.add(key.value)
        return super().construct_mapping(node, deep)


def parse(path: Path, own: bool = False) -> object:
    """A file's content; `own`: it belongs to the package, and may be large."""
    try:
        with path.open("rb") as file:
            data = file.read() if own else file.read(LARGEST + 1)
        if len(data) > LARGEST and not own:
            raise _wrong(path, f"it is larger than {LARGEST >> 10} kB; a recipe is a few lines of key: value")
        text = data.decode("utf-8-sig")
        if not own:
            _check_nesting(text)
        return cast(object, yaml.load(text, _Loader))
    except UnicodeDecodeError as error:
        raise _wrong(path, f"not UTF-8 (byte {error.start + 1}); save it as UTF-8 text") from None
    except OSError as error:
        raise _wrong(path, f"cannot be read: {error.strerror}") from None
    except yaml.MarkedYAMLError as error:
        line = f"line {error.problem_mark.line + 1}: " if error.problem_mark else ""
        advice = "" if isinstance(error, yaml.constructor.ConstructorError) else f"; {SYNTAX}"
        raise _wrong(path, f"{line}{error.problem}{advice}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise _wrong(path, f"not YAML: {str(error).splitlines()[0]}; a recipe is lines of key: value") from None


def _check_nesting(text: str) -> None:
    """An error for what the loader would follow until the stack or memory is full; events come one by one."""
    depth = aliases = 0
    for event in yaml.parse(text, _Loader):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        aliases += isinstance(event, yaml.AliasEvent)
        if depth > DEEPEST or aliases > MOST_ALIASES:
            problem = "too many brackets or indents inside each other" if depth > DEEPEST else "too many aliases (*)"
            mark: Any = event.start_mark  # its type differs between versions of types-PyYAML
            raise yaml.constructor.ConstructorError(None, None, f"{problem}; write it plainly", mark)


class PublishedEntry(NamedTuple):
    method: str
    on: str
    data: str
    settings: Settings
    numbers: dict[str, float | str]


@cache
def _published() -> tuple[PublishedEntry, ...]:
    """The numbers of benchmarks/papers/tables that a run can have beside it."""
    return tuple(PublishedEntry(*entry) for entry in json.loads(PUBLISHED.read_text(encoding="utf-8")))
