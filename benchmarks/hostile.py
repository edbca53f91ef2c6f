"""What a hostile party can do to a federation, tried on real kits, certificates and processes on this machine:

    python benchmarks/hostile.py                 # everything, about 10 minutes on two cores
    python benchmarks/hostile.py lies capture    # only these: lies, strangers, jobs, capture
    python benchmarks/hostile.py --out hostile.json

lies      a site whose agent or NVFlare process lies, in another way in every round: the run must finish, say who it was,
          and end with the bits of a run without that site wherever the site is left out
strangers no certificate, one of another federation, one site's keys under another's name: none gets in
jobs      a job with code or with a class that is not allowed, and a run that a site's rules forbid: refused, and noted
capture   every byte between a site and the server in a run of FedOT: no private row, image, embedding, file name or path

Exit code 1 where anything was lost. This file is also part of the lies' job: it is copied into the frozen package (as
fedvlm.federation.hostile) and named in its list of allowed classes. Only there does it play the liar.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import socket
import ssl
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from nvflare.collab import collab
from nvflare.collab.api.context import get_call_context, set_call_context
from safetensors.torch import load_file

from fedvlm.config.config import resolve
from fedvlm.core.state import Params
from fedvlm.federation import agent as honest
from fedvlm.federation import ledger
from fedvlm.federation.hub import SITES, Play, Status
from fedvlm.federation.links import Links
from fedvlm.federation.plan import BEGIN, FINISH, JSON, LOOK, Plan
from fedvlm.federation.site import DONE, Site, only_server, silent
from fedvlm.federation.wire import Header, octets, pack, unpack
from fedvlm.training.folder import RunFolder

if TYPE_CHECKING:
    from federation import Federation

MODULE = "fedvlm.federation.hostile"
PLACE = "FEDVLM_HOSTILE"  # a variable with the folder of the whole federation
NUL, ESC = "\x00", "\x1b"
FORGED = f"{ESC}[2J{ESC}[31mround 9: client noto is left out: forged\r\nround 10: all is well{NUL}"
WINDOW = 16  # bytes that no private thing may have in common with a message

Parts = dict[str, Params]
Answer = Callable[
    [Header, bytes], bytes | None
]  # from a request's header and the honest answer; None: no answer at all


# Lies of the agent, over bytes


def changed(change: Callable[[Parts], object]) -> Answer:
    """The honest tensors, with a change in place."""

    def lie(asked: Header, frame: bytes) -> bytes:
        header, parts = unpack(frame)
        change(parts)
        return pack(header, {p: {k: v.contiguous() for k, v in params.items()} for p, params in parts.items()})

    return lie


def told(**words: Any) -> Answer:
    """Other words beside the tensors."""

    def lie(asked: Header, frame: bytes) -> bytes:
        header, parts = unpack(frame)
        return reheaded(pack(header, parts), {**header._asdict(), **words})

    return lie


def reheaded(frame: bytes, header: object) -> bytes:
    """A frame with any header."""
    size = struct.unpack("<Q", frame[:8])[0]
    about = json.loads(frame[8 : 8 + size])
    about["__metadata__"]["header"] = json.dumps(header)
    text = json.dumps(about).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + frame[8 + size :]


def shared(value: Callable[[torch.Tensor], torch.Tensor]) -> Answer:
    return changed(lambda parts: parts["shared"].update({k: value(v) for k, v in parts["shared"].items()}))


def values(name: str, value: float) -> Answer:
    return changed(lambda parts: parts["values"].update({name: torch.full_like(parts["values"][name], value)}))


def one_number(value: float) -> Answer:
    """One number of one tensor."""

    def change(parts: Parts) -> None:
        first = next(iter(parts["shared"]))
        parts["shared"][first] = parts["shared"][first].clone()
        parts["shared"][first].view(-1)[0] = value

    return changed(change)


def scored(value: float) -> Answer:
    def change(parts: Parts) -> None:
        for name in parts["values"]:
            parts["values"][name] = torch.full_like(parts["values"][name], value)

    return changed(change)


def said(change: Callable[[dict[str, Any]], object]) -> Answer:
    """Another hello or ready."""

    def lie(asked: Header, frame: bytes) -> bytes:
        header, parts = unpack(frame)
        record = json.loads(parts[JSON]["text"].numpy().tobytes())
        change(record)
        return pack(header, {JSON: {"text": octets(json.dumps(record).encode())}})

    return lie


def text(content: bytes) -> Answer:
    return lambda asked, frame: pack(Header(ticket=asked.ticket), {JSON: {"text": octets(content)}})


def raw(content: bytes) -> Answer:
    return lambda asked, frame: content


def slowly(asked: Header, frame: bytes) -> bytes:
    time.sleep(15)
    return frame


def ended(asked: Header, frame: bytes) -> None:
    os._exit(1)


def many(count: int) -> Answer:
    return changed(lambda parts: parts["shared"].update({f"x{k}": torch.zeros(0) for k in range(count)}))


class Lie(NamedTuple):
    name: str
    answer: Answer
    step: str = "train"
    kept: bool = False  # it cannot be told from an honest answer: the model stays finite, and no more is asked


# One for each round of a run; each is refused
LIES = [
    Lie("other names", changed(lambda p: p.update(shared={f"{k}_": v for k, v in p["shared"].items()}))),
    Lie("no tensors", changed(lambda p: p.update(shared={}, values={}))),
    Lie("a part that was not agreed", changed(lambda p: p.update(private={"row": torch.ones(3)}))),
    Lie("a further tensor", changed(lambda p: p["shared"].update(more=torch.ones(3)))),
    Lie("other shapes", shared(lambda v: v[..., :-1])),
    Lie("two clients in one answer", shared(lambda v: torch.cat([v, v]))),
    Lie("float64", shared(torch.Tensor.double)),
    Lie("float16", shared(torch.Tensor.half)),
    Lie("integers", shared(torch.Tensor.long)),
    Lie("NaN everywhere", shared(lambda v: torch.full_like(v, np.nan))),
    Lie("one NaN", one_number(np.nan)),
    Lie("one infinity", one_number(np.inf)),
    Lie("3e38 everywhere", shared(lambda v: torch.full_like(v, 3e38))),
    Lie("update × 1e6", shared(lambda v: v * 1e6)),
    Lie("n = 1e30", values("n", 1e30)),
    Lie("n = −5", values("n", -5)),
    Lie("n = NaN", values("n", np.nan)),
    Lie("n = 0.5", values("n", 0.5)),
    Lie("loss = infinity", values("loss", np.inf)),
    Lie("1 MB of zeros behind the tensors", lambda asked, frame: frame + bytes(1 << 20)),
    Lie("100 MB", raw(bytes(100 << 20))),
    Lie("junk", raw(np.random.default_rng(0).bytes(5000))),
    Lie("empty", raw(b"")),
    Lie("cut in the middle", lambda asked, frame: frame[: len(frame) // 2]),
    Lie("a length of 2^63", lambda asked, frame: struct.pack("<Q", 1 << 63) + frame[8:]),
    Lie("JSON of 20,000 brackets", raw(struct.pack("<Q", 20000) + b"[" * 20000)),
    Lie("2,000 empty tensors", many(2000)),
    Lie("an answer to another request", told(ticket=3)),
    Lie("a header with a further word", told(evil="x")),
    Lie("a header with other types", told(ticket="7", error=5)),
    Lie("clipped = NaN", told(clipped=float("nan"))),
    Lie("noised = infinity", told(noised=float("inf"))),
    Lie("an error with escape codes and lines", told(error=FORGED)),
    Lie("an error of 60 kB", told(error="x" * 60_000)),
    Lie("scores of 3,831,417", scored(3_831_417.0), "score"),
    Lie("scores of NaN", scored(np.nan), "score"),
    Lie("negative scores", scored(-1.0), "score"),
    Lie("junk for scores", raw(b"\xff" * 999), "score"),
]
# These cannot be told from honest answers in the round: the model stays finite
KEPT = [
    Lie("another site's ledger head", told(ledger=f"4 {'ab' * 32}")),
    Lie("a ledger head of junk", told(ledger=FORGED)),
    Lie("update × −1", shared(lambda v: -v)),
    Lie("all zeros", shared(torch.zeros_like)),
]
# Each in a run of its own
FIRST = [
    Lie("junk for a hello", raw(b"\x00" * 500), LOOK),
    Lie("a hello of 20 MB", text(b'{"classes": ["' + b"a" * (20 << 20) + b'"]}'), LOOK),
    Lie("a hello of 100,000 brackets", text(b"[" * 100_000), LOOK),
    Lie("100,000 classes", said(lambda r: r.update(classes=[f"c{k}" for k in range(100_000)])), LOOK),
    Lie("classes with escape codes", said(lambda r: r.update(classes=[*r["classes"], FORGED])), LOOK),
    Lie("classes that are numbers", said(lambda r: r.update(classes=[1, 2])), LOOK),
    Lie("a backbone with escape codes", said(lambda r: r.update(backbone=FORGED)), LOOK),
    Lie("a refusal with escape codes", told(error=FORGED), LOOK),
    Lie("negative counts", said(lambda r: r.update(counts=[-5, 1, 1])), BEGIN),
    Lie("counts of 2^62", said(lambda r: r.update(counts=[1 << 62] * 3)), BEGIN),
    Lie("counts of 1e30", said(lambda r: r.update(counts=[1e30] * 3)), BEGIN),
    Lie("1,000 counts", said(lambda r: r.update(counts=[1] * 1000)), BEGIN),
    Lie("a mark of 1 MB", said(lambda r: r.update(mark="m" * (1 << 20))), BEGIN),
    Lie("junk for a ready", raw(b"\x01" * 500), BEGIN),
    Lie("data that change", said(lambda r: r.update(mark="0" * 16)), BEGIN),
    Lie("examples that nobody else has", said(lambda r: r.update(extras=["corrupted", FORGED])), BEGIN, kept=True),
    Lie("junk at the end", raw(b"\x02" * 500), FINISH, kept=True),
    Lie("100 MB at the end", raw(bytes(100 << 20)), FINISH, kept=True),
    Lie("an error at the end", told(error=FORGED), FINISH, kept=True),
]
SERIES = {"refused": LIES, "kept": KEPT}  # of rounds
LATE = [
    Lie("never answers", lambda asked, frame: None),
    Lie("takes 15 seconds", slowly),
    Lie("ends its process", ended),
]


# Lies of a site's NVFlare process, which may return anything


def part(size: object, content: object = b"abc", **more: object) -> Callable[[], object]:
    return lambda: {"state": DONE, "size": size, "part": content, **more}


RELAY: dict[str, Callable[[], object]] = {
    "a size of −5": part(-5),
    "a size of True": part(True),
    "a size that is smaller than the part": part(1, b"abc" * 1_000_000),
    "a size of 2^62": part(1 << 62),
    "a size that is larger than the part": part(60_000),
    "a size that is a text": part("9"),
    "a part that is a text": part(3, "abc"),
    "no part": lambda: {"state": DONE},
}
RELAY_LATE: dict[str, Callable[[], object]] = {
    "always at work": lambda: {"state": "working", "progress": FORGED * 10_000},
    "always unknown": lambda: {"state": "unknown"},
    "a list": lambda: [1, 2, 3],
    "an error": lambda: 1 / 0,
}


# What runs in the frozen copy


def place() -> Path:
    return Path(os.environ[PLACE])


def lie_now(step: str, round: int) -> Lie | None:
    """The lie of this request, as the scenario says."""
    scenario = (place() / "scenario").read_text()
    found = [lie for lie in (*FIRST, *LATE) if lie.name == scenario and lie.step == step]
    if scenario in SERIES and 1 <= round <= len(SERIES[scenario]):
        lie = SERIES[scenario][round - 1]
        found = [lie] if lie.step == step else [LIES[0]] if step == "train" else []
    return found[0] if found else None


class Liar(honest.Agent):
    def answer(self, request: honest.Request) -> bytes:
        asked = request.header
        lie = lie_now(asked.step, asked.round)
        true = super().answer(request)
        told = lie.answer(asked, true) if lie else true
        while told is None:
            time.sleep(1)
        return told


class Watched(honest.Agent):
    """Keeps its private row after every answer."""

    def answer(self, request: honest.Request) -> bytes:
        found = super().answer(request)
        rows = self.place / "rows.bin"
        kept = self.home / "kept"
        kept.mkdir(exist_ok=True)
        if rows.exists():
            shutil.copyfile(rows, kept / f"{len(list(kept.iterdir())):04}")
        return found


def agent(home: Path, run: str) -> honest.Agent:
    """In place of the agent's own class (see `prepared`)."""
    scenario, liar = (place() / "scenario").read_text(), (place() / "liar").read_text()
    kind = Watched if scenario == "fedot" else Liar if home.name == f"home-{liar}" else honest.Agent
    return kind(home, run)


