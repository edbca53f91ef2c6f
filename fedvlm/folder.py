"""A run's folder: all that was decided, what happened each round, and the state to go on from.

run.json (the record, see records.py) · code/ (the user's own parts) · rounds.jsonl (one object per round) ·
state.safetensors (after the last whole round, replaced atomically) · rows.bin (clients' private rows) ·
outputs.safetensors (final logits on test) · log.txt
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import platform
import subprocess
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, cast

from filelock import FileLock, Timeout

import fedvlm
from fedvlm import recipe
from fedvlm.config import Setup, binding
from fedvlm.errors import FedvlmError
from fedvlm.names import file_name
from fedvlm.records import BackboneRecord, DataRecord, MetricRecord, Result, RoundRecord, RunRecord

if TYPE_CHECKING:
    from fedvlm.core import State
    from fedvlm.data.federation import Federation
    from fedvlm.data.pool import Pool


def identity(setup: Setup, pool: Pool) -> str:
    """Two runs with the same identity would give the same numbers."""
    decided = setup.binding()
    decided |= {"data": pool.fingerprint, "backbone": pool.backbone, "version": fedvlm.__version__}
    return hashlib.blake2b(json.dumps(decided, sort_keys=True).encode(), digest_size=4).hexdigest()


def folder_name(setup: Setup, pool: Pool) -> str:
    unseen = "+".join(setup.config.unseen) or "all"
    method = f"{setup.method.name}-{setup.method.on}" if setup.method.on else setup.method.name
    return file_name(f"{method}-{pool.source.name}-{unseen}-s{setup.config.seed}-{identity(setup, pool)}")


class RunFolder:
    def __init__(self, folder: Path):
        self.folder = folder

    @classmethod
    def start(cls, folder: Path, setup: Setup, pool: Pool, federation: Federation) -> RunFolder:
        """A new folder, or the one that already holds this very run."""
        run, mark = cls(folder), identity(setup, pool)
        if (folder / "run.json").exists():
            found = run.record
            if found.identity != mark:
                raise FedvlmError(f"{folder} holds another run ({differs(found, setup, pool)}); choose another out=")
            return run
        if folder.exists() and any(p.name not in ("log.txt", ".lock", "code") for p in folder.iterdir()):
            raise FedvlmError(f"{folder} is not empty and holds no run; choose another out=")
        try:
            for home, code in setup.codes.items():
                code.write(folder / "code" / home)
        except OSError as error:
            raise run.unwritable(error) from error
        run.write("run.json", describe(setup, pool, federation, mark).to_json().encode())
        return run

    @property
    def record(self) -> RunRecord:
        path = self.folder / "run.json"
        try:
            return RunRecord.from_json(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise FedvlmError(f"{self.folder} is not a run: it holds no run.json") from None
        except (OSError, ValueError) as error:
            raise FedvlmError(
                f"{path} is damaged or of another version ({error}); start the run anew elsewhere"
            ) from error

    def setup(self) -> Setup:
        """What was decided, from this folder alone."""
        record = self.record
        if record.legacy:
            raise FedvlmError(
                f"{self.folder} was written by fedvlm 0.1: tables and pages can be made of it, but to go on, predict or "
                "export use that version"
            )
        return Setup.from_record(record, self.folder)

    @property
    def done(self) -> bool:
        return self.record.result is not None

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """One process per run."""
        try:
            with FileLock(self.folder / ".lock", timeout=0):
                yield
        except Timeout:
            raise FedvlmError(f"{self.folder}: another process is running this run") from None
        except OSError as error:
            raise self.unwritable(error) from error

    def rounds(self) -> list[RoundRecord]:
        path = self.folder / "rounds.jsonl"
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        out = []
        for line in lines:
            with contextlib.suppress(ValueError):  # the last line of a killed process may be incomplete
                out.append(cast(RoundRecord, json.loads(line)))
        return out

    def append(self, record: RoundRecord) -> None:
        try:
            with (self.folder / "rounds.jsonl").open("a", encoding="utf-8") as out:
                out.write(json.dumps(record) + "\n")
        except OSError as error:
            raise self.unwritable(error) from error

    def save(self, state: State, round: int) -> None:
        """After a whole round: the old state stands until the new one is complete."""
        from safetensors.torch import save

        flat = {f"{kind}/{k}": v.contiguous() for kind, params in state._asdict().items() for k, v in params.items()}
        self.write("state.safetensors", save(flat, {"round": str(round)}))

    def load(self) -> tuple[State, int] | None:
        """The saved state and its round; None before the first round."""
        from safetensors import SafetensorError, safe_open

        from fedvlm.core import Params, State

        path = self.folder / "state.safetensors"
        if not path.exists():
            return None
        try:
            with safe_open(path, "pt") as file:
                round = int(file.metadata()["round"])
                flat = {k: file.get_tensor(k) for k in file.keys()}  # noqa: SIM118
        except (SafetensorError, OSError, KeyError, TypeError) as error:
            raise FedvlmError(f"{path} is damaged ({error}); start the run anew elsewhere") from error
        kinds: dict[str, Params] = {kind: {} for kind in State._fields}
        for name, value in flat.items():
            kind, _, key = name.partition("/")
            kinds[kind][key] = value
        return State(**kinds), round

    def rewind(self, round: int) -> None:
        """Removes records of rounds after the saved state."""
        kept = [json.dumps(r) + "\n" for r in self.rounds() if r["round"] <= round]
        self.write("rounds.jsonl", "".join(kept).encode())

    def finish(self, result: Result) -> None:
        self.write("run.json", replace(self.record, result=result).to_json().encode())

    def write(self, name: str, data: bytes) -> None:
        """Atomically: written beside, then renamed."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            part = self.folder / f"{name}.part"
            part.write_bytes(data)
            part.replace(self.folder / name)
        except OSError as error:
            raise self.unwritable(error) from error

    def unwritable(self, error: OSError) -> FedvlmError:
        return FedvlmError(
            f"{self.folder} cannot be written ({error.strerror}); what was saved stands: make room and `fedvlm resume` it"
        )

    def log(self, text: str) -> None:
        with contextlib.suppress(OSError), (self.folder / "log.txt").open("a", encoding="utf-8") as out:
            out.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n")


