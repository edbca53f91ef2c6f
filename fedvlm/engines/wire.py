"""What crosses between server and client: safetensors bytes, framed by their length, and checked on arrival."""

from __future__ import annotations

import json
import struct
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from fedvlm.core import FedvlmError, Params

LIMIT = 4 << 30  # a longer frame is refused before it is read
HEAD = struct.Struct("<Q")
Expected = dict[str, tuple[tuple[int, ...], torch.dtype]]  # shape (−1: any length) and dtype by name


class BadMessage(FedvlmError):
    """What arrived is not what was agreed."""


def pack(params: Params, **about: Any) -> bytes:
    return save({k: v.contiguous() for k, v in params.items()}, {"about": json.dumps(about)})


def unpack(data: bytes) -> tuple[Params, dict[str, Any]]:
    try:
        size = HEAD.unpack(data[:8])[0]
        about = json.loads(json.loads(data[8 : 8 + size])["__metadata__"]["about"])
        return load(data), about
    except (SafetensorError, ValueError, KeyError, TypeError, struct.error, RecursionError) as error:
        raise BadMessage(f"a message is not readable ({type(error).__name__})") from error


def send(pipe: BinaryIO, data: bytes) -> None:
    pipe.write(HEAD.pack(len(data)))
    pipe.write(data)
    pipe.flush()


def receive(pipe: BinaryIO) -> bytes | None:
    """The next frame; None where the other side has gone."""
    head = pipe.read(HEAD.size)
    if len(head) < HEAD.size:
        return None
    (size,) = HEAD.unpack(head)
    if size > LIMIT:
        raise BadMessage(f"a message of {size:,} bytes is over the limit of {LIMIT:,}")
    data = pipe.read(size)
    return data if len(data) == size else None


def check(params: Params, expected: Expected, who: str) -> None:
    """Names, shapes, dtypes and finite numbers are what was agreed."""
    if params.keys() != expected.keys():
        odd = sorted(params.keys() ^ expected.keys())
        raise BadMessage(f"{who} sent other names than agreed: {', '.join(odd[:5])}")
    for name, (shape, dtype) in expected.items():
        value = params[name]
        fits = value.dim() == len(shape) and all(n in (-1, m) for n, m in zip(shape, value.shape, strict=True))
        if not fits or value.dtype != dtype:
            raise BadMessage(f"{who} sent {name} as {tuple(value.shape)} {value.dtype}, not {tuple(shape)} {dtype}")
        if value.is_floating_point() and not value.isfinite().all():
            raise BadMessage(f"{who} sent {name} with numbers that are not finite")
