"""A client in a process of its own: it reads its own folder and its channel, and answers there.
`python -m fedvlm.federation.worker FOLDER PARENT` (the number of the process that asks). Its private row stays in its
folder.

Each process that opens the folder takes the next epoch. A process that was paused and comes back late finds a later epoch
and writes nothing any more; one whose parent is gone ends.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from filelock import FileLock
from safetensors.torch import load_file, save

from fedvlm import backbones
from fedvlm.backbones.base import tower_of
from fedvlm.config.config import Config, Setup
from fedvlm.core.adapter import Task
from fedvlm.core.data import SPLITS, Data, Extra
from fedvlm.core.records import MethodRecord, PartRecord, build
from fedvlm.core.schema import Schema
from fedvlm.core.state import Message, Params, Reply, aligned
from fedvlm.engines.rows import RESTORE, Rows
from fedvlm.engines.stacked import Stacked
from fedvlm.errors import BadMessage, FedvlmError, Refused
from fedvlm.federation import ledger
from fedvlm.federation.budget import Budget
from fedvlm.federation.protocol import Course, Diary
from fedvlm.federation.wire import OUTPUTS, SECURE, Channel, Header, octets, pack, receive, send, to_message, unpack
from fedvlm.parts import user_code
from fedvlm.privacy.accounting import Release
from fedvlm.privacy.mechanism import Privacy, secret_of
from fedvlm.privacy.secure.settings import message_fingerprint
from fedvlm.rounds.method import Method
from fedvlm.rounds.steps import STEPS
from fedvlm.system import files
from fedvlm.system.names import printable

if TYPE_CHECKING:
    from fedvlm.privacy.secure.client import Client as SecureClient
    from fedvlm.privacy.secure.messages import Integers

CLIENT = "client.json"
EPOCH = "epoch"  # file with the number of processes that have opened the folder
LOCK_SECONDS = 60
SAID = 300  # characters of why nothing was answered


def serve_clients(folder: Path, requests: Channel, replies: Channel) -> None:
    client = SiteClient(folder)
    while frame := receive(requests):
        try:
            header, parts = unpack(frame)
        except BadMessage as error:
            send(replies, pack(Header(error=str(error)), {}))
        else:
            send(replies, client.answer(header, parts))


@dataclass(frozen=True)
class ClientRecord:
    """client.json: what a client knows of its run beside data and parts, which `write_folder` adds."""

    run: str  # what its ledger calls the run
    name: str
    first: int = 0  # the place of its first example in the pool
    backbone: str = ""
    threads: int = 1
    device: str = "cpu"  # where it trains
    privacy: dict[str, float | str] | None = None  # dp=
    secret: str = ""  # dp=: in hexadecimal, random and this client's own; "": made of the seed (a simulation)
    ledger: str = ""  # the file; "": in this folder
    withheld: bool = False  # how many examples it has is not told: it counts as one
    smallest: int = 0  # clients that must be in a sum of masked updates
    agreement: str = ""  # what the run's parties have in common: it is in every mask, and in the hash of every request
    course: Course = field(default_factory=Course)
    clients: int = 0  # of the run
    budget: Budget | None = None  # where its releases are counted, and their limits
    release: Release | None = None  # what training in a round releases
    scored: list[bool] = field(default_factory=lambda: [True] * len(SPLITS))  # which splits' scores are told
    id: int = 0
    bounds: list[int] = field(default_factory=list)
    parts: dict[str, dict[str, object]] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)  # home → the folder that the user's own part was read from
    classes: list[str] = field(default_factory=list)
    phrases: list[str] = field(default_factory=list)
    nouns: list[str] = field(default_factory=list)
    dim: int = 0
    scale: float = 1.0
    seed: int = 0
    rounds: int = 1


def write_folder(folder: Path, about: ClientRecord, setup: Setup, task: Task, data: Data, newcomer: Params) -> None:
    """What a client needs: its own examples, what everybody may know, and how to build the method."""
    files.private_folder(folder)
    if newcomer and (folder / CLIENT).exists() and not (folder / "rows.bin").exists():
        raise FedvlmError(f"{folder / 'rows.bin'} is gone, and with it this client's own model; {RESTORE}")
    Rows(newcomer, 1, folder / "rows.bin").file.close()
    record = asdict(about) | {
        "id": int(data.ids[0]),
        "bounds": data.bounds[0].tolist(),
        "parts": {home: asdict(part) for home, part in setup.parts.items()},
        "origins": {home: code.origin for home, code in setup.codes.items()},
        "classes": task.classes,
        "phrases": task.phrases,
        "nouns": task.nouns,
        "dim": task.dim,
        "scale": task.scale,
        "seed": data.seed,
        "rounds": data.rounds,
    }
    files.write(folder / CLIENT, json.dumps(record), private=True)
    for home, code in setup.codes.items():
        code.write(folder / "code" / home)
    public = {"text": task.text} if task.text is not None else {}
    mine = {"x": data.x, "y": data.y}
    for name, extra in data.extras.items():
        target = mine if extra.aligned else public
        target[f"extra.{name}.x"] = extra.x
        if extra.y is not None:
            target[f"extra.{name}.y"] = extra.y
    for name, params in (("public", public), ("data", mine)):
        content = save({k: v.contiguous() for k, v in params.items()})
        files.write(folder / f"{name}.safetensors", content, private=True)


class SiteClient:
    def __init__(self, folder: Path):
        about = self.record(folder)
        torch.set_num_threads(max(1, about.threads))
        public, mine = (
            {k: aligned(v) for k, v in load_file(folder / f"{name}.safetensors").items()} for name in ("public", "data")
        )
        records = {home: PartRecord(**part) for home, part in about.parts.items()}  # type: ignore[arg-type]
        codes = {
            h: user_code.stored_code(folder / "code" / h, p.code, about.origins.get(h, ""))
            for h, p in records.items()
            if p.code
        }
        setup = Setup(MethodRecord("client"), Config(), records, codes=codes)
        needed = setup.adapter.requires
        tower = tower_of(backbones.load(about.backbone), needed) if needed else None
        task = Task(tuple(about.classes), public.get("text"), about.dim, about.scale, tower)
        task = task._replace(nouns=tuple(about.nouns), phrases=tuple(about.phrases))
        secret = bytes.fromhex(about.secret) if about.secret else secret_of(about.seed)
        privacy = Privacy(**about.privacy, secret=secret) if about.privacy else None  # type: ignore[arg-type]
        method = Method.build(setup.adapter, setup.local, setup.merge, task, about.seed, setup.metrics, privacy)
        extras: dict[str, Extra] = {}
        for home in (public, mine):
            for name in (k.split(".")[1] for k in home if k.startswith("extra.") and k.endswith(".x")):
                extras[name] = Extra(home[f"extra.{name}.x"], home.get(f"extra.{name}.y"), home is mine)
        ids, bounds = np.array([about.id]), np.array([about.bounds])
        data = Data(mine["x"], mine["y"], bounds, ids, about.seed, 0, about.rounds, extras)
        self.about, self.folder, self.method, self.warning = about, folder, method, ""
        self.secure: SecureClient | None = None  # of the round under way
        self.ledger = ledger.Ledger(Path(about.ledger or folder / ledger.SENT), sync=bool(about.ledger))
        with FileLock(folder / ".lock", timeout=LOCK_SECONDS):
            self.epoch = last_epoch(folder) + 1
            files.write(folder / EPOCH, str(self.epoch).encode(), private=True)
        self.diary = Diary(folder, sync=bool(about.ledger))  # nobody else writes it from here on
        self.engine = Stacked(
            method, data, 1, folder / "rows.bin", self._warn, about.device, self.only_process, name=lambda _: about.name
        )

    @staticmethod
    def record(folder: Path) -> ClientRecord:
        raw = json.loads((folder / CLIENT).read_text(encoding="utf-8"))
        made: dict[str, object] = {"course": build(Course, raw["course"])}
        if raw["budget"]:
            made |= {"budget": build(Budget, raw["budget"]), "release": Release(*raw["release"])}
        return ClientRecord(**raw | made)

    def _warn(self, text: str) -> None:
        self.warning = text

    @contextlib.contextmanager
    def only_process(self) -> Iterator[None]:
        """Hold the lock that every write of the private row needs."""
        with FileLock(self.folder / ".lock", timeout=LOCK_SECONDS):
            if last_epoch(self.folder) != self.epoch:
                raise FedvlmError("another process has taken over this client's folder")
            yield

    def answer(
        self, header: Header, parts: dict[str, Params], check: Callable[[bytes], None] = lambda frame: None
    ) -> bytes:
        """The bytes that leave, after the ledger has them. The same request again gets the same. `check`: of the bytes,
        by a site's own rules."""
        done, request, note = Header(ticket=header.ticket, ledger=str(self.ledger.head)), "", ""
        try:
            message = to_message(header, parts)
            request = self.fingerprint(header, message)
            stored = place = None
            if not (header.step == OUTPUTS and not self.about.ledger):  # a rehearsal's, which sends nothing
                place = self.about.course.place(header, message)
                if not header.step.startswith(SECURE):  # those are fresh in each attempt (`secure_answer`)
                    self.check_model(message)
                    with self.only_process():
                        stored = self.diary.admit(header.round, place, request)
            if stored is not None:
                before, found = unpack(stored)
                done, note = before._replace(ticket=done.ticket, ledger=done.ledger), "the same answer again"
            else:
                done, found = self.step(header, parts, done)
            frame = pack(done, found)
            check(frame)
            if stored is None and place is not None and not header.step.startswith(SECURE):
                with self.only_process():
                    self.diary.keep(place, frame)
        except Exception as error:
            done, note = done._replace(error=told(error, header.step, rehearsal=not self.about.ledger)), ""
            frame = pack(done, {})
        return self.noted(header, done, frame, request, note)

    def fingerprint(self, header: Header, message: Message) -> str:
        """A hash of a request: what everybody agreed on, the place in the run, and the message."""
        step = SECURE if header.step.startswith(SECURE) else header.step
        return message_fingerprint(message, self.about.agreement, step, header.round, header.exchange).hex()

    def check_model(self, message: Message) -> None:
        expected = {k: v.shape for k, v in self.method.initial.items()}
        odd = {*message.reference} - {*expected} or {*message.task} - {"text", "novel"}
        if odd or {k: v.shape for k, v in message.shared.items()} != expected:
            raise Refused("was sent another model than the plan's: its parameters have other names or shapes")

    def step(self, header: Header, parts: dict[str, Params], done: Header) -> tuple[Header, dict[str, Params]]:
        """What a request asks for."""
        message = to_message(header, parts)
        if header.step == OUTPUTS:
            self.write_outputs(message, header.round)
            return done, {}
        if header.step.startswith(SECURE):
            kind = header.step.removeprefix(SECURE)
            payload = self.secure_answer(kind, parts[SECURE]["payload"].numpy().tobytes(), message, header)
            masked = kind == "masked"
            done = self.with_flags(done, "train", message) if masked else done
            return done._replace(masked=masked), {SECURE: {"payload": octets(payload)}}
        reply = self.reply(header.step, message, header)
        return self.with_flags(done, header.step, message), {"values": reply.values, "shared": reply.shared}

    def reply(self, step: str, message: Message, header: Header) -> Reply:
        """The client's reply, as it may leave."""
        about, privacy = self.about, self.method.privacy
        if about.budget and about.budget.epsilon and step not in ("train", "score"):
            raise Refused(f"{step} is not answered under a budget (epsilon): no noise covers it")
        if about.secret and privacy:
            asked = self.fingerprint(header, message)
            if about.budget and about.release and step == "train":
                about.budget.spend(header.round, asked, about.release)
            key = hmac.digest(bytes.fromhex(about.secret), asked.encode(), "sha256")
            self.engine.method = replace(self.engine.method, privacy=replace(privacy, secret=key))
        schema = STEPS[step].schema(self.method, self.engine.data.extras)
        if step == "score" and not any(about.scored):  # without a look at the data
            reply = Reply(np.array([0]), {k: torch.zeros(1, *f.shape) for k, f in schema.values.items()})
        else:
            found = list(self.engine.run(step, np.array([0]), message, header.round, header.exchange))
            if not found:
                raise ValueError(self.warning)
            reply = found[0]
        if step == "score" and not all(about.scored):
            reply = self.without_scores(reply, schema)
        return reply._replace(values=without_sizes(reply.values, schema, self.engine.data)) if about.withheld else reply

    def without_scores(self, reply: Reply, schema: Schema) -> Reply:
        """Scores of splits that are told as having no examples; of training, where there is a number of them, 0."""
        shown = torch.tensor(self.about.scored)
        values = dict(reply.values)
        for name, value in values.items():
            field = schema.values[name]
            if name == "count":
                values[name] = torch.tensor([declared(self.engine.data, self.about.scored)]).to(value.dtype)
            elif field.per == "split":
                values[name] = torch.where(shown.view(1, -1, *[1] * (value.dim() - 2)), value, 0)
            elif not self.about.scored[SPLITS.index("test")]:
                values[name] = torch.full_like(value, max(-1.0, min(0.0, field.low)))
        return reply._replace(values=values)

    def with_flags(self, done: Header, step: str, message: Message) -> Header:
        """The header of an answer, with what was done to an update before it leaves."""
        privacy = self.method.privacy
        if step != "train" or privacy is None:
            return done
        norm = privacy.clipping_norm(message.extra)
        mine = privacy.level == "example" or privacy.noise_at == "client"
        return done._replace(clipped=norm, noised=norm * privacy.noise if mine else 0.0)

    def secure_answer(self, kind: str, payload: bytes, message: Message, header: Header) -> bytes:
        """A step of secure aggregation. Keys and masks are of one attempt and are lost with this process. An attempt that
        was not opened may be made again, for the same message in the same place."""
        from fedvlm.privacy.secure import client

        place = header.round, header.exchange
        if kind == "keys":
            self.secure, self.secure_place = client.Client(self.about.id, self.about.smallest), place
        if self.secure is None:
            raise BadMessage("began anew in the middle of a secure round")
        if place != self.secure_place:
            raise Refused("was asked to go on with the secure sum of another round")
        if kind == "masked" and self.secure.parameters.model.hex() != self.fingerprint(header, message):
            raise Refused("was sent another plan, round or model than agreed for this secure sum")
        found = self.secure.answer(kind, payload, partial(self.contribution, message, header))
        if self.secure.parameters.ids[-1] >= self.about.clients:
            raise Refused("was asked for a secure sum with clients that are not in the plan")
        with self.only_process():  # nothing has left yet
            self.diary.admit(*place, self.secure.parameters.model.hex(), kind == "keys")
            if kind == "unmask":
                self.diary.open(header.exchange)
        return found

    def contribution(self, message: Message, header: Header) -> Integers:
        """This client's trained update in fixed point."""
        from fedvlm.privacy.secure.fixed import SumPlan
        from fedvlm.privacy.secure.sums import Summable

        assert self.secure is not None
        agreed, merge = self.secure.parameters, self.method.merge
        assert isinstance(merge, Summable), "secure=true with a merge that was refused (needs_replies)"
        plan = SumPlan.of(merge.ranges(self.method.model, message.shared, agreed.limit), agreed.planned)
        found: Integers = plan.encode(merge.summands(self.reply("train", message, header), message.shared))[0]
        return found

    def write_outputs(self, message: Message, round: int) -> None:
        found = self.engine.outputs(message, round)
        if found:
            found["row"] = found["row"] + self.about.first
        files.write(self.folder / "outputs.safetensors", save(found), private=True)

    def noted(self, asked: Header, done: Header, frame: bytes, request: str, note: str) -> bytes:
        """The frame, once it is in the ledger."""
        line = ledger.Sent(self.about.run, self.about.name, asked.step, asked.round, asked.exchange, refused=done.error)
        line = replace(line, clipped=done.clipped, noised=done.noised, masked=done.masked, request=request, note=note)
        self.ledger.append(ledger.line_of(frame, line))
        return frame


