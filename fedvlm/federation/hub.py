"""The server's part in a run: it asks the sites who they are, agrees on the classes, and plays the rounds. It holds no data
of theirs: classes, sizes (unless a site withholds them) and fingerprints are all that it learns before the first round.

NVFlare calls `Hub.go` in the server's job process. The run's folder lies in the server's home and outlives the job, so that
another job goes on with it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard, TypeVar

import numpy as np
import torch
from nvflare.collab import collab
from nvflare.collab.api.context import get_call_context, set_call_context

from fedvlm import backbones
from fedvlm.backbones.base import Backbone
from fedvlm.config import trust
from fedvlm.config.config import Setup
from fedvlm.core.adapter import NeedsNouns, Task
from fedvlm.core.data import Data, Extra
from fedvlm.core.records import RoundRecord, build, parsed
from fedvlm.data.clients import Federation
from fedvlm.data.formats.text import ALPHABET
from fedvlm.data.pool import Pool, task_of, with_nouns
from fedvlm.data.source import Source
from fedvlm.errors import BadMessage, FedvlmError, VoidRound
from fedvlm.federation import ledger
from fedvlm.federation.engines import nvflare as engine
from fedvlm.federation.links import Links
from fedvlm.federation.plan import (
    BEGIN,
    FETCHED,
    FINISH,
    LOOK,
    Agreed,
    Hello,
    Plan,
    SiteReady,
    packed_record,
    unpacked_record,
)
from fedvlm.federation.remote import Silence
from fedvlm.federation.secret import secret
from fedvlm.federation.settings import SERVER_HOME, halt_file, status_file
from fedvlm.federation.wire import Header, pack, unpack
from fedvlm.system import allowed, files
from fedvlm.system.names import file_name, printable
from fedvlm.training.folder import RunFolder
from fedvlm.training.planned_run import PlannedRun
from fedvlm.training.train import train

BACKBONE = "FEDVLM_BACKBONE"  # its own copy of the backbone, if given there
TICK = 1.0  # seconds between two looks at what a job says of itself
SITES = "sites.json"  # in a run's folder: what each site said when it began
MOST = 1 << 24  # bytes of an answer to look or begin
MARK = 64  # characters of a site's mark
MOST_SAID = 200  # characters of what a site says of its processor
ENCODING = 24 * 3600.0  # seconds that a site may take to encode its data, where the others wait for it

Answer = TypeVar("Answer", Hello, SiteReady)


class Heard(NamedTuple):
    """An answer as it came, for the ledger."""

    site: str
    step: str
    round: int
    frame: bytes


class Hub:
    def __init__(self, plan: str):
        self.plan = plan

    @collab.main  # type: ignore[untyped-decorator]
    def go(self) -> str:
        """The error that ended the run, in words; "" where it is finished."""
        plan = build(Plan, parsed(self.plan))
        folder = Path(os.environ[SERVER_HOME]) / "runs" / file_name(plan.name)
        context = get_call_context()
        fl_ctx = collab.fl_ctx
        links = Links(plan.name, {p.name: p for p in context.clients}, lambda: set_call_context(context))
        status = Status(folder, str(fl_ctx.get_job_id()))
        threading.Thread(target=status.follow, daemon=True).start()
        place = Path(fl_ctx.get_workspace().get_run_dir(fl_ctx.get_job_id())) / FETCHED
        try:
            Play(plan, links, folder, status).run(status.go_on)
        except Halted:
            return ""
        except Exception as error:
            status.ended(error)
            if not isinstance(error, FedvlmError):
                raise
            return status.error
        finally:
            status.over.set()
            with contextlib.suppress(FedvlmError):  # a full disk
                status.write()
            links.close()
            if (folder / "run.json").exists():
                shutil.copytree(folder, place, ignore=shutil.ignore_patterns("*.lock"), dirs_exist_ok=True)
        return ""


class Halted(Exception):
    """The keeper asked the job to end after a whole round."""


class Status:
    """What a job says of itself to the keeper and the office, in the run's folder."""

    def __init__(self, folder: Path, job: str = ""):
        self.folder, self.job = folder, job
        self.error, self.passes = "", False  # why the run ended, and whether that may be otherwise another time
        self.said: list[str] = []
        self.left_out: dict[str, str] = {}  # sites, and why, for a reason that another job would not change
        self.links: Links | None = None
        self.written = ""
        self.over = threading.Event()

    def say(self, text: str) -> None:
        self.said.append(printable(text))

    def ended(self, error: Exception) -> None:
        known = isinstance(error, FedvlmError)
        self.error = str(error) if known else f"{type(error).__name__} (a defect; the server's log says where)"
        self.passes = isinstance(error, VoidRound)

    def go_on(self, record: RoundRecord) -> None:
        """Is called after each round."""
        asked = halt_file(self.folder)
        if asked.exists() and asked.read_text(encoding="utf-8") == self.job:
            raise Halted

    def write(self) -> None:
        silent = [name for name, why in self.links.trouble.items() if why] if self.links else []
        encoding = {k: v for k, v in self.links.progress.items() if v} if self.links else {}
        told = {"job": self.job, "error": self.error, "passes": self.passes, "said": self.said}
        content = json.dumps(told | {"left_out": self.left_out, "silent": sorted(silent), "encoding": encoding})
        if content != self.written:
            files.write(status_file(self.folder), content, private=True)
            self.written = content

    def follow(self) -> None:
        """Writes what changes, until the job is over."""
        while not self.over.wait(TICK):
            with contextlib.suppress(FedvlmError):  # a full disk
                self.write()


