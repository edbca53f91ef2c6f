"""What NVFlare calls in a site's job process: it passes requests to the site's agent, a process of its own, and its answers
back. Needs no torch.

A request has a ticket, and asking again with the same ticket gives the same answer: a call that was lost is just repeated,
and a late one changes nothing. Large messages come and go in parts, a few at a time, and lie in files without a name in
between: this process takes no memory for them.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

from nvflare.collab import collab

from fedvlm.errors import BadMessage, FedvlmError
from fedvlm.federation.frames import LIMIT, SLICE, begin, connected_process, receive_parts, send, send_parts
from fedvlm.system import files
from fedvlm.system.names import file_name, printable

PART = 8 << 20  # bytes of a message that travel in one call
LONGEST_WAIT = 20.0  # seconds that a call may wait for the agent
STARTS = 2  # of the agent for one request
LEAST = 1 << 20  # bytes of a disk that is not full
FULL = "its disk is full"
LOG = "agent.log"

DONE, WORKING, UNKNOWN, LATE, DIED = "done", "working", "unknown", "late", "died"


Method = Callable[..., Any]


def silent(method: Method) -> Method:
    """None in place of an error, which goes to the site's own log: NVFlare would send its text and the paths of files."""

    @wraps(method)
    def call(self: Site, *args: Any, **keys: Any) -> Any:
        try:
            return method(self, *args, **keys)
        except Exception as error:
            with contextlib.suppress(OSError), (self.home / LOG).open("a", encoding="utf-8") as log:
                log.write(f"{method.__name__}: {type(error).__name__}: {printable(error)}\n")
            return None

    return call


class Site:
    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.ticket, self.starts = -1, 0
        self.coming = Coming()
        self.frame: Spool | None = None  # of the request under way, until the agent begins to answer
        self.reply: Spool | None = None
        self.agent: AgentProcess | None = None

    @collab.init  # type: ignore[untyped-decorator]
    def open(self) -> None:
        """Must not raise: an error here would end the job for everybody."""
        self.home = Path(os.environ.get("FEDVLM_SITE", ""))

    @collab.final  # type: ignore[untyped-decorator]
    def close(self) -> None:
        if self.agent:
            self.agent.stop()

    @collab.publish  # type: ignore[untyped-decorator]
    def ping(self) -> bool:
        return True

    @collab.publish  # type: ignore[untyped-decorator]
    @silent
    def put(self, ticket: int, index: int, size: int, part: bytes) -> bool:
        """A part of a large request; `ask` with the ticket and no frame follows."""
        only_server()
        at = index * PART
        if not 0 <= at < size <= LIMIT or len(part) != min(PART, size - at):
            raise BadMessage("a part of a message is out of its range")
        with self.changed:
            if self.needs(ticket):
                if (self.coming.ticket, self.coming.size) != (ticket, size):
                    self.coming = Coming(ticket, size, Spool(self.home))
                assert self.coming.data
                self.coming.data.put(at, part)
                self.coming.missing.discard(index)
        return True

    @collab.publish  # type: ignore[untyped-decorator]
    @silent
    def ask(self, run: str, ticket: int, frame: bytes, wait: float) -> dict[str, Any]:
        """The answer, if it is there within `wait` seconds; a frame is needed with a ticket's first call only."""
        only_server()
        try:
            return self.answer(run, ticket, frame, wait)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            return {"state": DIED, "why": FULL}

    def answer(self, run: str, ticket: int, frame: bytes, wait: float) -> dict[str, Any]:
        with self.changed:
            if ticket < self.ticket:
                return {"state": LATE}
            if self.needs(ticket):
                if not frame and (self.coming.ticket != ticket or self.coming.missing):
                    return {"state": UNKNOWN}
                self.starts = self.starts if ticket == self.ticket else 0
                self.ticket, self.reply = ticket, None
                self.frame = Spool(self.home, frame) if frame else self.coming.data
                self.coming = Coming()
                self.start(run, again=self.agent is not None and self.agent.busy)
            deadline = time.monotonic() + min(wait, LONGEST_WAIT)
            while self.reply is None and (left := deadline - time.monotonic()) > 0:
                self.changed.wait(left)
                if self.agent and self.agent.ended and self.reply is None:
                    if self.starts >= STARTS:
                        return {"state": DIED, "why": self.why()}
                    if self.frame is None:  # it ended in the middle of its answer
                        return {"state": UNKNOWN}
                    self.start(run, again=True)
            if self.reply is None:
                return {"state": WORKING, "progress": self.progress(run)}
            return {"state": DONE, "size": self.reply.size, "part": self.reply.get(0, PART)}

    @collab.publish  # type: ignore[untyped-decorator]
    @silent
    def get(self, ticket: int, index: int) -> bytes:
        """A further part of a large answer."""
        only_server()
        with self.changed:
            if ticket != self.ticket or self.reply is None:
                raise BadMessage("there is no such answer (any more)")
            return self.reply.get(index * PART, PART)

    def needs(self, ticket: int) -> bool:
        """Whether a frame is wanted with this ticket: it is new, or its frame is gone and its answer was lost."""
        lost = self.frame is None and self.reply is None and self.agent is not None and self.agent.ended
        return ticket > self.ticket or (ticket == self.ticket and lost)

    def start(self, run: str, again: bool) -> None:
        """Gives the request to the agent; a new one where it died, or still works on a request that was given up."""
        if again and self.agent:
            self.agent.kill()
        if self.agent is None or self.agent.ended:
            self.agent = AgentProcess(self.home, run, self.begins, self.answered)
        self.starts += 1
        assert self.frame is not None
        self.agent.post(self.ticket, self.frame)

    def begins(self, agent: AgentProcess, ticket: int) -> None:
        """Drop the request, because the agent's thread begins to answer it."""
        with self.changed:
            if agent is self.agent and ticket == self.ticket:
                self.frame = None

    def answered(self, agent: AgentProcess, ticket: int, reply: Spool | None) -> None:
        """Take an answer from the agent's thread, or None when the agent ended."""
        with self.changed:
            if reply is not None and agent is self.agent and ticket == self.ticket:
                self.reply = reply
            self.changed.notify_all()

    def why(self) -> str:
        """What can be said of an agent that ended: nothing that depends on the data."""
        if shutil.disk_usage(self.home).free < LEAST:
            return FULL
        killed = self.agent is not None and self.agent.process.returncode == -getattr(signal, "SIGKILL", 9)
        return "it was killed, as it happens when memory is short" if killed else ""

    def progress(self, run: str) -> str:
        try:
            return (self.home / "runs" / file_name(run) / "progress").read_text(encoding="ascii")[:100]
        except OSError:
            return ""


