"""The keeper of runs at a federation's server: without the network, and for real with the office gone."""

from __future__ import annotations

import contextlib
import json
import os
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("nvflare")

from nvflare.apis.event_type import EventType
from nvflare.apis.job_def import RunStatus

from fedvlm.errors import FedvlmError
from fedvlm.federation import keeper
from fedvlm.federation.settings import SERVER_HOME, status_file

NAME = "fedot-hearts"
SITES = ["north", "south"]


class Server:
    """NVFlare's engine, its store of jobs and its runner of jobs."""

    def __init__(self):
        self.job_def_manager = self.job_runner = self
        self.started = []
        self.store, self.sites, self.stopped, self.running_jobs = {}, dict.fromkeys(SITES, 0.0), [], {}

    def new_context(self):
        return contextlib.nullcontext()

    def put(self, status=RunStatus.SUBMITTED, **more):
        job = f"job-{len(self.store)}"
        self.store[job] = {"name": NAME, "job_id": job, "status": status.value, "submitter_name": "office", **more}
        return job

    def get_job(self, job, ctx):
        return SimpleNamespace(job_id=job, meta=self.store[job]) if self.store.get(job) else None

    def get_jobs_to_schedule(self, ctx):
        found = [self.get_job(j, ctx) for j in self.store]
        return [j for j in found if j and j.meta["status"] == RunStatus.SUBMITTED]

    def set_status(self, job, status, ctx):
        self.store[job]["status"] = status.value

    def clone(self, from_jid, meta, fl_ctx):
        assert self.store[from_jid]["name"] == meta["name"] and meta["submitter_name"] == "office"
        return {"job_id": self.put()}

    def delete(self, job, ctx):
        self.store[job] = None

    def stop_run(self, job, ctx):
        self.stopped.append(job)

    def check_client_resources(self, job, wanted, ctx):
        return dict.fromkeys(wanted, (True, "token"))

    def start_client_job(self, job, sites, ctx):
        self.started += sites

    def update_unfinished_jobs(self, ctx):
        for meta in filter(None, self.store.values()):
            if meta["status"] in (RunStatus.RUNNING, RunStatus.DISPATCHED):
                meta["status"] = RunStatus.ABANDONED.value

    def get_clients(self):
        return [SimpleNamespace(name=n, last_connect_time=time.time() - ago) for n, ago in self.sites.items()]


class Kept:
    """A keeper, and what a job would write."""

    def __init__(self, home: Path, server: Server):
        self.home, self.server, self.folder = home, server, home / "runs" / NAME
        self.start()

    def start(self) -> None:
        """Begins anew, as after a kill, from the table on the disk."""
        self.keeper = keeper.Keeper()
        self.keeper.handle_event(EventType.SYSTEM_START, SimpleNamespace(get_engine=lambda: self.server))

    @property
    def run(self) -> keeper.Run:
        return self.keeper.runs[NAME]

    def look(self, **status) -> tuple[str, str]:
        """Sets the state of the run's job, and lets the keeper look once."""
        if status:
            self.server.store[self.run.job]["status"] = status["job"].value
        self.keeper.look(None)
        return self.run.state, self.run.reason

    def played(self, round: int, **more) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "run.json").write_text(
            json.dumps({"clients": SITES, "config": {"quorum": 0.5}} | {"result": more.pop("result", None)})
        )
        with (self.folder / "rounds.jsonl").open("a") as out:
            out.write(json.dumps({"round": round, **more}) + "\n")

    def told(self, **more) -> None:
        path = status_file(self.folder)
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps({"job": self.run.job, **more}))

    def decide(self, word: str, name: str = NAME) -> None:
        with self.keeper.changing():
            getattr(self.keeper, word)(name, None, "office")


