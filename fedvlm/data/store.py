"""The feature store: a cache on disk of what frozen encoders compute from images and phrases.

There is one folder per backbone, preprocessing, view and arithmetic of the machine that encodes. It holds immutable
segment files, each a table of rows with the content hash of the input (the key) and a checksum per row. A segment is
written under a temporary name and then renamed, so that any number of processes may write at once: at worst a row is
computed twice, and readers use the one stored first. A row whose checksum does not match is treated as missing and
computed again. Many small segments are joined into one; a reader that finds a segment gone reads the folder again. A cache
that cannot be written is used as it is.

The keys of a longer segment are also in a file of their own beside it, so that opening a view does not read its rows. That
file is made by whoever opens a segment without one; where it is damaged or missing, the segment itself is read.

Embeddings are stored as they are before normalisation where the backbone gives them so (view raw): one encoding serves
adapters of both views. Rows that earlier versions stored normalised are still read.
"""

from __future__ import annotations

import errno
import hashlib
import json
import shutil
import time
import uuid
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import BinaryIO, TypedDict

import numpy as np
import torch
from filelock import FileLock, Timeout
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from fedvlm.backbones.alone import encoder_threads
from fedvlm.backbones.arithmetic import computed_by
from fedvlm.backbones.base import (
    RAW,
    Backbone,
    Elsewhere,
    HasPrecisions,
    SafeInThreads,
    ViewFormat,
    encode_view,
    offered,
    view_format,
)
from fedvlm.core.state import aligned
from fedvlm.data import encoding
from fedvlm.data.ahead import Wanted, read_ahead, ready
from fedvlm.data.columns import Words
from fedvlm.data.corruptions import KINDS, corrupt
from fedvlm.data.encoding import EncodingQueue, pace_of
from fedvlm.data.images import BadImage, is_turned
from fedvlm.data.index import KEY, Index, Place
from fedvlm.data.source import Source, digest
from fedvlm.errors import FedvlmError, nearest
from fedvlm.system import console, files
from fedvlm.system.machine import cache_home
from fedvlm.system.names import file_name
from fedvlm.system.timing import timed

PHRASES = 256  # phrases per call of an encoder on a CPU
KEYS_APART = 1024  # rows of a segment from which on its keys have a file of their own
LABELS = 1 << 16  # labels that are hashed at a time
MANY = 64  # segments smaller than encoding.SEGMENT_BYTES that are joined
MOST_OPEN = 32  # files open at a time
ATTEMPTS = 10  # to read a folder that other processes change
ROWS, KEYS = ".rows", ".keys"  # how the names of segments end, and of the files of their keys
CHECK = 4  # bytes of the checksum at the end of a file of keys
READ_ONLY = (errno.EACCES, errno.EPERM, errno.EROFS)
SEVERITIES = 5  # of each kind of corruption
CPU = torch.device("cpu")
ABANDONED = 3600  # seconds after which a temporary file is taken for the leftover of a crash

Progress = Callable[[int, int], None]  # (done, total)
Corruption = tuple[str, int]  # its kind, and its severity from 1 to 5


class ViewSummary(TypedDict):
    view: str  # the folder's name
    segments: int
    bytes: int
    used: float  # time of the last write, in seconds since the epoch


def home() -> Path:
    return cache_home()


