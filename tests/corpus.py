"""Bad data files: each is made by a function and must be left out or refused, for a reason that matches its pattern.

`image`: a file among good images, which is left out. `data`: a file or folder for data=, which is refused, or a part of it
left out. What a system cannot make (a pipe, a socket, a name that is not UTF-8) is missing there.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import pickle
import random
import socket
import struct
import time
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
from PIL import Image
from safetensors.numpy import save

from fedvlm.backbones.base import Backbone
from fedvlm.data.images import BYTES
from fedvlm.data.pool import embedding_pool, image_pool, text_pool
from fedvlm.data.source import open_source
from fedvlm.errors import FedvlmError

LARGE, NOT_AN_IMAGE, NOT_READ = r"more than [\d,]+", "not a readable image", "cannot be read"


class Bad(NamedTuple):
    name: str
    kind: Literal["image", "data"]
    make: Callable[[Path], object]  # makes it at this path
    reason: str  # a regular expression


def outcome(path: Path, backbone: Backbone) -> str:
    """Why data=PATH is refused, or parts of it are left out; "" where nothing is wrong."""
    try:
        source = open_source(str(path))
        if source.tokens is not None:
            text_pool(source)
        elif source.embeddings is not None:
            embedding_pool(source)
        else:
            return "; ".join(image_pool(source, backbone, "{}").skipped.values())
    except FedvlmError as error:
        return str(error)
    return ""


class Tried(NamedTuple):
    bad: Bad
    said: str
    seconds: float


def tried(folder: Path, backbone: Backbone, corpus: Sequence[Bad] = ()) -> Iterator[Tried]:
    """Makes each in a folder of its own, and loads it."""
    for number, bad in enumerate(corpus or CORPUS):
        place = folder / f"{number:03d}" / bad.name
        if bad.kind == "image":
            place = good_images(place.parent) / "cat" / bad.name
        place.parent.mkdir(parents=True, exist_ok=True)
        try:
            bad.make(place)
        except (AttributeError, NotImplementedError, OSError, UnicodeError):
            continue  # not on this system
        began = time.perf_counter()
        said = outcome(place.parent.parent if bad.kind == "image" else place, backbone)
        yield Tried(bad, said, time.perf_counter() - began)


def good_images(root: Path) -> Path:
    for label, red in (("cat", 200), ("dog", 20)):
        (root / label).mkdir(parents=True)
        for k in range(2):
            Image.new("RGB", (6, 5), (red, 40 * k, 90)).save(root / label / f"{k}.png")
    return root


# Images


def encoded(form: str, size: tuple[int, int] = (64, 48), mode: str = "RGB", **options: object) -> bytes:
    stream = io.BytesIO()
    picture = Image.linear_gradient("L").resize(size).convert(mode) if max(size) < 9000 else Image.new(mode, size)
    picture.save(stream, form, **options)
    return stream.getvalue()


def bytes_of(data: bytes) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(data)


def cut(form: str, **options: object) -> Callable[[Path], object]:
    return lambda path: path.write_bytes((data := encoded(form, **options))[: len(data) // 2])


def picture(form: str, size: tuple[int, int], mode: str = "1") -> Callable[[Path], object]:
    return lambda path: path.write_bytes(encoded(form, size, mode))


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(width: int = 8, height: int = 8, *chunks: bytes, depth: int = 8, colour: int = 0) -> bytes:
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + b"".join(chunks) + chunk(b"IEND", b"")


def tiff(width: int, height: int, *more: tuple[int, int, int, int], data: bytes = b"") -> bytes:
    """Deflated grey pixels; `more` are tags (number, type, count, value)."""
    tags = {256: (4, 1, width), 257: (4, 1, height), 258: (3, 1, 8), 259: (3, 1, 8), 262: (3, 1, 1), 277: (3, 1, 1)}
    tags |= {number: (kind, count, value) for number, kind, count, value in more}
    start = 8 + 2 + 12 * len(tags) + 4
    tags |= {k: (4, 1, start) for k in (273, 324) if k in tags}
    entries = [struct.pack("<HHII", number, *tags[number]) for number in sorted(tags)]
    return b"II*\0" + struct.pack("<IH", 8, len(tags)) + b"".join(entries) + bytes(4) + data


def tiled(width: int, height: int, count: int = 1) -> bytes:
    sides = [(322, 4, count, width), (323, 4, count, height)]
    data = zlib.compress(bytes(1 << 16))
    return tiff(16, 16, *sides, (324, 4, 1, 0), (325, 4, 1, len(data)), data=data)


def many_scans(path: Path) -> None:
    data = encoded("JPEG", (64, 48), "L", progressive=True)
    last = data[data.rindex(b"\xff\xda") : -2]
    path.write_bytes(data[:-2] + last * 5000 + data[-2:])


def webp_canvas(width: int, height: int) -> bytes:
    size = struct.pack("<I", width - 1)[:3] + struct.pack("<I", height - 1)[:3]
    body = b"WEBPVP8X" + struct.pack("<I", 10) + b"\2\0\0\0" + size + b"ANIM" + struct.pack("<I", 6) + bytes(6)
    return b"RIFF" + struct.pack("<I", len(body)) + body


def bmp(width: int, height: int, bits: int = 24) -> bytes:
    return (
        b"BM" + struct.pack("<IHHI", 100, 0, 0, 54) + struct.pack("<IiiHHIIiiII", 40, width, height, 1, bits, *[0] * 6)
    )


def changed(data: bytes, at: int, *new: int) -> bytes:
    return data[:at] + bytes(new) + data[at + len(new) :]


def jpeg_size(width: int, height: int) -> bytes:
    data = encoded("JPEG")
    at = data.index(b"\xff\xc0") + 5
    return changed(data, at, *struct.pack(">HH", height, width))


def unix_socket(path: Path) -> None:
    family = socket.AF_UNIX  # AttributeError on Windows
    with socket.socket(family) as end:
        end.bind(os.path.relpath(path))  # the length of such a path is limited


def large_file(path: Path) -> None:
    path.touch()
    os.truncate(path, BYTES + 1)


def ztxt(megabytes: int) -> bytes:
    return b"k\0\0" + zlib.compress(bytes(megabytes << 20), 9)


NOISE = random.Random(1).randbytes(4000)
PIXELS8 = chunk(b"IDAT", zlib.compress(bytes(72)))

IMAGES = {
    "empty.png": (bytes_of(b""), "empty"),
    "text.jpg": (bytes_of(b"this is not an image"), NOT_AN_IMAGE),
    "page.gif": (bytes_of(b"<!doctype html><title>404</title>"), NOT_AN_IMAGE),
    "noise.png": (bytes_of(NOISE), NOT_AN_IMAGE),
    "zeros.png": (bytes_of(bytes(1 << 20)), NOT_AN_IMAGE),
    "ones.jpg": (bytes_of(b"\xff" * 5000), NOT_AN_IMAGE),
    "pickle.jpg": (bytes_of(pickle.dumps({"a": 1})), NOT_AN_IMAGE),
    "gzip.png": (bytes_of(gzip.compress(b"x" * 999)), NOT_AN_IMAGE),
    # cut off
    "cut.jpg": (cut("JPEG"), NOT_AN_IMAGE),
    "cut-progressive.jpg": (cut("JPEG", progressive=True), NOT_AN_IMAGE),
    "cut.png": (cut("PNG"), NOT_AN_IMAGE),
    "cut.webp": (cut("WEBP"), NOT_AN_IMAGE),
    "cut.bmp": (cut("BMP"), NOT_AN_IMAGE),
    "cut.gif": (cut("GIF"), NOT_AN_IMAGE),
    "cut.tif": (cut("TIFF"), NOT_AN_IMAGE),
    "cut-deflated.tiff": (cut("TIFF", compression="tiff_deflate"), NOT_AN_IMAGE),
    "cut.ppm": (cut("PPM"), NOT_AN_IMAGE),
    "signature.png": (bytes_of(b"\x89PNG\r\n\x1a\n"), NOT_AN_IMAGE),
    "start.jpg": (bytes_of(b"\xff\xd8\xff"), NOT_AN_IMAGE),
    "header.gif": (bytes_of(b"GIF89a\x10\0\x10\0\0\0\0"), NOT_AN_IMAGE),
    "header.webp": (bytes_of(encoded("WEBP")[:20]), NOT_AN_IMAGE),
    # too large, or small files that unpack to much
    "strip.png": (picture("PNG", (60_000, 1)), "one side is more than 100 times"),
    "column.png": (picture("PNG", (1, 60_000)), "one side is more than 100 times"),
    "strip.jpg": (picture("JPEG", (60_000, 1), "L"), "one side is more than 100 times"),
    "strip.gif": (picture("GIF", (1, 30_000), "L"), "one side is more than 100 times"),
    "large.png": (picture("PNG", (9_000, 9_000)), LARGE),
    "large.tif": (picture("TIFF", (9_500, 9_500)), LARGE),
    "bomb.png": (bytes_of(png(50_000, 50_000, PIXELS8)), LARGE),
    "most.png": (bytes_of(png(2**31 - 1, 2**31 - 1, PIXELS8)), LARGE),
    "bomb.jpg": (bytes_of(jpeg_size(65_500, 65_500)), LARGE),
    "bomb.gif": (bytes_of(b"GIF89a\xff\xff\xff\xff\0\0\0,\0\0\0\0\xff\xff\xff\xff\0\x08\1\0\0;"), LARGE),
    "bomb.webp": (bytes_of(webp_canvas(16_000, 16_000)), f"{LARGE}|{NOT_AN_IMAGE}"),
    "bomb.tif": (bytes_of(tiff(200_000, 200_000, (273, 4, 1, 0), (279, 4, 1, 8), data=bytes(8))), LARGE),
    "bomb.bmp": (bytes_of(bmp(200_000, 200_000)), LARGE),
    "bomb.ppm": (bytes_of(b"P6 99999 99999 255\n"), LARGE),
    "bomb.pgm": (bytes_of(b"P5 99999999999 9999999999 255\n"), f"{LARGE}|{NOT_AN_IMAGE}"),
    "tile.tif": (bytes_of(tiled(30_000, 30_000)), "tiles of more than"),
    "tile-list.tif": (bytes_of(tiled(8, 8, count=3)), f"tiles of more than|{NOT_AN_IMAGE}"),
    "scans.jpg": (many_scans, "5006 scans, more than 100"),
    "comment.png": (bytes_of(png(8, 8, chunk(b"zTXt", ztxt(80)), PIXELS8)), NOT_AN_IMAGE),
    "file.png": (large_file, "bytes, more than"),
    # formats that are not decoded, whatever the file is called
    "postscript.png": (picture("EPS", (20, 20), "RGB"), NOT_AN_IMAGE),
    "pdf.jpg": (picture("PDF", (20, 20), "RGB"), NOT_AN_IMAGE),
    "icon.png": (picture("ICO", (20, 20), "RGB"), NOT_AN_IMAGE),
    "targa.bmp": (picture("TGA", (20, 20), "RGB"), NOT_AN_IMAGE),
    "photoshop.png": (bytes_of(b"8BPS\0\1" + bytes(6) + struct.pack(">HIIHH", 3, 9, 9, 8, 3) + bytes(99)), NOT_AN_IMAGE),
    "vector.png": (bytes_of(b'<svg xmlns="http://www.w3.org/2000/svg"/>'), NOT_AN_IMAGE),
    "pixmap.png": (bytes_of(b'/* XPM */\n"2 2 1 1",\n"a c #000000",\n"aa","aa"'), NOT_AN_IMAGE),
    # damaged inside
    "no-pixels.png": (bytes_of(png(8, 8)), NOT_AN_IMAGE),
    "not-deflate.png": (bytes_of(png(8, 8, chunk(b"IDAT", b"x" * 50))), NOT_AN_IMAGE),
    "check.png": (bytes_of(changed(png(8, 8, PIXELS8), 30, 1, 2)), NOT_AN_IMAGE),
    "no-width.png": (bytes_of(png(0, 8, PIXELS8)), f"{NOT_AN_IMAGE}|one side"),
    "depth.png": (bytes_of(png(8, 8, PIXELS8, depth=3)), NOT_AN_IMAGE),
    "colour.png": (bytes_of(png(8, 8, PIXELS8, colour=9)), NOT_AN_IMAGE),
    "chunk.png": (bytes_of(png(8, 8, struct.pack(">I", 2**31 - 1) + b"IDAT" + bytes(9))), NOT_AN_IMAGE),
    "no-size.jpg": (bytes_of(jpeg_size(0, 0)), f"{NOT_AN_IMAGE}|one side"),
    "no-size.gif": (bytes_of(b"GIF89a\0\0\0\0\0\0\0,\0\0\0\0\0\0\0\0\0\x08\1\0\0;"), f"{NOT_AN_IMAGE}|one side"),
    "no-tables.jpg": (bytes_of(encoded("JPEG").replace(b"\xff\xdb", b"\xff\xfe")), NOT_AN_IMAGE),
    "bits.bmp": (bytes_of(bmp(8, 8, bits=7)), NOT_AN_IMAGE),
    "negative.bmp": (bytes_of(bmp(-8, -8)), f"{NOT_AN_IMAGE}|{LARGE}"),
    "maximum.ppm": (bytes_of(b"P6 4 4 0\n" + bytes(48)), NOT_AN_IMAGE),
    "words.ppm": (bytes_of(b"P6 wide high 255\n" + bytes(48)), NOT_AN_IMAGE),
    "few.pgm": (bytes_of(b"P2\n7000 7000\n255\n1 2 3\n"), NOT_AN_IMAGE),
    "loop.tif": (bytes_of(b"II*\0\x08\0\0\0\0\0\x08\0\0\0"), NOT_AN_IMAGE),
    "tags.tif": (bytes_of(b"II*\0\x08\0\0\0\xff\xff" + bytes(40)), NOT_AN_IMAGE),
    "count.tif": (bytes_of(tiff(8, 8, (273, 4, 2**32 - 1, 0), (279, 4, 1, 8), data=bytes(8))), NOT_AN_IMAGE),
    "zero.tif": (bytes_of(tiff(8, 8, (282, 5, 1, 0), (273, 4, 1, 0), (279, 4, 1, 0))), NOT_AN_IMAGE),
    "float.tif": (lambda path: Image.new("F", (4, 4)).save(path), "floating-point"),
    # no regular files
    "pipe.png": (lambda path: os.mkfifo(path), "not a regular file"),
    "socket.png": (unix_socket, "not a regular file"),
    "device.png": (lambda path: path.symlink_to("/dev/zero" if Path("/dev/zero").exists() else path), "not a regular"),
    "gone.png": (lambda path: path.symlink_to(path.parent / "nowhere"), NOT_READ),
    "circle.png": (lambda path: path.symlink_to(path), NOT_READ),
}  # fmt: skip


# Zip files


def zipped(members: list[tuple[str, bytes]], method: int = zipfile.ZIP_STORED) -> bytes:
    """Good images, and these members."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", method) as archive:
        for k, (label, red) in enumerate((("cat", 10), ("cat", 90), ("dog", 200), ("dog", 250))):
            good = io.BytesIO()
            Image.new("RGB", (6, 5), (red, 40, 90)).save(good, "PNG")
            archive.writestr(f"{label}/{k}.png", good.getvalue())
        for name, data in members:
            archive.writestr(zipfile.ZipInfo(name), data, method)
    return stream.getvalue()


