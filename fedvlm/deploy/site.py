"""What NVFlare calls in a site's job process: it passes requests to the site's agent, a process of its own, and its answers
back. Needs no torch.

A request has a ticket, and asking again with the same ticket gives the same answer: a call that was lost is just repeated,
and a late one changes nothing. Large messages come and go in parts.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

from nvflare.collab import collab

from fedvlm import files
from fedvlm.engines.frames import LIMIT, connected, receive, send
from fedvlm.errors import BadMessage, FedvlmError
from fedvlm.names import file_name, printable

PART = 8 << 20  # bytes of a message that travel in one call
LONGEST_WAIT = 20.0  # seconds that a call may wait for the agent
STARTS = 2  # of the agent for one request
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
        self.coming: dict[int, list[bytes | None]] = {}  # by ticket, the parts that have arrived
        self.frame: bytes | None = None  # of the request under way
        self.reply: bytes | None = None
        self.agent: Agent | None = None

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
    def put(self, ticket: int, index: int, count: int, part: bytes) -> bool:
        """A part of a large request; `ask` with the ticket and no frame follows."""
        only_server()
        if not 0 <= index < count <= LIMIT // PART + 1 or len(part) > PART:
            raise BadMessage("a part of a message is out of its range")
        with self.changed:
            if ticket > self.ticket:
                self.coming = {ticket: self.coming.get(ticket) or [None] * count}
                self.coming[ticket][index] = part
        return True

    @collab.publish  # type: ignore[untyped-decorator]
    @silent
    def ask(self, run: str, ticket: int, frame: bytes, wait: float) -> dict[str, Any]:
        """The answer, if it is there within `wait` seconds; a frame is needed with a ticket's first call only."""
        only_server()
        with self.changed:
            if ticket < self.ticket:
                return {"state": LATE}
            if ticket > self.ticket:
                parts = self.coming.pop(ticket, [])
                if not frame and (not parts or None in parts):
                    return {"state": UNKNOWN}
                self.ticket, self.frame, self.reply, self.starts = ticket, frame or joined(parts), None, 0
                self.start(run, again=self.agent is not None and self.agent.busy)
            deadline = time.monotonic() + min(wait, LONGEST_WAIT)
            while self.reply is None and (left := deadline - time.monotonic()) > 0:
                self.changed.wait(left)
                if self.agent and self.agent.ended and self.reply is None:
                    if self.starts >= STARTS:
                        return {"state": DIED}
                    self.start(run, again=True)
            if self.reply is None:
                return {"state": WORKING, "progress": self.progress(run)}
            self.frame = None
            return {"state": DONE, "size": len(self.reply), "part": self.reply[:PART]}

    @collab.publish  # type: ignore[untyped-decorator]
    @silent
    def get(self, ticket: int, index: int) -> bytes:
        """A further part of a large answer."""
        only_server()
        with self.changed:
            if ticket != self.ticket or self.reply is None:
                raise BadMessage("there is no such answer (any more)")
            return self.reply[index * PART : (index + 1) * PART]

    def start(self, run: str, again: bool) -> None:
        """Gives the request to the agent; a new one where it died, or still works on a request that was given up."""
        if again and self.agent:
            self.agent.kill()
        if self.agent is None or self.agent.ended:
            self.agent = Agent(self.home, run, self.answered)
        self.starts += 1
        self.agent.post(self.ticket, self.frame or b"")

    def answered(self, agent: Agent, ticket: int, reply: bytes | None) -> None:
        """Called by the agent's thread with an answer, and with None when the agent ended."""
        with self.changed:
            if reply is not None and agent is self.agent and ticket == self.ticket:
                self.reply = reply
            self.changed.notify_all()

    def progress(self, run: str) -> str:
        try:
            return (self.home / "runs" / file_name(run) / "progress").read_text(encoding="ascii")[:100]
        except OSError:
            return ""


class Agent:
    """The process that holds this site's data for a run (deploy/agent.py)."""

    def __init__(self, home: Path, run: str, answered: Any):
        self.answered, self.ticket, self.busy, self.ended = answered, -1, False, False
        call = [sys.executable, "-m", "fedvlm.deploy.agent", str(home), run, str(os.getpid())]
        env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
        with files.opened(home / LOG, "ab", private=True) as log:
            self.process, self.reader, self.writer = connected(call, log, env)
        threading.Thread(target=self.read, daemon=True).start()

    def post(self, ticket: int, frame: bytes) -> None:
        self.ticket, self.busy = ticket, True
        threading.Thread(target=self.write, args=(frame,), daemon=True).start()

    def write(self, frame: bytes) -> None:
        try:
            send(self.writer, frame)
        except OSError:
            self.process.kill()

    def read(self) -> None:
        try:
            while (frame := receive(self.reader)) is not None:
                self.busy = False
                self.answered(self, self.ticket, frame)
        except (OSError, ValueError, BadMessage):
            self.process.kill()
        self.process.wait()
        self.ended = True
        self.answered(self, self.ticket, None)

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


def joined(parts: list[bytes | None]) -> bytes:
    return b"".join(p or b"" for p in parts)
