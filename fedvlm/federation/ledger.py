"""The ledger: what left a site, one line each in its ledger.jsonl; received.jsonl in a run's folder is the server's side.

Every line holds the SHA-256 of itself and of the line before, so that `verify` notices a line that was changed, removed or
moved. Whoever owns the file could calculate all hashes anew, or remove the last lines: that is noticed only by what others
keep. A site therefore sends its ledger's head (the number of lines before the reply, and the last hash) with each reply, the
server writes it down, and `compare` finds the difference. Needs no torch.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import struct
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import BinaryIO, NamedTuple

from filelock import FileLock

from fedvlm.core.records import build, parsed
from fedvlm.errors import FedvlmError
from fedvlm.system import files
from fedvlm.system.names import printable

SENT, RECEIVED = "ledger.jsonl", "received.jsonl"
NOTHING = "0" * 64  # the hash before the first line
BLOCK = 1 << 16  # bytes read at a time from the end
LOCK_SECONDS = 60
LONGEST = 500  # characters of a sentence
MOST_REPEATS = 20  # of one request: a server or a network that fails repeats some
ATTEMPTS = ("look", "begin", "finish", "secure.keys", "secure.shares", "secure.masked", "secure.unmask")  # may differ
REPAIR = "repair"  # the step of a line that says that a cut line was removed
HEAD = struct.Struct("<Q")  # of a safetensors file: the bytes of its JSON header


@dataclass(frozen=True)
class Tensor:
    name: str
    shape: list[int]
    dtype: str


@dataclass(frozen=True)
class LedgerHead:
    """The last line of a ledger."""

    count: int
    hash: str

    def __str__(self) -> str:
        return f"{self.count} {self.hash}"

    @classmethod
    def parse(cls, text: str) -> LedgerHead | None:
        """What `str` wrote; None for anything else."""
        count, _, hash = text.partition(" ")
        return cls(int(count), hash) if count.isdecimal() and len(count) < 19 and len(hash) == 64 else None


@dataclass(frozen=True)
class Sent:
    """One message from a site, or its refusal to answer."""

    run: str
    site: str
    step: str
    round: int = 0
    exchange: int = 0
    to: str = "server"
    direction: str = "sent"  # or "received", on the server's side
    tensors: list[Tensor] = field(default_factory=list)
    bytes: int = 0
    sha256: str = ""  # of the bytes
    request: str = ""  # SHA-256 of what was asked: plan and agreement, step, round, exchange and message
    clipped: bool | float = False  # True, or the norm to which the update was clipped
    noised: bool | float = False  # True, or the noise's standard deviation
    masked: bool = False  # by secure aggregation
    refused: str = ""  # why nothing was sent
    note: str = ""
    site_head: LedgerHead | None = None  # on the server's side: the head of the site's ledger, as the site told it


@dataclass(frozen=True)
class Entry(Sent):
    """A line of a ledger."""

    number: int = 0  # of the line, from 1
    time: str = ""  # UTC
    previous: str = ""  # the hash of the line before
    hash: str = ""

    @property
    def head(self) -> LedgerHead:
        return LedgerHead(self.number, self.hash)


class Fault(NamedTuple):
    line: int
    reason: str


class Content(NamedTuple):
    """What a message's bytes say of themselves."""

    tensors: list[Tensor]
    bytes: int
    sha256: str


def content(frame: bytes) -> Content:
    """The content of the bytes that are sent; without tensors where they are not in the safetensors format."""
    tensors: list[Tensor] = []
    with contextlib.suppress(ValueError, KeyError, struct.error):
        about = parsed(frame[8 : 8 + HEAD.unpack(frame[:8])[0]].decode())
        given = [(k, v) for k, v in about.items() if k != "__metadata__" and isinstance(v, dict)]
        tensors = [build(Tensor, {"name": k, "shape": v["shape"], "dtype": v["dtype"]}) for k, v in given]
    return Content(tensors, len(frame), hashlib.sha256(frame).hexdigest())


def line_of(frame: bytes, sent: Sent) -> Sent:
    """A line with what the message's bytes say of themselves."""
    about = content(frame)
    return replace(sent, tensors=about.tensors, bytes=about.bytes, sha256=about.sha256)


class Ledger:
    """Several processes may append to one file."""

    def __init__(self, path: Path, sync: bool = True):
        self.path = path
        self.sync = sync  # a line is on the disk before `append` returns, and so before its bytes leave

    def append(self, sent: Sent) -> Entry:
        """Writes a line; its `head` can be sent along."""
        with files.writing(self.path), FileLock(f"{self.path}.lock", timeout=LOCK_SECONDS):
            is_new = not self.path.exists()
            with files.opened(self.path, "a+b", private=True, buffering=0) as file:
                head, cut = self._end(file)
                if cut:
                    file.truncate(file.seek(0, os.SEEK_END) - len(cut))
                    text = f"a line that was cut is removed: {printable(cut.decode(errors='replace'))}"
                    head = _write(file, Sent(sent.run, sent.site, REPAIR, note=text), head).head
                entry = _write(file, sent, head)
                if self.sync:
                    os.fsync(file.fileno())
            if is_new and self.sync:
                files.sync_folder(self.path.parent)
        return entry

    @property
    def head(self) -> LedgerHead:
        """The last whole line's."""
        if not self.path.exists():
            return LedgerHead(0, NOTHING)
        with self.path.open("rb") as file:
            return self._end(file)[0]

    def _end(self, file: BinaryIO) -> tuple[LedgerHead, bytes]:
        """The last whole line's head, and what stands behind it: a line that was cut (a full disk, a power cut)."""
        at, tail = file.seek(0, os.SEEK_END), b""
        while at and tail.count(b"\n") < 2:
            start = max(0, at - BLOCK)
            file.seek(start)
            tail = file.read(at - start) + tail
            at = start
        whole, _, cut = tail.rpartition(b"\n")
        if not whole:
            return LedgerHead(0, NOTHING), cut
        try:
            return _read(whole.rpartition(b"\n")[2]).head, cut
        except ValueError as error:
            raise FedvlmError(
                f"{self.path}: its last line was changed ({error}); move the file away, and a new one is begun"
            ) from error


