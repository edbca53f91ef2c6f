"""A federation across sites, without the network: the server's Play and Links, the sites' Site and agent processes, with
calls that NVFlare would carry made directly. The real thing is test_provision.py's test of mark nvflare."""

from __future__ import annotations

import contextlib
import errno
import json
import shutil
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

pytest.importorskip("nvflare")

from fedvlm.backbones.arithmetic import arithmetic
from fedvlm.config.config import resolve
from fedvlm.data.pool import Pools
from fedvlm.engines.rows import Rows
from fedvlm.errors import FedvlmError, Refused
from fedvlm.federation import agent, hub, ledger, site, wire, worker
from fedvlm.federation.admin import run_name
from fedvlm.federation.links import Links
from fedvlm.federation.plan import Agreed, Plan, SiteReady, packed_record, unpacked_record
from fedvlm.federation.remote import Silence
from fedvlm.federation.wire import Header, octets, pack, unpack
from fedvlm.federation.worker import told
from fedvlm.training.folder import RunFolder
from fedvlm.training.planned_run import PlannedRun
from fedvlm.training.train import train

CLASSES = ("bird", "clock", "fruit", "hand", "train")
STYLES = ("noto", "openmoji", "twemoji")
FEW = "smallest_examples: 1\n"  # six of a class are trained on


class InProcess:
    """The site's agent in this process: starting Python for each would take seconds."""

    def __init__(self, home, run, begins, answered):
        self.home, self.run, self.answered = home, run, answered
        self.busy = self.ended = False
        self.agent = agent.Agent(home, run)

    def post(self, ticket, frame):
        threading.Thread(target=lambda: self.answered(self, ticket, self.reply(frame))).start()

    def reply(self, frame):
        return site.Spool(self.home, answer(self.agent, frame.get(0, frame.size)))

    def stop(self):
        self.ended = True

    kill = stop


def answer(one: agent.Agent, frame: bytes) -> bytes:
    return one.answer(agent.Request.read(frame))


class Proxy:
    """NVFlare's end of a call."""

    def __init__(self, one: site.Site, broken=()):
        self.site, self.broken, self.calls = one, set(broken), 0

    def __call__(self, timeout):
        return self

    def __getattr__(self, method):
        def call(*args):
            self.calls += 1
            if self.calls in self.broken:
                raise TimeoutError(method)
            return getattr(self.site, method)(*args)

        return call


class Sites:
    """Sites with homes of their own, and a server."""

    def __init__(self, images: Path, place: Path, rules: dict[str, str] | None = None):
        self.images, self.place, self.sites = images, place, dict[str, site.Site]()
        for style in STYLES:
            home = place / style
            home.mkdir(parents=True)
            shutil.copytree(images / style, place / "data" / style)
            about = {"site": style, "federation": "test", "data": str(place / "data" / style), "backbone": "mini-clip"}
            (home / "site.yaml").write_text((rules or {}).get(style, "") + FEW)
            about["rules"] = str(home / "site.yaml")
            (home / "site.json").write_text(json.dumps(about))
            self.start(style)

    def start(self, style: str) -> None:
        self.sites[style] = site.Site()
        self.sites[style].home = self.place / style

    def plan(self, method: str, **keys) -> Plan:
        self.setup = resolve(method, {"unseen": "noto", "rounds": 2, "engine": "serial", **keys})
        return Plan.of(self.setup, "test", run_name(self.setup, "test", list(STYLES)), list(STYLES))

    def play(self, plan: Plan, broken=None, only=STYLES) -> RunFolder:
        self.proxies = {n: Proxy(self.sites[n], (broken or {}).get(n, ())) for n in only}
        self.status = hub.Status(self.place / "server" / "runs" / plan.name)
        links = Links(plan.name, self.proxies)
        try:
            return hub.Play(plan, links, self.status.folder, self.status).run()
        finally:
            links.close()

    def serial(self, plan: Plan) -> RunFolder:
        setup = self.setup.with_(data=str(self.images))
        return train(PlannedRun(setup, Pools().load(setup), self.place / "serial"))

    def own_rows(self, style: str, plan: Plan, newcomer: dict, round: int) -> dict:
        path = self.place / style / "runs" / plan.name / "clients" / style / "rows.bin"
        return Rows(newcomer, 1, path).read(np.array([0]), round)

    def stop(self) -> None:
        for one in self.sites.values():
            one.close()