class Relay(Site):
    """A site's NVFlare process: it keeps what passes, and lies if it is the liar's."""

    run = step = ""  # of the last request

    def lies(self) -> Callable[[], object] | None:
        liar = (place() / "liar").read_text()
        return (
            (RELAY | RELAY_LATE).get((place() / "scenario").read_text()) if self.home.name == f"home-{liar}" else None
        )

    @collab.publish  # type: ignore[untyped-decorator]
    @silent
    def ask(self, run: str, ticket: int, frame: bytes, wait: float) -> object:
        only_server()
        if run != self.run and self.agent:
            self.agent.stop()
            self.agent = None
        self.run = run
        self.step = unpack(frame)[0].step if frame else self.step
        if self.step == "train" and (lie := self.lies()):
            return lie()
        found = Site.ask(self, run, ticket, frame, wait)
        if (place() / "scenario").read_text() == "fedot":
            kept = self.home / "frames"
            kept.mkdir(exist_ok=True)
            reply = self.reply.get(0, self.reply.size) if self.reply else b""
            for kind, content in (("asked", frame), ("answered", reply)):
                if content:
                    (kept / f"{ticket:06}-{kind}").write_bytes(content)
        return found


@dataclass
class Outcome:
    """Of a run in which somebody lied."""

    name: str
    error: str = ""
    rounds: list[dict[str, Any]] = field(default_factory=list)
    log: list[str] = field(default_factory=list)
    folder: str = ""
    seconds: float = 0.0


