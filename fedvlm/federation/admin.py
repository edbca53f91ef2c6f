"""`fedvlm run … federation=KIT`: submits a run to a federation's server, follows it, and fetches its folder.

The run goes on at the server whether anybody follows it or not. Where the server died, or a site came (back) that is not in
the job, the job is submitted anew, and goes on from the last whole round.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple, cast

from fedvlm.config import catalogue
from fedvlm.config.config import Setup
from fedvlm.core.records import RoundRecord, RunRecord
from fedvlm.errors import FedvlmError
from fedvlm.federation.plan import FETCHED, LEFT_OUT, ROUNDS, Plan
from fedvlm.federation.provision import open_kit
from fedvlm.federation.status import WAITING, Unreachable, session
from fedvlm.privacy.secure.sums import needs_replies
from fedvlm.system import allowed, console, files
from fedvlm.system.machine import runs_home
from fedvlm.system.names import file_name
from fedvlm.training.folder import RunFolder

TICK = 1.0  # seconds between two looks at a job
REJOIN = 20.0  # seconds that a connected site may be missing in a job before it is submitted anew
JOBS = 20  # for one run, at most
LOST = 600.0  # seconds that the server may be away
BACK = 60.0  # seconds for which sites that took part are waited for when a job is submitted anew
LARGEST_DELTA = 0.01  # that is taken without being given
ENDED = ("FINISHED", "FAILED", "ABORTED", "ABANDONED", "STOPPED")

OnRound = Callable[[RoundRecord], None]


class Followed(NamedTuple):
    """How a job ended."""

    state: str
    error: str  # in the server's words


def run_on_sites(setup: Setup, on_round: OnRound, out: Path | None = None) -> RunFolder:
    """The finished run, fetched to `out` or to its usual place."""
    planned(setup)  # what cannot be is refused before the server is asked
    kit = allowed.absolute(setup.config.federation)
    given = out or (Path(setup.config.out) if setup.config.out else None)
    with session(kit) as (flare, about):
        here = connected(flare)
        sites = sites_of(given, setup) or sorted({*about.sites, *here})
        name = run_name(setup, about.federation, sites)
    if not here:
        raise FedvlmError(f"no site of {about.federation} is connected; start `fedvlm join` at the sites first")
    folder = given or runs_home() / file_name(name)
    if (folder / "run.json").exists() and RunFolder(folder).done:
        return RunFolder(folder)
    plan = Plan.of(setup, about.federation, name, sites)
    follower = Follower(kit, plan, folder, on_round)
    for _ in range(JOBS):
        before = follower.seen
        try:
            ended = follower.job()
        except KeyboardInterrupt:
            raise KeyboardInterrupt(f"{name} goes on at the server of {plan.federation}") from None
        if (folder / "run.json").exists() and follower.run.done:
            return follower.run
        if ended.error:
            raise FedvlmError(ended.error)
        if follower.seen == before and "EXCEPTION" in ended.state:
            raise FedvlmError(
                f"the job ended ({ended.state}) before a round was played; see log.txt of the server's kit"
            )
        console.note(f"the job ended ({ended.state}); the run goes on with another from its last whole round")
    raise FedvlmError(f"{JOBS} jobs ended before the run did; see log.txt of the server's kit")


def refuse_keys(setup: Setup) -> None:
    """An error where the user gave what only the data of one place can have."""
    config = setup.config
    given = [f"{key}={getattr(config, key)}" for key in config.changed(catalogue.with_trait("central"))]
    given += ["seeds="] * (len(config.seeds) > 1) + ["data="] * ("data" in setup.given)
    for text in given:
        if text != "partition=domain":  # the default means the same here
            raise FedvlmError(f"{text} does not go with federation=: each site is one client, and has its own data")
    if config.secure and (reason := needs_replies(setup.merge)):
        raise FedvlmError(f"secure=true: the server sees only sums, and merge={setup.parts['merge'].name} {reason}")


def refuse_delta(setup: Setup, sites: list[str]) -> None:
    """An error where dp=client would promise nothing: the default δ of few sites is no small probability."""
    config, train = setup.config, len({*sites} - {*setup.config.unseen})
    default = 1 / max(2, train) ** 1.1
    if config.dp == "client" and not config.delta and default > LARGEST_DELTA:
        raise FedvlmError(
            f"dp=client: with {train} sites the default δ of 1/n^1.1 is {default:.2g}, which promises nothing; give "
            "delta=, such as 1e-5, or use dp=example"
        )


def planned(setup: Setup) -> Plan:
    """The run as it would be submitted, from the kit alone: nothing is contacted."""
    refuse_keys(setup)
    about = open_kit(allowed.absolute(setup.config.federation), "admin")[1]
    refuse_delta(setup, about.sites)
    return Plan.of(setup, about.federation, run_name(setup, about.federation, about.sites), about.sites)


def sites_of(folder: Path | None, setup: Setup) -> list[str]:
    """The sites with which the run in this folder began: others may have come or gone since."""
    if folder is None or not (folder / "run.json").exists():
        return []
    found = RunFolder(folder).record
    if decided(Setup.from_record(found, folder)) != decided(setup):
        raise FedvlmError(f"{folder} holds another run; choose another out=")
    return found.clients


def decided(setup: Setup) -> dict[str, object]:
    """What decides the numbers of a run, beside its sites and their data; the engine is always the same."""
    return {k: v for k, v in setup.binding().items() if k not in ("data", "engine")}


def run_name(setup: Setup, federation: str, sites: list[str]) -> str:
    content = json.dumps([decided(setup), federation, sites], sort_keys=True, default=str)
    mark = hashlib.blake2b(content.encode(), digest_size=4).hexdigest()
    unseen = "+".join(setup.config.unseen) or "all"
    return file_name(f"{setup.method.label.replace(' ', '-')}-{federation}-{unseen}-s{setup.config.seed}-{mark}")


def connected(flare: Any) -> list[str]:
    return [str(c.name) for c in flare.get_connected_client_list()]


class Follower:
    def __init__(self, kit: str, plan: Plan, folder: Path, on_round: OnRound):
        self.kit, self.plan, self.folder, self.on_round = kit, plan, folder, on_round
        self.seen, self.lines = 0, 0  # rounds and lines of a job that were told
        self.first = 0  # round of the job
        self.told: set[str] = set()
        self.heard = 0.0  # time.monotonic() when the server last answered
        self.missing: dict[str, float] = {}  # connected sites that are not in the job, and since when
        self.silent: set[str] = set()  # sites that did not answer the server's last call
        self.left_out: set[str] = set()  # sites that do not take part, for a reason

    @property
    def run(self) -> RunFolder:
        return RunFolder(self.folder)

    def job(self) -> Followed:
        """One job, from its submission to its end; one that already runs is followed. A server that was killed and is back
        lists its former job as running for ever, so that only jobs that really run count."""
        self.heard = time.monotonic()
        waits = False
        while True:
            try:
                with session(self.kit) as (flare, _):
                    job = running(flare, self.plan.name)
                    if not job:
                        self.wait_for_sites(flare)
                    return self.follow(flare, job or self.submit(flare))
            except (Unreachable, ConnectionGone) as error:
                if time.monotonic() - self.heard > LOST:
                    raise FedvlmError(f"{error}; the same command follows the run when the server is back") from error
                if not waits:
                    console.warn(f"{error}; waiting for it, up to {LOST / 60:.0f} minutes")
                waits = True
                time.sleep(3 * TICK)

    def wait_for_sites(self, flare: Any) -> None:
        """A server that is back is there before its sites are: without them, the next rounds would be played by few."""
        rounds = self.run.rounds() if (self.folder / "run.json").exists() else []
        absent = {n for r in rounds[-1:] for n in (*r.get("missing", []), *r.get("quarantined", []))}
        wanted = ({*self.plan.sites} - absent - self.left_out) if rounds else set()
        deadline = time.monotonic() + BACK
        while time.monotonic() < deadline:
            with flare_errors():
                gone = wanted - set(connected(flare))
            if not gone:
                return
            self.tell([f"waiting for {', '.join(sorted(gone))} to come back"], console.note)
            time.sleep(TICK)

    def submit(self, flare: Any) -> str:
        with tempfile.TemporaryDirectory() as place:
            write_job(Path(place) / "job", self.plan)
            with flare_errors():
                job = str(flare.submit_job(str(Path(place) / "job")))
        console.note(f"{self.plan.name}: submitted to {self.plan.federation}; Ctrl-C leaves it running")
        self.missing, self.silent, self.lines, self.first = {}, set(), 0, self.seen
        return job

    def follow(self, flare: Any, job: str) -> Followed:
        while True:
            with flare_errors():
                meta = flare.get_job_meta(job) or {}
            self.heard = time.monotonic()
            state = str(meta.get("status", "")).upper()
            if any(word in state for word in ENDED):
                return self.fetch(flare, job, state)
            if "RUNNING" in state:
                error = self.news(flare, job)
                if not error and self.someone_is_missing(flare):
                    with flare_errors():
                        flare.abort_job(job)
                    self.missing = {}
            time.sleep(TICK)

    def news(self, flare: Any, job: str) -> str:
        """Mirrors what the server has recorded since the last time."""
        try:
            told = flare.do_app_command(job, ROUNDS, {"since": self.seen, "line": self.lines})
        except Exception:  # the job starts or ends just now
            return ""
        self.silent, self.left_out = set(told.get("silent", [])), set(told.get("left_out", []))
        encoding = {str(k): str(v).split() for k, v in told.get("encoding", {}).items()}
        tenths = {k: 10 * int(v[0]) // max(1, int(v[1])) for k, v in encoding.items() if are_numbers(v)}
        self.tell([f"{k} encodes its data: {10 * n} %" for k, n in tenths.items()], console.note)
        self.tell([str(line) for line in told.get("said", [])])
        self.lines += len(told.get("said", []))
        if told.get("run"):
            self.mirror(str(told["run"]), [cast(RoundRecord, r) for r in told.get("rounds", [])])
        return str(told.get("error", ""))

    def tell(self, lines: list[str], say: Callable[[str], None] = console.warn) -> None:
        """Each line once."""
        for line in lines:
            if line not in self.told:
                say(line)
        self.told |= {*lines}

    def mirror(self, record: str, rounds: list[RoundRecord]) -> None:
        """The server's record here, so that `fedvlm resume` knows where the run is."""
        found = RunRecord.from_json(record)
        if not (self.folder / "run.json").exists():
            config = found.config | {"federation": self.kit}
            files.write(self.folder / "run.json", replace(found, config=config, result=None).to_json())
        for one in rounds:
            self.run.append(one)
            self.seen = one["round"] + 1
            self.on_round(one)

    def someone_is_missing(self, flare: Any) -> bool:
        """Whether a site is connected that has not been in the job for a while: it came late, or was started anew."""
        with flare_errors():
            here = set(connected(flare))
        rounds = self.run.rounds() if (self.folder / "run.json").exists() else []
        rounds = [r for r in rounds[-1:] if r["round"] >= self.first]  # of this job: it may take long to start
        absent = set(rounds[-1].get("missing", [])) if rounds else set()
        quarantined = set(rounds[-1].get("quarantined", [])) if rounds else set()
        now = time.monotonic()
        waiting = ((absent | self.silent) & here & set(self.plan.sites)) - quarantined - self.left_out
        self.missing = {name: self.missing.get(name, now) for name in waiting}
        return any(now - since > REJOIN for since in self.missing.values())

    def fetch(self, flare: Any, job: str, state: str) -> Followed:
        """The run's folder, as the server left it."""
        with tempfile.TemporaryDirectory() as place:
            try:
                flare.download_job_result(job, place)
            except Exception as error:
                return Followed(
                    state, "" if "ABORT" in state else f"the result cannot be fetched ({type(error).__name__})"
                )
            found = sorted(Path(place).rglob(f"{FETCHED}/run.json"))
            failed = sorted(Path(place).rglob(f"{FETCHED}/error.txt"))
            if found:
                copy_run(found[0].parent, self.folder, self.kit)
                self.tell(left_out(self.folder / "log.txt"))  # a short run is over before anybody asks for news
            return Followed(state, failed[0].read_text(encoding="utf-8") if failed else "")


