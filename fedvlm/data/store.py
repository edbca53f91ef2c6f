"""The feature store: a cache on disk of what frozen encoders compute from images and phrases.

There is one folder per backbone, preprocessing and view. It holds immutable segment files, each a table of rows with the
content hash of the input (the key) and a checksum per row. A segment is written under a temporary name and then renamed,
so that any number of processes may write at once: at worst a row is computed twice, and readers use the one stored first.
A row whose checksum does not match is treated as missing and computed again.
"""

from __future__ import annotations

import json
import shutil
import time
import uuid
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypedDict

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from fedvlm.backbones.base import Backbone, ViewFormat, encode_view, view_format
from fedvlm.core import FedvlmError
from fedvlm.data.corruptions import KINDS, corrupt
from fedvlm.data.source import Source, decode, digest
from fedvlm.errors import nearest
from fedvlm.machine import cache_home
from fedvlm.names import file_name

BATCH = 64  # images per call of an encoder
PHRASES = 256  # phrases per call of an encoder
SEGMENT_ROWS, SEGMENT_BYTES = 2048, 64 << 20  # a segment is written at either size; a crash loses at most one segment
SEVERITIES = 5  # of each kind of corruption
ABANDONED = 3600  # seconds after which a temporary file is taken for the leftover of a crash

Progress = Callable[[int, int], None]  # (done, total)


class ViewSummary(TypedDict):
    view: str  # the folder's name
    segments: int
    bytes: int
    used: float  # time of the last write, in seconds since the epoch


def home() -> Path:
    return cache_home()


@dataclass
class View:
    """The stored rows of one view of one backbone, by content hash. Segments are memory-mapped."""

    folder: Path
    format: ViewFormat

    def __post_init__(self) -> None:
        self.index: dict[bytes, list[tuple[np.ndarray, int]]] = {}  # key → (segment, row) of each copy, oldest first
        self.loaded: set[Path] = set()
        self.broken = 0  # damaged segments and rows found so far
        self._load_new_segments()

    def _load_new_segments(self) -> None:
        """Segments that this or another process wrote since the last call."""
        for path in sorted(set(self.folder.glob("*.rows")) - self.loaded):
            self.loaded.add(path)
            self._load_segment(path)

    @property
    def record_dtype(self) -> np.dtype:
        return np.dtype([("key", "V16"), ("check", "<u4"), ("row", self.format.dtype, self.format.shape)])

    def _load_segment(self, path: Path) -> None:
        try:
            size = path.stat().st_size
        except FileNotFoundError:  # pruned by another process since it was listed
            return
        if size == 0 or size % self.record_dtype.itemsize:  # truncated
            self.broken += 1
            path.unlink(missing_ok=True)
            return
        table = np.memmap(path, self.record_dtype, "r")
        for i, key in enumerate(table["key"]):
            self.index.setdefault(key.tobytes(), []).append((table, i))

    def get(self, key: bytes) -> np.ndarray | None:
        """The oldest intact row, or None. Always the oldest: a row computed again in another batch may differ in its last
        bits, and results must not change with it."""
        copies = self.index.get(key, [])
        while copies:
            table, i = copies[0]
            row = np.asarray(table["row"][i])
            if checksum(key, row) == table["check"][i]:
                return row
            self.broken += 1
            copies.pop(0)
        return None

    def put(self, keys: list[bytes], rows: np.ndarray) -> None:
        table = np.zeros(len(keys), self.record_dtype)
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
        self._load_new_segments()


def checksum(key: bytes, row: np.ndarray) -> int:
    return zlib.crc32(row.tobytes(), zlib.crc32(key))


def open_view(backbone: Backbone, view: str = "embedding") -> View:
    """`view` is one of the backbone's image views, or "text" for embeddings of phrases."""
    name = f"{Path(backbone.name).name}-{backbone.fingerprint[:12]}-{view.replace('@', '-')}"
    return View(
        home() / "features" / file_name(name),
        ViewFormat((backbone.dim,)) if view == "text" else view_format(backbone, view),
    )


def features(
    source: Source,
    backbone: Backbone,
    broken: str = "skip",
    progress: Progress | None = None,
    view: str = "embedding",
    version: int | None = None,
) -> tuple[Tensor, list[bytes], dict[str, str]]:
    """The view of every item [items, …] in the source's order, their keys, and the skipped files with the reasons.

    broken: "skip" skips unreadable images, whose rows are NaN (0 for integers); "refuse" raises an error at the first.
    version: None for the images as they are; 0 … 74 for one of their 75 corruptions, see `corrupted`.
    """
    stored = open_view(backbone, view)
    keys: list[bytes] = []
    skipped: dict[str, str] = {}
    dtype = np.dtype(stored.format.dtype)
    out = np.full((len(source.items), *stored.format.shape), np.nan if dtype.kind == "f" else 0, dtype)
    queue = _EncodingQueue(stored, partial(encode_view, backbone, view=view), out)
    for index, data in source.read():
        key, transform = digest(data), None
        if version is not None:
            key, transform = corrupted(key, version)
        keys.append(key)
        row = stored.get(key)
        if row is not None:
            out[index] = row
        elif not queue.add_duplicate(key, index):
            try:
                image = decode(data)
                queue.add(key, index, transform(image) if transform else image)
            except ValueError as error:
                name = source.items[index].path
                if broken == "refuse":
                    raise FedvlmError(f"{name}: {error}; repair or remove it, or give broken=skip") from error
                skipped[name] = str(error)
        if progress:
            progress(index + 1, len(source.items))
    queue.flush()
    return torch.from_numpy(out), keys, skipped