class Server:
    def __init__(self, sites: list[str], scenarios: list[str]):
        self.sites, self.scenarios = sites, scenarios

    @collab.main  # type: ignore[untyped-decorator]
    def go(self) -> str:
        context = get_call_context()
        everybody = {p.name: p for p in context.clients}
        liar = (place() / "liar").read_text()
        tickets = 0
        for scenario in self.scenarios:
            without = scenario.startswith("without")
            (place() / "scenario").write_text(scenario)
            sites = {n: p for n, p in everybody.items() if not (without and n == liar)}
            links = Links(scenario, sites, lambda: set_call_context(context))
            links.tickets = tickets
            outcome = Outcome(scenario)
            began = time.monotonic()
            try:
                self.play(scenario, links, outcome)
            except Exception as error:
                outcome.error = f"{type(error).__name__}: {error}"
            outcome.seconds = time.monotonic() - began
            tickets = links.tickets + 1000
            links.close()
            with (place() / "outcomes.jsonl").open("a") as out:
                out.write(json.dumps(vars(outcome)) + "\n")
        return ""

    def play(self, scenario: str, links: Links, outcome: Outcome) -> None:
        number = scenario.removeprefix("without ")
        rounds = int(number) if number.isdecimal() else len(SERIES.get(scenario, "12"))
        method = "fedot" if scenario == "fedot" else "fedavg"
        keys = {"rounds": 5 if scenario == "fedot" else rounds, "timeout": 60, "grace": 6}
        name = f"run-{len(list(place().glob('home-server/runs/*')))}"
        plan = Plan.of(resolve(method, keys), "bench", name, self.sites)
        links.run = name
        folder = Path(os.environ["FEDVLM_HOME"]) / "runs" / name
        outcome.folder = str(folder)
        run = RunFolder(folder)
        if scenario == "data that change":
            (place() / "scenario").write_text("")
            Play(plan, links, folder, Status(folder)).run()
            for path in (p for p in folder.iterdir() if p.name not in (SITES, "run.json")):
                path.unlink()  # what the sites said is left, and a run that has not begun
            record = json.loads((folder / "run.json").read_text())
            (folder / "run.json").write_text(json.dumps(record | {"result": None}))
            (place() / "scenario").write_text(scenario)
        try:
            Play(plan, links, folder, Status(folder)).run()
        finally:
            outcome.rounds = [dict(r) for r in run.rounds()] if (folder / "run.json").exists() else []
            log = folder / "log.txt"
            outcome.log = log.read_text(encoding="utf-8").splitlines() if log.exists() else []