@pytest.fixture
def kept(tmp_path, monkeypatch) -> Kept:
    monkeypatch.setenv(SERVER_HOME, str(tmp_path))
    monkeypatch.setattr(keeper.Keeper, "keep", lambda self: None)  # the test looks itself
    monkeypatch.setattr(keeper, "PAUSE", 0.0)
    made = Kept(tmp_path, Server())
    made.server.put()
    return made


def test_a_run_goes_on_after_a_crash_with_a_copy_of_its_job(kept):
    assert kept.look()[0] == "waiting" and kept.look(job=RunStatus.RUNNING)[0] == "running"
    kept.played(3)
    state, reason = kept.look(job=RunStatus.FINISHED_ABNORMAL)
    assert state == "waiting" and "FINISHED:ABNORMAL" in reason
    assert kept.look()[0] == "wanted" and (kept.run.job, kept.run.jobs, kept.run.round) == ("job-1", 2, 3)
    assert kept.server.store["job-0"] is None  # the store does not grow
    assert "the job ended (FINISHED:ABNORMAL); the run goes on from round 4" in (kept.folder / "log.txt").read_text()
    kept.played(9, result={"P": 1})
    assert kept.look(job=RunStatus.FINISHED_COMPLETED) == ("done", "")


def test_a_keeper_that_was_killed_goes_on_from_its_table(kept):
    kept.look()
    kept.look(job=RunStatus.RUNNING)
    kept.played(2)
    kept.start()  # NVFlare lists its job as running, which a killed server does for ever
    assert kept.run.state == "running"
    assert "ABANDONED" in kept.look()[1]
    kept.start()
    assert kept.look()[0] == "wanted" and kept.run.job == "job-1"
    kept.keeper.runs.clear()
    kept.start()
    assert kept.look()[0] == "waiting" and kept.run.jobs == 2 and len(kept.server.store) == 2


def test_a_killed_keeper_takes_up_a_job_that_its_table_has_not(kept):
    kept.look()
    kept.played(2)
    kept.look(job=RunStatus.FINISHED_ABNORMAL)
    kept.server.put()  # it was copied, and the table was not written any more
    kept.look()
    assert kept.run.job == "job-1" and kept.look(job=RunStatus.RUNNING)[0] == "running"


def test_sites_of_the_last_round_are_waited_for(kept, monkeypatch):
    kept.look()
    kept.look(job=RunStatus.RUNNING)
    kept.played(3, missing=[])
    kept.server.sites.pop("south")
    kept.look(job=RunStatus.FINISHED_ABNORMAL)
    assert kept.look() == ("waiting", "waiting for south")
    kept.told(left_out={"south": "its rules"})
    assert kept.look()[0] == "wanted"  # nobody waits for who cannot take part
    kept.look(job=RunStatus.FINISHED_ABNORMAL)
    kept.played(4, missing=[])
    assert kept.look() == ("waiting", "waiting for south")
    monkeypatch.setattr(keeper, "BACK", 0.0)
    assert kept.look()[0] == "wanted"


def test_a_run_ends_in_words(kept):
    kept.look()
    kept.told(error="no site takes part")
    assert kept.look(job=RunStatus.FINISHED_COMPLETED) == ("failed", "no site takes part")
    kept.decide("resume")
    assert kept.look()[0] == "wanted" and kept.run.job == "job-1"
    assert kept.look(job=RunStatus.FINISHED_COMPLETED) == ("failed", "its job ended without a result")
    kept.decide("resume")
    kept.look()
    kept.told(error="too few sites answered", passes=True)  # it may be otherwise later
    assert kept.look(job=RunStatus.FINISHED_COMPLETED) == ("waiting", "too few sites answered")


def test_an_outage_of_most_sites_is_waited_out(kept, monkeypatch):
    """Each attempt would cost rounds, since those that change nothing count."""
    monkeypatch.setattr(keeper, "BACK", 0.0)
    kept.look()
    kept.played(5, void="too few")
    kept.told(error="3 rounds in a row changed nothing", passes=True)
    kept.server.sites = {}
    for _ in range(3):
        assert kept.look(job=RunStatus.FINISHED_COMPLETED)[0] == "waiting"
    assert kept.run.reason == "waiting for north, south" and kept.run.jobs == 1 and kept.run.fruitless == 1
    kept.server.sites = {"north": 0.0}
    assert kept.look()[0] == "wanted"