def corrupted(key: bytes, version: int) -> tuple[bytes, Callable[[Image.Image], Image.Image]]:
    """The key of a corrupted version of an image, and the function that makes it.

    Versions 0 … 74 are the 75 corruptions (15 kinds × 5 severities), in an order that starts at a point given by the
    image's content.
    """
    start = int.from_bytes(key[:4], "little")
    kind, severity = divmod((start + version) % (SEVERITIES * len(KINDS)), SEVERITIES)
    new_key = digest(key + f"{KINDS[kind]}-{severity + 1}".encode())
    seed = int.from_bytes(new_key[:7], "little")
    return new_key, lambda image: corrupt(image, KINDS[kind], severity + 1, seed)


def text_embeddings(backbone: Backbone, phrases: list[str]) -> Tensor | None:
    """The phrases' embeddings [phrases, dim], stored like those of images; None if the backbone has no text tower."""
    return text_embeddings_by(backbone, phrases, backbone.texts)


def text_embeddings_by(
    backbone: Backbone,
    phrases: list[str],
    encode: Callable[[list[str]], Tensor | None],
    key_prefix: str = "",
    progress: Progress | None = None,
) -> Tensor | None:
    """As `text_embeddings`, with a custom encoder. `key_prefix` must name that encoder: its rows are then stored apart
    from those of `backbone.texts`, from which they may differ in their last bits."""
    stored = open_view(backbone, "text")
    keys = {p: digest((key_prefix + p).encode()) for p in phrases}
    missing = [p for p, key in keys.items() if stored.get(key) is None]
    if len(missing) > PHRASES:
        missing.sort(key=len)  # batches are padded to their longest phrase
    for first in range(0, len(missing), SEGMENT_ROWS):
        segment = missing[first : first + SEGMENT_ROWS]
        encoded = [encode(segment[k : k + PHRASES]) for k in range(0, len(segment), PHRASES)]
        if encoded[0] is None:
            return None
        stored.put([keys[p] for p in segment], np.concatenate([e.numpy() for e in encoded if e is not None]))
        if progress:
            progress(first + len(segment), len(missing))
    rows = [row for p in phrases if (row := stored.get(keys[p])) is not None]
    return torch.from_numpy(np.stack(rows))


class _EncodingQueue:
    """Encodes images in batches, stores the rows in segments, and copies each row to its places in `out`.

    A file that occurs more than once is encoded once.
    """

    def __init__(self, view: View, encode: Callable[[list[Image.Image]], Tensor], out: np.ndarray):
        self.view, self.encode, self.out = view, encode, out
        self.images: list[Image.Image] = []  # not encoded yet
        self.rows: list[np.ndarray] = []  # encoded and not stored yet, a batch each
        self.keys: list[bytes] = []  # of `rows`, then of `images`
        self.places: dict[bytes, list[int]] = {}  # key → indices in `out`

    def add_duplicate(self, key: bytes, place: int) -> bool:
        """Whether an image with this key is in the queue already; if so, its row is copied to `place` too."""
        if key not in self.places:
            return False
        self.places[key].append(place)
        return True

    def add(self, key: bytes, place: int, image: Image.Image) -> None:
        self.places[key] = [place]
        self.keys.append(key)
        self.images.append(image)
        if len(self.images) >= BATCH:
            self._encode()
        if sum(map(len, self.rows)) >= SEGMENT_ROWS or sum(r.nbytes for r in self.rows) >= SEGMENT_BYTES:
            self._store()

    def _encode(self) -> None:
        if self.images:
            self.rows.append(self.encode(self.images).numpy())
            self.images = []

    def _store(self) -> None:
        if self.rows:
            rows = np.concatenate(self.rows)
            self.view.put(self.keys[: len(rows)], rows)
            for key in self.keys[: len(rows)]:
                self.out[self.places.pop(key)] = self.view.get(key)
            self.keys, self.rows = self.keys[len(rows) :], []

    def flush(self) -> None:
        self._encode()
        self._store()


def listing() -> Iterator[ViewSummary]:
    """What the store holds, one entry per view."""
    root = home() / "features"
    for folder in sorted(p for p in root.iterdir() if p.is_dir()) if root.is_dir() else []:
        files = list(folder.glob("*.rows"))
        used = max((f.stat().st_mtime for f in files), default=folder.stat().st_mtime)
        yield {"view": folder.name, "segments": len(files), "bytes": sum(f.stat().st_size for f in files), "used": used}


def prune(older_than_days: float = 0.0, names: Iterable[str] = ()) -> list[str]:
    """Removes the named views or, if none is named, those not written for that many days (0: all); returns their names.
    Temporary files left by crashes are removed in any case."""
    removed: list[str] = []
    wanted, known = set(names), list(listing())
    for name in wanted - {e["view"] for e in known}:
        raise FedvlmError(f"the feature store has no view {name}; {nearest(name, [e['view'] for e in known])}")
    for entry in known:
        folder = home() / "features" / entry["view"]
        for part in folder.glob("*.part"):
            if time.time() - part.stat().st_mtime > ABANDONED:
                part.unlink(missing_ok=True)
        old = time.time() - entry["used"] >= older_than_days * 86400
        if entry["view"] in wanted or (not wanted and old):
            shutil.rmtree(folder)
            removed.append(entry["view"])
    return removed


def fingerprint(keys: list[bytes], labels: list[str]) -> str:
    """A hash of a data set: contents and labels, in order."""
    return digest(b"".join(keys) + json.dumps(labels).encode()).hex()[:16]
