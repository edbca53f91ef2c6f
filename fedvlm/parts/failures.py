"""Errors in parts of the user's own: the file and line, the part, what it was asked for, and the shapes of the tensors in
that line.

A traceback is read from its end. Frames of libraries belong to whoever called them, so that the last frame that is not a
library's is the user's or ours; only an error whose last frame is ours may be a defect of fedvlm.
"""

from __future__ import annotations

import inspect
import linecache
import re
import sysconfig
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import NamedTuple

from fedvlm.errors import FedvlmError
from fedvlm.parts import user_code

PACKAGE = Path(__file__).parents[1]
LIBRARIES = tuple(sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib"))
CHAIN = re.compile(r"""[A-Za-z_]\w*(?:\.[A-Za-z_]\w*|\[(?:"[^"\]]*"|'[^'\]]*')\])*""")  # names, as params["head"].mT
STEP = re.compile(r"""\.(\w+)|\[["']([^\]]*)["']\]""")  # of such a chain: an attribute or an entry


class OwnPartFailed(FedvlmError):
    """An error in a part of the user's own, or in what fedvlm made of its results."""


class Place(NamedTuple):
    """A line of code that was being run."""

    frame: FrameType
    line: int
    part: str  # such as adapter=gate.py; "": of fedvlm, or of other code
    file: str

    @property
    def ours(self) -> bool:
        return not self.part and Path(self.frame.f_code.co_filename).is_relative_to(PACKAGE)

    @property
    def source(self) -> str:
        return linecache.getline(self.frame.f_code.co_filename, self.line).strip()

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


@contextmanager
def explained(doing: str, *parts: object) -> Iterator[None]:
    """Turns an error of a part of the user's own into one that says where it is; `doing`: step, round and clients,
    `parts`: all that had to do with it."""
    try:
        yield
    except FedvlmError:
        raise
    except Exception as error:
        # torch's, not imported here
        full = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
        if full or not (text := described(error, doing, parts)):
            raise
        raise OwnPartFailed(text) from error


def described(error: BaseException, doing: str, parts: Iterable[object]) -> str:
    """The error in words; "" where no part of the user's own has to do with it."""
    places = places_of(error)
    own = [p for p in places if p.part]
    used = dict.fromkeys(user_code.home_of(inspect.getfile(type(part)))[0] for part in parts)
    suspects = own[-1].part if own else " or ".join(filter(None, used))
    if not suspects:
        return ""
    last, shown = places[-1], (own or places)[-1]
    fault = f"{type(error).__name__}: {error}".strip(": ")
    lines = [f"{suspects} failed in {doing}, {shown}: {fault}" if own else f"{doing} failed in {last}: {fault}"]
    lines += [shown.source, *filter(None, [shapes(shown)])]
    if not own:
        lines.append(f"what {suspects} returned may not fit here; if it does, this is a defect of fedvlm")
    elif last.ours:
        lines.append(f"raised in {last}: a defect of fedvlm, unless it was called with what it does not take")
    return "\n".join(lines)


def fault_of(error: BaseException) -> str:
    """An error that nobody expected, with the place where it was raised and whose defect that is."""
    places = places_of(error)
    whose = "; this is a defect of fedvlm" if not places or places[-1].ours else ""
    where = f" ({places[-1]}{whose})" if places else f" ({whose[2:]})"
    return f"{type(error).__name__}: {error}{where}"


def places_of(error: BaseException) -> list[Place]:
    """The lines of a traceback without those of libraries, the last one where the error was raised."""
    found = []
    for frame, line in traceback.walk_tb(error.__traceback__):
        name = frame.f_code.co_filename
        part, file = user_code.home_of(name)
        if part:
            found.append(Place(frame, line, part, file))
        elif Path(name).is_relative_to(PACKAGE):
            found.append(Place(frame, line, "", Path(name).relative_to(PACKAGE.parent).as_posix()))
        elif not name.startswith((*LIBRARIES, "<")):
            found.append(Place(frame, line, "", name))
    return found


def shapes(place: Place) -> str:
    """The shapes of the tensors and arrays that the line names."""
    found: dict[str, str] = {}
    for chain in CHAIN.finditer(place.source):
        name = re.match(r"\w+", chain[0])
        assert name
        value, text, shape = place.frame.f_locals.get(name[0]), name[0], None
        for step in [None, *STEP.finditer(chain[0])]:
            if step is not None:
                try:
                    value = getattr(value, step[1]) if step[1] else value[step[2]]  # type: ignore[index]
                except Exception:  # of the user's own classes, in any way
                    break
                text += step[0]
            if isinstance(now := getattr(value, "shape", None), tuple):
                shape = f"{text} is {tuple(now)}", text
        if shape is not None:
            found[shape[1]] = shape[0]
    return ", ".join(found.values())
