"""A run's folder: what was asked, what happened each round, and the state to go on from.

run.json (asked, resolved, versions, data, backbone, result) · rounds.jsonl (one object a round) ·
state.safetensors (after the last whole round, replaced atomically) · rows.bin (clients' private rows) ·
outputs.safetensors (final logits on test) · log.txt
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import platform
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

import fedvlm
from fedvlm.config import Setup
from fedvlm.core import FedvlmError, Params, State
from fedvlm.data.federation import Pool
from fedvlm.evaluate.protocols import OPEN

LOOSE = ("out", "seeds", "jobs", "protocol", "timeout", "device")  # keys that do not change a run's numbers


def binding(config: dict[str, Any]) -> dict[str, Any]:
    """What of a run's keys changes its numbers: of the protocols, the one that takes classes away."""
    return {k: v for k, v in config.items() if k not in LOOSE or (k, v) == ("protocol", OPEN)}


def identity(setup: Setup, pool: Pool) -> str:
    """Two runs with the same identity would give the same numbers."""
    decided = binding(setup.record())
    decided |= {"data": pool.fingerprint, "backbone": pool.backbone, "version": fedvlm.__version__}
    decided["files"] = {
        a: Path(n).read_text() for a, n in setup.chosen.items() if n.endswith(".py")
    }  # parts of one's own
    return hashlib.blake2b(json.dumps(decided, sort_keys=True).encode(), digest_size=4).hexdigest()


def folder_name(setup: Setup, pool: Pool) -> str:
    unseen = "+".join(setup.config.unseen) or "all"
    return f"{setup.recipe.name}-{pool.source.name}-{unseen}-s{setup.config.seed}-{identity(setup, pool)}"