def entries(path: Path) -> Iterator[Entry]:
    """All lines; an error names the first that is wrong."""
    before = LedgerHead(0, NOTHING)
    try:
        with path.open("rb") as file:
            for line in file:
                try:
                    if not line.endswith(b"\n"):
                        raise ValueError("it was cut; the next entry removes it and says so")
                    entry = _read(line)
                    if (entry.number, entry.previous) != (before.count + 1, before.hash):
                        raise ValueError("it does not follow the line before: lines were removed, added or moved")
                except ValueError as error:
                    raise BadLine(path, before.count + 1, str(error)) from error
                yield entry
                before = entry.head
    except OSError as error:
        raise FedvlmError(f"{path} cannot be read ({error.strerror})") from error


class BadLine(FedvlmError):
    """A line of a ledger that is not as it was written."""

    def __init__(self, path: Path, line: int, reason: str):
        super().__init__(f"{path}, line {line}: {reason}")
        self.fault = Fault(line, reason)


def verify(path: Path) -> Fault | None:
    """The first line that is wrong. A removal at the end cannot be noticed here: see `compare`."""
    try:
        for _ in entries(path):
            pass
    except BadLine as error:
        return error.fault
    return None


def compare(ledger: Path, received: Path, site: str) -> list[str]:
    """The points in which the site's ledger and the server's received.jsonl differ about what this site sent; [] where
    they agree. A reply that was lost on its way stands in the ledger alone."""
    everybody = list(entries(received))
    arrived, runs = [e for e in everybody if e.site == site], {e.run for e in everybody}
    mine, hashes = list[Entry](), {0: NOTHING}
    for entry in entries(ledger):
        hashes[entry.number] = entry.hash
        if entry.site == site and entry.run in runs and entry.step != REPAIR:
            mine.append(entry)
    found = []
    for one, others, fault in ((mine, arrived, "was not received"), (arrived, mine, "is not in the site's ledger")):
        spare = Counter(map(_said, others))
        for entry in one:
            spare[_said(entry)] -= 1
            if spare[_said(entry)] < 0:
                what = f"{entry.step} of round {entry.round}, exchange {entry.exchange} ({entry.bytes:,} bytes)"
                found.append(f"{entry.run}: {what} {fault}")
    for told in (e.site_head for e in arrived if e.site_head):
        if hashes.get(told.count) != told.hash:
            found.append(f"line {told.count} of the site's ledger is not the one that the server was told of")
            break
    return found


def audit(path: Path) -> list[str]:
    """What a server asked of a site that an honest one does not ask, in sentences, from the site's ledger alone."""
    refused, places, again = (
        Counter[tuple[str, ...]](),
        dict[tuple[object, ...], set[str]](),
        Counter[tuple[object, ...]](),
    )
    for entry in entries(path):
        place = entry.run, entry.step, entry.round, entry.exchange
        if entry.refused:
            refused[entry.run, entry.step, entry.refused] += 1
        elif entry.step != REPAIR:
            again[place] += 1
            if entry.step not in ATTEMPTS:
                places.setdefault(place, set()).add(entry.request)
    found = [f"{run}: {step} was refused {n} times: {why}" for (run, step, why), n in refused.items()]
    found += [
        f"{p[0]}: {p[1]} of round {p[2]} was answered for {len(r)} requests" for p, r in places.items() if len(r) > 1
    ]
    found += [f"{p[0]}: {p[1]} of round {p[2]} was asked for {n} times" for p, n in again.items() if n > MOST_REPEATS]
    return [printable(sentence, LONGEST) for sentence in found]


def _said(entry: Entry) -> tuple[object, ...]:
    """What both sides know of a message. The server's reason of a refusal may be shorter than the site's."""
    flags = (entry.clipped, entry.noised, entry.masked)
    return entry.run, entry.step, entry.round, entry.exchange, entry.bytes, entry.sha256, *flags, bool(entry.refused)


def _write(file: BinaryIO, sent: Sent, head: LedgerHead) -> Entry:
    now = datetime.now(UTC).isoformat(timespec="milliseconds")
    raw = asdict(sent) | {"number": head.count + 1, "time": now, "previous": head.hash}
    raw["hash"] = _hash(raw)
    line = memoryview(json.dumps(raw, allow_nan=False).encode() + b"\n")
    while line:  # a write may be short
        line = line[file.write(line) :]
    return build(Entry, raw)


def _read(line: bytes) -> Entry:
    """ValueError where it is not a line as it was written."""
    raw = parsed(line.decode())
    entry = build(Entry, raw)
    if _hash({k: v for k, v in raw.items() if k != "hash"}) != entry.hash:
        raise ValueError("it was changed: its hash is another")
    return entry


def _hash(raw: dict[str, object]) -> str:
    """Hash an entry with the hash of the line before, in one form whatever the order and the spaces in the file."""
    return hashlib.sha256(json.dumps(raw, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
