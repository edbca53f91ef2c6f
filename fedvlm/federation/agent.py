"""A site's part in one run: it opens the site's own data, encodes them with the site's own backbone, and answers steps.
`python -m fedvlm.federation.agent HOME RUN PARENT`; requests and answers are frames on its standard input and output.

What leaves is checked against the site's own rules (rules.py) and written down in its ledger first.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
import threading
import time
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

import fedvlm
from fedvlm import backbones
from fedvlm.backbones.arithmetic import described_arithmetic
from fedvlm.backbones.base import Backbone
from fedvlm.config import catalogue, trust
from fedvlm.config.config import Setup
from fedvlm.core.data import Data
from fedvlm.core.records import RunRecord, build, parsed, read_text
from fedvlm.core.state import Params, State
from fedvlm.data.clients import Federation, own_data
from fedvlm.data.pool import Pool, Pools, task_of
from fedvlm.data.source import Source, open_source
from fedvlm.engines.base import device_of
from fedvlm.errors import BadMessage, FedvlmError, Refused
from fedvlm.federation import ledger
from fedvlm.federation.budget import Budget
from fedvlm.federation.plan import (
    BEGIN,
    FINISH,
    JSON,
    LOOK,
    Agreed,
    Hello,
    Plan,
    SiteReady,
    code_fingerprint,
    packed_record,
    text_of,
    unpacked_record,
)
from fedvlm.federation.protocol import Course
from fedvlm.federation.rules import Rules
from fedvlm.federation.secret import secret
from fedvlm.federation.wire import Channel, Header, pack, receive, send, unpack
from fedvlm.federation.worker import CLIENT, ClientRecord, SiteClient, declared, end_after, told, write_folder
from fedvlm.privacy.mechanism import Privacy
from fedvlm.rounds.method import Method
from fedvlm.system import files
from fedvlm.system.names import file_name
from fedvlm.training.folder import RunFolder
from fedvlm.training.privacy_plan import check_method, planned

REPEATS, REPEATED = re.compile(r"[*+{]"), re.compile(r"\)[*+{]")  # of a regular expression
MOST_CLASSES = 30_000
SITE, PLAN, PROGRESS = "site.json", "plan.json", "progress"


@dataclass(frozen=True)
class Home:
    """site.json in a site's home, as `fedvlm join` writes it."""

    site: str
    federation: str
    data: str
    backbone: str
    rules: str = ""

    @classmethod
    def read(cls, home: Path) -> Home:
        try:
            return build(cls, parsed(read_text(home / SITE)))
        except (OSError, ValueError) as error:
            raise FedvlmError(f"{home / SITE}: {error}; start the site with `fedvlm join`") from error