def describe(setup: Setup, pool: Pool, federation: Federation, mark: str) -> RunRecord:
    name, _, fingerprint = pool.backbone.rpartition("@")
    task, source, home = pool.task, pool.source, setup.parts
    return RunRecord(
        identity=mark,
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
        ),
        backbone=BackboneRecord(name, fingerprint, task.dim, task.scale),
        published=recipe.published(setup.method.name, setup.method.on, source.name, setup.settings()),
        reveals=setup.merge.reveals,
        versions={
            "fedvlm": fedvlm.__version__,
            "commit": _commit(),
            "python": platform.python_version(),
            "torch": version("torch"),
            "numpy": version("numpy"),
        },
        started=time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        clients=list(federation.names),
        homes=dict(zip(federation.names, federation.domains, strict=True)),
    )


def _commit() -> str:
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        here = Path(__file__).parent
        call = ["git", "-C", str(here), "describe", "--always", "--dirty", "--exclude", "*"]
        return subprocess.run(call, capture_output=True, text=True, timeout=5, check=True).stdout.strip()
    return ""


def differs(found: RunRecord, setup: Setup, pool: Pool) -> str:
    """What a run that is in the way has different, in words."""
    old, new = binding(found.config), binding(setup.settings())
    keys = [k for k in old | new if old.get(k) != new.get(k)]
    for axis in ("adapter", "local", "merge"):
        theirs, ours = getattr(found, axis), setup.parts[axis]
        keys += [axis] if (theirs.name, theirs.settings) != (ours.name, ours.settings) else []
    keys += ["the code of your own parts"] if not keys and setup.codes else []
    keys += ["the images"] if found.data.fingerprint != pool.fingerprint else []
    return "it differs in " + ", ".join(keys) if keys else "another version of fedvlm made it"


def find(paths: list[str]) -> list[RunFolder]:
    """The runs at or below these folders."""
    found = []
    for path in paths:
        folder = Path(path)
        if (folder / "run.json").is_file():
            found.append(RunFolder(folder))
        elif folder.is_dir():
            found += [RunFolder(p.parent) for p in sorted(folder.rglob("run.json"))]
        else:
            raise FedvlmError(f"{path}: no such run or folder of runs")
    if not found:
        raise FedvlmError(f"no runs in {', '.join(paths)}")
    return found
