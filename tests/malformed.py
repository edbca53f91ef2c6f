"""Replies that are almost right: built as a client would, then damaged in one to three ways that know the format."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable

import numpy as np
import torch

from fedvlm.core.schema import Schema
from fedvlm.core.state import Params
from fedvlm.federation import wire
from fedvlm.federation.wire import Header

Parts = dict[str, Params]
ODD = [0, -1, 2**63, 1e308, -1e308, None, True, "x" * 300, "\x1b[2J\nround 9: forged", [], {}, [[[]]], "NaN", 1.5]
NUMBERS = [float("nan"), float("inf"), -float("inf"), 3e38, -3e38, 1e30, -1.0, 0.5, 0.0, 1e-45]


def honest(schema: Schema, shared: Params, examples: int) -> Parts:
    """A reply that fits."""
    values = {}
    for name, field in schema.values.items():
        shape = [3 if n == -1 else n for n in field.shape]
        low = max(field.low, 0.0) * (examples if field.per == "train" else 1)
        values[name] = torch.full((1, *shape), float(np.ceil(low)))
    return {"values": values, "shared": {k: v[None].clone() for k, v in shared.items()} if schema.shared else {}}


def pick(draw: np.random.Generator, choices: list):
    return choices[int(draw.integers(len(choices)))]


def renamed(draw: np.random.Generator, parts: Parts) -> None:
    part = pick(draw, list(parts))
    if parts[part]:
        name = pick(draw, list(parts[part]))
        parts[part][pick(draw, ["", "/", "../x", "n" * 1000, "shared", "\x00", name.upper()])] = parts[part].pop(name)


def dropped(draw: np.random.Generator, parts: Parts) -> None:
    part = pick(draw, list(parts))
    if parts[part]:
        del parts[part][pick(draw, list(parts[part]))]


def added(draw: np.random.Generator, parts: Parts) -> None:
    parts.setdefault(pick(draw, ["values", "shared", "own", ""]), {})["extra"] = torch.ones(int(draw.integers(1, 5)))


def reshaped(draw: np.random.Generator, parts: Parts) -> None:
    part = pick(draw, list(parts))
    for name, value in list(parts[part].items()):
        if draw.random() < 0.5:
            changes = [value.flatten()[:0], value.flatten(), value[None], value.sum(), torch.stack([value, value])]
            parts[part][name] = pick(draw, changes).contiguous()


def retyped(draw: np.random.Generator, parts: Parts) -> None:
    part = pick(draw, list(parts))
    for name, value in list(parts[part].items()):
        if draw.random() < 0.5:
            kind = pick(draw, [torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool])
            parts[part][name] = value.nan_to_num().to(kind)


def poisoned(draw: np.random.Generator, parts: Parts) -> None:
    part = pick(draw, list(parts))
    if parts[part]:
        value = parts[part][pick(draw, list(parts[part]))]
        if value.numel() and value.is_floating_point():
            value.view(-1)[int(draw.integers(value.numel()))] = pick(draw, NUMBERS)


CHANGES: list[Callable[[np.random.Generator, Parts], None]] = [renamed, dropped, added, reshaped, retyped, poisoned]


def words_changed(draw: np.random.Generator, data: bytes) -> bytes:
    """Another value in the JSON: the header, its type, offsets, shapes, dtypes."""
    (size,) = struct.unpack("<Q", data[:8])
    about = json.loads(data[8 : 8 + size])
    where = pick(draw, list(about))
    if where == "__metadata__":
        header = json.loads(about[where]["header"])
        if draw.random() < 0.7:
            header[pick(draw, [*header, "more"])] = pick(draw, ODD)
        else:
            header = pick(draw, ODD)
        about[where] = pick(draw, [{"header": json.dumps(header)}, {}, pick(draw, ODD), {"header": header}])
    else:
        about[where][pick(draw, ["dtype", "shape", "data_offsets", "more"])] = pick(draw, [*ODD, [0, 8], [8, 0], "F32"])
    text = json.dumps(about).encode()
    return struct.pack("<Q", len(text)) + text + data[8 + size :]


def bytes_changed(draw: np.random.Generator, data: bytes) -> bytes:
    changed = bytearray(data)
    for _ in range(int(draw.integers(1, 4))):
        changed[int(draw.integers(len(changed)))] = int(draw.integers(256))
    return bytes(changed[: int(draw.integers(len(changed) + 1))] if draw.random() < 0.3 else changed)


def reply(seed: int, schema: Schema, shared: Params, examples: int) -> bytes:
    draw = np.random.default_rng(seed)
    parts = honest(schema, shared, examples)
    for _ in range(int(draw.integers(1, 4))):
        pick(draw, CHANGES)(draw, parts)
    data = wire.pack(Header(ticket=7), parts)
    if draw.random() < 0.3:
        data = words_changed(draw, data)
    if draw.random() < 0.2:
        data = bytes_changed(draw, data)
    return data
