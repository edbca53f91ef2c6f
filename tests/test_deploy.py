"""A federation across sites, without the network: the server's Play and Links, the sites' Site and agent processes, with
calls that NVFlare would carry made directly. The real thing is tests/test_nvflare.py."""

from __future__ import annotations

import json
import shutil
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

pytest.importorskip("nvflare")

from fedvlm import ledger
from fedvlm.config import resolve
from fedvlm.data.pool import Pools
from fedvlm.deploy import agent, hub, site
from fedvlm.deploy.admin import run_name
from fedvlm.deploy.links import Links
from fedvlm.deploy.plan import Plan
from fedvlm.engines.rows import Rows
from fedvlm.errors import FedvlmError
from fedvlm.folder import RunFolder
from fedvlm.train import train

STYLES = ("noto", "openmoji", "twemoji")


class InProcess:
    """The site's agent in this process: starting Python for each would take seconds."""

    def __init__(self, home, run, answered):
        self.home, self.run, self.answered = home, run, answered
        self.busy = self.ended = False
        self.agent = agent.Agent(home, run)

    def post(self, ticket, frame):
        threading.Thread(target=lambda: self.answered(self, ticket, self.agent.answer(frame))).start()

    def stop(self):
        self.ended = True

    kill = stop


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
            if rules and style in rules:
                (home / "site.yaml").write_text(rules[style])
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
        return train(setup, Pools().load(setup), self.place / "serial")

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
        monkeypatch.setattr(site, "Agent", InProcess)
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
    from fedvlm.predictor import from_run

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