def are_numbers(words: list[str]) -> bool:
    """Whether a site's progress is what it should be: done and total."""
    return len(words) == 2 and all(w.isdecimal() and w.isascii() for w in words)


def left_out(log: Path) -> list[str]:
    """Who did not take part, and why, without the time."""
    lines = log.read_text(encoding="utf-8").splitlines() if log.exists() else []
    return [line.split(" ", 2)[2] for line in lines if f" {LEFT_OUT}: " in line]


class ConnectionGone(Exception):
    """The server did not answer a call."""


@contextlib.contextmanager
def flare_errors() -> Iterator[None]:
    """NVFlare's own kinds of errors mean here that the server is away."""
    try:
        yield
    except FedvlmError:
        raise
    except Exception as error:
        raise ConnectionGone(f"the server does not answer ({type(error).__name__})") from error


def running(flare: Any, name: str) -> str:
    """The job of this run that is under way; "" where there is none."""
    with flare_errors():
        active = {str(j.job_id) for j in flare.get_system_info().job_info}
        jobs = [j for j in flare.list_jobs() if j.get("job_name") == name]
    return next((str(j["job_id"]) for j in jobs if j["job_id"] in active or j["status"] in WAITING), "")


def write_job(folder: Path, plan: Plan) -> None:
    """NVFlare's three files of a job. It carries no code: classes are named, and the kits allow just these."""
    threads = {"max_inbound_call_threads": 100, "max_outbound_call_threads": 100}
    server = {
        "format_version": 2,
        "workflows": [
            {
                "id": "controller",
                "path": "nvflare.collab.runtime.controller.CollabController",
                "args": {"server_obj_id": "_server", "collab_obj_ids": [], "props": {}, **threads},
            }
        ],
        "components": [
            {"id": "_server", "path": "fedvlm.federation.hub.Hub", "args": {"plan": json.dumps(asdict(plan))}}
        ],
        "task_data_filters": [],
        "task_result_filters": [],
    }
    site = {
        "format_version": 2,
        "executors": [
            {
                "tasks": ["*"],
                "executor": {
                    "path": "fedvlm.federation.comeback.Executor",
                    "args": {"client_obj_id": "_client", "collab_obj_ids": [], "props": {}, **threads},
                },
            }
        ],
        "components": [{"id": "_client", "path": "fedvlm.federation.site.Site", "args": {}}],
        "task_data_filters": [],
        "task_result_filters": [],
    }
    meta = {"name": plan.name, "resource_spec": {}, "min_clients": 1, "deploy_map": {"app": ["@ALL"]}}
    files.write(folder / "meta.json", json.dumps(meta))
    files.write(folder / "app" / "config" / "config_fed_server.json", json.dumps(server))
    files.write(folder / "app" / "config" / "config_fed_client.json", json.dumps(site))


def copy_run(source: Path, target: Path, kit: str) -> None:
    """The files of a run's folder, run.json last: it says that the others are there."""
    files.private_folder(target)
    for path in sorted(source.rglob("*")):
        if path.is_file() and path.name != "run.json":
            place = target / path.relative_to(source)
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, place)
    record = RunRecord.from_json((source / "run.json").read_text(encoding="utf-8"))
    files.write(target / "run.json", replace(record, config=record.config | {"federation": kit}).to_json(), sync=True)