# The federation, and what is tried


class Tried(NamedTuple):
    what: str
    lost: str  # why it is lost; "" where it is not
    seen: str = ""


def prepared(folder: Path) -> Federation:
    from exchange import patch
    from federation import Federation, styles

    fed = Federation(folder, sorted(styles()[:3]))
    fed.env[PLACE] = str(folder)
    (folder / "liar").write_text(fed.sites[2])  # the last: the others have the same places without it
    (folder / "scenario").write_text("")
    package = folder / "code" / "fedvlm"
    (package / "federation" / "hostile.py").write_bytes(Path(__file__).read_bytes())
    for kind, name in (("server", "Server"), ("site", "Relay")):
        patch(package / "federation" / "settings.py", f'"{kind}": [', f'"{kind}": ["{MODULE}.{name}", ')
    own = "serve_site(Agent(Path(sys.argv[1]), sys.argv[2])"
    patch(
        package / "federation" / "agent.py",
        f"    {own}",
        f"    from {MODULE} import agent\n\n    {own.replace('Agent', 'agent')}",
    )
    patch(package / "rounds" / "guard.py", "OFFENCES = 3 ", "OFFENCES = 10_000 ")  # so that a liar may go on
    return fed


def job(
    fed: Federation,
    folder: Path,
    server: dict[str, object],
    site: dict[str, object] | None = None,
    more: dict[str, bytes] | None = None,
    limit: float = 60.0,
) -> str:
    """Submits a job that names these classes; how it ended."""
    from fedvlm.core.records import MethodRecord, PartRecord
    from fedvlm.federation import admin
    from fedvlm.federation.settings import KEEP
    from fedvlm.federation.status import ask, session

    part = PartRecord("")
    plan = Plan(
        "bench", folder.name, fed.sites, MethodRecord(""), part, part, part, [], {}, {}, "", ""
    )  # only its name counts
    admin.write_job(folder, plan)
    for party, component in (("server", server), ("client", site or {})):
        path = folder / "app" / "config" / f"config_fed_{party}.json"
        config = json.loads(path.read_text())
        config["components"] = [config["components"][0] | component]
        path.write_text(json.dumps(config))
    for name, content in (more or {}).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    try:
        with session(str(fed.place / "kits" / "admin.zip")) as (flare, _):
            number, deadline = flare.submit_job(str(folder)), time.monotonic() + limit
            while time.monotonic() < deadline:
                state = str((flare.get_job_meta(number) or {}).get("status"))
                if any(word in state for word in ("FINISHED", "REJECTED")):
                    with contextlib.suppress(Exception):  # the keeper would try it again
                        ask(flare, KEEP, "stop", plan.name)
                    return state
                time.sleep(1)
            flare.abort_job(number)
            return f"aborted after {limit:.0f} s"
    except Exception as error:
        return f"refused: {type(error).__name__}: {error}"