@pytest.fixture
def federation(images, tmp_path, monkeypatch, request):
    monkeypatch.setattr(site, "only_server", lambda: None)
    if "processes" not in request.node.name:
        monkeypatch.setattr(site, "AgentProcess", InProcess)
    made: list[Sites] = []

    def make(**keys) -> Sites:
        made.append(Sites(images, tmp_path, **keys))
        return made[-1]

    yield make
    for one in made:
        one.stop()


def shared(run: RunFolder) -> dict:
    return {k: v for k, v in load_file(run.folder / "state.safetensors").items() if k.startswith("shared/")}


def same(one: dict, other: dict) -> None:
    assert one.keys() == other.keys()
    assert all(torch.equal(v, other[k]) for k, v in one.items())


def test_sites_in_processes_that_own_their_data_give_the_bits_of_a_serial_run(federation):
    sites = federation()
    plan = sites.plan("fedot")
    run, serial = sites.play(plan), sites.serial(plan)
    same(shared(run), shared(serial))
    state, round = serial.load()
    rows = Rows(state.private, 3, serial.folder / "rows.bin")
    for i, style in enumerate(STYLES):
        same(sites.own_rows(style, plan, state.private, round), rows.read(np.array([i]), round))
    kept = ("round", "P", "G", "shared", "personal", "newcomer", "clients", "loss", "weights")
    for one, other in zip(run.rounds(), serial.rounds(), strict=True):
        assert {k: one.get(k) for k in kept} == {k: other.get(k) for k in kept}
    for style in STYLES:  # both sides have written down the same
        assert ledger.compare(sites.place / style / ledger.SENT, run.folder / ledger.RECEIVED, style) == []
        assert ledger.verify(sites.place / style / ledger.SENT) is None
    assert run.record.processors == {who: [str(arithmetic())] for who in ("server", *STYLES)}
    from fedvlm.predict.predictor import from_run

    mine = RunFolder(sites.place / "openmoji" / "runs" / plan.name)
    assert from_run(mine, "openmoji").whose == "openmoji"  # a site can use its own model
    # the server has no example, no path and no file name of theirs
    names = [p.name for p in sites.images.rglob("*.png")]
    for path in (p for p in (sites.place / "server").rglob("*") if p.is_file()):
        content = path.read_bytes()
        assert not any(n.encode() in content for n in names) and str(sites.place / "data").encode() not in content


def test_lost_calls_are_repeated_and_change_nothing(federation):
    sites = federation()
    plan = sites.plan("fedavg")
    run = sites.play(plan, broken={"twemoji": (2, 5, 6), "openmoji": (1, 4)})
    same(shared(run), shared(sites.serial(plan)))


def test_a_site_with_rules_of_its_own_is_left_out_and_said_so(federation):
    sites = federation(rules={"twemoji": "methods: [fedclip]\n"})
    plan = sites.plan("fedavg")
    run = sites.play(plan)
    assert "twemoji does not take part: this site's rules allow no method fedavg" in sites.status.said[0]
    assert run.rounds()[-1]["missing"] == ["twemoji"]
    refusals = [e for e in ledger.entries(sites.place / "twemoji" / ledger.SENT) if e.refused]
    assert "allow no method" in refusals[0].refused  # in the site's ledger, too


def test_withheld_counts_are_nowhere(federation):
    sites = federation(rules={"twemoji": "counts: false\n"})
    run = sites.play(sites.plan("fedavg"))
    rounds = run.rounds()
    assert rounds[-1]["weights"]["openmoji"] > 0.9  # twemoji counts as one example
    assert rounds[-1]["clients"]["twemoji"]["shared"]["test"] is not None


