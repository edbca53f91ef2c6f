"""A run's folder: all that was decided, what happened each round, and the state to go on from.

run.json (the record, see records.py) · code/ (the user's own parts) · rounds.jsonl (one object per round) ·
state.safetensors (after the last whole round, replaced atomically) · rows.bin (clients' private rows) ·
outputs.safetensors (final logits on test) · evaluations/ (answers to later questions) · log.txt (only where a client
failed)

A folder without run.json holds no run: whatever a first command that was stopped left there is written again. A process
that is killed costs the round under way. A power cut costs the same where rounds take longer than SYNC_SHARE syncs of the
disk (about 0.2 s); the rounds of a faster run are not all on the disk at every moment.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import platform
import subprocess
import time
from collections.abc import Collection, Iterator
from dataclasses import asdict, replace
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, cast

from filelock import FileLock, Timeout

import fedvlm
from fedvlm.config import recipe, trust
from fedvlm.config.config import Setup, binding
from fedvlm.core import client_names
from fedvlm.core.records import BackboneRecord, DataRecord, MetricRecord, Result, RoundRecord, RunRecord, read_text
from fedvlm.errors import FedvlmError
from fedvlm.system import console, files
from fedvlm.system.names import printable
from fedvlm.training.places import folder_of, remember

if TYPE_CHECKING:
    from torch import Tensor

    from fedvlm.core.state import State
    from fedvlm.training.planned_run import PlannedRun

STATE = "state.safetensors"
SWEEP = "sweep"  # the folder of the runs that a sweep tried (sweep.py)
KEEPS_ROWS = ("serial", "stacked")  # engines with the private rows of all clients in rows.bin
SYNC_SHARE = 20  # waiting for the disk may take one part in so many of the time
RESTORE = "restore it from a copy, or start the run anew elsewhere"
SERVER = "server"  # what the process that plays the rounds is called in a record
ADVICE = "finished rounds are kept: free some space or get write permission there, then `fedvlm resume` the run"


class RunFolder:
    def __init__(self, folder: Path, trusted: bool = False):
        """`trusted`: whether it may do what a folder from others would do here (trust.py)."""
        self.folder, self.trusted = folder, trusted
        self._known: tuple[files.Stamp, RunRecord] | None = None  # run.json as it was last read or written here
        self.next_sync = 0.0  # time.monotonic() from which `save` waits for the disk again

    @classmethod
    def start(cls, planned: PlannedRun) -> RunFolder:
        """A new folder, or the one that already holds this very run."""
        folder, setup = planned.folder, planned.setup
        run = cls(folder)
        if (folder / "run.json").exists():
            found = run.record
            if found.identity != planned.identity:
                raise FedvlmError(f"{folder} holds another run ({differs(found, planned)}); choose another out=")
            if found.result is None:
                run.load()  # damage is told before anything is written
            return run
        left = ("log.txt", ".lock", "code")  # by a command that was stopped before run.json was there
        if folder.exists() and any(p.name not in left and p.suffix != files.PART for p in folder.iterdir()):
            raise FedvlmError(f"{folder} is not empty and holds no run; choose another out=")
        anew = "make room there, or choose another out="
        with files.writing(folder, anew):
            for home, code in setup.codes.items():
                code.write(folder / "code" / home)
            for path in folder.glob("code/**/*.py"):
                files.sync(path)
            trust.remember(setup)
            files.write(folder / "run.json", record_of(planned).to_json(), sync=True, advice=anew)
            files.sync_folder(folder.parent)
        remember(folder)
        return run

    @property
    def record(self) -> RunRecord:
        path = self.folder / "run.json"
        try:
            stamp = files.stamp(path)  # another process may have written it since
            if self._known is None or self._known[0] != stamp:
                self._known = stamp, RunRecord.from_json(read_text(path))
            return self._known[1]
        except FileNotFoundError:
            raise FedvlmError(f"{self.folder} is not a run: it holds no run.json") from None
        except (OSError, ValueError) as error:
            raise FedvlmError(
                f"{path} is damaged or of another version ({error}); start the run anew elsewhere"
            ) from error

    def setup(self, uses: Collection[str] = ()) -> Setup:
        """What was decided, from this folder alone; an error where it would do what the user did not allow (trust.py)."""
        return trust.admitted(Setup.from_record(self.record, self.folder), self.folder, self.trusted, uses)

    @property
    def name(self) -> str:
        """What ledgers call it."""
        return self.folder.name

    @property
    def done(self) -> bool:
        return self.record.result is not None

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """One process per run."""
        with files.writing(self.folder, ADVICE):
            try:
                with FileLock(self.folder / ".lock", timeout=0):
                    for part in self.folder.glob(f"*{files.PART}"):  # left by a process that was killed
                        part.unlink()
                    yield
            except Timeout:
                raise FedvlmError(f"{self.folder}: another process is running this run") from None
            except NotImplementedError:
                raise FedvlmError(f"{self.folder}: its file system has no locks; choose another out=") from None

    def rounds(self) -> list[RoundRecord]:
        """The records of rounds, without lines that a killed process or a full disk cut off; of a round that was recorded
        twice, the later one."""
        path = self.folder / "rounds.jsonl"
        found: dict[int, RoundRecord] = {}
        for line in path.read_bytes().splitlines() if path.exists() else []:
            with contextlib.suppress(ValueError, KeyError, TypeError):
                record = cast(RoundRecord, json.loads(line.decode()))
                found[int(record["round"])] = record
        return [found[round] for round in sorted(found)]

    def append(self, record: RoundRecord) -> None:
        with files.writing(self.folder, ADVICE), (self.folder / "rounds.jsonl").open("ab") as out:
            out.write(json.dumps(client_names.summarised(record)).encode() + b"\n")

    def save(self, state: State, round: int) -> None:
        """Save the state after a whole round: the old state stands until the new one is complete."""
        from safetensors.torch import save

        from fedvlm.core.copies import without_copy

        kinds = state._replace(private=without_copy(state.private, state.shared))._asdict().items()
        flat = {f"{kind}/{k}": v.contiguous().cpu() for kind, params in kinds for k, v in params.items()}
        about = {
            "saved": f"{round} {self._checksum(flat, round)}"
        }  # one entry: safetensors writes several in any order
        began = time.monotonic()
        sync = began >= self.next_sync
        if sync:
            self._sync()
        self.write(STATE, save(flat, about), sync)
        if sync:
            now = time.monotonic()
            self.next_sync = now + SYNC_SHARE * (now - began)

    def load(self) -> tuple[State, int] | None:
        """The saved state and its round; None before the first round."""
        from safetensors import SafetensorError, safe_open

        from fedvlm.core.copies import with_copy
        from fedvlm.core.state import Params, State, aligned

        path = self.folder / STATE
        if not path.exists():
            if any(record["round"] > 0 for record in self.rounds()):
                raise FedvlmError(f"{path} is missing, though rounds were played; {RESTORE}")
            return None
        kinds: dict[str, Params] = {kind: {} for kind in State._fields}
        try:
            with safe_open(path, "pt") as file:
                words = file.metadata()["saved"].split()
                flat = {k: aligned(file.get_tensor(k)) for k in file.keys()}  # noqa: SIM118
            round = int(words[0])
            for name, value in flat.items():
                kind, _, key = name.partition("/")
                kinds[kind][key] = value
        except (SafetensorError, OSError, LookupError, TypeError, ValueError) as error:
            raise FedvlmError(f"{path} is damaged or of another version ({error}); {RESTORE}") from error
        if words[1:] != [self._checksum(flat, round)]:
            raise FedvlmError(f"{path} is damaged (checksum), or of another run; {RESTORE}")
        kinds["private"] = with_copy(kinds["private"], kinds["shared"])
        state = State(**kinds)
        if state.private and round and self.record.engine.name in KEEPS_ROWS:
            rows = self.folder / "rows.bin"
            if not rows.exists() or not rows.stat().st_size:
                raise FedvlmError(f"{rows} is missing or empty, though clients have private rows; {RESTORE}")
        return state, round

    @cached_property
    def _identity(self) -> str:
        return self.record.identity

    def _checksum(self, tensors: dict[str, Tensor], round: int) -> str:
        """The checksum of a state and its round in this run."""
        from torch import uint8

        seen = hashlib.sha256(f"{self._identity} {round}".encode())
        for name in sorted(tensors):
            value = tensors[name]
            seen.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
            seen.update(value.reshape(-1).view(uint8).numpy().data)
        return seen.hexdigest()[:32]

    def rewind(self, round: int) -> None:
        """Removes records of rounds after the saved state; an error where one of those before is missing."""
        kept = [r for r in self.rounds() if r["round"] <= round]
        if missing := set(range(round + 1)) - {r["round"] for r in kept}:
            path = self.folder / "rounds.jsonl"
            raise FedvlmError(
                f"{path} has no record of round {min(missing)}, and {STATE} is of round {round}; {RESTORE}"
            )
        self.write("rounds.jsonl", "".join(json.dumps(client_names.summarised(r)) + "\n" for r in kept).encode())

    def finish(self, result: Result) -> None:
        self._sync(STATE, "outputs.safetensors")
        self._write_record(replace(self.record, result=result))

    def _sync(self, *more: str) -> None:
        """What a state needs is on the disk before the state is."""
        names = ("rounds.jsonl", "rows.bin", "clients/*/rows.bin", *more)
        with files.writing(self.folder, ADVICE):
            for path in (p for name in names for p in self.folder.glob(name)):
                files.sync(path)

    def write(self, name: str, data: bytes, sync: bool = False) -> None:
        """Write atomically; tensor files are readable by their owner only."""
        files.write(self.folder / name, data, private=name.endswith(".safetensors"), sync=sync, advice=ADVICE)

    def computed_by(self, found: dict[str, str]) -> None:
        """Records with what each party computes now, which in a resumed run may be another processor than before."""
        record = self.record
        known = record.processors
        changed = {who: what for who, what in found.items() if known.get(who, [""])[-1] != what}
        if not changed:
            return
        for who in sorted(changed.keys() & known.keys()):
            text = (
                f"{who} computes with {changed[who]} from here on, before with {known[who][-1]}; last bits may differ"
            )
            console.warn(f"{self.folder}: {text}")
            self.log(text)
        added = {who: [*known.get(who, []), what] for who, what in changed.items()}
        self._write_record(replace(record, processors=known | added))

    def _write_record(self, record: RunRecord) -> None:
        self.write("run.json", record.to_json().encode(), sync=True)
        self._known = files.stamp(self.folder / "run.json"), record

    def log(self, text: str) -> None:
        with contextlib.suppress(OSError), (self.folder / "log.txt").open("a", encoding="utf-8") as out:
            out.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {printable(text)}\n")


def record_of(planned: PlannedRun) -> RunRecord:
    from fedvlm.backbones.arithmetic import described_arithmetic
    from fedvlm.core.data import SPLITS
    from fedvlm.engines.base import device_of

    setup, pool, federation = planned.setup, planned.pool, planned.federation
    name, _, fingerprint = pool.backbone.rpartition("@")
    task, source, home = pool.task, pool.source, setup.parts
    return RunRecord(
        identity=planned.identity,
        method=setup.method,
        adapter=home["adapter"],
        local=home["local"],
        merge=home["merge"],
        engine=home["engine"],
        metrics=[
            MetricRecord(**asdict(home[f"metric-{name}"]), percent=m.percent, lower_is_better=m.lower_is_better)
            for name, m in setup.metrics.items()
        ],
        config=setup.settings(),
        given=setup.given,
        data=DataRecord(
            name=source.name,
            fingerprint=pool.fingerprint,
            metric=source.task_type.metric,
            images=len(source.items),
            domains=source.domains,
            classes=list(task.classes),
            novel=list(task.novel.classes) if task.novel else [],
            nouns=list(task.nouns),
            skipped=pool.skipped,
            split=[int(federation.data.counts(part).sum()) for part in SPLITS] if source.has_split else [],
        ),
        backbone=BackboneRecord(name, fingerprint, task.dim, task.scale, pool.view),
        published=recipe.published(setup.method.name, setup.method.on, source.name, setup.settings()),
        reveals=setup.merge.reveals,
        versions=versions(),
        processors={SERVER: [described_arithmetic(device_of(setup))]},
        started=time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        clients=list(federation.names),
        homes={
            name: home
            for name, home in zip(federation.names, federation.domains, strict=True)
            if len(federation.names) <= client_names.MANY or name != home
        },
    )


def versions() -> dict[str, str]:
    """Versions of the packages that affect results."""
    known = {"fedvlm": fedvlm.__version__, "commit": _commit(), "python": platform.python_version()}
    return known | {name: version(name) for name in ("torch", "numpy")}


def _commit() -> str:
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        here = Path(__file__).parent
        call = ["git", "-C", str(here), "describe", "--always", "--dirty", "--exclude", "*"]
        return subprocess.run(call, capture_output=True, text=True, timeout=5, check=True).stdout.strip()
    return ""


def differs(found: RunRecord, planned: PlannedRun) -> str:
    """What a run that is in the way has different, in words."""
    setup = planned.setup
    old, new = binding(found.config), binding(setup.settings())
    keys = [k for k in old | new if old.get(k) != new.get(k)]
    for axis in ("adapter", "local", "merge"):
        theirs, ours = getattr(found, axis), setup.parts[axis]
        keys += [axis] if (theirs.name, theirs.settings) != (ours.name, ours.settings) else []
    keys += ["the code of your own parts"] if not keys and setup.codes else []
    keys += ["the images"] if found.data.fingerprint != planned.pool.fingerprint else []
    return "it differs in " + ", ".join(keys) if keys else "another version of fedvlm made it"


def find_runs(paths: list[str]) -> list[RunFolder]:
    """The runs at or below these folders, which may be names (places.py), without those that a sweep tried."""
    found = []
    for folder in map(folder_of, paths):
        if (folder / "run.json").is_file():
            found.append(RunFolder(folder))
        else:
            below = sorted(folder.rglob("run.json"))
            found += [RunFolder(p.parent) for p in below if SWEEP not in p.relative_to(folder).parts]
    if not found:
        raise FedvlmError(f"no runs in {', '.join(paths)}")
    return found