@dataclass
class View:
    """The stored rows of one view of one backbone, by content hash."""

    folder: Path
    format: ViewFormat

    def __post_init__(self) -> None:
        self.record_dtype = np.dtype([("key", "V16"), ("check", "<u4"), ("row", self.format.dtype, self.format.shape)])
        self.index = Index()
        self.loaded: dict[Path, int] = {}  # segment → its size
        self.open: dict[Path, BinaryIO] = {}  # the one used last is at the end
        self.broken = 0  # damaged segments and rows found so far
        self.writable = True
        self.written: Path | None = None  # the segment of the last `put`
        self._load_new_segments()

    def _load_new_segments(self) -> None:
        """Segments that this or another process wrote since the last call; all of them where one is gone meanwhile, since
        its rows may be in a segment that was not listed yet."""
        for _ in range(ATTEMPTS):
            found: list[tuple[Path, bytes]] = []
            for path in sorted(self._segments() - self.loaded.keys()):
                try:
                    found.append((path, self._keys(path)))
                except FileNotFoundError:
                    self._forget()
                    break
                except OSError:  # a bad block, or no right to read it
                    self.broken += 1
            else:
                self.index.add(found)
                return

    def _segments(self) -> set[Path]:
        try:
            return set(self.folder.glob(f"*{ROWS}"))
        except FileNotFoundError:  # pruned at this moment
            return set()

    def _keys(self, path: Path) -> bytes:
        """The keys of a segment's rows; none where it is truncated, and then it is removed."""
        size = self.record_dtype.itemsize
        self.loaded[path] = path.stat().st_size
        count, rest = divmod(self.loaded[path], size)
        if not count or rest:
            path.unlink(missing_ok=True)
            self.broken += 1
            return b""
        apart = path.with_suffix(KEYS)
        with suppress(OSError):
            if count >= KEYS_APART and (kept := _checked_keys(apart.read_bytes(), count)):
                return kept
        with path.open("rb", buffering=0) as file:
            keys = b"".join(_read_at(file, i * size, KEY) for i in range(count))
        if count >= KEYS_APART:
            private = not files.shared_cache()
            with suppress(OSError), files.replaced(apart, private) as out:  # a full disk, or pruned at this moment
                out.write(keys + zlib.crc32(keys).to_bytes(CHECK, "little"))
        return keys

    def _reload(self) -> None:
        self._forget()
        self._load_new_segments()

    def _forget(self) -> None:
        self.index, self.loaded = Index(), {}
        while self.open:
            self.open.popitem()[1].close()

    def get(self, key: bytes) -> np.ndarray | None:
        """The oldest intact row, or None. Always the oldest: a row computed again in another batch may differ in its last
        bits, and results must not change with it."""
        found = self._oldest(key)
        return None if found is None else np.asarray(found[1]["row"])

    def get_other(self, key: bytes) -> np.ndarray | None:
        """The row, like `get`, but None where it is of the last `put`: who computed it need not read it."""
        place = self.index.oldest(key)
        return None if place is None or place[0] == self.written else self.get(key)

    def _oldest(self, key: bytes) -> tuple[Place, np.void] | None:
        """The oldest intact copy and where it is."""
        while place := self.index.oldest(key):
            try:
                (record,) = np.frombuffer(self._read(*place), self.record_dtype)
                if record["key"].tobytes() == key and checksum(key, record["row"]) == record["check"]:
                    return place, record
            except FileNotFoundError:
                self._reload()
                continue
            except (OSError, ValueError):  # a bad block, or cut off
                pass
            self.broken += 1
            self.index.drop_oldest(key)
        return None

    def _read(self, path: Path, i: int) -> bytes:
        file = self.open.pop(path, None) or path.open("rb", buffering=0)
        self.open[path] = file
        if len(self.open) > MOST_OPEN:
            self.open.pop(next(iter(self.open))).close()
        return _read_at(file, i * self.record_dtype.itemsize, self.record_dtype.itemsize)

    def put(self, keys: list[bytes], rows: np.ndarray) -> None:
        table = np.empty(len(keys), self.record_dtype)
        table["key"] = np.array([np.void(k) for k in keys], dtype="V16")
        table["row"] = rows
        table["check"] = [checksum(k, r) for k, r in zip(keys, table["row"], strict=True)]
        way_out = "free some space (`fedvlm cache --prune`) or set FEDVLM_CACHE to another folder"
        if self.writable:
            with files.writing(f"the feature store at {self.folder}", way_out):
                self._write(table)

    def _write(self, table: np.ndarray) -> None:
        try:
            files.cache_folder(self.folder)
            self.written = self._new_segment(time.time_ns())
            with files.replaced(self.written, not files.shared_cache()) as out:
                out.write(table.view(np.uint8).data)
        except (FileNotFoundError, FileExistsError):  # pruned at this moment; the rows are computed again when needed
            if self.folder.is_file():
                raise
            return
        except OSError as error:
            if error.errno not in READ_ONLY:
                raise
            self.writable = False
            console.warn(
                f"the feature store at {self.folder} cannot be written ({error.strerror}): features are computed each time; "
                "set FEDVLM_CACHE to another folder"
            )
            return
        self._load_new_segments()
        if len(self._small()) >= MANY:
            self._join()

    def _new_segment(self, nanoseconds: int) -> Path:
        return self.folder / f"{nanoseconds:020d}-{uuid.uuid4().hex[:8]}{ROWS}"

    def _small(self) -> list[Path]:
        """Oldest first."""
        return [path for path, size in sorted(self.loaded.items()) if size < encoding.SEGMENT_BYTES]

    def _join(self) -> None:
        """Writes the rows that are in use of all small segments into one, in the place of the oldest, and removes them."""
        with suppress(OSError, Timeout, NotImplementedError), FileLock(self.folder / ".lock", timeout=0):
            self._reload()
            small = self._small()
            if len(small) < MANY:  # another process was faster
                return
            joined = self._new_segment(int(small[0].name.split("-")[0]))
            with files.replaced(joined, not files.shared_cache(), sync=True) as out:
                for path in small:
                    keys = self._keys(path)
                    for i in range(len(keys) // KEY):
                        found = self._oldest(keys[KEY * i : KEY * (i + 1)])
                        if found is not None and found[0] == (path, i):
                            out.write(found[1].tobytes())
            self._forget()
            for path in small:
                with suppress(OSError):  # open in another process, on Windows
                    path.unlink()
            with suppress(OSError):
                for apart in self.folder.glob(f"*{KEYS}"):
                    if not apart.with_suffix(ROWS).exists():
                        apart.unlink(missing_ok=True)
            self._load_new_segments()


def _read_at(file: BinaryIO, start: int, length: int) -> bytes:
    file.seek(start)
    return file.read(length)


def _checked_keys(data: bytes, count: int) -> bytes:
    """The keys in a file of keys, or nothing where it is damaged."""
    keys, check = data[:-CHECK], int.from_bytes(data[-CHECK:], "little")
    return keys if len(keys) == KEY * count and zlib.crc32(keys) == check else b""


def checksum(key: bytes, row: np.ndarray) -> int:
    return zlib.crc32(np.ascontiguousarray(row).data, zlib.crc32(key))


def open_view(backbone: Backbone, view: str = "embedding") -> View:
    """`view` is one of the backbone's image views, or "text" for embeddings of phrases."""
    name = f"{Path(backbone.name).name}-{backbone.fingerprint[:12]}-{view.replace('@', '-')}"
    if isinstance(backbone, HasPrecisions) and backbone.precision != "full" and view not in ("text", "pixels"):
        name += f"-{backbone.precision}"
    if view != "pixels" and not isinstance(backbone, Elsewhere):  # another processor's rows have other last bits
        name += f"-{computed_by(backbone.device if isinstance(backbone, SafeInThreads) else CPU)}"
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
    version: int | Corruption | None = None,
) -> tuple[Tensor, list[bytes], dict[str, str]]:
    """The view of every item [items, …] in the source's order, their keys, and the skipped files with the reasons.

    broken: "skip" skips unreadable images, whose rows are NaN (0 for integers); "refuse" raises an error at the first.
    version: None for the images as they are; otherwise one of their 75 corruptions, see `corrupted`.
    """
    view = offered(backbone, view)
    stored = open_view(backbone, view)
    raw = open_view(backbone, RAW) if view == "embedding" and offered(backbone, RAW) == RAW else None
    if view == RAW and not stored.index and open_view(backbone).index:
        console.warn(
            f"backbone={backbone.name}: the feature store has embeddings of an earlier version, which are normalised, and "
            "this adapter needs them before normalisation; images are encoded once more"
        )
    keys: list[bytes] = []
    skipped: dict[str, str] = {}
    dtype = np.dtype(stored.format.dtype)
    out = np.full((len(source.items), *stored.format.shape), np.nan if dtype.kind == "f" else 0, dtype)
    encoded = RAW if raw else view
    encode = partial(encoded_images, backbone, encoded, stored.format)
    unnormalised = np.zeros(len(out), bool)

    def looked_up() -> Iterator[Wanted]:
        """Every file, and in `out` the rows that are stored."""
        for index, (data, key) in source.read_and(lambda data: (data, content_key(data))):
            transform = None
            if version is not None:
                key, transform = corrupted(key, version)
            keys.append(key)
            row = stored.get(key)
            if row is None and raw:
                row, unnormalised[index] = raw.get(key), True
            if row is not None:
                out[index] = row
            yield Wanted(index, data, key, row is not None, transform)

    pace = pace_of(backbone)
    with encoder_threads(pace.threads) as pool:
        queue = EncodingQueue(raw or stored, encode, out, pace, pool)
        made = read_ahead(looked_up(), partial(ready, backbone, encoded), 2 * pace.batch, pace.decoders)
        for file, image in made:
            index = file.place
            if not file.known and not queue.add_duplicate(file.key, index):
                try:
                    with timed("decode"):
                        found_image = image()
                except BadImage as error:
                    name = source.items[index].path
                    if broken == "refuse":
                        raise FedvlmError(f"{name}: {error}; repair or remove it, or give broken=skip") from error
                    skipped[name] = str(error)
                else:
                    queue.add(file.key, index, found_image)
            if progress:
                progress(index + 1, len(source.items))
        queue.flush()
    found = torch.from_numpy(out)
    if unnormalised.any():
        found[unnormalised] = F.normalize(found[unnormalised], dim=-1)
    return found, keys, skipped


