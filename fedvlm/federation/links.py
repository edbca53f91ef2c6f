"""The server's end of the conversations with its sites. Each site has a thread, so that a slow one delays nobody else."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any

import numpy as np

from fedvlm.federation.remote import Silence
from fedvlm.federation.site import DIED, DONE, LATE, LOG, PART, UNKNOWN, WORKING
from fedvlm.system.names import printable

POLL = 10.0  # seconds that a site may keep a call waiting for its agent
ANSWER = 15.0  # seconds for a call beyond that
PING = 3.0  # seconds for a site that was silent before
PAUSE = 1.0  # seconds before a lost call is repeated
BREATH = 0.05  # seconds before a site is asked again that has no answer yet
AT_ONCE = 3  # parts of a large message that are under way to or from one site
FAILURES, WITHIN = 3, 600.0  # so many failures in so many seconds, and a site is not asked for a while:
REST, GROWTH, LONGEST_REST = 60.0, 2, 3600.0  # seconds, longer each time


class Links:
    def __init__(self, run: str, sites: dict[str, Any], set_context: Callable[[], None] = lambda: None):
        """`sites`: by name, NVFlare's proxies of those in the job. `set_context`: called in each new thread."""
        self.rests = Rests(lambda name, why: None)
        self.run, self.sites, self.set_context = run, sites, set_context
        self.tickets = 0
        self.agreement = ""  # what all sites were told in look and begin
        self.silent: set[str] = set()
        self.busy: dict[str, Future[bytes | Silence]] = {}
        self.progress: dict[str, str] = {}  # of sites that are encoding
        self.trouble: dict[str, str] = {}  # why the last call to a site failed
        self.pool = ThreadPoolExecutor(max(1, len(sites)), initializer=set_context)

    def exchange(
        self,
        frames: dict[str, bytes],
        limits: dict[str, int],
        ticket: int,
        timeout: float,
        quorum: float,
        grace: float,
        lasting: bool = False,
    ) -> dict[str, bytes | Silence]:
        """What each site answers. Once a quorum has, the others have `grace` seconds left. `lasting`: who is late then goes
        on with it and is not asked for anything else."""
        deadline = time.monotonic() + timeout
        need = int(np.ceil(quorum * len(frames)))
        resting = self.rests.among(frames, need)
        ends = {name: [deadline] for name in frames}
        found: dict[str, bytes | Silence] = {}
        waiting: dict[Future[bytes | Silence], str] = {}
        for name, frame in frames.items():
            if name not in self.sites:
                found[name] = Silence.GONE
            elif name in resting:
                found[name] = Silence.RESTS
            elif name in self.busy and not self.busy[name].done():
                found[name] = Silence.LATE  # its thread still waits for an earlier call
            else:
                self.busy[name] = self.pool.submit(self.converse, name, frame, limits[name], ticket, ends[name])
                waiting[self.busy[name]] = name
        while waiting and (left := deadline - time.monotonic()) > 0:
            for future in wait(waiting, left, FIRST_COMPLETED).done:
                found[waiting.pop(future)] = future.result()
            if sum(isinstance(x, bytes) for x in found.values()) >= need:
                deadline = min(deadline, time.monotonic() + grace)
        for name in waiting.values():
            ends[name][0] *= lasting
            found[name] = Silence.LATE
        for name, answer in found.items():
            if answer in (Silence.LATE, Silence.DIED) and not lasting:
                self.rests.failed(name, f"{answer}{f' ({self.trouble[name]})' if self.trouble.get(name) else ''}")
        self.silent = (self.silent | set(waiting.values())) - {n for n, x in found.items() if isinstance(x, bytes)}
        return {name: found[name] for name in frames}

    def converse(self, name: str, frame: bytes, limit: int, ticket: int, end: list[float]) -> bytes | Silence:
        """One request to one site, repeated until it is answered or the time is over."""
        delivered = False
        if name in self.silent and not self.call(name, PING, "ping"):
            self.silent.add(name)
            return Silence.LATE
        while (left := end[0] - time.monotonic()) > 0:
            if not delivered and not self.deliver(name, frame, ticket):
                time.sleep(PAUSE)
                continue
            small = b"" if delivered or len(frame) > PART else frame
            patience = max(0.1, min(POLL, left))
            answer = self.call(name, patience + ANSWER, "ask", self.run, ticket, small, patience)
            if not isinstance(answer, dict):
                delivered = False
                time.sleep(PAUSE)
                continue
            state = answer.get("state")
            delivered = state != UNKNOWN
            self.progress[name] = str(answer.get("progress", ""))[:100] if state == WORKING else ""
            if state == DONE:
                whole = self.fetched(name, answer, limit, ticket)
                if whole is not None:
                    return whole
                time.sleep(PAUSE)
            if state == DIED:
                self.trouble[name] = printable(str(answer.get("why", "")), 200)
            if state in (DIED, LATE):
                return Silence.DIED if state == DIED else Silence.LATE
            time.sleep(BREATH)
        return Silence.LATE

    def deliver(self, name: str, frame: bytes, ticket: int) -> bool:
        """A large frame goes ahead in parts."""
        count = -(-len(frame) // PART)
        if count <= 1:
            return True
        size, view = len(frame), memoryview(frame)
        return self.each(
            range(count),
            lambda k: bool(self.call(name, ANSWER, "put", ticket, k, size, bytes(view[k * PART : (k + 1) * PART]))),
        )

    def fetched(self, name: str, answer: dict[str, Any], limit: int, ticket: int) -> bytes | None:
        """The whole of an answer, of which the first part is here; b"" (unreadable) where it is not as agreed, None where
        a part was lost."""
        size, first = answer.get("size"), answer.get("part")
        if type(size) is not int or not isinstance(first, bytes) or not 0 <= size <= limit:
            return b""
        if len(first) != min(size, PART):
            return b""
        if len(first) == size:
            return first
        whole = bytearray(size)
        whole[:PART] = first

        def get(k: int) -> bool:
            part, at = self.call(name, ANSWER, "get", ticket, k), k * PART
            if not isinstance(part, bytes) or len(part) != min(PART, size - at):
                return False
            whole[at : at + PART] = part
            return True

        return bytes(whole) if self.each(range(1, -(-size // PART)), get) else None

    def each(self, parts: range, one: Callable[[int], bool]) -> bool:
        """Whether it succeeds for every part; after a failure no further ones are begun."""
        with ThreadPoolExecutor(AT_ONCE, initializer=self.set_context) as pool:
            under_way = [pool.submit(one, k) for k in parts]
            try:
                return all(future.result() for future in under_way)
            finally:
                pool.shutdown(wait=False, cancel_futures=True)

    def call(self, name: str, seconds: float, method: str, *args: object) -> object:
        """None where the call fails: it is repeated by who needs it."""
        try:
            answer = getattr(self.sites[name](timeout=seconds), method)(*args)
            self.trouble[name] = "" if answer is not None else f"an error at the site, which its {LOG} tells"
            return answer
        except Exception as error:  # NVFlare's own kinds: no connection, no answer in time
            self.trouble[name] = printable(f"{type(error).__name__}: {error}", 200)
            return None

    def close(self) -> None:
        self.pool.shutdown(wait=False, cancel_futures=True)


class Rests:
    """Sites that failed again and again are not asked for a while, so that they cost the others nothing."""

    def __init__(self, say: Callable[[str, str], None]):
        self.clock = time.monotonic
        self.say = say  # is told of a site that rests, and why
        self.failures: dict[str, list[float]] = {}  # time.monotonic() of each, within WITHIN
        self.until: dict[str, float] = {}
        self.seconds: dict[str, float] = {}  # of the last rest

    def among(self, names: Iterable[str], need: int) -> set[str]:
        """Who rests now; nobody where the others are fewer than needed."""
        everybody, now = {*names}, self.clock()
        found = {n for n in everybody if now < self.until.get(n, 0.0)}
        return found if len(everybody) - len(found) >= need else set()

    def failed(self, name: str, why: str) -> None:
        now = self.clock()
        recent = [t for t in self.failures.get(name, []) if now - t < WITHIN]
        if not recent:
            self.seconds.pop(name, None)
        self.failures[name] = [*recent, now]
        if len(recent) + 1 >= FAILURES:
            self.seconds[name] = min(LONGEST_REST, self.seconds.get(name, REST / GROWTH) * GROWTH)
            self.until[name] = now + self.seconds[name]
            self.failures[name] = [self.until[name]] * (FAILURES - 1)  # one failure more, and it rests longer
            self.say(name, f"{why}, {FAILURES} times; it is asked again in {self.seconds[name]:.0f} s")
