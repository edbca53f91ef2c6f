"""NIfTI-1 volumes (.nii, .nii.gz), read without a library: the header's fields that say where the numbers are, no more.

Nothing in a file is trusted: sizes are limited before anything is read, and a compressed file is read to the length that
its header announces."""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from pathlib import Path
from typing import BinaryIO, cast

import numpy as np

from fedvlm.errors import FedvlmError

HEADER = 348  # bytes
DTYPES = {2: "u1", 4: "i2", 8: "i4", 16: "f4", 64: "f8", 256: "i1", 512: "u2", 768: "u4"}
MOST = 1 << 28  # numbers of a volume


def read_volume(path: Path) -> np.ndarray:
    """float32 [x, y, z], with the file's slope and intercept applied."""
    try:
        with cast(BinaryIO, gzip.open(path) if path.name.endswith(".gz") else path.open("rb")) as file:
            return _read(path, file)
    except (OSError, EOFError, zlib.error, struct.error) as error:
        raise FedvlmError(f"{path}: cannot be read as NIfTI-1 ({error})") from None


def _read(path: Path, file: BinaryIO) -> np.ndarray:
    header = file.read(HEADER)
    order = next((o for o in "<>" if len(header) == HEADER and struct.unpack(o + "i", header[:4])[0] == HEADER), "")
    if not order or header[344:347] != b"n+1":
        raise FedvlmError(f"{path}: not a NIfTI-1 file with header and numbers in one (.nii or .nii.gz)")
    dims = struct.unpack(order + "8h", header[40:56])
    code, offset, slope, intercept = (
        struct.unpack(order + kind, header[at : at + size])[0]
        for kind, at, size in (("h", 70, 2), ("f", 108, 4), ("f", 112, 4), ("f", 116, 4))
    )
    shape = [d for d in dims[1 : 1 + max(0, dims[0])] if d != 1] if 0 < dims[0] < 8 else []
    if len(shape) != 3 or min(shape) < 1 or math.prod(shape) > MOST:
        raise FedvlmError(
            f"{path}: has the size {'×'.join(map(str, shape)) or 'nothing'}; a volume of three axes is needed"
        )
    if code not in DTYPES or not HEADER <= offset <= 1 << 20:
        raise FedvlmError(
            f"{path}: numbers of type {code} at byte {offset:g}, which are not read here; save it as float32"
        )
    dtype = np.dtype(order + DTYPES[code])
    file.read(int(offset) - HEADER)
    content = file.read(math.prod(shape) * dtype.itemsize)
    if len(content) < math.prod(shape) * dtype.itemsize:
        raise FedvlmError(f"{path}: ends before its {math.prod(shape):,} numbers do")
    found = np.frombuffer(content, dtype).astype(np.float32).reshape(shape, order="F")
    usable = math.isfinite(slope) and math.isfinite(intercept) and slope != 0
    return found * np.float32(slope) + np.float32(intercept) if usable else found
