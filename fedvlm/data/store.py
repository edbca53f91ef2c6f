"""The feature store: what a frozen model says of an image is computed once and kept.

One folder a (backbone, preprocessing, view); in it immutable segments, each a batch of rows with their images' content
hashes and a checksum a row. A segment is written beside and renamed into place, so any number of processes may write;
the worst that two can do is compute the same row twice, and the first one stands. A row that fails its checksum counts
as absent and is rebuilt.
"""

from __future__ import annotations

import json
import os
import shutil
import time
import uuid
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from fedvlm.backbones.base import Backbone, Form, form, look
from fedvlm.core import FedvlmError
from fedvlm.data.corruptions import KINDS, corrupt
from fedvlm.data.source import Source, decode, digest
from fedvlm.errors import nearest

BATCH = 64  # images to an encoder at a time
PHRASES = 256  # and phrases
SEGMENT, LARGE = 2048, 64 << 20  # rows, bytes: a crash loses at most this much

Progress = Callable[[int, int], None]


def home() -> Path:
    return Path(os.environ.get("FEDVLM_CACHE") or Path.home() / ".cache" / "fedvlm")


@dataclass
class View:
    """One view of images through one backbone: rows by content hash, memory-mapped."""

    folder: Path
    form: Form

    def __post_init__(self) -> None:
        self.index: dict[bytes, list[tuple[np.ndarray, int]]] = {}  # oldest first
        self.mapped: set[Path] = set()
        self.broken = 0
        self._look()

    def _look(self) -> None:
        """Maps the segments that are new here, this process's and others'."""
        for path in sorted(set(self.folder.glob("*.rows")) - self.mapped):
            self.mapped.add(path)
            self._map(path)

    @property
    def kind(self) -> np.dtype:
        return np.dtype([("key", "V16"), ("check", "<u4"), ("row", self.form.kind, self.form.shape)])

    def _map(self, path: Path) -> None:
        try:
            size = path.stat().st_size
        except FileNotFoundError:  # pruned by another process since it was listed
            return
        if size == 0 or size % self.kind.itemsize:
            self.broken += 1
            path.unlink(missing_ok=True)  # cut short: it never was a whole segment
            return
        table = np.memmap(path, self.kind, "r")
        for i, key in enumerate(table["key"]):
            self.index.setdefault(key.tobytes(), []).append((table, i))

    def get(self, key: bytes) -> np.ndarray | None:
        """The row that was stored first and is whole: what is encoded later, in another batch, must not change its bits."""
        found = self.index.get(key, [])
        while found:
            table, i = found[0]
            row = np.asarray(table["row"][i])
            if checksum(key, row) == table["check"][i]:
                return row
            self.broken += 1
            found.pop(0)
        return None

    def put(self, keys: list[bytes], rows: np.ndarray) -> None:
        table = np.zeros(len(keys), self.kind)
        table["key"] = np.array([np.void(k) for k in keys], dtype="V16")
        table["row"] = rows
        table["check"] = [checksum(k, r) for k, r in zip(keys, table["row"], strict=True)]
        path = self.folder / f"{time.time_ns():020d}-{uuid.uuid4().hex[:8]}.rows"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            path.with_suffix(".part").write_bytes(table.tobytes())
            path.with_suffix(".part").rename(path)
        except OSError as error:
            with suppress(OSError):
                path.with_suffix(".part").unlink()
            raise FedvlmError(
                f"the feature store at {self.folder} cannot be written ({error.strerror}); free some space "
                "(`fedvlm cache --prune`) or set FEDVLM_CACHE to another folder"
            ) from error
        self._look()


def checksum(key: bytes, row: np.ndarray) -> int:
    return zlib.crc32(row.tobytes(), zlib.crc32(key))


def open_view(backbone: Backbone, view: str = "embedding") -> View:
    folder = home() / "features" / f"{Path(backbone.name).name}-{backbone.fingerprint[:12]}-{view.replace('@', '-')}"
    return View(folder, Form((backbone.dim,)) if view == "text" else form(backbone, view))


def features(
    source: Source,
    backbone: Backbone,
    broken: str = "skip",
    progress: Progress | None = None,
    seen: str = "embedding",
    version: int | None = None,
) -> tuple[Tensor, list[bytes], dict[str, str]]:
    """That view [items, …] in the source's order, content hashes, and the files left out with the reason.

    A `version` of an image is the image under one of the 75 corruptions (15 kinds × 5 severities), which one follows from
    its content; versions 0 … 74 are all of them.

    broken="skip" leaves unreadable images out (and names them); "refuse" stops at the first.
    """
    view = open_view(backbone, seen)
    keys: list[bytes] = []
    skipped: dict[str, str] = {}
    kind = np.dtype(view.form.kind)
    out = np.full((len(source.items), *view.form.shape), np.nan if kind.kind == "f" else 0, kind)
    pending = _Pending(view, partial(look, backbone, view=seen), out)
    for k, data in source.read():
        key, bend = digest(data), None
        if version is not None:
            key, bend = corrupted(key, version)
        keys.append(key)
        row = view.get(key)
        if row is not None:
            out[k] = row
        elif not pending.twin(key, k):
            try:
                pending.add(key, k, bend(decode(data)) if bend else decode(data))
            except ValueError as error:
                name = source.items[k].path
                if broken == "refuse":
                    raise FedvlmError(f"{name}: {error}; mend or remove it, or give broken=skip") from error
                skipped[name] = str(error)
        if progress:
            progress(k + 1, len(source.items))
    pending.finish()
    return torch.from_numpy(out), keys, skipped