def lies(fed: Federation) -> Iterator[Tried]:
    apart = [lie.name for lie in (*FIRST, *LATE)] + [*RELAY, *RELAY_LATE]
    scenarios = [f"without {len(LIES)}", "without 2", *SERIES, *apart]
    (fed.place / "outcomes.jsonl").unlink(missing_ok=True)
    ended = job(
        fed,
        fed.place / "job-lies",
        {"path": f"{MODULE}.Server", "args": {"sites": fed.sites, "scenarios": scenarios}},
        {"path": f"{MODULE}.Relay"},
        limit=1800.0,
    )
    told = [json.loads(line) for line in (fed.place / "outcomes.jsonl").read_text().splitlines()]
    found = {o["name"]: Outcome(**o) for o in told}
    for name in scenarios:
        if name not in found:
            yield Tried(name, f"it was not reached ({ended})")
        elif found[name].error:
            yield Tried(name, f"the run ended: {found[name].error[:200]}")
    liar = fed.sites[2]
    for name in (n for n in SERIES if n in found):
        yield from in_rounds(found[name], liar)
        yield from ledgers(fed, found[name], liar)
    if not {"refused", without := f"without {len(LIES)}"} - found.keys():
        yield same("the model after all that was refused", found["refused"], found[without])
    if "kept" in found:
        yield Tried("the model after all that was kept", unsound(found["kept"]))
    for name in apart:
        if name in found and not found[name].error:
            yield one_run(found[name], found["without 2"], liar)


def in_rounds(outcome: Outcome, liar: str) -> Iterator[Tried]:
    """One lie a round: the record or the log names the liar; what cannot be told from honesty leaves the model finite."""
    records = {int(r["round"]): r for r in outcome.rounds}
    for round, lie in enumerate(SERIES[outcome.name], 1):
        record = records.get(round, {})
        offence = record.get("offences", {}).get(liar, "")
        lines = [x for x in outcome.log if f"round {round}: client {liar} is left out" in x]
        others = [n for n in (*record.get("offences", {}), *record.get("late", [])) if n != liar]
        lost = "" if record else "there is no such round"
        lost = lost or ("" if offence or lines or outcome.name == "kept" else "it was accepted")
        lost = lost or (f"honest sites were blamed: {others}" if others else "")
        lost = lost or ("the log has a forged line" if any(x.startswith("round 10:") for x in outcome.log) else "")
        yield Tried(lie.name, lost, (offence or (lines[-1].partition(" left out: ")[2] if lines else "kept"))[:70])


def ledgers(fed: Federation, outcome: Outcome, liar: str) -> Iterator[Tried]:
    """An agent that wrote down another answer than it sent is found out afterwards, and nobody else."""
    received = Path(outcome.folder) / ledger.RECEIVED
    for site in fed.sites:
        found = ledger.compare(fed.place / f"home-{site}" / ledger.SENT, received, site)
        found = [f for f in found if "was not received" not in f]  # lies may be left out before they are written down
        lost = "" if bool(found) == (site == liar) else f"{found[:1] or 'no difference'}"
        yield Tried(
            f"{outcome.name}: the ledgers of {site} and the server", lost, "they differ" if found else "they agree"
        )


