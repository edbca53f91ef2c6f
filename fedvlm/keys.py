"""The keys of the command line: the fields of the dataclasses, as plain data, so that checking a key needs no torch."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import types
import typing
from collections.abc import Collection
from typing import Literal, NamedTuple, cast

from fedvlm.errors import FedvlmError, nearest
from fedvlm.records import Value

Scalar = int | float | str | bool | None
RENAMED = {
    "wander": "noise",
    "relative": "relative_noise",
    "tie": "kl_weight",
    "explore": "ascent_steps",
    "ascent": "ascent_rate",
    "hold_outsiders": "outsider_penalty",
    "hold": "penalty",
    "evenness": "temperature",
    "sparse": "l1",
    "calm_rounds": "patience",
    "calm": "tolerance",
    "steady": "retain",
    "relax": "relaxation",
    "seemly": "class_like",
    "reach": "step_size",
    "pace": "weight_lr",
    "blur": "upload_noise",
    "groups": "upload_groups",
    "upload": "upload_share",
    "wholes": "global_prompts",
    "details": "local_prompts",
    "nearest": "patches",
}  # keys of 0.1 and what they are called now
WORDS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}


class Key(NamedTuple):
    name: str
    type: str  # int, float, str, bool
    default: Value
    help: str = ""  # the comment behind the field
    choices: tuple[str | int, ...] = ()  # the only values; () any
    length: int = 0  # 0: a single value; −1: any number of values; n: exactly n

    def coerce(self, value: object, shown: str = "") -> Value:
        """A value as this key's type, or an error that says what would fit."""
        name = shown or self.name
        if not self.length:
            return self._one(name, value)
        items = (
            value.split(",") if isinstance(value, str) else list(value) if isinstance(value, list | tuple) else [value]
        )
        items = [i.strip() if isinstance(i, str) else i for i in items]
        items = [i for i in items if i not in ("", "none", None)]
        if self.length > 0 and len(items) != self.length:
            raise FedvlmError(f"{name}={value}: expected {self.length} values, such as 0.9,0.999")
        return [self._one(name, i) for i in items]

    def _one(self, name: str, value: object) -> Scalar:
        if isinstance(value, list | tuple | dict):
            raise FedvlmError(f"{name}={value}: expected a single value")
        if self.choices:
            found = [c for c in self.choices if str(c) == str(value)]
            if not found:
                raise FedvlmError(f"{name}={value}: {nearest(str(value), map(str, self.choices))}")
            return found[0]
        if self.type == "bool":
            if str(value).lower() not in WORDS:
                raise FedvlmError(f"{name}={value}: expected true or false")
            return WORDS[str(value).lower()]
        if self.type == "str":
            return "" if value is None else str(value)
        try:
            number = float(cast(float | str, value))
            if self.type == "int":
                if number != int(number):
                    raise ValueError
                return int(value) if isinstance(value, str) and value.strip().lstrip("+-").isdigit() else int(number)
        except (ValueError, OverflowError, TypeError):
            expected = "a whole number" if self.type == "int" else "a number"
            raise FedvlmError(f"{name}={value}: expected {expected}") from None
        if number != number:
            raise FedvlmError(f"{name}={value}: expected a number")
        return number


def keys_of(cls: type) -> list[Key]:
    """The fields of a dataclass."""
    hints, comments = typing.get_type_hints(cls), comments_of(cls)
    found = [key_of(f.name, hints[f.name], default_of(f), comments.get(f.name, "")) for f in dataclasses.fields(cls)]
    return [k if k.default is None else k._replace(default=k.coerce(k.default)) for k in found]  # 60 becomes 60.0


def default_of(field: dataclasses.Field[object]) -> Value:
    default = field.default
    if default is dataclasses.MISSING:
        if field.default_factory is dataclasses.MISSING:
            raise FedvlmError(f"the field {field.name} has no default; every field of a part needs one")
        default = field.default_factory()
    return cast(Value, list(default) if isinstance(default, tuple) else default)


def key_of(name: str, hint: object, default: Value, help: str) -> Key:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return key_of(name, next(a for a in args if a is not type(None)), default, help)
    if origin is Literal:
        return Key(name, type(args[0]).__name__, default, help, args)
    if origin is tuple:
        one = key_of(name, args[0], default, help)
        return one._replace(length=-1 if args[-1] is Ellipsis else len(args))
    if hint in (int, float, str, bool):
        return Key(name, cast(type, hint).__name__, default, help)
    raise FedvlmError(
        f"the field {name} is a {hint}; keys are int, float, str, bool, Literal, or a tuple of one of these"
    )


def comments_of(cls: type) -> dict[str, str]:
    """The comment behind each field, from the source of the class and its bases."""
    found: dict[str, str] = {}
    for kind in reversed(cls.__mro__):
        try:
            lines, _ = inspect.getsourcelines(kind)
        except (OSError, TypeError):
            continue
        source = inspect.cleandoc("".join(lines)) if lines[0][:1].isspace() else "".join(lines)
        body = ast.parse(source).body[0]
        shown = source.splitlines()
        for node in getattr(body, "body", []):
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.end_lineno:
                _, hash, comment = shown[node.end_lineno - 1][node.end_col_offset :].partition("#")
                found[node.target.id] = comment.strip() if hash else found.get(node.target.id, "")
    return found


def unknown(key: str, known: Collection[str], where: str = "") -> FedvlmError:
    name = key.rpartition(".")[2]
    if RENAMED.get(name) in known:
        return FedvlmError(f"{where}{key}= is not a key here: it is now called {RENAMED[name]}=")
    return FedvlmError(f"{where}{key}= is not a key here; {nearest(key, known)}")
