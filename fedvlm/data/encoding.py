"""Images on their way through an encoder: batches, threads that compute them, and rows that are stored in segments.

Where the backbone may be called by several threads, they compute while this one reads files and stores rows. On a CPU each
thread computes a few images with one core: an operation of one thread need not wait for the slowest of several, and its
intermediate results stay in the cache. On a GPU two threads take turns: one fills the queue of kernels while the other
waits for its results.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from fedvlm.backbones.alone import PIECE, pieces
from fedvlm.backbones.base import Backbone, SafeInThreads
from fedvlm.data import images as pictures
from fedvlm.data.ahead import DecodedImage
from fedvlm.system.machine import cores
from fedvlm.system.timing import timed

BATCH = 64  # images per call of an encoder
GPU_BATCH, GPU_ROOM = 256, 30 << 30  # images per call on a GPU with so many bytes of memory; on a smaller one BATCH
SEGMENT_ROWS, SEGMENT_BYTES = 2048, 64 << 20  # a segment is written at either size; a crash loses at most one segment

Images = list[Image.Image | Tensor]
Encode = Callable[[Images], np.ndarray]


class RowTarget(Protocol):
    """A place that rows are stored in: `store.View`."""

    def put(self, keys: list[bytes], rows: np.ndarray) -> None: ...

    def get_other(self, key: bytes) -> np.ndarray | None:
        """A row that was stored before the last `put`, perhaps by another process."""
        ...


class Pace(NamedTuple):
    batch: int  # images that are collected before they are encoded
    piece: int  # of them per call
    threads: int  # 0: the calls are made one by one, here
    decoders: int  # threads that decode images meanwhile


def pace_of(backbone: Backbone) -> Pace:
    if not isinstance(backbone, SafeInThreads):
        return Pace(BATCH, BATCH, 0, cores())
    if backbone.device.type == "cpu":  # decoding takes a sixth of mini-clip's time, and less of a larger model's
        return Pace(BATCH, PIECE, torch.get_num_threads(), max(1, cores() // 4))
    roomy = torch.cuda.get_device_properties(backbone.device).total_memory >= GPU_ROOM
    batch = GPU_BATCH if roomy else BATCH
    return Pace(batch, batch, 2, cores())


@dataclass
class EncodingQueue:
    """Encodes images in batches, stores the rows in segments, and copies each row to its places in `out`. A file that
    occurs more than once is encoded once."""

    view: RowTarget
    encode: Encode
    out: np.ndarray
    pace: Pace
    pool: ThreadPoolExecutor | None = None
    images: Images = field(default_factory=list)  # not given to the encoder yet
    pixels: int = 0  # of these
    coming: deque[Future[np.ndarray]] = field(default_factory=deque)  # a piece each
    rows: list[np.ndarray] = field(default_factory=list)  # encoded and not stored yet, a piece each
    keys: list[bytes] = field(default_factory=list)  # of `rows`, then of `coming`, then of `images`
    places: dict[bytes, list[int]] = field(default_factory=dict)  # key → indices in `out` that wait for it
    done: dict[bytes, int] = field(default_factory=dict)  # key → an index in `out` that has it

    def add_duplicate(self, key: bytes, place: int) -> bool:
        """Whether an image with this key was added already; if so, its row is copied to `place` too."""
        if key in self.done:
            self.out[place] = self.out[self.done[key]]
        elif key in self.places:
            self.places[key].append(place)
        else:
            return False
        return True

    def add(self, key: bytes, place: int, ready: DecodedImage) -> None:
        if len(self.images) >= self.pace.batch or self.pixels + ready.pixels > pictures.PIXELS:
            self._encode()
        self.places[key] = [place]
        self.keys.append(key)
        self.images.append(ready.image)
        self.pixels += ready.pixels

    def _encode(self) -> None:
        """Gives the collected images to the encoder, and takes what it has finished."""
        for part in pieces(len(self.images), self.pace.piece) if self.images else ():
            self.coming.append(self._call(self.images[part]))
        self.images, self.pixels = [], 0
        self._take(self.pace.threads)
        if sum(map(len, self.rows)) >= SEGMENT_ROWS or sum(r.nbytes for r in self.rows) >= SEGMENT_BYTES:
            self._store()

    def _call(self, images: Images) -> Future[np.ndarray]:
        first = not self.rows and not self.done and not self.coming
        if self.pool and not first:  # the first call loads the model, which several threads must not do at once
            return self.pool.submit(self.encode, images)
        made: Future[np.ndarray] = Future()
        with timed("encode"):
            made.set_result(self.encode(images))
        return made

    def _take(self, unfinished: int) -> None:
        """Rows in their order; waits until at most so many calls are unfinished."""
        with timed("encode"):
            while self.coming and (self.coming[0].done() or sum(not f.done() for f in self.coming) > unfinished):
                self.rows.append(self.coming.popleft().result())

    def _store(self) -> None:
        if not self.rows:
            return
        with timed("write"):
            rows = self.rows[0] if len(self.rows) == 1 else np.concatenate(self.rows)
            keys, self.keys, self.rows = self.keys[: len(rows)], self.keys[len(rows) :], []
            self.view.put(keys, rows)
            for key, computed in zip(keys, rows, strict=True):
                row, places = self.view.get_other(key), self.places.pop(key)
                self.out[places] = computed if row is None else row
                self.done[key] = places[0]

    def flush(self) -> None:
        self._encode()
        self._take(0)
        self._store()