def one_run(outcome: Outcome, without: Outcome, liar: str) -> Tried:
    """A lie in a run of its own."""
    lie = next((x for x in (*FIRST, *LATE) if x.name == outcome.name), None)
    lines = [x for x in outcome.log if liar in x]
    if lie and lie.kept:
        return Tried(outcome.name, unsound(outcome) or blamed(outcome, liar), "the run goes on")
    found = same(outcome.name, outcome, without)
    return found._replace(
        lost=found.lost or ("" if lines else "nobody was told") or blamed(outcome, liar),
        seen=(lines[0].partition(liar)[2] if lines else "")[:70],
    )


def blamed(outcome: Outcome, liar: str) -> str:
    names = {n for r in outcome.rounds for n in (*r.get("offences", {}), *r.get("late", []), *r.get("missing", []))}
    return f"honest sites were blamed: {sorted(names - {liar})}" if names - {liar} else ""


def state_of(outcome: Outcome) -> Params:
    return {k: v for k, v in load_file(Path(outcome.folder) / "state.safetensors").items() if k.startswith("shared/")}


def unsound(outcome: Outcome) -> str:
    return "" if all(v.isfinite().all() for v in state_of(outcome).values()) else "the model is not finite"


def same(name: str, outcome: Outcome, without: Outcome) -> Tried:
    """The model is finite, and that of the run without the liar."""
    one, other = state_of(outcome), state_of(without)
    lost = unsound(outcome)
    odd = [k for k in other if not torch.equal(one[k], other[k])]
    lost = lost or (f"the model differs from that without the liar ({odd[0]})" if odd else "")
    return Tried(name, lost)


def strangers(fed: Federation) -> Iterator[Tried]:
    about = json.loads((fed.place / "kits" / "admin" / "kit.json").read_text())
    port = about["port"]
    other = fed.place / "other"
    fed.fedvlm("federation", "init", "noto", "host=localhost", f"port={port}", "name=bench", f"out={other}")
    foreign, own = unpacked_kit(other / "noto.zip"), unpacked_kit(fed.place / "kits" / f"{fed.sites[2]}.zip")
    shutil.copyfile(own / "startup" / "rootCA.pem", foreign / "startup" / "rootCA.pem")  # it trusts the server
    answer = entered(port, own)
    yield Tried("TLS with a site's certificate gets an answer (the test works)", "" if answer else "none", answer)
    yield Tried("TLS without a certificate", entered(port, None))
    yield Tried("TLS with a foreign certificate", entered(port, foreign))
    yield Tried("no TLS at all", plain(port))
    yield Tried("a kit of another federation", joined(fed, foreign, "stranger", "stranger"))
    thief = fed.place / "thief"
    shutil.copytree(own, thief, ignore=shutil.ignore_patterns("log*", "*.lock", ".lock", "audit*"))
    # its keys, the name of a site that is not connected: a fourth one of the same federation
    fed.fedvlm("federation", "add", "fourth", f"in={fed.place / 'kits'}")
    yield Tried("one site's keys under another's name", joined(fed, thief, "fourth", "fourth"))
    yield Tried("one site's keys under the name of one that is connected", taken_over(fed, thief, fed.sites[0]))


def unpacked_kit(path: Path) -> Path:
    from fedvlm.federation.provision import unzip_kit as unpack_kit

    return unpack_kit(path)


def entered(port: int, kit: Path | None) -> str:
    """Whether a TLS connection with the keys of this kit can say anything."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    if kit:
        context.load_cert_chain(kit / "startup" / "client.crt", kit / "startup" / "client.key")
    try:
        with socket.create_connection(("localhost", port), 10) as raw, context.wrap_socket(raw) as secure:
            secure.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
            answer = secure.recv(1000)
    except OSError:
        return ""
    return f"the server answered {answer[:60]!r}" if answer else ""


def plain(port: int) -> str:
    try:
        with socket.create_connection(("localhost", port), 10) as raw:
            raw.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
            raw.settimeout(10)
            answer = raw.recv(1000)
    except OSError:
        return ""
    return f"the server answered {answer[:60]!r}" if answer and not answer.startswith(b"\x15") else ""  # a TLS alert


def started(fed: Federation, kit: Path, name: str) -> subprocess.Popen[bytes]:
    """NVFlare's process of a site with the keys of `kit` and any name; our own checks are left out."""
    about = json.loads((kit / "kit.json").read_text()) | {"name": name}
    (kit / "kit.json").write_text(json.dumps(about))
    code = (
        "import json,sys; from pathlib import Path; from fedvlm.federation.settings import About;"
        "from fedvlm.federation.provision import write_settings; k = Path(sys.argv[1]);"
        "write_settings(k, About(**json.loads((k / 'kit.json').read_text())), k)"
    )
    subprocess.run([sys.executable, "-c", code, str(kit)], env=fed.env, check=True)
    call = [sys.executable, "-m", "fedvlm.federation.start", "site", str(kit), name, str(os.getpid())]
    log = (fed.place / f"{kit.name}.log").open("ab")
    return subprocess.Popen(call, env=fed.env, cwd=kit, stdout=log, stderr=log)


