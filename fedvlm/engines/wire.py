"""What crosses between server and client: safetensors bytes, framed by their length, and checked on arrival."""

from __future__ import annotations

import json
import struct
from typing import IO, NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from fedvlm.core import Message, Params, Reply
from fedvlm.errors import FedvlmError
from fedvlm.steps.base import Schema

LIMIT = 4 << 30  # a longer frame is refused before it is read
HEAD = struct.Struct("<Q")


class BadMessage(FedvlmError):
    """What arrived is not what the schema says."""


class Header(NamedTuple):
    """What is said beside the tensors."""

    step: str = ""
    round: int = 0
    exchange: int = 0
    ticket: int = -1  # a reply carries the ticket of its request
    stage: str = ""
    error: str = ""  # why a client cannot answer


def pack(header: Header, parts: dict[str, Params]) -> bytes:
    """Tensors are named PART/NAME."""
    flat = {f"{part}/{k}": v.contiguous() for part, params in parts.items() for k, v in params.items()}
    return save(flat, {"header": json.dumps(header._asdict())})


def unpack(data: bytes) -> tuple[Header, dict[str, Params]]:
    try:
        size = HEAD.unpack(data[:8])[0]
        header = Header(**json.loads(json.loads(data[8 : 8 + size])["__metadata__"]["header"]))
        flat = load(data)
    except (SafetensorError, ValueError, KeyError, TypeError, struct.error, RecursionError) as error:
        raise BadMessage(f"a message is not readable ({type(error).__name__})") from error
    parts: dict[str, Params] = {}
    for name, value in flat.items():
        part, _, key = name.partition("/")
        parts.setdefault(part, {})[key] = value
    return header, parts


def pack_message(message: Message, header: Header) -> bytes:
    return pack(header._replace(stage=message.stage), message.parts())


def to_message(header: Header, parts: dict[str, Params]) -> Message:
    known = {k: parts.get(k, {}) for k in ("shared", "task", "reference", "extra")}
    return Message(**known, stage=header.stage)


def send(pipe: IO[bytes], data: bytes) -> None:
    pipe.write(HEAD.pack(len(data)))
    pipe.write(data)
    pipe.flush()


def receive(pipe: IO[bytes]) -> bytes | None:
    """The next frame; None where the other side has gone."""
    head = pipe.read(HEAD.size)
    if len(head) < HEAD.size:
        return None
    (size,) = HEAD.unpack(head)
    if size > LIMIT:
        raise BadMessage(f"a message of {size:,} bytes is over the limit of {LIMIT:,}")
    data = pipe.read(size)
    return data if len(data) == size else None


def checked(client: int, who: str, parts: dict[str, Params], schema: Schema, shared: Params) -> Reply:
    """A client's reply, if names, shapes, dtypes and finiteness are what the schema says; `shared` is what was sent."""
    odd = sorted(parts.keys() - {"values", "shared"})
    if odd:
        raise BadMessage(f"{who} sent other parts than agreed: {', '.join(odd[:5])}")
    dtype = torch.get_default_dtype()
    expected = {k: (shape, dtype) for k, shape in schema.values.items()}
    _check(who, parts.get("values", {}), expected)
    trained = {k: (tuple(v.shape), v.dtype) for k, v in shared.items()} if schema.shared else {}
    _check(who, parts.get("shared", {}), trained)
    return Reply(np.array([client]), parts.get("values", {}), parts.get("shared", {}))


def _check(who: str, params: Params, expected: dict[str, tuple[tuple[int, ...], torch.dtype]]) -> None:
    if params.keys() != expected.keys():
        odd = sorted(params.keys() ^ expected.keys())
        raise BadMessage(f"{who} sent other names than agreed: {', '.join(odd[:5])}")
    for name, (shape, dtype) in expected.items():
        value, wanted = params[name], (1, *shape)
        fits = value.dim() == len(wanted) and all(n in (-1, m) for n, m in zip(wanted, value.shape, strict=True))
        if not fits or value.dtype != dtype:
            raise BadMessage(f"{who} sent {name} as {tuple(value.shape)} {value.dtype}, not {wanted} {dtype}")
        if value.is_floating_point() and not value.isfinite().all():
            raise BadMessage(f"{who} sent {name} with numbers that are not finite")