def with_headers(data: bytes, name: bytes, local: dict[int, bytes], central: dict[int, bytes]) -> bytes:
    """The zip with other values in the headers of one member, by offset in the header."""
    out = bytearray(data)
    places = ((data.index(name) - 30, local), (data.rindex(name) - 46, central))
    for start, changes in places:
        for offset, value in changes.items():
            out[start + offset : start + offset + len(value)] = value
    return bytes(out)


def odd_member(flag: int = 0, method: int = 0, size: int | None = None) -> bytes:
    local = {6: struct.pack("<HH", flag, method)} | ({22: struct.pack("<I", size)} if size is not None else {})
    central = {8: struct.pack("<HH", flag, method)} | ({24: struct.pack("<I", size)} if size is not None else {})
    return with_headers(zipped([("cat/odd.png", encoded("PNG"))]), b"cat/odd.png", local, central)


def deflated_zeros(megabytes: int) -> bytes:
    pack = zlib.compressobj(9, zlib.DEFLATED, -15)
    return (pack.compress(bytes(1 << 20)) + pack.flush(zlib.Z_FULL_FLUSH)) * megabytes + b"\3\0"


def zip_bomb(declared: int) -> bytes:
    """A member of a gigabyte in a megabyte, that claims to have `declared` bytes."""
    data = zipped([("cat/odd.png", deflated_zeros(1024))])
    length = {22: struct.pack("<I", declared)}
    return with_headers(data, b"cat/odd.png", {8: b"\x08\0"} | length, {10: b"\x08\0", 24: struct.pack("<I", declared)})


