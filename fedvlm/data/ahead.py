"""Images decoded and prepared in threads, ahead of the encoder that needs them next.

Pillow decodes and resizes without Python's lock, so that threads keep up while the model computes. What is
computed, and in which batches, is the same as without threads.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import NamedTuple

from PIL import Image
from torch import Tensor

from fedvlm.backbones.base import Backbone, PreparesImages
from fedvlm.data import images
from fedvlm.data.images import BadImage, decode, opened

Transform = Callable[[Image.Image], Image.Image]


class DecodedImage(NamedTuple):
    image: Image.Image | Tensor  # decoded, or as `PreparesImages` gives it
    pixels: int  # of the decoded image


class Wanted(NamedTuple):
    """A file of a source, and its row where that is known."""

    place: int  # among the source's items
    data: bytes
    key: bytes
    known: bool
    transform: Transform | None


Make = Callable[
    [bytes, Transform | None, Image.Image | None], DecodedImage
]  # the last: what `opened` gave for these bytes


def ready(
    backbone: Backbone, view: str, data: bytes, transform: Transform | None, image: Image.Image | None = None
) -> DecodedImage:
    image = decode(data, image)
    if transform:
        image = transform(image)
    if isinstance(backbone, PreparesImages):
        with suppress(Exception):  # the encoder meets the same error, and reports it as its own
            return DecodedImage(backbone.prepare(image, view), image.width * image.height)
    return DecodedImage(image, image.width * image.height)


def read_ahead(
    files: Iterable[Wanted], make: Make, depth: int, threads: int
) -> Iterator[tuple[Wanted, Callable[[], DecodedImage]]]:
    """The files in their order, each with a function that waits for its image (and raises `BadImage`). At most `depth`
    images of together PIXELS pixels are made ahead, each content once."""
    waiting: deque[tuple[Wanted, Future[DecodedImage] | None, int]] = deque()
    begun: set[bytes] = set()
    held = 0
    pool = ThreadPoolExecutor(threads, thread_name_prefix="decode")

    def next_of(wanted: Wanted, future: Future[DecodedImage] | None) -> tuple[Wanted, Callable[[], DecodedImage]]:
        return wanted, future.result if future else lambda: make(wanted.data, wanted.transform, None)

    try:
        for wanted in files:
            future, size = None, 0
            image = None if wanted.known or wanted.key in begun else opened_image(wanted.data)
            if image:
                size = image.width * image.height
                while waiting and held + size > images.PIXELS:
                    first, made, its = waiting.popleft()
                    held -= its
                    yield next_of(first, made)
                # the first is made here: what a processor imports must not be imported by several threads at once
                call = partial(make, wanted.data, wanted.transform, image)
                future = pool.submit(call) if begun else made_now(call)
                begun.add(wanted.key)
            waiting.append((wanted, future, size))
            held += size
            while len(waiting) > depth:
                first, made, its = waiting.popleft()
                held -= its
                yield next_of(first, made)
        while waiting:
            first, made, _ = waiting.popleft()
            yield next_of(first, made)
    finally:
        pool.shutdown(cancel_futures=True)


def made_now(call: Callable[[], DecodedImage]) -> Future[DecodedImage]:
    future: Future[DecodedImage] = Future()
    try:
        future.set_result(call())
    except BadImage as error:
        future.set_exception(error)
    return future


def opened_image(data: bytes) -> Image.Image | None:
    """None where the size is not known before decoding (DICOM), or nothing can be decoded."""
    try:
        return opened(data)
    except BadImage:
        return None