def test_a_site_with_other_classes_or_another_backbone_is_left_out(federation, monkeypatch):
    sites = federation()
    (sites.place / "data" / "twemoji" / "bird").rename(sites.place / "data" / "twemoji" / "birds")
    run = sites.play(sites.plan("fedavg"))
    assert "classes that the others do not have, such as birds" in sites.status.said[0]
    assert run.rounds()[-1]["missing"] == ["twemoji"]


def test_a_run_goes_on_where_it_stopped_with_new_processes(federation):
    sites = federation()
    plan = sites.plan("fedot", rounds=3)
    whole = sites.serial(plan)

    class Stopped(Exception):
        pass

    def cut(record):
        if record["round"] == 1:
            raise Stopped

    links = Links(plan.name, {n: Proxy(s) for n, s in sites.sites.items()})
    folder = sites.place / "server" / "runs" / plan.name
    with pytest.raises(Stopped):
        hub.Play(plan, links, folder, hub.Status(folder)).run(cut)
    links.close()
    for style in STYLES:  # another job: new processes at the sites
        sites.sites[style].close()
        sites.start(style)
    run = sites.play(plan)
    same(shared(run), shared(whole))


def test_a_job_ends_after_a_whole_round_when_its_keeper_asks(federation):
    sites = federation()
    plan = sites.plan("fedot", rounds=3)
    folder = sites.place / "server" / "runs" / plan.name
    status = hub.Status(folder, "this job")
    for asked, rounds in (("this job", 1), ("an earlier job", 4)):  # round 0 comes first
        hub.halt_file(folder).parent.mkdir(parents=True, exist_ok=True)
        hub.halt_file(folder).write_text(asked)
        for style in STYLES:  # new processes for each job
            sites.sites[style].close()
            sites.start(style)
        links = Links(plan.name, {n: Proxy(s) for n, s in sites.sites.items()})
        with pytest.raises(hub.Halted) if rounds == 1 else contextlib.nullcontext():
            hub.Play(plan, links, folder, status).run(status.go_on)
        links.close()
        assert len(RunFolder(folder).rounds()) == rounds
    same(shared(RunFolder(folder)), shared(sites.serial(plan)))


def test_changed_data_are_noticed_when_a_run_goes_on(federation):
    sites = federation()
    plan = sites.plan("fedavg")
    run = sites.play(plan)
    record = run.record
    (run.folder / "run.json").write_text(replace(record, result=None).to_json())
    next((sites.place / "data" / "twemoji" / "bird").iterdir()).unlink()
    for style in STYLES:
        sites.sites[style].close()
        sites.start(style)
    sites.play(plan)
    assert "twemoji does not take part: its data are not those with which the run began" in sites.status.said


def test_a_plan_with_code_or_of_another_version_is_refused(federation, tmp_path):
    sites = federation()
    plan = sites.plan("fedavg")
    with pytest.raises(FedvlmError, match="carry no code"):
        replace(plan, adapter=replace(plan.adapter, name="os.path")).setup()
    with pytest.raises(FedvlmError, match="install the same version everywhere"):
        sites.play(replace(plan, code="0" * 16))


@pytest.mark.parametrize("keys", [{"secure": True}, {"dp": "client", "noise_multiplier": 1.0}])
def test_secure_sums_and_privacy_go_across_sites(federation, keys):
    pytest.importorskip("cryptography")
    pytest.importorskip("dp_accounting")
    sites = federation()
    plan = sites.plan("fedavg", unseen=[], **keys)
    run = sites.play(plan)
    assert "void" not in run.rounds()[-1]
    sent = [e for e in ledger.entries(sites.place / "noto" / ledger.SENT) if e.round]
    if "secure" in keys:
        same(shared(run), shared(sites.serial(plan)))
        assert [e.masked for e in sent if e.step == "secure.masked"] == [True, True]
        assert not any(t.name.startswith("shared/") for e in sent for t in e.tensors)
    else:  # noise comes from secrets of the machines: no two runs are the same
        assert run.rounds()[-1]["epsilon"] > 0
        assert [e.clipped for e in sent if e.step == "train"] == [1.0, 1.0]