def content_key(data: bytes) -> bytes:
    """The key of an image: a hash of its bytes, and of whether EXIF turns it."""
    return digest(data + b" upright") if is_turned(data) else digest(data)


def encoded_images(
    backbone: Backbone, view: str, format: ViewFormat, images: Sequence[Image.Image | Tensor]
) -> np.ndarray:
    """What the encoder gives for these images; whatever goes wrong in there is not a fault of an image."""
    computing = backbone.computing() if isinstance(backbone, HasPrecisions) else nullcontext()
    try:
        with computing:
            found = encode_view(backbone, images, view)
        rows = (found.float() if found.dtype == torch.bfloat16 else found).numpy()
    except FedvlmError:
        raise
    except Exception as error:
        raise FedvlmError(
            f"backbone={backbone.name} failed on {len(images)} images ({type(error).__name__}: {error}); --debug shows where"
        ) from error
    return checked_rows(rows, (len(images), *format.shape), backbone)


def checked_rows(rows: np.ndarray, shape: tuple[int, ...], backbone: Backbone) -> np.ndarray:
    if rows.shape != shape:
        raise FedvlmError(f"backbone={backbone.name} returned an array of shape {rows.shape} instead of {shape}")
    if not np.isfinite(rows).all():
        raise FedvlmError(
            f"backbone={backbone.name} returned numbers that are not finite; use other weights or precision"
        )
    return rows