def twice(path: Path) -> None:
    data = zipped([("cat/a.png", encoded("PNG")), ("cat/b.png", encoded("PNG"))])
    path.write_bytes(data.replace(b"cat/b.png", b"cat/a.png"))


def cut_zip(path: Path) -> None:
    path.write_bytes((data := zipped([]))[: len(data) // 2])


def bad_directory(path: Path) -> None:
    data = zipped([])
    path.write_bytes(data.replace(b"PK\1\2", b"PK\1\3"))


ZIPS = {
    "text.zip": (bytes_of(b"no zip at all"), "neither a folder nor a zip"),
    "cut.zip": (cut_zip, "neither a folder nor a zip"),
    "directory.zip": (bad_directory, "cannot be read as a zip"),
    "absolute.zip": (bytes_of(zipped([("/etc/cat/x.png", encoded("PNG"))])), "outside of it; zip the folder again"),
    "above.zip": (bytes_of(zipped([("../cat/x.png", encoded("PNG"))])), "outside of it"),
    "twice.zip": (twice, "cat/a.png occurs twice"),
    "encrypted.zip": (bytes_of(odd_member(flag=1)), "encrypted"),
    "method.zip": (bytes_of(odd_member(method=99)), "cannot be read from the zip"),
    "broken-method.zip": (bytes_of(odd_member(method=14)), "cannot be read from the zip"),
    "shorter.zip": (bytes_of(odd_member(size=20)), "cannot be read from the zip"),
    "gigabyte.zip": (bytes_of(odd_member(size=1 << 30)), "bytes, more than"),
    "bomb.zip": (bytes_of(zip_bomb(1 << 30)), "bytes, more than"),
    "lying-bomb.zip": (bytes_of(zip_bomb(5000)), "cannot be read from the zip"),
    "link.zip": (bytes_of(zipped([("cat/link.png", b"../../../etc/passwd")])), NOT_AN_IMAGE),
    "nested.zip": (bytes_of(zipped([("cat/zip.png", zipped([]))])), NOT_AN_IMAGE),
    "lzma-bomb.zip": (bytes_of(zipped([("cat/x.png", bytes(8 << 20))], zipfile.ZIP_LZMA)), NOT_AN_IMAGE),
}


# Text and embeddings


def line(role: str = "A", text: str = "abc " * 100, **more: object) -> bytes:
    return json.dumps({"role": role, "text": text} | more).encode() + b"\n"


def broken_gzip(data: bytes) -> bytes:
    packed = gzip.compress(data)
    return changed(packed, 12, 255, 255, 255)


TEXTS = {
    "empty.jsonl": (bytes_of(b""), "is empty"),
    "broken.jsonl.gz": (bytes_of(broken_gzip(line() * 50)), r"broken.jsonl.gz: cannot be read after line \d"),
    "check.jsonl.gz": (bytes_of(changed(gzip.compress(line()), len(gzip.compress(line())) - 6, 1)), "cannot be read after"),
    "cut.jsonl.gz": (bytes_of(gzip.compress(line() * 50)[:-20]), r"cannot be read after line \d"),
    "plain.jsonl.gz": (bytes_of(line()), "cannot be read after line 0"),
    "bomb.jsonl.gz": (bytes_of(gzip.compress(line()) + gzip.compress(b"a" * (1 << 20), 9) * 400), r"line 2\); split it"),
    "latin.jsonl": (bytes_of(line() + '{"role": "Zoë"}'.encode("latin-1")), "line 2 is not"),
    "list.jsonl": (bytes_of(line() + b"[1, 2]\n"), "line 2 is not"),
    "number.jsonl": (bytes_of(line() + b"7\n"), "line 2 is not"),
    "word.jsonl": (bytes_of(line() + b'"role"\n'), "line 2 is not"),
    "null.jsonl": (bytes_of(line() + b"null\n"), "line 2 is not"),
    "no-text.jsonl": (bytes_of(line() + b'{"role": "A"}\n'), "line 2 is not"),
    "deep.jsonl": (bytes_of(line() + b"[" * 100_000), "line 2 is not"),
    "digits.jsonl": (bytes_of(line() + b"9" * 100_000), "line 2 is not"),
    "short.jsonl": (bytes_of(line(text="short")), "no speaker has more"),
    "pipe.jsonl": (lambda path: os.mkfifo(path), "no such file"),
    "folder.jsonl": (lambda path: path.mkdir(), "no such file"),
}  # fmt: skip


def vectors(classes: object = None, scale: object = None, **tensors: object) -> Callable[[Path], object]:
    x = np.eye(6, 4, dtype=np.float32) + 1
    given = {"x": x, "y": np.array([0, 1, 0, 1, 0, 1])} | tensors
    about = {k: json.dumps(v) for k, v in {"classes": classes, "scale": scale}.items() if v is not None}
    return bytes_of(save({k: np.asarray(v) for k, v in given.items() if v is not None}, about))


def rows_of_ones(change: tuple[int, float]) -> np.ndarray:
    x = np.ones((6, 4), np.float32)
    x[change[0]] = change[1]
    return x


VECTORS = {
    "text.safetensors": (bytes_of(b"not safetensors"), "cannot be read as embeddings"),
    "header.safetensors": (bytes_of((1 << 60).to_bytes(8, "little") + b"{}"), "cannot be read as embeddings"),
    "cut.safetensors": (lambda path: path.write_bytes(save({"x": np.ones((9, 9))})[:-100]), "cannot be read as embeddings"),
    "pipe.safetensors": (lambda path: os.mkfifo(path), "no such file"),
    "no-labels.safetensors": (vectors(y=None), "no tensor 'y'"),
    "shape.safetensors": (vectors(x=np.ones(6, np.float32)), r"'x' is torch.float32 \(6,\)"),
    "fewer.safetensors": (vectors(y=[0, 1]), r"x is \(6, 4\) and y \(2,\)"),
    "square.safetensors": (vectors(y=[[0, 1], [1, 0], [0, 1]]), "expected whole numbers"),
    "none.safetensors": (vectors(x=np.ones((0, 4), np.float32), y=np.zeros(0, np.int64)), r"x is \(0, 4\)"),
    "nan.safetensors": (vectors(x=rows_of_ones((2, np.nan))), "zero or not finite"),
    "zero.safetensors": (vectors(x=rows_of_ones((2, 0))), "zero or not finite"),
    "overflow.safetensors": (vectors(x=rows_of_ones((2, 1e30))), "zero or not finite"),
    "complex.safetensors": (vectors(x=np.ones((6, 4), np.complex64)), "torch.complex64"),
    "fraction.safetensors": (vectors(y=np.array([0, 1, 0, 1.5, 0, 1])), "expected whole numbers"),
    "label.safetensors": (vectors(["a", "b"], y=[0, 1, 2, 0, 1, 2]), "labels are 0 to 2, for 2 classes"),
    "negative.safetensors": (vectors(y=[0, 1, -1, 0, 1, 1]), "labels are -1 to 1"),
    "far.safetensors": (vectors(y=[0, 1, 10**18, 0, 1, 1]), "labels are 0 to 1000000000000000000"),
    "one-class.safetensors": (vectors(y=[0] * 6), "labels are 0 to 0"),
    "classes.safetensors": (vectors(3), "'classes' must be a list"),
    "scale.safetensors": (vectors(scale="hot"), "scale='hot'"),
    "scale-nan.safetensors": (vectors(scale=float("nan")), "scale=nan"),
    "domain.safetensors": (vectors(domain=[0, 0, 0, 0, 0, 7]), "'domain' must be"),
    "group.safetensors": (vectors(group=[1, 2]), "'group' has 2 numbers for 6 rows"),
    "group-shape.safetensors": (vectors(group=[[1, 2, 3], [4, 5, 6]]), "'group' is torch.int64"),
    "names.safetensors": (vectors(text=np.ones((3, 4), np.float32)), r"text is \(3, 4\); expected \(2, 4\)"),
    "names-nan.safetensors": (vectors(text=np.full((2, 4), np.nan, np.float32)), "rows of 'text'"),
}  # fmt: skip


# Folders


def folder_with_name(name: bytes) -> Callable[[Path], object]:
    def make(path: Path) -> None:
        good_images(path)
        odd = path / os.fsdecode(name)
        odd.mkdir()
        (odd / "0.png").write_bytes(encoded("PNG"))

    return make


def one_class(path: Path) -> None:
    good_images(path)
    for file in (path / "dog").iterdir():
        file.write_bytes(b"broken")


FOLDERS = {
    "empty": (lambda path: path.mkdir(), "no images in it"),
    "pipe": (lambda path: os.mkfifo(path), "neither a folder nor a zip"),
    "circle": (lambda path: path.symlink_to(path), "cannot be opened|no such folder"),
    "nowhere": (lambda path: None, "no such folder"),
    "long" * 100: (lambda path: None, "cannot be opened|no such folder"),
    "latin": (folder_with_name(b"caf\xe9"), r"caf\\udce9/0.png' is not valid UTF-8"),
    "one-class": (one_class, r"only one class is left \(cat\)"),
}

CORPUS = (
    *(Bad(name, "image", make, reason) for name, (make, reason) in IMAGES.items()),
    *(Bad(n, "data", m, r) for group in (ZIPS, TEXTS, VECTORS, FOLDERS) for n, (m, r) in group.items()),
)