def begun(sites: Sites, style: str, plan: Plan) -> tuple[agent.Agent, SiteReady]:
    one = agent.Agent(sites.place / style, plan.name)
    assert not unpack(answer(one, pack(Header("look"), packed_record(plan))))[0].error
    agreed = Agreed(STYLES.index(style), list(CLASSES), [])
    header, parts = unpack(answer(one, pack(Header("begin"), packed_record(agreed))))
    assert not header.error
    return one, unpacked_record(SiteReady, parts)


def test_a_site_says_where_it_trains(federation, monkeypatch):
    """Not with a GPU, which no machine of these tests has: where the method and the examples would go."""
    sites = federation(rules={"noto": "device: cuda\n", "openmoji": "device: cpu\n"})
    plan = sites.plan("promptfl", device="cpu")  # the server's key is not the site's
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    one = agent.Agent(sites.place / "noto", plan.name)
    one.look(plan)
    with pytest.raises(Refused, match="device=cuda: torch finds no GPU here; give device=cpu"):
        one.begin(Agreed(0, list(CLASSES), []))
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    places = []
    monkeypatch.setattr(worker, "Stacked", lambda *args, **keys: places.append(args[5]))
    monkeypatch.setattr(agent, "described_arithmetic", str)
    for style in STYLES:  # twemoji: auto
        begun(sites, style, plan)
    assert places == ["cuda", "cpu", "cuda"]


def test_noise_has_another_secret_in_every_run_and_for_other_data(federation):
    """With the same, the difference of two runs would have no noise."""
    sites = federation()
    plan = sites.plan("fedavg")
    found = [begun(sites, "noto", p)[0].client.about.secret for p in (plan, replace(plan, name="another"), plan)]
    assert found[0] != found[1] and found[0] == found[2]
    next((sites.place / "data" / "noto" / "bird").iterdir()).unlink()
    assert begun(sites, "noto", plan)[0].client.about.secret != found[0]


def test_a_mark_cannot_be_recognised_by_who_has_the_same_images(federation):
    sites = federation()
    plan = sites.plan("fedavg")
    about = json.loads((sites.place / "noto" / "site.json").read_text())
    (sites.place / "twemoji" / "site.json").write_text(json.dumps(about | {"site": "twemoji"}))
    assert begun(sites, "noto", plan)[1].mark != begun(sites, "twemoji", plan)[1].mark


# Sites that lie: whatever one of them sends, the run finishes without it


def lying(monkeypatch, step: str, lie) -> None:
    """twemoji's agent answers this step with `lie(frame)` in place of the honest frame."""
    honest = agent.Agent.answer

    def answer(self, request):
        found = honest(self, request)
        return lie(found) if self.about.site == "twemoji" and request.header.step == step else found

    monkeypatch.setattr(agent.Agent, "answer", answer)


def with_header(frame: bytes, **words) -> bytes:
    header, parts = unpack(frame)
    return pack(header._replace(**words), parts)


def with_record(frame: bytes, **entries) -> bytes:
    header, parts = unpack(frame)
    record = json.loads(parts["json"]["text"].numpy().tobytes()) | entries
    return pack(header, {"json": {"text": octets(json.dumps(record).encode())}})


@pytest.mark.parametrize(
    "words", [{"clipped": float("nan")}, {"noised": float("inf")}, {"ticket": 1}], ids=["nan", "inf", "ticket"]
)
def test_words_that_no_site_says_are_an_offence(federation, monkeypatch, words):
    lying(monkeypatch, "train", lambda frame: with_header(frame, **words))
    sites = federation()
    run = sites.play(sites.plan("fedavg"))
    assert [list(r.get("offences", {})) for r in run.rounds()] == [[], ["twemoji"], ["twemoji"]]