class Agent:
    def __init__(self, home: Path, run: str):
        """`run`: the name of a folder below home/runs, which holds this site's part of a run."""
        self.home, self.about = home, Home.read(home)
        self.rules = Rules.read(self.about.rules)
        self.folder = home / "runs" / file_name(run)
        self.ledger = ledger.Ledger(home / ledger.SENT)
        self.client: SiteClient | None = None

    @property
    def place(self) -> Path:
        """The client's folder, inside the run's."""
        return self.folder / "clients" / file_name(self.about.site)

    def answer(self, request: Request) -> bytes:
        """The bytes that leave."""
        header, parts = request.header, request.parts
        try:
            if request.error:
                raise request.error
            if header.step == LOOK:
                return self.told(request, packed_record(self.look(unpacked_record(Plan, parts))))
            if header.step == BEGIN:
                return self.told(request, packed_record(self.begin(unpacked_record(Agreed, parts))))
            if header.step == FINISH:
                return self.told(request, self.finish(header, parts))
            self.rules.check_step(header.step)
            if self.client is None:  # a new process: the rules may have changed since the run began
                self.check(self.plan())
                self.client = SiteClient(self.place)
            return self.client.answer(header, parts, self.rules.check_answer)
        except Exception as error:
            return self.told(request, {}, told(error, header.step))

    def told(self, asked: Request, parts: dict[str, Params], error: str = "") -> bytes:
        """An answer of the site itself, in the ledger."""
        header = asked.header
        frame = pack(Header(ticket=header.ticket, error=error, ledger=str(self.ledger.head)), parts)
        record = asked.parts.get(JSON, {}).get("text")
        request = hashlib.sha256(record.numpy().tobytes()).hexdigest() if record is not None else ""
        line = ledger.Sent(self.folder.name, self.about.site, header.step, header.round, header.exchange)
        self.ledger.append(ledger.line_of(frame, replace(line, refused=error, request=request)))
        return frame

    def look(self, plan: Plan) -> Hello:
        """A plan that this site can take part in is kept: no other comes under the same name."""
        if plan.federation != self.about.federation or self.about.site not in plan.sites:
            raise Refused(
                f"the plan is for {plan.federation}, and this is {self.about.site} of {self.about.federation}"
            )
        if (plan.version, plan.code) != (fedvlm.__version__, code_fingerprint()):
            raise Refused(
                f"fedvlm here is {fedvlm.__version__} ({code_fingerprint()}), and the run is made with {plan.version} "
                f"({plan.code}); install the same version everywhere"
            )
        if file_name(plan.name) != self.folder.name:
            raise Refused("the plan has another name than the run that it came with")
        setup = self.check(plan)
        if (self.folder / PLAN).exists() and self.plan().agreement() != plan.agreement():
            raise Refused("another plan came under the name of a run that has begun here")
        source, setup = self.source(setup), self.own_setup(setup)
        if source.task_type is not setup.adapter.task_type:
            raise Refused(f"the data here are {source.task_type.description}, and the run learns something else")
        files.private_folder(self.folder)
        files.write(self.folder / PLAN, json.dumps(asdict(plan)), private=True, sync=True)
        mark = "none" if setup.adapter.view == "text" else self.backbone.fingerprint
        return Hello(fedvlm.__version__, code_fingerprint(), mark, list(source.classes), source.task_type.description)

    def plan(self) -> Plan:
        """The plan that was received in `look`."""
        return build(Plan, parsed(read_text(self.folder / PLAN)))

    def check(self, plan: Plan) -> Setup:
        """The plan's setup; an error where this site's rules do not allow such a run."""
        setup = plan.setup()
        self.rules.check_paths([setup.adapter, setup.local, setup.merge, *setup.metrics.values()])
        view, reveals = setup.adapter.view, setup.merge.reveals
        self.rules.check_run(setup.method.name, setup.parts["merge"].name, setup.config, reveals, view)
        self.rules.check_cohort(len(set(plan.sites) - set(setup.config.unseen)))
        return setup

    def begin(self, agreed: Agreed) -> SiteReady:
        """Encodes and splits the site's own data; features are stored, so that a second time is quick."""
        plan = self.plan()
        setup, own = self.check(plan), self.own_setup(plan.setup())
        if len(agreed.classes) > MOST_CLASSES or len(agreed.nouns) > MOST_CLASSES:
            raise Refused(f"was told of more than {MOST_CLASSES:,} classes")
        if agreed.id != plan.sites.index(self.about.site):
            raise Refused("was told another number than the plan's")
        agreement = plan.agreement(agreed)
        if (self.place / CLIENT).exists() and SiteClient.record(self.place).agreement != agreement:
            raise Refused("was told other classes than when this run began here")
        source = self.source(setup)
        if odd := sorted(set(source.classes) - set(agreed.classes)):
            raise Refused(f"there are {len(odd)} classes here that the others do not have, such as {odd[0]}")
        pool = Pools().load(own, self.progress)
        if setup.adapter.view != "text":
            task = task_of(self.backbone, agreed.classes, own.config.template, own.adapter.requires)
            pool = replace(pool, task=task._replace(nouns=tuple(agreed.nouns)))
        if reason := own.adapter.incompatible(pool.x.shape[1:]):
            raise Refused(f"this site's backbone does not go with adapter={plan.adapter.name}: {reason}")
        data = replace(
            own_data(pool, own.config, own.config.seed, agreed.classes, agreed.id), rounds=max(1, own.config.rounds)
        )
        method = Method.build(own.adapter, own.local, own.merge, pool.task, own.config.seed, own.metrics)
        trains = self.about.site not in setup.config.unseen and bool(data.counts("train")[0])
        examples = int(data.counts("train")[0])
        if trains:
            labels = data.y[:examples] if data.y.dim() == 1 else data.y[:0]
            self.rules.check_examples(examples, torch.bincount(labels).tolist())
        delta = self.rules.delta or 1 / max(2, examples) ** 1.1
        private = privacy_of(setup, method, data, plan, delta if self.rules.epsilon else 1.0) if trains else None
        budget = self.budget(delta)
        release = private.account.upload if private and private.account and adds_noise(private) else None
        if release:
            budget.check(release, setup.config.rounds)
        device = self.device(own)
        about = ClientRecord(
            run=self.folder.name,
            name=self.about.site,
            backbone=self.about.backbone,
            threads=own.config.threads,
            device=device,
            privacy=private.plain() if private else None,
            secret=secret(self.folder, f"noise {pool.fingerprint}").hex(),
            ledger=str(self.home / ledger.SENT),
            withheld=not self.rules.counts,
            smallest=self.rules.smallest_cohort,
            agreement=agreement,
            course=Course.of(own.config, method, trains),
            clients=len(plan.sites),
            budget=budget if release else None,
            release=release,
            scored=self.scored(data),
        )
        write_folder(self.place, about, setup, pool.task, data, method.newcomer)
        self.client = SiteClient(self.place)
        counts = declared(data, about.scored)
        told = counts if self.rules.counts else [min(1, n) for n in counts]
        return SiteReady(told, self.mark(pool), sorted(pool.extras), len(pool.skipped), described_arithmetic(device))

    def budget(self, delta: float) -> Budget:
        rules, data = self.rules, self.about.data
        names = (str(Budget.path_of(data)), data, self.about.federation, self.folder.name)
        return Budget(*names, rules.epsilon, rules.epsilon_per_run, delta)

    def scored(self, data: Data) -> list[bool]:
        """Which splits are scored: under a budget none, since scores have no noise, and none of too few examples."""
        return [not self.rules.epsilon and int(n) >= self.rules.smallest_examples for n in np.diff(data.bounds)[0]]

    def finish(self, header: Header, parts: dict[str, Params]) -> dict[str, Params]:
        """The finished run with the shared model, so that this site can use it with its own private part."""
        try:
            record = RunRecord.from_json(text_of(parts))
        except ValueError as error:
            raise BadMessage(f"the finished run is not readable: {error}") from error
        config = record.config | {"data": self.about.data, "backbone": self.about.backbone}
        files.write(self.folder / "run.json", replace(record, config=config).to_json())
        state = {kind: parts.get(f"state-{kind}", {}) for kind in State._fields}
        RunFolder(self.folder).save(State(**state), header.round)
        return {}

    def source(self, setup: Setup) -> Source:
        config = setup.config
        if len(config.group) > 200 or len(REPEATS.findall(config.group)) > 3 or REPEATED.search(config.group):
            raise Refused("group= repeats more than file names need: they would take too long")
        return open_source(self.about.data, config.group, 0, config.stride)

    def own_setup(self, setup: Setup) -> Setup:
        """The run's setup with what is this site's own."""
        if setup.config.outsiders:
            raise Refused("outsiders= is a folder of who asks, and sites open only their own; leave it out")
        usual = setup.with_defaults(catalogue.with_trait("site", "central"))
        return usual.with_(data=self.about.data, backbone=self.about.backbone, device=self.rules.device)

    def device(self, setup: Setup) -> str:
        try:
            return device_of(setup)
        except FedvlmError as error:
            raise Refused(f"this site's rules: {error}") from None

    @cached_property
    def backbone(self) -> Backbone:
        trust.remember_backbone(self.about.backbone)
        return backbones.load(self.about.backbone)

    def progress(self, done: int, total: int) -> None:
        shown = (done, total) if self.rules.counts else (100 * done // max(1, total), 100)
        files.write(self.folder / PROGRESS, f"{shown[0]} {shown[1]}", private=True)

    def mark(self, pool: Pool) -> str:
        """A keyed hash of the site's data, which nobody who has the same images can recognise."""
        return hashlib.sha256(secret(self.home, "mark") + pool.fingerprint.encode()).hexdigest()[:16]


def privacy_of(setup: Setup, method: Method, data: Data, plan: Plan, delta: float) -> Privacy | None:
    """What this site does to its answers, from the plan and its own examples alone. dp=client: as one of all sites, asked in
    every round; dp=example: for its own number of examples."""
    config = setup.config
    if config.dp == "none":
        return None
    alone = config.dp == "example"
    sites = ["this site"] if alone else [s for s in plan.sites if s not in config.unseen]
    several = replace(data, bounds=np.repeat(data.bounds, len(sites), axis=0))
    federation = Federation(tuple(sites), tuple(sites), several, method.task)
    if alone or config.noise_at == "client":
        default = 1 / (len(data.y[: int(data.counts("train")[0])]) if alone else len(sites)) ** 1.1
        setup = setup.with_(participation=1.0, sampling="fixed", delta=min(delta, config.delta or default))
    privacy = planned(setup, federation)
    check_method(replace(method, privacy=privacy), federation)
    return privacy


def adds_noise(privacy: Privacy) -> bool:
    """Whether this site adds the noise itself."""
    return privacy.level == "example" or privacy.noise_at == "client"


class Request(NamedTuple):
    header: Header
    parts: dict[str, Params]
    error: BadMessage | None = None

    @classmethod
    def read(cls, frame: bytes) -> Request:
        try:
            return cls(*unpack(frame))
        except BadMessage as error:
            return cls(Header(), {}, error)


def serve_site(agent: Agent, requests: Channel, replies: Channel) -> None:
    """Answers within the limits of the site's rules."""
    bound_memory(agent.rules.memory)
    while frame := receive(requests):
        request, began = Request.read(frame), time.monotonic()
        frame = b""  # the tensors are copies: without the frame, the answer finds room
        with Ended(agent, request, replies):
            answer = agent.answer(request)
        del request
        if every := agent.rules.answers_every:
            time.sleep(every - (time.monotonic() - began) % every)
        send(replies, answer)
        del answer


def bound_memory(gigabytes: float) -> None:
    """Whatever would take this process beyond it fails, which the server is told as a full memory."""
    if not gigabytes:
        return
    if torch.cuda.is_available():
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, gigabytes * 1e9 / total))
    import psutil  # NVFlare needs it, too

    if limit := getattr(psutil.Process(), "rlimit", None):  # on Linux
        limit(psutil.RLIMIT_DATA, (int(gigabytes * 1e9), psutil.RLIM_INFINITY))


class Ended:
    """Ends this process where an answer takes longer than the site's rules allow; the server is told so."""

    def __init__(self, agent: Agent, request: Request, replies: Channel):
        self.agent, self.request, self.replies = agent, request, replies
        self.lock, self.over = threading.Lock(), False
        most = agent.rules.step_seconds if request.header.step not in (LOOK, BEGIN, FINISH) else 0.0
        self.timer = threading.Timer(most, self.end) if most else None

    def __enter__(self) -> None:
        if self.timer:
            self.timer.start()

    def __exit__(self, *error: object) -> None:
        with self.lock:
            self.over = True
        if self.timer:
            self.timer.cancel()

    def end(self) -> None:
        with self.lock:
            if self.over:
                return
            why = f"an answer took longer than the {self.agent.rules.step_seconds:g} s of this site's rules (step_seconds)"
            send(self.replies, self.agent.told(self.request, {}, why))
            os._exit(1)  # whatever it computes ends with it


if __name__ == "__main__":
    threading.Thread(target=end_after, args=(int(sys.argv[3]),), daemon=True).start()
    out = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # whatever prints goes to the log, not into a message
    serve_site(Agent(Path(sys.argv[1]), sys.argv[2]), os.fdopen(0, "rb", buffering=0), out)