def test_a_job_that_crashes_again_and_again_is_given_up(kept):
    kept.look()
    for _ in range(keeper.FRUITLESS - 1):
        assert kept.look(job=RunStatus.FINISHED_ABNORMAL)[0] == "waiting" and kept.look()[0] == "wanted"
    state, reason = kept.look(job=RunStatus.FINISHED_ABNORMAL)
    assert state == "failed" and "5 times without a further round" in reason


def test_a_run_that_is_stopped_stays_so(kept, monkeypatch):
    kept.look()
    kept.look(job=RunStatus.RUNNING)
    kept.decide("stop")
    assert keeper.halt_file(kept.folder).read_text() == "job-0"  # the job looks there after each round
    kept.look()
    for word in ("resume", "forget"):
        with pytest.raises(FedvlmError, match="being stopped"):
            kept.decide(word)
    assert kept.server.stopped == []
    monkeypatch.setattr(keeper, "HALT", -1.0)  # a long round
    kept.look()
    assert kept.server.stopped == ["job-0"]
    kept.start()
    assert kept.look(job=RunStatus.FINISHED_ABORTED) == ("stopped", "stopped by office") and len(kept.server.store) == 1
    with pytest.raises(FedvlmError, match="is not under way: it is stopped"):
        kept.decide("stop")
    kept.decide("resume")
    assert kept.look()[0] == "wanted"
    assert kept.look(job=RunStatus.FINISHED_ABORTED) == ("stopped", "its job was aborted")  # by NVFlare's own command


def test_a_run_that_waits_can_be_stopped_and_forgotten(kept):
    kept.look()
    kept.played(2)
    kept.look(job=RunStatus.FINISHED_ABNORMAL)
    kept.decide("stop")
    assert kept.look()[0] == "stopped" and kept.run.job == "job-0"
    with pytest.raises(FedvlmError, match=r"no run fedot; did you mean fedot-hearts\?"):
        kept.decide("forget", "fedot")
    kept.decide("forget")
    assert kept.keeper.runs == {} and not kept.folder.exists() and kept.server.store["job-0"] is None


def test_a_second_job_of_a_run_that_is_under_way_is_not_run(kept):
    kept.look()
    kept.look(job=RunStatus.RUNNING)
    second = kept.server.put()
    kept.look()
    assert kept.server.store[second]["status"] == RunStatus.FINISHED_ABORTED and kept.run.job == "job-0"


def test_a_late_site_ends_a_job_seldom_and_more_and_more_so(kept, monkeypatch):
    now = time.monotonic()
    monkeypatch.setattr(keeper.time, "monotonic", lambda: now)
    kept.look()
    kept.look(job=RunStatus.RUNNING)
    ends = []
    for second in range(300):
        now += 1
        kept.played(second, missing=["south"])
        kept.look(job=RunStatus.RUNNING)
        if kept.run.again:
            ends.append(second)
            assert kept.look(job=RunStatus.FINISHED_COMPLETED)[1] == "south is there and not in the job"
            kept.look()
    assert ends[0] == pytest.approx(keeper.REJOIN, abs=2) and len(ends) == 3
    assert ends[2] - ends[1] > 2.5 * (ends[1] - ends[0])