def declared(data: Data, scored: list[bool]) -> list[int]:
    """How many examples of each split a site says that it has: those of splits that are not scored are not told, but of
    training, which may be asked."""
    counts = [int(n) for n in np.diff(data.bounds)[0]]
    return [n if known else 0 for n, known in zip(counts, [True, *scored[1:]], strict=True)]


def told(error: Exception, step: str, rehearsal: bool = False) -> str:
    """What the server is told of an error. Of a site's, the text where it is about the plan or the request alone; of all
    that may depend on its data (a shape tells how many examples there are), that something failed."""
    if rehearsal:
        return f"{type(error).__name__}: {error}"
    if isinstance(error, Refused | BadMessage) and not {"/", "\\"} & set(text := str(error)):
        return printable(text, SAID)
    print(f"{step}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
    chain = (error, error.__cause__)
    if any(isinstance(e, OSError) and e.errno == errno.ENOSPC for e in chain):
        return "its disk is full"
    if isinstance(error, MemoryError | torch.OutOfMemoryError) or "allocate memory" in str(error):  # torch's
        return "its memory is full"
    return "failed (the site's log says more)"


def without_sizes(values: Params, schema: Schema, data: Data) -> Params:
    """The values as if the client had one example of each split that has any: sums over examples become means, counts
    become 1."""
    counts = torch.from_numpy(np.diff(data.bounds, axis=1)).clamp(min=1).to(data.dtype)
    found: Params = {}
    for name, value in values.items():
        field = schema.values[name]
        if -1 in field.shape or (field.whole and field.shape not in ((), (len(SPLITS),))):
            raise Refused(f"{name} tells how many examples this site has, which it withholds (counts: false)")
        if field.per == "split":
            value = value / counts.view(1, len(SPLITS), *[1] * (value.dim() - 2))
        elif field.per:
            value = value / counts[0, SPLITS.index(field.per)]
        found[name] = value
    return found


def last_epoch(folder: Path) -> int:
    path = folder / EPOCH
    return int(path.read_text(encoding="ascii")) if path.exists() else 0


def end_after(parent: int) -> None:
    """A process whose parent was killed is given to another one."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


if __name__ == "__main__":
    threading.Thread(target=end_after, args=(int(sys.argv[2]),), daemon=True).start()
    replies = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # whatever prints goes to the log, not into a message
    serve_clients(Path(sys.argv[1]), os.fdopen(0, "rb", buffering=0), replies)
