"""What crosses between server and client: safetensors bytes, framed by their length. The guard checks what they say."""

from __future__ import annotations

import json
import math
import struct
from typing import NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load

from fedvlm.core.schema import Schema
from fedvlm.core.state import Message, Params, Reply, aligned, nbytes
from fedvlm.errors import BadMessage
from fedvlm.federation.frames import HEAD, LIMIT
from fedvlm.federation.frames import Channel as Channel
from fedvlm.federation.frames import receive as receive
from fedvlm.federation.frames import send as send

OVERHEAD = 64 << 10  # bytes of a frame beside its tensors, and for each tensor:
PER_TENSOR = 1 << 10
OUTPUTS = "outputs"  # not a step: the client writes its logits into its own folder and sends nothing
SECURE = "secure."  # how the steps of secure aggregation begin, and the part of a frame that has their payload
TYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


class Header(NamedTuple):
    """What is said beside the tensors."""

    step: str = ""
    round: int = 0
    exchange: int = 0
    ticket: int = -1  # a reply carries the ticket of its request
    stage: str = ""
    error: str = ""  # why a client cannot answer
    ledger: str = ""  # of a reply: the head of the client's ledger before it (count and hash)
    clipped: float = 0.0  # of a reply: the norm to which the update was clipped; 0: not at all
    noised: float = 0.0  # the standard deviation of the noise in it
    masked: bool = False  # by secure aggregation


def pack(header: Header, parts: dict[str, Params]) -> bytes:
    """Tensors are named PART/NAME. Written here, since safetensors' own `save` copies every tensor twice."""
    about: dict[str, object] = {"__metadata__": {"header": json.dumps(header._asdict())}}
    buffers, at = [b"", b""], 0
    flat = [(f"{part}/{k}", v) for part, params in parts.items() for k, v in params.items()]
    for name, value in sorted(flat, key=lambda item: (-item[1].element_size(), item[0])):  # large types first: aligned
        raw = value.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
        about[name] = {
            "dtype": TYPES[value.dtype],
            "shape": list(value.shape),
            "data_offsets": [at, at + raw.nbytes],
        }
        buffers.append(raw.data)  # type: ignore[arg-type]
        at += raw.nbytes
    text = json.dumps(about).encode()
    text += b" " * (-len(text) % 8)
    buffers[:2] = [HEAD.pack(len(text)), text]
    return b"".join(buffers)


def unpack(data: bytes) -> tuple[Header, dict[str, Params]]:
    try:
        size = HEAD.unpack(data[:8])[0]
        header = read_header(json.loads(data[8 : 8 + size])["__metadata__"]["header"])
        flat = load(data)
        for name, value in flat.items():
            flat[name] = aligned(value)
    except (SafetensorError, ValueError, KeyError, TypeError, struct.error, RecursionError) as error:
        raise BadMessage(f"a message is not readable ({type(error).__name__})") from error
    parts: dict[str, Params] = {}
    for name, value in flat.items():
        part, _, key = name.partition("/")
        parts.setdefault(part, {})[key] = value
    return header, parts


def read_header(text: str) -> Header:
    header = Header(**json.loads(text))
    for name, default in Header._field_defaults.items():
        value = getattr(header, name)
        if type(value) is not type(default) or (isinstance(value, float) and not math.isfinite(value)):
            raise TypeError(name)
    return header


def pack_message(message: Message, header: Header) -> bytes:
    return pack(header._replace(stage=message.stage), message.parts())


def octets(data: bytes) -> torch.Tensor:
    """Bytes as a tensor."""
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


def to_message(header: Header, parts: dict[str, Params]) -> Message:
    known = {k: parts.get(k, {}) for k in ("shared", "task", "reference", "extra")}
    return Message(**known, stage=header.stage)


def to_reply(client: int, parts: dict[str, Params]) -> Reply:
    """A client's reply, to be checked by the guard."""
    odd = sorted(parts.keys() - {"values", "shared"})
    if odd:
        raise BadMessage(f"sent other parts than agreed: {', '.join(odd[:5])}")
    return Reply(np.array([client]), parts.get("values", {}), parts.get("shared", {}))


def longest_reply(schema: Schema, shared: Params, examples: int) -> int:
    """Bytes that a client's reply may have; `examples`: of training, that it declared."""
    word, fields = 8, schema.values.values()
    values = word * sum(math.prod(examples if n == -1 else n for n in f.shape) for f in fields)
    tensors = len(fields) + len(shared)
    return min(LIMIT, values + schema.shared * nbytes(shared) + OVERHEAD + PER_TENSOR * tensors)