def test_an_answer_without_tensors_is_an_offence(federation, monkeypatch):
    lying(monkeypatch, "train", lambda frame: pack(unpack(frame)[0], {}))
    sites = federation()
    run = sites.play(sites.plan("fedavg"))
    assert [list(r.get("offences", {})) for r in run.rounds()] == [[], ["twemoji"], ["twemoji"]]


def test_junk_at_the_end_does_not_end_the_run(federation, monkeypatch):
    lying(monkeypatch, "finish", lambda frame: b"\x02" * 500)
    sites = federation()
    assert sites.play(sites.plan("fedavg")).done


def test_extra_examples_that_one_site_alone_names_change_nothing_for_the_others(federation, monkeypatch):
    lying(monkeypatch, "begin", lambda frame: with_record(frame, extras=["corrupted", "\x1b[2J"]))
    sites = federation()
    assert not any("offences" in r or "missing" in r for r in sites.play(sites.plan("fedavg")).rounds())


def test_a_mark_that_is_none_is_refused(federation, monkeypatch):
    lying(monkeypatch, "begin", lambda frame: with_record(frame, mark="m" * 1_000_000))
    sites = federation()
    run = sites.play(sites.plan("fedavg"))
    assert run.rounds()[-1]["missing"] == ["twemoji"]
    assert (run.folder / "sites.json").stat().st_size < 1000


@pytest.mark.parametrize(
    "answer",
    [
        {"size": -5, "part": b"abc"},
        {"size": 1, "part": b"abc"},
        {"size": 60_000, "part": b"abc"},
        {"size": 1 << 62, "part": b"abc"},
        {"size": 3, "part": "abc"},
        {},
    ],
    ids=["negative", "small", "large", "huge", "text", "empty"],
)
def test_a_site_whose_relay_returns_nonsense_has_sent_something_unreadable(answer):
    class Relay:
        def __call__(self, timeout):
            return self

        def ask(self, *args):
            return {"state": site.DONE, **answer}

    links = Links("run", {"north": Relay()})
    assert links.exchange({"north": b"frame"}, {"north": 100_000}, 1, 5.0, 1.0, 5.0) == {"north": b""}
    links.close()


class Sick:
    """A site whose agent dies at every request, or that does not answer."""

    def __init__(self, **answer):
        self.found, self.asked = answer, 0

    def __call__(self, timeout):
        return self

    def ping(self):
        return bool(self.found)

    def ask(self, *args):
        self.asked += 1
        if not self.found:
            raise TimeoutError
        return self.found


DONE = {"state": site.DONE, "size": 1, "part": b"x"}


def exchange(links: Links, ticket: int, quorum: float = 0.5) -> dict:
    names = list(links.sites)
    return links.exchange(dict.fromkeys(names, b"frame"), dict.fromkeys(names, 100), ticket, 5.0, quorum, 1.0)


def test_a_sick_site_is_not_asked_for_a_while_and_then_for_longer():
    now, said = [1000.0], []
    sick = Sick(state=site.DIED, why=site.FULL)
    links = Links("run", {"north": Sick(**DONE), "south": Sick(**DONE), "west": sick})
    links.rests.clock, links.rests.say = lambda: now[0], lambda name, why: said.append((name, why))
    found = [exchange(links, k)["west"] for k in range(1, 6)]
    assert found == [Silence.DIED] * 3 + [Silence.RESTS] * 2 and sick.asked == 3
    assert said == [("west", "its process ended twice (its disk is full), 3 times; it is asked again in 60 s")]
    now[0] += 61
    assert [exchange(links, k)["west"] for k in (6, 7)] == [Silence.DIED, Silence.RESTS]
    now[0] += 61
    assert exchange(links, 8)["west"] is Silence.RESTS  # it rests for longer
    now[0] += 60
    sick.found = DONE
    assert exchange(links, 9)["west"] == b"x"
    links.close()


