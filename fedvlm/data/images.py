"""Image files of any origin: the one decoder of the client and of the encode server (which takes no DICOM).

Whatever is wrong with a file is a `BadImage` with the reason. Only regular files are opened, only FORMATS are decoded, and
bytes, pixels and sides are bounded before a pixel is decoded. Within these bounds images are decoded in full and never
made smaller: the encoder's own preprocessing does that. Of several frames the first is read.
"""

from __future__ import annotations

import io
import math
import os
import re
import stat
import threading
import warnings
import zipfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import cast

from PIL import Image, ImageOps
from PIL.JpegImagePlugin import JpegImageFile
from PIL.TiffImagePlugin import TILELENGTH, TILEWIDTH, TiffImageFile

from fedvlm.data.format import Format, decoders

BYTES = 256 << 20  # of a file; an uncompressed RGBA image of PIXELS has fewer
PIXELS = 64_000_000  # of an image, and of the images that are in memory together for an encoder
RATIO = 100  # of the longer side to the shorter: encoders enlarge the shorter side to hundreds of pixels, then crop
SCANS = 100  # of a JPEG, where ten are usual: 100 bytes of file are a scan, and each passes over all pixels
SCAN = re.compile(rb"\xff\xda\0[\x08\x0a\x0c\x0e][\1-\4]")  # the start of one: marker, length, number of components
BLOCK = 4096  # bytes read at a time from a zip, where these can unpack to a hundred megabytes
ORIENTATION = 0x0112  # EXIF's tag
EXIF = (b"Exif\0\0", b"eXIf", b"EXIF")  # as JPEG, PNG and WebP mark it
FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")

_filters = threading.Lock()  # `catch_warnings` sets and restores the filters of the whole process


class BadImage(ValueError):
    """A file that is not read or decoded; the message is the reason."""


class TooLarge(BadImage):
    pass


class Unreadable(bytes):
    """No bytes, in the place of those of a file that cannot be read; decoding it raises `BadImage` with the reason."""

    reason: str

    def __new__(cls, reason: str) -> Unreadable:
        made = super().__new__(cls)
        made.reason = reason
        return made


@contextmanager
def bad_image(what: str) -> Iterator[None]:
    """Turns every error into a BadImage: decoders of untrusted bytes may fail in any way, also out of memory."""
    try:
        yield
    except BadImage:
        raise
    except OSError as error:
        raise BadImage(f"{what} ({error.strerror or type(error).__name__})") from error
    except Exception as error:
        raise BadImage(f"{what} ({type(error).__name__})") from error


def read_file(path: Path) -> bytes:
    """The bytes of a regular file. A pipe or a device, whose bytes may never come or never end, is not opened."""
    with bad_image("cannot be read"):
        found = path.stat()
        if not stat.S_ISREG(found.st_mode):
            raise BadImage("cannot be read: not a regular file")
        check_length(found.st_size)
        with open(path, "rb", opener=_open_without_waiting) as file:
            data = file.read(BYTES + 1)  # it may have grown
        check_length(len(data))
        return data


def read_member(archive: zipfile.ZipFile, name: str) -> bytes:
    """The bytes of a zip's member, decompressed in small blocks: bzip2 and LZMA unpack a block as a whole."""
    with bad_image("cannot be read from the zip"):
        info = archive.getinfo(name)
        if info.flag_bits & 1:
            raise BadImage("cannot be read from the zip: encrypted")
        check_length(info.file_size)
        data = bytearray()
        with archive.open(info) as member:
            while block := member.read(BLOCK):  # never more than it says
                data += block
        return bytes(data)


def _open_without_waiting(path: str, flags: int) -> int:
    """Open without blocking, in case a pipe has taken the file's place since it was checked."""
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


def check_length(length: int) -> None:
    if length > BYTES:
        raise TooLarge(f"{length:,} bytes, more than {BYTES:,}")


