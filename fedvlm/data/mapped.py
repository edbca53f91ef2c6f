"""Large tables of examples in a memory-mapped temporary file, so that only what is read takes memory.

The file has no name, or is removed when it is closed: it lives as long as the tensor. It is in the cache folder, since a
system's folder for temporary files is often in memory itself. Smaller tables are ordinary tensors, with the same numbers.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from fedvlm.system import files
from fedvlm.system.machine import cache_home

LARGE = 256 << 20  # bytes from which on a table is in a file
BLOCK = 16 << 20  # bytes that are computed and written at a time


def gathered(x: Tensor, rows: np.ndarray) -> Tensor:
    """x[rows]."""
    return by_blocks(x, len(rows), lambda first, last: x.index_select(0, torch.from_numpy(rows[first:last])))


def mapped_rows(x: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
    """change(x), of a function that treats each row by itself and keeps shape and dtype."""
    return by_blocks(x, len(x), lambda first, last: change(x[first:last]))


def by_blocks(like: Tensor, count: int, block: Callable[[int, int], Tensor]) -> Tensor:
    """`count` rows like those of a tensor; `block` computes those from a first one to before a last one."""
    size = like[:1].nbytes
    if count * size < LARGE or like.device.type != "cpu":
        return block(0, count)
    step, place = max(1, BLOCK // size), cache_home() / "mapped"
    with files.writing(place, "make room there, or set FEDVLM_CACHE to another folder"):
        files.cache_folder(place)
        with tempfile.TemporaryFile(dir=place) as file:
            for first in range(0, count, step):
                file.write(block(first, min(first + step, count)).contiguous().numpy().data)
            file.flush()
            table = np.memmap(file, like[:0].numpy().dtype, "r+", shape=(count, *like.shape[1:]))
    return torch.from_numpy(table)