def corrupted(key: bytes, version: int | Corruption) -> tuple[bytes, Callable[[Image.Image], Image.Image]]:
    """The key of a corrupted version of an image, and the function that makes it.

    Versions 0 … 74 are the 75 corruptions (15 kinds × 5 severities), in an order that starts at a point given by the
    image's content; or one of them by its name.
    """
    if isinstance(version, int):
        start = int.from_bytes(key[:4], "little")
        at, below = divmod((start + version) % (SEVERITIES * len(KINDS)), SEVERITIES)
        version = KINDS[at], below + 1
    kind, severity = version
    new_key = digest(key + f"{kind}-{severity}".encode())
    seed = int.from_bytes(new_key[:7], "little")
    return new_key, lambda image: corrupt(image, kind, severity, seed)


def text_embeddings(backbone: Backbone, phrases: list[str], progress: Progress | None = None) -> Tensor | None:
    """The phrases' embeddings [phrases, dim], stored like those of images; None if the backbone has no text tower."""
    stored = open_view(backbone, "text")
    keys = {p: digest(p.encode()) for p in phrases}
    found = {p: row for p, key in keys.items() if (row := stored.get(key)) is not None}
    missing = [p for p in keys if p not in found]
    if len(missing) > PHRASES:
        missing.sort(key=len)  # batches are padded to their longest phrase
    on_gpu = isinstance(backbone, SafeInThreads) and backbone.device.type != "cpu"
    at_once = encoding.SEGMENT_ROWS if on_gpu else PHRASES
    for first in range(0, len(missing), encoding.SEGMENT_ROWS):
        segment = missing[first : first + encoding.SEGMENT_ROWS]
        with timed("encode"):
            encoded = [backbone.texts(segment[k : k + at_once]) for k in range(0, len(segment), at_once)]
        if encoded[0] is None:
            return None
        rows = np.concatenate([e.numpy() for e in encoded if e is not None])
        checked_rows(rows, (len(segment), *stored.format.shape), backbone)
        stored.put([keys[p] for p in segment], rows)
        for phrase, row in zip(segment, rows, strict=True):
            other = stored.get_other(keys[phrase])
            found[phrase] = row if other is None else other
        if progress:
            progress(first + len(segment), len(missing))
    return aligned(torch.from_numpy(np.stack([found[p] for p in phrases])))