def corrupted(key: bytes, version: int) -> tuple[bytes, Callable[[Image.Image], Image.Image]]:
    """The key of that version, and how it is made."""
    kind, severity = divmod((int.from_bytes(key[:4], "little") + version) % (5 * len(KINDS)), 5)
    told = digest(key + f"{KINDS[kind]}-{severity + 1}".encode())
    seed = int.from_bytes(told[:7], "little")
    return told, lambda image: corrupt(image, KINDS[kind], severity + 1, seed)


def class_names(backbone: Backbone, phrases: list[str]) -> Tensor | None:
    """The phrases' embeddings [phrases, dim], kept like images' are; None without a text tower."""
    return texts(backbone, phrases, backbone.texts)


def texts(
    backbone: Backbone,
    phrases: list[str],
    encode: Callable[[list[str]], Tensor | None],
    how: str = "",
    progress: Progress | None = None,
) -> Tensor | None:
    """The same by an encoder of one's own; `how` keeps its rows apart, whose last bits may differ."""
    view = open_view(backbone, "text")
    keys = {p: digest((how + p).encode()) for p in phrases}
    missing = [p for p, key in keys.items() if view.get(key) is None]
    if len(missing) > PHRASES:
        missing.sort(key=len)  # about equal lengths together: a batch is as long as its longest
    for first in range(0, len(missing), SEGMENT):
        segment = missing[first : first + SEGMENT]
        fresh = [encode(segment[k : k + PHRASES]) for k in range(0, len(segment), PHRASES)]
        if fresh[0] is None:
            return None
        view.put([keys[p] for p in segment], np.concatenate([f.numpy() for f in fresh if f is not None]))
        if progress:
            progress(first + len(segment), len(missing))
    rows = [row for p in phrases if (row := view.get(keys[p])) is not None]
    return torch.from_numpy(np.stack(rows))


class _Pending:
    """Images waiting to be encoded, and rows waiting to be written."""

    def __init__(self, view: View, look: Callable[[list], Tensor], out: np.ndarray):
        self.view, self.look, self.out = view, look, out
        self.images: list = []
        self.keys: list[bytes] = []
        self.rows: list[np.ndarray] = []
        self.places: dict[bytes, list[int]] = {}

    def twin(self, key: bytes, place: int) -> bool:
        """The same file twice is encoded once."""
        if key not in self.places:
            return False
        self.places[key].append(place)
        return True

    def add(self, key: bytes, place: int, image) -> None:
        self.places[key] = [place]
        self.keys.append(key)
        self.images.append(image)
        if len(self.images) >= BATCH:
            self._encode()
        if sum(map(len, self.rows)) >= SEGMENT or sum(r.nbytes for r in self.rows) >= LARGE:
            self._write()

    def _encode(self) -> None:
        if self.images:
            self.rows.append(self.look(self.images).numpy())
            self.images = []

    def _write(self) -> None:
        if self.rows:
            rows = np.concatenate(self.rows)
            self.view.put(self.keys[: len(rows)], rows)
            for key in self.keys[: len(rows)]:
                self.out[self.places.pop(key)] = self.view.get(key)
            self.keys, self.rows = self.keys[len(rows) :], []

    def finish(self) -> None:
        self._encode()
        self._write()


def listing() -> Iterator[dict]:
    """What the store holds, a view each."""
    root = home() / "features"
    for folder in sorted(p for p in root.iterdir() if p.is_dir()) if root.is_dir() else []:
        files = list(folder.glob("*.rows"))
        used = max((f.stat().st_mtime for f in files), default=folder.stat().st_mtime)
        yield {"view": folder.name, "segments": len(files), "bytes": sum(f.stat().st_size for f in files), "used": used}


def prune(older_than_days: float = 0.0, names: Iterable[str] = ()) -> list[str]:
    """Removes views not written for that long (or just those named); leftovers of crashes go in any case."""
    gone: list[str] = []
    wanted, known = set(names), list(listing())
    for name in wanted - {e["view"] for e in known}:
        raise FedvlmError(f"the feature store has no view {name}; {nearest(name, [e['view'] for e in known])}")
    for entry in known:
        folder = home() / "features" / entry["view"]
        for part in folder.glob("*.part"):
            if time.time() - part.stat().st_mtime > 3600:
                part.unlink(missing_ok=True)
        old = time.time() - entry["used"] >= older_than_days * 86400
        if entry["view"] in wanted or (not wanted and old):
            shutil.rmtree(folder)
            gone.append(entry["view"])
    return gone


def fingerprint(keys: list[bytes], labels: list[str]) -> str:
    """Of a data set: contents and labels, in order."""
    return digest(b"".join(keys) + json.dumps(labels).encode()).hex()[:16]