def test_nobody_rests_whom_the_round_needs():
    links = Links("run", {"north": Sick(**DONE), "south": Sick(state=site.DIED)})
    assert [exchange(links, k, quorum=1.0)["south"] for k in range(1, 6)] == [Silence.DIED] * 5
    links.close()


def test_a_full_disk_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(site, "only_server", lambda: None)
    one = site.Site()
    one.home = tmp_path

    def full(home, content=b""):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(site, "Spool", full)
    assert one.ask("run", 1, b"frame", 0.0) == {"state": site.DIED, "why": "its disk is full"}
    error = FedvlmError("cannot be written")
    error.__cause__ = OSError(errno.ENOSPC, "No space left on device")
    assert told(error, "train") == "its disk is full" and told(MemoryError(), "train") == "its memory is full"


def test_a_site_that_takes_long_to_begin_does_not_hold_up_the_others(federation, monkeypatch):
    """Once quorum= of the sites are ready; it goes on encoding, and is not taken for sick."""
    slow, begin = threading.Event(), agent.Agent.begin

    def late(self, agreed):
        if self.about.site == "twemoji":
            slow.wait(60)
        return begin(self, agreed)

    monkeypatch.setattr(agent.Agent, "begin", late)
    sites = federation()
    run = sites.play(sites.plan("fedavg", start_timeout=0.01, timeout=5, grace=1))
    assert "twemoji does not take part: no answer in time" in sites.status.said
    assert run.done and run.rounds()[-1]["missing"] == ["twemoji"] and not sites.status.left_out
    slow.set()


class Slow(InProcess):
    """Answers with the bytes of the request, after they have come in parts."""

    def __init__(self, home, run, begins, answered):
        self.answered, self.busy, self.ended = answered, False, False

    def post(self, ticket, frame):
        self.answered(self, ticket, frame)


def test_large_messages_go_in_parts_and_lost_ones_are_repeated(monkeypatch, tmp_path):
    monkeypatch.setattr(site, "only_server", lambda: None)
    monkeypatch.setattr(site, "AgentProcess", Slow)
    for module in (site, "fedvlm.federation.links"):
        monkeypatch.setattr(module, "PART", 1000) if module is site else monkeypatch.setattr(f"{module}.PART", 1000)
    monkeypatch.setattr("fedvlm.federation.links.PAUSE", 0.01)
    one = site.Site()
    one.home = tmp_path
    frame = bytes(range(256)) * 20
    links = Links("run", {"north": Proxy(one, broken=(2, 9, 11))})  # a put, an ask and a get are lost
    assert links.exchange({"north": frame}, {"north": 10_000}, 1, 5.0, 1.0, 5.0) == {"north": frame}
    links.close()


def test_large_messages_lie_in_files_without_a_name(tmp_path, monkeypatch):
    monkeypatch.setattr(site, "PART", 1000)
    spool = site.Spool(tmp_path)
    spool.put(1500, b"b" * 500)
    spool.put(0, b"a" * 1500)
    assert spool.size == 2000 and spool.get(1400, 300) == b"a" * 100 + b"b" * 200
    assert spool.file._rolled and not list(tmp_path.iterdir())


def test_no_path_is_in_an_error_that_leaves(federation):
    sites = federation()
    shutil.rmtree(sites.place / "data" / "twemoji")
    run = sites.play(sites.plan("fedavg"))
    assert run.rounds()[-1]["missing"] == ["twemoji"]
    assert "twemoji does not take part" in sites.status.said[0]
    sent = (run.folder / ledger.RECEIVED).read_text() + "".join(sites.status.said)
    assert str(sites.place) not in sent and "data/twemoji" not in sent


def test_progress_does_not_tell_counts_that_are_withheld(federation):
    sites = federation(rules={"twemoji": "counts: false\n"})
    plan = sites.plan("fedavg")
    told = agent.Agent(sites.place / "twemoji", plan.name)
    told.folder.mkdir(parents=True)
    told.progress(3, 60)
    assert (told.folder / "progress").read_text() == "5 100"