def joined(fed: Federation, kit: Path, name: str, shown: str) -> str:
    process = started(fed, kit, name)
    try:
        time.sleep(25)
        told = fed.fedvlm("federation", "status", str(fed.place / "kits" / "admin.zip"), check=False)
        return f"{shown} is connected" if any(x.split()[:1] == [shown] for x in told.splitlines()) else ""
    finally:
        process.kill()


def taken_over(fed: Federation, kit: Path, name: str) -> str:
    """The site of that name must stay connected, and the other be refused."""
    process = started(fed, kit, name)
    try:
        time.sleep(25)
        log = (kit / "log.txt").read_text(errors="replace") if (kit / "log.txt").exists() else ""
        if "Successfully registered client" in log:
            return f"it was registered as {name}"
        return "" if name in fed.connected() else f"{name} lost its connection"
    finally:
        process.kill()


def jobs(fed: Federation) -> Iterator[Tried]:
    marks = [fed.place / f"mark-{k}" for k in range(4)]
    code = f"from pathlib import Path\nPath({str(marks[0])!r}).write_text('x')\n\n\nclass Evil:\n    pass\n".encode()
    server: dict[str, object] = {"path": "fedvlm.federation.hub.Hub", "args": {"plan": "{}"}}
    ended = job(fed, fed.place / "job-code", server, {"path": "evil.Evil"}, {"app/custom/evil.py": code})
    yield Tried("a job with code", "it ran" if marks[0].exists() else "", ended[:70])

    def touching(k: int) -> dict[str, object]:
        return {"path": "subprocess.Popen", "args": {"args": ["touch", str(marks[k])]}}

    named = {"the server": (touching(1), None, "server"), "a site": (server, touching(2), fed.sites[1])}
    for k, (party, (at_server, at_site, kit)) in enumerate(named.items()):
        ended = job(fed, fed.place / f"job-class-{k}", at_server, at_site)
        logs = [p.read_text(errors="replace") for p in (fed.place / "kits" / kit).glob("*/log.txt")]
        refused = any("ComponentNotAuthorized" in text or "not authorized" in text for text in logs)
        lost = "it ran" if marks[k + 1].exists() else "" if refused else "the log does not say that it was refused"
        yield Tried(f"a class that {party} does not allow", lost, ended[:70])
    yield from forbidden(fed)


def forbidden(fed: Federation) -> Iterator[Tried]:
    """A run that a site's rules do not allow, by the command that people use."""
    site = fed.sites[1]
    home = fed.place / f"home-{site}"
    (fed.place / "strict.yaml").write_text("methods: [fedclip]\n")
    record = json.loads((home / "site.json").read_text())
    (home / "site.json").write_text(json.dumps(record | {"rules": str(fed.place / "strict.yaml")}))
    try:
        process = fed.run("fedavg", "forbidden", 2)
        process.wait(300)
    finally:
        (home / "site.json").write_text(json.dumps(record))
    words = "rules allow no method fedavg"
    run = RunFolder(fed.place / "forbidden")
    missing = (fed.place / "forbidden" / "run.json").exists() and run.rounds()[-1].get("missing")
    yield Tried("a method that site.yaml forbids", "" if missing == [site] else f"missing is {missing}")
    log = fed.place / "forbidden" / "log.txt"
    yield Tried("… in the server's log", "" if log.exists() and words in log.read_text() else "it is not there")
    for where, path in (("site's ledger", home / ledger.SENT), ("server's ledger", run.folder / ledger.RECEIVED)):
        found = [e for e in ledger.entries(path) if words in e.refused and e.site == site] if path.exists() else []
        yield Tried(f"… in the {where}", "" if found else "it is not there")


