"""A site's own account of what was released of its data, over all runs and federations.

A release is in the file of the data set, on the disk, before anything is computed for it, under its run, place and request:
the same request again, also after a kill, costs nothing more, and nothing leaves that is not there. ε is about one example;
an update of a whole site with noise (dp=client) counts as a release about each of its examples.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from filelock import FileLock

from fedvlm.core.records import build, parsed
from fedvlm.errors import FedvlmError, Refused
from fedvlm.privacy.accounting import Release, composed_epsilon
from fedvlm.system import files
from fedvlm.system.machine import data_home

FOLDER = "budgets"  # in the folder of what cannot be made again
LOCK_SECONDS = 60


@dataclass(frozen=True)
class Entry:
    """A line of an account."""

    data: str
    federation: str
    run: str
    round: int
    request: str
    noise: float
    rate: float
    times: int
    delta: float  # at which it was checked

    @property
    def release(self) -> Release:
        return Release(self.noise, self.rate, self.times)


@dataclass(frozen=True)
class Budget:
    """The account of a data set, with the limits of a site's rules."""

    path: str
    data: str  # as the site names it
    federation: str
    run: str
    epsilon: float  # of all runs together; 0: not limited
    per_run: float
    delta: float

    @classmethod
    def path_of(cls, data: str) -> Path:
        """The account of the data at a place on this machine, whatever they are at the time."""
        name = hashlib.sha256(str(Path(data).expanduser().resolve()).encode()).hexdigest()[:16]
        return data_home() / FOLDER / f"{name}.jsonl"

    def check(self, planned: Release, rounds: int) -> None:
        """An error where a whole run does not fit into what is left."""
        everything = entries(Path(self.path))
        mine = sum(e.run == self.run and e.federation == self.federation for e in everything)
        self._limit(everything, planned._replace(times=planned.times * max(0, rounds - mine)))

    def spend(self, round: int, request: str, release: Release) -> None:
        path, entry = Path(self.path), Entry(self.data, self.federation, self.run, round, request, *release, self.delta)
        files.private_folder(path.parent)
        with FileLock(f"{path}.lock", timeout=LOCK_SECONDS):
            everything = entries(path)
            if entry in everything:
                return
            self._limit(everything, release)
            is_new = not path.exists()
            with files.writing(path), files.opened(path, "a+b", private=True) as file:
                cut = path.stat().st_size and not path.read_bytes().endswith(b"\n")
                file.write(b"\n" * bool(cut) + json.dumps(asdict(entry)).encode() + b"\n")
            files.sync(path)
            if is_new:
                files.sync_folder(path.parent)

    def _limit(self, before: list[Entry], release: Release) -> None:
        mine = [e for e in before if e.run == self.run and e.federation == self.federation]
        for limit, counted, what in ((self.epsilon, before, "all runs"), (self.per_run, mine, "a run")):
            if limit and spent((*(e.release for e in counted), release), self.delta) > limit:
                raise Refused(f"this site's budget of epsilon={limit:g} for {what} does not allow it")


def entries(path: Path) -> list[Entry]:
    """What was released. A line that was cut when the machine stopped was of nothing that left."""
    found = list[Entry]()
    for line in path.read_bytes().split(b"\n") if path.exists() else ():
        if line and not line.endswith(b"}"):
            continue
        try:
            found += [build(Entry, parsed(line.decode()))] if line else []
        except ValueError as error:
            raise FedvlmError(f"{path} is damaged ({error}); restore it from a copy") from error
    return found


def spent(releases: Iterable[Release], delta: float) -> float:
    """ε of these releases together, whatever their order."""
    counts = Counter[tuple[float, float]]()
    for release in releases:
        counts[release.noise, release.rate] += release.times
    return composed_epsilon(tuple(Release(*kind, n) for kind, n in sorted(counts.items())), delta)
