"""A disk that is full, or a process that is killed, at a given byte; and small runs that meet them and go on.

    python tests/fullness.py 100        # so many random bytes: how many runs end with the same bits

As a command, `python fullness.py FOLDER ROOM WORDS…` is `fedvlm WORDS…` on a disk with ROOM bytes for FOLDER.
"""

from __future__ import annotations

import builtins
import contextlib
import errno
import io
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.nn import functional as F

SECTOR = 512  # a write that does not fit ends at a sector, as on a disk
RUN = {"method": "fedot", "rounds": 4, "lr": 0.05, "unseen": "sketch", "epochs": 1}
COMPARED = ("state.safetensors", "rows.bin", "outputs.safetensors")


class Killed(BaseException):
    """The process is gone: nothing that it does afterwards reaches the disk."""


class Disk:
    """Within a `with` block, what is written below `folder` takes space, of which there is `room` (None: any number of
    bytes). Then writes fail or, with `dies`, the process ends."""

    def __init__(self, folder: Path, room: int | None = None, dies: bool = False):
        self.folder, self.room, self.dies = os.path.realpath(folder), room, dies
        self.used, self.dead = 0, False

    def __enter__(self) -> Disk:
        self.inner = {(m, n): getattr(m, n) for m, n in ((io, "open"), (builtins, "open"), (os, "unlink"))}
        self.inner |= {(os, n): getattr(os, n) for n in ("replace", "rename", "mkdir")}
        io.open = builtins.open = self.open  # type: ignore[assignment]
        for name in ("unlink", "replace", "rename", "mkdir"):
            setattr(os, name, self.while_alive(self.inner[os, name]))
        return self

    def __exit__(self, *error: object) -> None:
        for (module, name), inner in self.inner.items():
            setattr(module, name, inner)

    def while_alive(self, inner: Any) -> Any:
        def call(*args: Any, **keys: Any) -> Any:
            if self.dead:
                raise Killed
            return inner(*args, **keys)

        return call

    def holds(self, file: Any) -> bool:
        if isinstance(file, int):
            return False
        path = os.path.realpath(file)
        return path == self.folder or path.startswith(self.folder + os.sep)

    def open(
        self,
        file: Any,
        mode: str = "r",
        buffering: int = -1,
        encoding: str | None = None,
        errors: str | None = None,
        newline: str | None = None,
        closefd: bool = True,
        opener: Any = None,
    ) -> Any:
        writes = set(mode) & set("wax+")
        if not writes or not self.holds(file):
            return self.inner[io, "open"](file, mode, buffering, encoding, errors, newline, closefd, opener)
        if self.dead:
            raise Killed
        raw = _File(file, mode.replace("b", "").replace("t", ""), opener=opener)
        raw.disk = self
        if "b" in mode and buffering == 0:
            return raw
        buffered = io.BufferedRandom(raw) if "+" in mode else io.BufferedWriter(raw)
        return buffered if "b" in mode else io.TextIOWrapper(buffered, encoding or "utf-8", errors, newline)

    def take(self, at: int, count: int) -> int:
        """How many of `count` bytes at position `at` can be written."""
        if self.dead:
            raise Killed
        if self.room is None or self.used + count <= self.room:
            self.used += count
            return count
        fits, self.used = self.room - self.used, self.room
        return max(0, (at + fits) // SECTOR * SECTOR - at)

    def end(self) -> None:
        if self.dies:
            self.dead = True
            raise Killed
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class _File(io.FileIO):
    disk: Disk

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        fits = self.disk.take(self.tell(), len(view))
        written = super().write(view[:fits]) or 0
        if fits < len(view):
            self.disk.end()
        return written


class Trials:
    """Runs of a few rounds with private rows, on data that no encoder has to read; all in one folder."""

    def __init__(self, folder: Path):
        from fedvlm.config.config import resolve
        from fedvlm.data.formats.embeddings import write_embeddings
        from fedvlm.data.pool import Pools

        draw, classes = torch.Generator().manual_seed(3), ["cat", "dog", "owl"]
        text = torch.randn(3, 16, generator=draw)
        y = torch.randint(3, (60,), generator=draw)
        x = F.normalize(text[y] + torch.randn(60, 16, generator=draw), dim=1)
        self.folder, data = folder, folder / "animals.safetensors"
        folder.mkdir(parents=True, exist_ok=True)
        write_embeddings(
            data, x, y.tolist(), classes, [("photo", "sketch", "clip")[k % 3] for k in range(60)], text=text
        )
        keys = {k: v for k, v in RUN.items() if k != "method"}
        self.words = ["run", RUN["method"], f"data={data}", *(f"{k}={v}" for k, v in keys.items())]
        self.setup = resolve(str(RUN["method"]), keys | {"data": str(data)})
        self.pool = Pools().load(self.setup)
        with Disk(folder / "whole") as disk:
            self.whole = self.run(folder / "whole")
        self.bytes = disk.used  # that a whole run writes

    def run(self, folder: Path) -> Any:
        from fedvlm.training.planned_run import PlannedRun
        from fedvlm.training.train import train

        return train(PlannedRun(self.setup, self.pool, folder))

    def resumed(self, folder: Path, *rooms: int, dies: bool = False) -> list[str]:
        """A run that finds so much room at each attempt, then goes on with enough; what of it differs from a whole run."""
        from fedvlm.errors import FedvlmError

        for room in rooms:
            with contextlib.suppress(FedvlmError, Killed), Disk(folder, room, dies):
                self.run(folder)
        self.run(folder)
        return self.differences(folder)

    def resumed_command(self, folder: Path, room: int) -> tuple[str, list[str]]:
        """As `resumed`, with processes of their own: what the first said, and the differences."""
        words = [*self.words, f"out={folder}"]
        call = [sys.executable, __file__, str(folder), str(room), *words]
        told = subprocess.run(call, capture_output=True, text=True, check=False)
        again = ["resume", str(folder)] if (folder / "run.json").exists() else words
        subprocess.run([sys.executable, "-m", "fedvlm", *again], check=True, capture_output=True)
        return told.stderr, self.differences(folder)

    def differences(self, folder: Path) -> list[str]:
        from fedvlm.training.folder import RunFolder

        run, whole = RunFolder(folder), self.whole
        found = [n for n in COMPARED if (folder / n).read_bytes() != (whole.folder / n).read_bytes()]
        rounds = [[{k: v for k, v in r.items() if k != "seconds"} for r in one.rounds()] for one in (run, whole)]
        found += ["rounds.jsonl"] if rounds[0] != rounds[1] else []
        left = {p.name for p in folder.rglob("*")} ^ {p.name for p in whole.folder.rglob("*")} - {"log.txt"}
        return found + ([] if run.done else ["not finished"]) + sorted(left)


@contextlib.contextmanager
def read_only(folder: Path) -> Iterator[None]:
    """What is below that folder cannot be changed, also by root."""
    inside = Disk(folder).holds
    inner = {n: getattr(os, n) for n in ("open", "mkdir", "unlink", "replace", "rename", "rmdir")}
    inner_open = io.open

    def refused() -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    def opened(file: Any, mode: str = "r", *args: Any, **keys: Any) -> Any:
        return refused() if set(mode) & set("wax+") and inside(file) else inner_open(file, mode, *args, **keys)

    def os_open(path: Any, flags: int, *args: Any, **keys: Any) -> Any:
        writes = flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        return refused() if writes and inside(path) else inner["open"](path, flags, *args, **keys)

    def guarded(call: Any) -> Any:
        return lambda path, *args, **keys: refused() if inside(path) else call(path, *args, **keys)

    changed = {n: guarded(c) for n, c in inner.items()} | {"open": os_open}
    with (
        mock.patch.multiple(io, open=opened),
        mock.patch.multiple(builtins, open=opened),
        mock.patch.multiple(os, **changed),
    ):
        yield


@contextlib.contextmanager
def small_file_system(folder: Path, size: int) -> Iterator[None]:
    """A file system of so many bytes, mounted there; OSError where that is not possible."""
    folder.mkdir(parents=True, exist_ok=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    try:
        if subprocess.run(mount, capture_output=True, check=False).returncode:
            raise OSError("no right to mount")
    except FileNotFoundError as error:
        raise OSError("no command mount") from error
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], capture_output=True, check=True)


def enlarge(folder: Path, size: int) -> None:
    subprocess.run(["mount", "-o", f"remount,size={size}", str(folder)], capture_output=True, check=True)


if __name__ == "__main__":
    from fedvlm.cli import main

    with Disk(Path(sys.argv[1]), int(sys.argv[2])):
        code = main(sys.argv[3:])
    sys.exit(code)