class Play:
    def __init__(self, plan: Plan, links: Links, folder: Path, status: Status):
        self.plan, self.links, self.folder, self.status = plan, links, folder, status
        status.links = links
        links.rests.say = lambda name, why: self.leave_out(name, why, for_good=False)
        self.setup = plan.setup()
        self.heard: list[Heard] = []

    def run(self, on_round: Callable[[RoundRecord], None] = lambda record: None) -> RunFolder:
        torch.set_num_threads(max(1, self.setup.config.threads))
        hellos = self.hello()
        pool = self.pool(self.classes(hellos))
        planned = PlannedRun(self.setup, pool, self.folder)
        ready = self.begin(hellos, planned)
        planned.federation = self.federation(pool, ready)
        if privacy := planned.method.privacy:
            privacy = replace(privacy, secret=secret(self.folder.parent.parent, planned.identity))
            planned.method = replace(planned.method, privacy=privacy)
        run = RunFolder.start(planned)
        self.keep(run, ready)
        engine.connected = self.links
        try:
            run = train(planned, on_round)
        finally:
            engine.connected = None
        self.finish(run)
        return run

    def hello(self) -> dict[str, Hello]:
        """What the sites answer that can take part; who cannot is told why."""
        found = self.ask(
            LOOK, dict.fromkeys(self.plan.sites, packed_record(self.plan)), Hello, self.setup.config.timeout
        )
        wanted = "none" if self.setup.adapter.view == "text" else self.backbone.fingerprint
        for name, hello in list(found.items()):
            if hello.backbone != wanted:
                ours = f"the server's {self.setup.config.backbone} has {wanted}"
                self.leave_out(name, f"its backbone has the fingerprint {hello.backbone}, and {ours}")
                del found[name]
        if not found:
            raise FedvlmError("\n".join(["no site takes part:", *self.status.said[-5:]]))
        return found

    def classes(self, hellos: dict[str, Hello]) -> list[str]:
        """The list that most sites have; of equally many, the longest. Who has others beside is left out."""
        lists = Counter(tuple(h.classes) for h in hellos.values())
        most = max(lists, key=lambda c: (lists[c], len(c)))
        for name, hello in list(hellos.items()):
            if odd := sorted(set(hello.classes) - set(most)):
                self.leave_out(name, f"it has {len(odd)} classes that the others do not have, such as {odd[0]}")
                del hellos[name]
        return list(most)

    def pool(self, classes: list[str]) -> Pool:
        """The task, and nothing to train on."""
        config, adapter = self.setup.config, self.setup.adapter
        source = Source(self.plan.federation, Path(), (), adapter.task_type)
        mark = hashlib.sha256(json.dumps([self.plan.federation, self.plan.sites, classes]).encode()).hexdigest()[:16]
        if adapter.view == "text":
            return Pool(source, torch.zeros(0), Task(tuple(ALPHABET), None, 0, 1.0), mark, "none@none")
        task = task_of(self.backbone, classes, config.template, adapter.requires)
        named = f"{self.backbone.name}@{self.backbone.fingerprint}"
        pool = Pool(source, torch.zeros(0), task, mark, named)
        if isinstance(adapter, NeedsNouns):
            pool = with_nouns(pool, self.backbone, config.template, adapter.candidates, None)
        return pool

    def begin(self, hellos: dict[str, Hello], planned: PlannedRun) -> dict[str, SiteReady]:
        task, known = planned.pool.task, self.known()
        agreed = Agreed(0, list(task.classes), list(task.nouns))
        self.links.agreement = self.plan.agreement(agreed)
        frames = {n: packed_record(replace(agreed, id=self.plan.sites.index(n))) for n in hellos}
        config = self.setup.config
        found = self.ask(BEGIN, frames, SiteReady, ENCODING, config.quorum, 60 * config.start_timeout)
        for name, ready in list(found.items()):
            fits = len(ready.counts) == 3 and all(0 <= n < 1 << 40 for n in ready.counts) and len(ready.mark) <= MARK
            if not fits:
                self.leave_out(name, "the numbers of its examples, or the mark of its data, are out of their range")
            elif known.get(name, ready.mark) != ready.mark:
                self.leave_out(name, "its data are not those with which the run began")
            if not fits or known.get(name, ready.mark) != ready.mark:
                del found[name]
        return found

    def federation(self, pool: Pool, ready: dict[str, SiteReady]) -> Federation:
        """All sites of the plan; those that are not there have no examples."""
        names = self.plan.sites
        sizes = np.array([ready[n].counts if n in ready else [0, 0, 0] for n in names])
        ends = np.cumsum(sizes, axis=1)
        bounds = np.concatenate([np.zeros((len(names), 1), np.int64), ends], axis=1)
        named = Counter(e for r in ready.values() for e in set(r.extras))
        extras = {k: Extra(torch.zeros(0), aligned=True) for k in sorted(named) if 2 * named[k] > len(ready)}
        empty = torch.zeros(0)
        data = Data(empty, empty.long(), bounds, np.arange(len(names)), self.setup.config.seed, extras=extras)
        wanted = self.setup.config.unseen
        if odd := [u for u in wanted if u not in names]:
            raise FedvlmError(f"unseen={odd[0]}: no such site; there is {', '.join(names)}")
        unseen = tuple(k for k, n in enumerate(names) if n in wanted)
        found = Federation(tuple(names), tuple(names), data, pool.task, unseen)
        if not len(found.seen):
            raise FedvlmError("\n".join(["nobody is left to train:", *self.status.said[-5:]]))
        return found

    def finish(self, run: RunFolder) -> None:
        """Each site gets the finished run, to use it with its own private part."""
        saved = run.load()
        if saved is None:
            return
        state, round = saved
        parts = packed_record(run.record) | {f"state-{k}": v for k, v in state._asdict().items() if k != "server"}
        answers = self.ask_raw(FINISH, dict.fromkeys(self.links.sites, parts), self.setup.config.timeout, round)
        self.heard = [Heard(name, FINISH, round, a) for name, a in answers.items() if readable(a)]
        self.keep(run, {})

    def ask(
        self,
        step: str,
        parts: dict[str, Any],
        kind: type[Answer],
        seconds: float,
        quorum: float = 1.0,
        grace: float = 0.0,
    ) -> dict[str, Answer]:
        found: dict[str, Answer] = {}
        for name, answer in self.ask_raw(step, parts, seconds, 0, quorum, grace).items():
            if isinstance(answer, Silence):  # it may come, or come back
                trouble = self.links.trouble.get(name)
                self.leave_out(name, f"{answer} ({trouble})" if trouble else answer.value, for_good=False)
                continue
            try:
                header, content = unpack(answer)
                self.heard.append(Heard(name, step, 0, answer))
                if header.error:
                    raise BadMessage(header.error)
                found[name] = unpacked_record(kind, content)
            except BadMessage as error:
                self.leave_out(name, str(error))
        return found

    def ask_raw(
        self, step: str, parts: dict[str, Any], seconds: float, round: int = 0, quorum: float = 1.0, grace: float = 0.0
    ) -> dict[str, bytes | Silence]:
        self.links.tickets += 1
        ticket = self.links.tickets
        frames = {n: pack(Header(step, round, 0, ticket), p) for n, p in parts.items()}
        most = dict.fromkeys(frames, MOST)
        return self.links.exchange(frames, most, ticket, seconds, quorum, grace, lasting=step == BEGIN)

    def leave_out(self, name: str, reason: str, for_good: bool = True) -> None:
        text = f"{name} does not take part: {printable(reason, 300)}"
        self.status.say(text)
        if for_good:
            self.status.left_out[name] = printable(reason, 300)
        files.private_folder(self.folder)  # the run itself may not have begun
        RunFolder(self.folder).log(text)

    def known(self) -> dict[str, str]:
        path = self.folder / SITES
        return dict(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else {}

    def keep(self, run: RunFolder, ready: dict[str, SiteReady]) -> None:
        """Marks of the sites' data, to notice a change, and what came before the run's folder was there."""
        files.write(self.folder / SITES, json.dumps(self.known() | {n: r.mark for n, r in ready.items()}))
        run.computed_by({n: printable(r.computed_by, MOST_SAID) for n, r in ready.items()})
        received = ledger.Ledger(self.folder / ledger.RECEIVED, sync=False)
        for name, step, round, frame in self.heard:
            header = unpack(frame)[0]
            line = ledger.Sent(run.name, name, step, round, direction="received", refused=printable(header.error))
            received.append(ledger.line_of(frame, replace(line, site_head=ledger.LedgerHead.parse(header.ledger))))
        self.heard = []

    @property
    def backbone(self) -> Backbone:
        return server_backbone(self.setup)


def readable(answer: bytes | Silence) -> TypeGuard[bytes]:
    try:
        return isinstance(answer, bytes) and bool(unpack(answer))
    except BadMessage:
        return False


def server_backbone(setup: Setup) -> Backbone:
    """The server's own copy. What a plan names may run code or reach the network only if the server's owner gave it."""
    own = os.environ.get(BACKBONE, "")
    name = own or setup.config.backbone
    if not own and [n for n in trust.backbone_needs(name) if not allowed.known(n)]:
        raise FedvlmError(
            f"backbone={name}: start the server with `fedvlm serve KIT backbone={name}`, if it may use that"
        )
    return backbones.load(name)