def test_a_site_that_is_not_there_may_come_and_one_that_is_refused_may_not(federation):
    sites = federation(rules={"openmoji": "counts: true\n", "twemoji": "methods: [fedclip]\n"})
    run = sites.play(sites.plan("fedavg", unseen=[], quorum=0.3), only=("openmoji", "twemoji"))
    assert run.rounds()[-1]["missing"] == ["noto", "twemoji"]
    assert {*sites.status.left_out} == {"twemoji"}  # noto is brought in when it is back


def test_rules_that_became_stricter_hold_for_a_new_process(federation):
    sites = federation()
    plan = sites.plan("fedavg")
    sites.play(plan)
    home = sites.place / "twemoji"
    (home / "site.yaml").write_text("methods: [fedclip]\n")
    about = json.loads((home / "site.json").read_text()) | {"rules": str(home / "site.yaml")}
    (home / "site.json").write_text(json.dumps(about))
    frame = wire.pack(wire.Header("score", 1), {})
    told = wire.unpack(answer(agent.Agent(home, plan.name), frame))[0]
    assert "this site's rules allow no method fedavg" in told.error


def limited(place: Path, rules: str, seconds: float, steps: list[str]) -> tuple[list[str], list[float], int]:
    """What a site with these rules answers to these steps, whose training takes so long, when, and how it ended."""
    (place / "site.yaml").write_text(rules)
    about = {"site": "north", "federation": "test", "data": str(place), "backbone": "mini-clip"}
    (place / "site.json").write_text(json.dumps(about | {"rules": str(place / "site.yaml")}))
    call = [sys.executable, str(Path(__file__).parents[1] / "slow_agent.py"), str(place), str(seconds)]
    with subprocess.Popen(call, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0) as process:
        assert process.stdin and process.stdout
        said, times = [], []
        for step in steps:
            began = time.monotonic()
            with contextlib.suppress(BrokenPipeError):
                wire.send(process.stdin, pack(Header(step=step), {}))  # type: ignore[arg-type]
            if not (frame := wire.receive(process.stdout)):  # type: ignore[arg-type]
                break
            times.append(time.monotonic() - began)
            said.append(unpack(frame)[0].error)
        process.stdin.close()
        return said, times, process.wait()


def test_an_answer_that_takes_too_long_is_not_given(tmp_path: Path) -> None:
    said, times, code = limited(tmp_path, "step_seconds: 0.5", 60, ["score", "train", "score"])
    assert said[0] == "asked" and "0.5 s of this site's rules" in said[1] and len(said) == 2 and code == 1
    assert times[1] < 20
    assert "0.5 s of this site's rules" in [e.refused for e in ledger.entries(tmp_path / ledger.SENT)][-1]
    assert limited(tmp_path, "step_seconds: 20", 0.1, ["train", "score"])[0] == ["asked", "asked"]


def test_answers_leave_at_multiples_of_a_time(tmp_path: Path) -> None:
    """A quick one and a slow one cannot be told apart."""
    _, times, _ = limited(tmp_path, "answers_every: 1.5", 0.7, ["score", "score", "train"])
    assert 1.3 < times[1] < 2.6 and 1.3 < times[2] < 2.6


def test_a_run_takes_no_more_memory_than_the_rules_allow() -> None:
    code = (
        "import torch; from fedvlm.federation import agent, worker; agent.bound_memory(float({}))\n"
        "try: torch.zeros(2_000_000_000, dtype=torch.uint8); print('fits')\n"
        "except Exception as error: print(worker.told(error, 'train'))"
    )
    for most, said in (("0", "fits"), ("1.5", "its memory is full")):
        done = subprocess.run([sys.executable, "-c", code.format(most)], capture_output=True, text=True, check=True)
        assert done.stdout.strip() == said