def listing() -> Iterator[ViewSummary]:
    """What the store holds, one entry per view."""
    root = home() / "features"
    with _readable(root):
        folders = sorted(p for p in root.iterdir() if p.is_dir() and p.suffix != files.PART) if root.is_dir() else []
        for folder in folders:
            with suppress(FileNotFoundError):  # another process prunes
                segments = [path.stat() for path in folder.glob(f"*{ROWS}")]
                used = max((f.st_mtime for f in segments), default=folder.stat().st_mtime)
                size = sum(f.st_size for f in segments)
                yield {"view": folder.name, "segments": len(segments), "bytes": size, "used": used}


def prune(older_than_days: float = 0.0, names: Iterable[str] = ()) -> list[str]:
    """Removes the named views or, if none is named, those not written for that many days (0: all); returns their names.
    Temporary files left by crashes are removed in any case."""
    removed: list[str] = []
    wanted, known = set(names), list(listing())
    for name in wanted - {e["view"] for e in known}:
        raise FedvlmError(f"the feature store has no view {name}; {nearest(name, [e['view'] for e in known])}")
    root = home() / "features"
    with _readable(root):
        with suppress(FileNotFoundError):  # others write and prune; what is overlooked waits for the next time
            for part in root.glob(f"**/*{files.PART}"):
                if time.time() - part.stat().st_mtime > ABANDONED:
                    shutil.rmtree(part) if part.is_dir() else part.unlink()
        for entry in known:
            old = time.time() - entry["used"] >= older_than_days * 86400
            if entry["view"] in wanted or (not wanted and old):
                with suppress(FileNotFoundError):  # another process was faster
                    shutil.rmtree((root / entry["view"]).rename(root / f"{uuid.uuid4().hex}{files.PART}"))  # as a whole
                removed.append(entry["view"])
    return removed


@contextmanager
def _readable(root: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise FedvlmError(
            f"the feature store at {root} cannot be read or changed ({error.strerror}); set FEDVLM_CACHE to another folder"
        ) from error


def data_fingerprint(keys: list[bytes], labels: Sequence[str]) -> str:
    """A hash of a data set: contents and labels, in order; the labels as a JSON list, a part at a time."""
    words, seen = Words.of(labels), hashlib.blake2b(b"".join(keys), digest_size=KEY)
    texts = [json.dumps(name) for name in words.names]
    seen.update(b"[")
    for first in range(0, len(words), LABELS):
        part = ", ".join([texts[k] for k in words.codes[first : first + LABELS].tolist()])
        seen.update(f"{', ' if first else ''}{part}".encode())
    seen.update(b"]")
    return seen.hexdigest()[:16]
