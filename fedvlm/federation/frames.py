"""Frames between processes: bytes behind their length. Needs no torch."""

from __future__ import annotations

import os
import socket
import struct
import subprocess
from collections.abc import Callable
from typing import IO, Protocol, cast

from fedvlm.errors import BadMessage

LIMIT = 4 << 30  # a longer frame is refused before it is read
HEAD = struct.Struct("<Q")
SLICE = 1 << 20  # bytes read at a time


class Channel(Protocol):
    """An unbuffered pipe or socket: buffered ones take a time quadratic in the size of a frame."""

    def write(self, data: memoryview, /) -> int | None: ...

    def readinto(self, buffer: memoryview, /) -> int | None: ...


def send(channel: Channel, data: bytes) -> None:
    for part in (HEAD.pack(len(data)), data):
        write_frame(channel, part)


def send_parts(channel: Channel, size: int, part: Callable[[int], bytes]) -> None:
    """A frame of so many bytes, of which `part` returns some from a place on."""
    write_frame(channel, HEAD.pack(size))
    at = 0
    while at < size:
        found = part(at)
        write_frame(channel, found)
        at += len(found)


def receive(channel: Channel, limit: Callable[[], int] = lambda: LIMIT) -> bytes | None:
    """The next frame; None where the other side has gone. The limit is asked for when the frame begins."""
    size = begin(channel, limit)
    return None if size is None else read_frame(channel, size)


def receive_parts(channel: Channel, size: int, put: Callable[[int, bytes], None]) -> bool:
    """The content of a frame that has begun; `put` gets the place and the bytes of each part. False where the other side
    has gone."""
    buffer, at = memoryview(bytearray(min(size, SLICE))), 0
    while at < size:
        got = channel.readinto(buffer[: size - at])
        if not got:
            return False
        put(at, bytes(buffer[:got]))
        at += got
    return True


def begin(channel: Channel, limit: Callable[[], int]) -> int | None:
    """The size of the next frame; None where the other side has gone."""
    head = read_frame(channel, HEAD.size)
    if head is None:
        return None
    (size,) = HEAD.unpack(head)
    if size > limit():
        raise BadMessage(f"a message of {size:,} bytes is over the limit of {limit():,}")
    return int(size)


def write_frame(channel: Channel, data: bytes) -> None:
    view = memoryview(data)
    while view:  # a write may be short
        view = view[channel.write(view) or 0 :]


def read_frame(channel: Channel, size: int) -> bytes | None:
    data = bytearray(size)
    view, at = memoryview(data), 0
    while at < size:
        got = channel.readinto(view[at : at + SLICE])
        if not got:
            return None
        at += got
    return bytes(data)


def connected_process(
    call: list[str], log: IO[bytes], env: dict[str, str]
) -> tuple[subprocess.Popen[bytes], Channel, Channel]:
    """A process with its standard input and output as channels: a socket where a process can have one in their place
    (many times as fast as a pipe), else pipes."""
    if os.name != "posix":
        pipe = subprocess.PIPE
        process = subprocess.Popen(call, bufsize=0, stdin=pipe, stdout=pipe, stderr=log, env=env)
        assert process.stdin and process.stdout
        return process, cast(Channel, process.stdout), cast(Channel, process.stdin)
    ours, theirs = socket.socketpair()
    with theirs:
        end = theirs.fileno()
        process = subprocess.Popen(call, stdin=end, stdout=end, stderr=log, env=env, start_new_session=True)
    channel = cast(Channel, ours.makefile("rwb", buffering=0))
    ours.close()  # the channel keeps it open
    return process, channel, channel