class Run:
    def __init__(self, folder: Path):
        self.folder = folder

    @classmethod
    def start(cls, folder: Path, setup: Setup, pool: Pool, homes: dict[str, str] | None = None) -> Run:
        """A new folder, or the one that already holds this very run."""
        run, mark = cls(folder), identity(setup, pool)
        if (folder / "run.json").exists():
            found = run.info
            if found["identity"] != mark:
                raise FedvlmError(f"{folder} holds another run ({differs(found, setup, pool)}); choose another out=")
            return run
        if folder.exists() and any(p.name not in ("log.txt", ".lock") for p in folder.iterdir()):
            raise FedvlmError(f"{folder} is not empty and holds no run; choose another out=")
        run.write(
            "run.json",
            json.dumps(
                _describe(setup, pool, mark) | {"clients": list(homes or {}), "homes": homes or {}}, indent=1
            ).encode(),
        )
        return run

    @property
    def info(self) -> dict[str, Any]:
        try:
            return json.loads((self.folder / "run.json").read_text())
        except FileNotFoundError:
            raise FedvlmError(f"{self.folder} is not a run: it holds no run.json") from None
        except ValueError as error:
            raise FedvlmError(
                f"{self.folder / 'run.json'} is damaged ({error}); start the run anew elsewhere"
            ) from error

    @property
    def done(self) -> bool:
        return "result" in self.info

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """One process a run."""
        with (self.folder / ".lock").open("w") as handle:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise FedvlmError(f"{self.folder}: another process is running this run") from None
            yield

    def rounds(self) -> list[dict[str, Any]]:
        path = self.folder / "rounds.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        out = []
        for line in lines:
            with contextlib.suppress(ValueError):  # the last line of a killed process may be half a line
                out.append(json.loads(line))
        return out

    def append(self, record: dict[str, Any]) -> None:
        try:
            with (self.folder / "rounds.jsonl").open("a") as out:
                out.write(json.dumps(record) + "\n")
        except OSError as error:
            raise self.full(error) from error

    def save(self, state: State, round: int) -> None:
        """After a whole round: the old state stands until the new one is complete."""
        kinds = {"shared": state.shared, "private": state.private, "server": state.server}
        flat = {f"{kind}/{k}": v.contiguous() for kind, params in kinds.items() for k, v in params.items()}
        self.write("state.safetensors", save(flat, {"round": str(round)}))

    def load(self) -> tuple[State, int] | None:
        path = self.folder / "state.safetensors"
        if not path.exists():
            return None
        try:
            with safe_open(path, "pt") as file:
                round = int(file.metadata()["round"])
                flat = {k: file.get_tensor(k) for k in file.keys()}  # noqa: SIM118
        except (SafetensorError, OSError, KeyError, TypeError) as error:
            raise FedvlmError(f"{path} is damaged ({error}); start the run anew elsewhere") from error
        kinds: dict[str, Params] = {"shared": {}, "private": {}, "server": {}}
        for name, value in flat.items():
            kind, _, key = name.partition("/")
            kinds[kind][key] = value
        return State(**kinds), round

    def rewind(self, round: int) -> None:
        """Forget records of rounds after the saved state."""
        kept = [json.dumps(r) + "\n" for r in self.rounds() if r["round"] <= round]
        self.write("rounds.jsonl", "".join(kept).encode())

    def finish(self, result: dict[str, Any]) -> None:
        self.write("run.json", json.dumps(self.info | {"result": result}, indent=1).encode())

    def write(self, name: str, data: bytes) -> None:
        """Atomically: beside, then in place."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            part = self.folder / f"{name}.part"
            part.write_bytes(data)
            part.rename(self.folder / name)
        except OSError as error:
            raise self.full(error) from error

    def full(self, error: OSError) -> FedvlmError:
        return FedvlmError(
            f"{self.folder} cannot be written ({error.strerror}); what was saved stands: make room and `fedvlm resume` it"
        )

    def log(self, text: str) -> None:
        with contextlib.suppress(OSError), (self.folder / "log.txt").open("a") as out:
            out.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n")


def _describe(setup: Setup, pool: Pool, mark: str) -> dict[str, Any]:
    return {
        "identity": mark,
        "method": setup.recipe.name,
        "recipe": setup.recipe.path or setup.recipe.name,
        "given": setup.given,
        "config": setup.record(),
        "data": {
            "name": pool.source.name,
            "fingerprint": pool.fingerprint,
            "metric": pool.source.kind.metric,
            "images": len(pool.source.items),
            "domains": pool.source.domains,
            "classes": list(pool.task.classes),
            "novel": list(pool.task.novel.classes) if pool.task.novel else [],
            "nouns": list(pool.task.nouns),
            "skipped": pool.skipped,
        },
        "reveals": setup.merge.reveals,
        "backbone": {"name": pool.backbone, "dim": pool.task.dim, "scale": pool.task.scale},
        "versions": {
            "fedvlm": fedvlm.__version__,
            "commit": _commit(),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "numpy": np.__version__,
        },
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }


def _commit() -> str:
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        here = Path(__file__).parent
        call = ["git", "-C", str(here), "describe", "--always", "--dirty", "--exclude", "*"]
        return subprocess.run(call, capture_output=True, text=True, timeout=5, check=True).stdout.strip()
    return ""


def differs(info: dict[str, Any], setup: Setup, pool: Pool) -> str:
    """What a run in the way has different, in words."""
    old, new = (binding(c) for c in (info["config"], json.loads(json.dumps(setup.record()))))
    keys = [k for k in old | new if old.get(k) != new.get(k)]
    if info["data"]["fingerprint"] != pool.fingerprint:
        keys.append("the images")
    return "it differs in " + ", ".join(keys) if keys else "another version of fedvlm made it"


def find(paths: list[str]) -> list[Run]:
    """The runs at or below these folders."""
    runs = []
    for path in paths:
        folder = Path(path)
        if (folder / "run.json").is_file():
            runs.append(Run(folder))
        elif folder.is_dir():
            runs += [Run(p.parent) for p in sorted(folder.rglob("run.json"))]
        else:
            raise FedvlmError(f"{path}: no such run or folder of runs")
    if not runs:
        raise FedvlmError(f"no runs in {', '.join(paths)}")
    return runs


def default_out() -> Path:
    return Path(os.environ.get("FEDVLM_RUNS") or "runs")