def opened(data: bytes, formats: tuple[str, ...] = FORMATS) -> Image.Image:
    """The image with its size, before any pixel is decoded."""
    if isinstance(data, Unreadable):
        raise BadImage(data.reason)
    if not data:
        raise BadImage("cannot be read: the file is empty")
    with bad_image("not a readable image"):
        try:
            with _filters, warnings.catch_warnings():
                warnings.simplefilter("ignore")  # among them one about its size, which is checked here
                image = Image.open(io.BytesIO(data), formats=formats)
                _check_size(image, data)
                return image
        except Image.DecompressionBombError as error:
            raise TooLarge(f"more than {PIXELS:,} pixels") from error


def _check_size(image: Image.Image, data: bytes) -> None:
    width, height = image.size
    if width * height > PIXELS:
        raise TooLarge(f"{width}×{height} pixels, more than {PIXELS:,}")
    if max(width, height) > RATIO * min(width, height):
        raise TooLarge(f"{width}×{height} pixels: one side is more than {RATIO} times the other")
    if isinstance(image, TiffImageFile):  # its tiles may be larger than the image
        tile = [image.tag_v2.get(side, 1) for side in (TILEWIDTH, TILELENGTH)]
        if not all(isinstance(side, int) for side in tile) or math.prod(tile) > PIXELS:
            raise TooLarge(f"tiles of more than {PIXELS:,} pixels")
    if isinstance(image, JpegImageFile) and (scans := len(SCAN.findall(data))) > SCANS:
        raise TooLarge(f"{scans} scans, more than {SCANS}")


def too_many(images: Iterable[Image.Image]) -> bool:
    """Whether these have more pixels than may be in memory together for an encoder."""
    return sum(image.width * image.height for image in images) > PIXELS


def load(image: Image.Image) -> None:
    """Decodes the pixels."""
    with bad_image("not a readable image"):
        image.load()


def decode(data: bytes, image: Image.Image | None = None) -> Image.Image:
    """An RGB image on white, upright as its EXIF data say. `image`: what `opened` gave for these bytes, if it is known."""
    for kind, one in decoders().items():
        with bad_image(f"not a readable {kind.upper()} file"):
            if (found := _picture(one, data)) is not None:
                return found
    image = image or opened(data)
    with bad_image("not a readable image"):
        if image.mode == "F":
            raise BadImage("floating-point pixels, for which no black and white level is defined; save it with 8 bits")
        image.load()  # before its EXIF data: reading a PNG's decodes it, and hides what is wrong with it
        if image.mode.startswith("I"):  # 16-bit greyscale; Pillow's own conversion clips everything above 255 to white
            image = _upright(image).convert("I")
            low, high = cast(tuple[float, float], image.getextrema())
            if low < 0 or high > 65535:
                raise BadImage("32-bit pixels, for which no white level is defined; save it with 8 or 16 bits")
            return image.point(lambda grey: grey * (1 / 257) + 0.5).convert("L").convert("RGB")
        image = _upright(image)
        if image.mode in ("RGBA", "LA", "PA") or (image.mode == "P" and "transparency" in image.info):
            white = Image.new("RGBA", image.size, "white")
            image = Image.alpha_composite(white, image.convert("RGBA"))
        return image.convert("RGB")


def _picture(kind: Format, data: bytes) -> Image.Image | None:
    try:
        image = kind.picture(data, PIXELS)
    except ValueError as error:
        raise BadImage(str(error)) from error
    if image is not None:
        _check_size(image, data)
    return image and image.convert("RGB")


def _upright(image: Image.Image) -> Image.Image:
    """Turned as the camera was held. A malformed EXIF block is ignored: the picture is there without it."""
    try:
        turned = image.getexif().get(ORIENTATION, 1) in range(2, 9)
    except Exception:  # of untrusted bytes, in any way
        return image
    return ImageOps.exif_transpose(image) if turned else image


def is_turned(data: bytes) -> bool:
    """Whether `decode` turns this image; cheap for files without EXIF data."""
    if not any(mark in data for mark in EXIF):  # several times as fast as one regular expression
        return False
    try:
        return opened(data).getexif().get(ORIENTATION, 1) in range(2, 9)
    except Exception:
        return False