def capture(fed: Federation) -> Iterator[Tried]:
    ended = job(
        fed,
        fed.place / "job-fedot",
        {"path": f"{MODULE}.Server", "args": {"sites": fed.sites, "scenarios": ["fedot"]}},
        {"path": f"{MODULE}.Relay"},
        limit=1800.0,
    )
    outcome = Outcome(**json.loads((fed.place / "outcomes.jsonl").read_text().splitlines()[-1]))
    if outcome.error or outcome.name != "fedot":
        yield Tried("a run of FedOT", outcome.error or ended)
        return
    frames = [p.read_bytes() for p in sorted(fed.place.glob("home-*/frames/*"))]
    public = {w for v in state_of(outcome).values() for w in windows(v.numpy().tobytes())}
    secrets = {kind: found - {bytes(WINDOW)} for kind, found in secrets_of(fed).items()}
    secrets["the shared model"] = public
    hits = dict.fromkeys(secrets, 0)
    for frame in frames:
        seen = {frame[k : k + WINDOW] for k in range(len(frame) - WINDOW + 1)}
        for kind, needles in secrets.items():
            hits[kind] += len(needles & seen)
    total = sum(map(len, frames))
    yield Tried("the shared model is found (the search works)", "" if hits.pop("the shared model") else "it is not")
    for kind, count in hits.items():
        looked = f"none of {len(secrets[kind]):,} pieces in {len(frames)} messages, {total:,} bytes"
        yield Tried(
            kind, f"{count} pieces crossed" if count else "" if secrets[kind] else "nothing to look for", looked
        )
    words = {p.name for p in fed.images.rglob("*.png")} | {
        str(fed.place),
        fed.place.name,
        "rows.bin",
        "data.safetensors",
    }
    crossed = sorted(w for w in words if any(w.encode() in f for f in frames))
    yield Tried("file names and paths", f"{crossed[:3]} crossed" if crossed else "", f"none of {len(words)}")


def windows(content: bytes) -> set[bytes]:
    return {content[k : k + WINDOW] for k in range(0, len(content) - WINDOW + 1, WINDOW)}


def secrets_of(fed: Federation) -> dict[str, set[bytes]]:
    """Pieces of what must not leave a site, by kind."""
    found: dict[str, set[bytes]] = {"private rows": set(), "embeddings": set(), "images": set()}
    for site in fed.sites:
        kept = [p.read_bytes() for p in sorted((fed.place / f"home-{site}" / "kept").iterdir())]
        for content in kept[1:]:  # the first is what everybody begins with
            found["private rows"] |= windows(content) - windows(kept[0])
        for path in (fed.place / f"home-{site}").glob("runs/*/clients/*/data.safetensors"):
            x = load_file(path)["x"].flatten(1)
            for kind in (torch.float32, torch.float64, torch.float16):
                for row in x.to(kind):
                    found["embeddings"] |= windows(row.numpy().tobytes())
        for path in (fed.images / site).rglob("*.png"):
            found["images"] |= windows(path.read_bytes()[64:])
    common = {w for w in found["images"] if len(set(w)) < 6}  # runs of one byte stand in any file
    return found | {"images": found["images"] - common}


CHECKS = {"lies": lies, "strangers": strangers, "jobs": jobs, "capture": capture}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checks", nargs="*", help=f"some of {', '.join(CHECKS)}; none: all")
    parser.add_argument("--place", type=Path, help="a new folder to look into afterwards; default: a temporary one")
    parser.add_argument("--out", type=Path, help="a JSON file")
    args = parser.parse_args()
    if unknown := set(args.checks) - CHECKS.keys():
        parser.error(f"{', '.join(sorted(unknown))}: choose from {', '.join(CHECKS)}")
    kept: dict[str, list[Tried]] = {}
    with tempfile.TemporaryDirectory() as folder:
        fed = prepared(args.place or Path(folder))
        try:
            fed.up()
            for name in args.checks or CHECKS:
                began = time.monotonic()
                kept[name] = []
                for tried in CHECKS[name](fed):
                    kept[name].append(tried)
                    print(
                        f"{'LOST' if tried.lost else 'held'}  {name:9}  {tried.what}: {tried.lost or tried.seen}",
                        flush=True,
                    )
                print(f"{name} took {time.monotonic() - began:.0f} s", flush=True)
        finally:
            fed.down()
    print("\n".join(f"{name}: {len(all)} tried, {sum(bool(t.lost) for t in all)} lost" for name, all in kept.items()))
    if args.out:
        args.out.write_text(json.dumps({k: [t._asdict() for t in v] for k, v in kept.items()}, indent=1) + "\n")
    return int(any(t.lost for found in kept.values() for t in found))


if __name__ == "__main__":
    sys.exit(main())