class Spool:
    """Bytes in memory or, from PART on, in a file of the site's home that has no name and is gone with this object."""

    def __init__(self, home: Path, content: bytes = b""):
        self.file = tempfile.SpooledTemporaryFile(PART, dir=str(home))  # noqa: SIM115
        self.lock = threading.Lock()  # the agent's thread reads while calls come in
        self.put(0, content)

    @property
    def size(self) -> int:
        with self.lock:
            return self.file.seek(0, os.SEEK_END)

    def put(self, at: int, part: bytes) -> None:
        with self.lock:
            self.file.seek(at)
            self.file.write(part)

    def get(self, at: int, count: int) -> bytes:
        with self.lock:
            self.file.seek(at)
            return self.file.read(count)


class Coming:
    """A large request, of which parts have arrived."""

    def __init__(self, ticket: int = -1, size: int = 0, data: Spool | None = None):
        self.ticket, self.size, self.data, self.missing = ticket, size, data, set(range(-(-size // PART)))


class AgentProcess:
    """The process that holds this site's data for a run (federation/agent.py)."""

    def __init__(self, home: Path, run: str, begins: Any, answered: Any):
        self.home, self.begins, self.answered = home, begins, answered
        self.ticket, self.busy, self.ended = -1, False, False
        call = [sys.executable, "-m", "fedvlm.federation.agent", str(home), run, str(os.getpid())]
        env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
        with files.opened(home / LOG, "ab", private=True) as log:
            self.process, self.reader, self.writer = connected_process(call, log, env)
        threading.Thread(target=self.read, daemon=True).start()

    def post(self, ticket: int, frame: Spool) -> None:
        self.ticket, self.busy = ticket, True
        threading.Thread(target=self.write, args=(frame,), daemon=True).start()

    def write(self, frame: Spool) -> None:
        try:
            send_parts(self.writer, frame.size, lambda at: frame.get(at, SLICE))
        except (OSError, ValueError):
            self.process.kill()

    def read(self) -> None:
        try:
            while (size := begin(self.reader, self.limit)) is not None:
                frame = Spool(self.home)
                if not receive_parts(self.reader, size, frame.put):
                    break
                self.busy = False
                self.answered(self, self.ticket, frame)
                del frame
        except (OSError, ValueError, BadMessage):
            self.process.kill()
        self.process.wait()
        self.ended = True
        self.answered(self, self.ticket, None)

    def limit(self) -> int:
        """The largest size of an answer in bytes; asked for when an answer begins."""
        self.begins(self, self.ticket)
        return LIMIT

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self.ended = True

    def stop(self) -> None:
        try:
            send(self.writer, b"")
            self.process.wait(5)
        except (OSError, subprocess.TimeoutExpired):
            self.kill()


def only_server() -> None:
    """Sites can call each other in NVFlare; here only the server has anything to ask."""
    if collab.caller != "server":
        raise FedvlmError("only the server may ask")
