"""The keys of the command line: the fields of the dataclasses, as plain data, so that checking a key needs no torch."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import io
import math
import operator
import tokenize
import types
import typing
from collections.abc import Collection
from typing import Annotated, Literal, NamedTuple, SupportsFloat, SupportsIndex, cast

from fedvlm.core.ranges import Purpose, Range, Trait
from fedvlm.core.records import Select, Value
from fedvlm.errors import FedvlmError, nearest

Scalar = int | float | str | bool | None
WORDS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}


class Key(NamedTuple):
    name: str
    type: str  # int, float, str, bool
    default: Value
    help: str = ""  # the comment behind the field or above it
    choices: tuple[str | int, ...] = ()  # the only values; () any
    length: int = 0  # 0: a single value; −1: any number of values; n: exactly n
    range: Range = Range()
    purpose: Purpose | Literal[""] = ""  # of a part's key none
    traits: tuple[Trait, ...] = ()
    decisive: tuple[str, ...] = ()  # the only values that change the numbers of a run; () all

    def binds(self, value: Value) -> bool:
        """Whether this value is one of those that decide the numbers of a run."""
        return value in self.decisive if self.decisive else "unbound" not in self.traits

    def fair(self, select: Select) -> bool:
        """Whether rows of a fair table, which reports this round of each run, must agree in it."""
        free = {"unbound", "free", "tuned", *(["selection"] if select == "last" else [])}
        return not free & {*self.traits}

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
            example = ",".join(f"{x:g}" for x in cast(list[float], self.default))
            raise FedvlmError(f"{name}={value}: expected {self.length} values, such as {example}")
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
            if "\0" in str(value):
                raise FedvlmError(f"{name}={value!r}: expected text without null characters")
            return "" if value is None else str(value)
        try:
            number = whole_number(value) if self.type == "int" else float(cast(SupportsFloat | str, value))
        except (
            ValueError,
            OverflowError,
            TypeError,
            RuntimeError,
        ):  # the last: torch's, for a tensor of several numbers
            number = math.nan
        if not (math.isfinite(number) and self.range.holds(number)):
            kind = "a whole number" if self.type == "int" else "a finite number" if math.isinf(number) else "a number"
            raise FedvlmError(f"{name}={value}: expected {kind} {self.range}".rstrip())
        return number


def whole_number(value: object) -> int:
    """Exactly: as a float, a large seed would lose its last digits. An error for more than 64 bits."""
    try:
        number = int(value) if isinstance(value, str) else operator.index(cast(SupportsIndex, value))
    except (ValueError, TypeError):  # 1e3, or 10.0
        real = float(cast(SupportsFloat | str, value))
        number = int(real)
        if number != real:
            raise
    if not -(2**63) <= number < 2**63:
        raise OverflowError
    return number


def keys_of(cls: type) -> list[Key]:
    """The fields of a dataclass."""
    hints, comments = typing.get_type_hints(cls, include_extras=True), comments_of(cls)
    homes = {name: vars(c) for c in reversed(cls.__mro__) for name in inspect.get_annotations(c)}
    found = [
        key_of(f.name, hints[f.name], default_of(f), comments.get(f.name, ""))._replace(
            purpose=homes[f.name].get("purpose", ""),
            traits=(*homes[f.name].get("traits", ()), *f.metadata.get("traits", ())),
            decisive=f.metadata.get("decisive", ()),
        )
        for f in dataclasses.fields(cls)
    ]
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
    if origin is Annotated:
        one = key_of(name, args[0], default, help)
        return one._replace(range=next((a for a in args[1:] if isinstance(a, Range)), one.range))
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
    """The comment behind each field, or above it, from the source of the class and its bases."""
    found: dict[str, str] = {}
    for kind in reversed(cls.__mro__):
        try:
            lines, _ = inspect.getsourcelines(kind)
        except (OSError, TypeError):
            continue
        source = inspect.cleandoc("".join(lines)) if lines[0][:1].isspace() else "".join(lines)
        body = ast.parse(source).body[0]
        comments = comments_by_line(source)
        end = body.lineno
        for node in getattr(body, "body", []):
            start, end = end + 1, node.end_lineno
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                comment = " ".join(comments[n] for n in range(start, end + 1) if n in comments)
                found[node.target.id] = comment or found.get(node.target.id, "")
    return found


def comments_by_line(source: str) -> dict[int, str]:
    read = io.StringIO(source).readline
    tokens = tokenize.generate_tokens(read)
    return {t.start[0]: t.string.lstrip("#").strip() for t in tokens if t.type == tokenize.COMMENT}


def unknown(key: str, known: Collection[str], where: str = "") -> FedvlmError:
    return FedvlmError(f"{where}{key}= is not a key here; {nearest(key, known)}")