def test_a_site_that_was_started_anew_gets_its_part_of_the_job_again(kept, monkeypatch):
    now = time.monotonic()
    monkeypatch.setattr(keeper.time, "monotonic", lambda: now)
    kept.look()
    kept.look(job=RunStatus.RUNNING)
    job = SimpleNamespace(meta={"job_clients": [{"name": s} for s in SITES]})
    kept.server.running_jobs[kept.run.job] = job
    for silent, seconds in ((["south"], 15), ([], 5), (["south"], 40), (["south"], 30)):
        for _ in range(seconds):
            now += 1
            kept.told(silent=silent)
            kept.look()
    assert kept.server.started == ["south", "south"]  # once each time that it was away
    assert kept.run.again == "south is there and not in the job"  # that did not help the second time


def test_a_site_that_is_away_ends_no_job(kept, monkeypatch):
    """NVFlare lists it for ten minutes more."""
    monkeypatch.setattr(keeper, "REJOIN", 0.0)
    kept.look()
    kept.server.sites["south"] = 60.0
    kept.look(job=RunStatus.RUNNING)
    for round in range(3):
        kept.played(round, missing=["south"])
        kept.look()
    assert kept.server.stopped == []


def test_what_is_new_of_a_run(kept, monkeypatch):
    monkeypatch.setattr(keeper, "NEWS", 0.0)
    assert kept.keeper.news(NAME, {}) == {"state": "unknown"}
    kept.look()
    kept.played(0)
    kept.told(said=["south does not take part: its rules"], encoding={})
    first = kept.keeper.news(NAME, {})
    assert json.loads(first["rounds"]) == {"round": 0} and json.loads(first["run"])["clients"] == SITES
    assert first["said"] == ["south does not take part: its rules"]
    kept.played(1)
    with (kept.folder / "rounds.jsonl").open("a") as out:
        out.write('{"round": 2')  # is being written
    second = kept.keeper.news(NAME, {"at": first["at"]})
    assert json.loads(second["rounds"]) == {"round": 1} and second["run"] == ""
    (kept.folder / "rounds.jsonl").write_text('{"round": 0}\n')  # cut, as when a run goes on
    assert json.loads(kept.keeper.news(NAME, {"at": second["at"]})["rounds"]) == {"round": 0}


@pytest.mark.nvflare
@pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")
def test_with_the_office_gone_a_killed_run_ends_with_the_same_bits(tmp_path):
    """For real: the office is killed after submission, the server's job process is killed, the run is stopped and resumed,
    and the server killed."""
    import federation as bench  # benchmarks/federation.py

    fed = bench.Federation(tmp_path, bench.styles()[:2])
    rounds = 300
    try:
        fed.up()
        office, path = fed.run("fedavg", "out", rounds), tmp_path / "out" / "rounds.jsonl"
        fed.until(lambda: path.exists() and len(path.read_bytes().splitlines()) > 3, 200)
        office.kill()
        assert office.wait() and not (tmp_path / "out" / "state.safetensors").exists()
        bench.kill("runner_process", str(tmp_path / "kits" / "server"))

        def kept() -> keeper.Run:
            return next(iter(keeper.read_table(tmp_path / "home-server" / "runs.json").values()))

        fed.until(lambda: kept().jobs == 2 and kept().state == "running", 100)
        kit = str(tmp_path / "kits" / "admin.zip")
        assert "is stopped" in fed.fedvlm("federation", "stop", kit, "fedavg")
        fed.until(lambda: not kept().halt, 60)
        assert "goes on" in fed.fedvlm("federation", "resume", kit, "fedavg")
        fed.until(lambda: kept().jobs == 3 and kept().state == "running", 100)
        bench.kill_server(fed, "")
        fed.until(lambda: kept().state == "done", 300)
        assert kept().jobs == 4
        log = (tmp_path / "home-server" / "runs" / kept().name / "log.txt").read_text()
        assert log.count("the run goes on from round") == 2
        assert "done" in fed.fedvlm("federation", "status", kit, kept().name)
        assert fed.run("fedavg", "out", rounds).wait() == 0  # it is fetched
        fed.reference("fedavg", "serial", "serial", rounds)
        assert fed.differences("out", "serial") == []
    finally:
        fed.down()
