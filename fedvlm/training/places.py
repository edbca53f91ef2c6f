"""The folders in which runs were written on this machine, so that a run's name is enough from any folder."""

from __future__ import annotations

import contextlib
from pathlib import Path

from fedvlm.errors import FedvlmError, nearest
from fedvlm.system.machine import cache_home, runs_home

LIST = "runs.txt"  # in the cache: a folder with runs in each line


def remember(run: Path) -> None:
    """Note the folder that a run lies in."""
    place, file = str(run.parent.resolve()), cache_home() / LIST
    with contextlib.suppress(OSError):  # names stay unknown; paths work
        if not file.is_file() or place not in file.read_text("utf-8").splitlines():
            file.parent.mkdir(parents=True, exist_ok=True)
            with file.open("a", encoding="utf-8") as out:
                out.write(f"{place}\n")


def named(name: str) -> Path | None:
    """The run, or the folder of runs, that a path or a name stands for; None where there is none, an error where there are
    several."""
    if Path(name).is_dir():
        return Path(name)
    if not name or Path(name).is_absolute():
        return None
    file = cache_home() / LIST
    places = [Path(line) for line in file.read_text("utf-8").splitlines()] if file.is_file() else []
    homes = [runs_home(), *(p.parent for p in runs_home().rglob("run.json")), *places]
    found = {place.resolve() for home in homes for place in (home / name, home.parent / name) if place.is_dir()}
    found = {p for p in found if (p / "run.json").is_file() or any(p.glob("*/run.json"))}
    if len(found) > 1:
        raise FedvlmError(f"{name}: there are several; give one of {', '.join(map(str, sorted(found)))}")
    return next(iter(found), None)


def folder_of(name: str) -> Path:
    """What `named` finds, and an error where that is nothing."""
    if (found := named(name)) is None:
        known = [p.parent.name for p in runs_home().rglob("run.json")]
        hint = f"; {nearest(name, known)}" if known else ""
        raise FedvlmError(f"{name}: no such run or folder of runs (`fedvlm ls runs` lists them){hint}")
    return found
