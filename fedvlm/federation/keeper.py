"""The keeper of runs: a part of NVFlare's server process that carries every run to its end, whether anybody watches or not.

Its table (runs.json in the server's home) has a line for each run, and is all that it needs to go on after it was killed.
The office puts a job into NVFlare's store; where that job ends before its run does, the keeper puts a copy of it there,
which goes on from the last whole round. Admin commands are how the office looks at runs (LOOK) and decides (KEEP). Needs no
torch.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from nvflare.apis.event_type import EventType
from nvflare.apis.fl_component import FLComponent
from nvflare.apis.job_def import JobMetaKey, RunStatus
from nvflare.apis.job_scheduler_spec import DispatchInfo
from nvflare.fuel.hci.proto import MetaStatusValue, make_meta
from nvflare.fuel.hci.reg import CommandModule, CommandModuleSpec, CommandSpec
from nvflare.fuel.hci.server.authz import PreAuthzReturnCode
from nvflare.fuel.hci.server.constants import ConnProps
from nvflare.private.fed.server.job_cmds import CLONED_META_KEYS
from nvflare.private.fed.server.server_cmd_modules import ServerCommandModules

from fedvlm.errors import FedvlmError, nearest
from fedvlm.federation.settings import KEEP, LOOK, OVERVIEW, SERVER_HOME, halt_file, status_file
from fedvlm.system import files
from fedvlm.system.names import file_name, printable

TABLE = "runs.json"  # in the server's home
TICK = 1.0  # seconds between two looks at the runs
SEEN = 5.0  # seconds between two overviews for `/health`
FRESH = 30.0  # seconds since a site was heard for which it counts as connected
BACK = 60.0  # seconds for which sites that took part are waited for before a job is submitted anew
REJOIN = 20.0  # seconds that a connected site may be missing in a job before the job is ended for it, the first time
HALT = 30.0  # seconds that a job has to end after a whole round before it is aborted
STARTING = 30.0  # seconds that a site's process has to start and to be asked, beyond that
GROWTH = 3  # times as long, the next time
PAUSE, LONGEST_PAUSE = 5.0, 3600.0  # seconds before a job is submitted after one that played no round, growing
FRUITLESS = 5  # jobs in a row that crashed without having played a round
NEWS = 3.0  # seconds that an answer may wait for something new
MOST = 1 << 20  # bytes of rounds in an answer
LINES = 200  # of a log in an answer
ACTIVE = ("wanted", "waiting", "running")
SUBMITTER = (JobMetaKey.SUBMITTER_NAME, JobMetaKey.SUBMITTER_ORG, JobMetaKey.SUBMITTER_ROLE)


@dataclass
class Run:
    """A line of the table."""

    name: str
    state: str = "wanted"  # one of ACTIVE, or stopped, done, failed
    reason: str = ""  # why it waits, was stopped or failed
    job: str = ""  # NVFlare's, the last one
    jobs: int = 1  # that were submitted for it
    round: int = -1  # the last that was recorded when its job was submitted
    fruitless: int = 0  # jobs in a row that ended without a further round
    ended: float = 0.0  # time.time() when its job ended and another one is to follow; 0: it has not
    again: str = ""  # why the keeper itself ended the job
    halt: float = 0.0  # time.time() when its job was told to end; 0: it was not
    patience: dict[str, float] = field(default_factory=dict)  # seconds that a site may be missing, where not REJOIN


class Keeper(FLComponent):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.home = Path(os.environ[SERVER_HOME])
        self.runs = read_table(self.home / TABLE)
        self.lock = threading.Lock()
        self.missing: dict[tuple[str, str], float] = {}  # run and site, and since when
        self.started: set[tuple[str, str]] = set()  # job and site, for sites that got their part of a job again
        ServerCommandModules.register_cmd_module(Words(self))

    def handle_event(self, event_type: str, fl_ctx: Any) -> None:
        if event_type == EventType.SYSTEM_START:
            self.engine = fl_ctx.get_engine()
            self.engine.job_runner.update_unfinished_jobs(fl_ctx)  # a killed server lists them as running for ever
            threading.Thread(target=self.keep, daemon=True).start()

    @property
    def jobs(self) -> Any:
        return self.engine.job_def_manager

    def keep(self) -> None:
        seen = 0.0
        while True:
            try:
                with self.engine.new_context() as ctx:
                    self.look(ctx)
                if time.monotonic() - seen > SEEN:
                    files.write(self.home / OVERVIEW, json.dumps(self.overview()), private=True)
                    seen = time.monotonic()
            except Exception as error:  # a full disk: the next look may succeed
                self.logger.error(f"keeper: {type(error).__name__}: {printable(error)}")
            time.sleep(TICK)

    def look(self, ctx: Any) -> None:
        with self.changing():
            for job in self.jobs.get_jobs_to_schedule(ctx):
                self.adopt(job, ctx)
            for run in [r for r in self.runs.values() if r.state in ACTIVE or r.halt]:
                self.attend(run, ctx)

    @contextlib.contextmanager
    def changing(self) -> Iterator[None]:
        """Whoever changes the table waits for the others, and leaves it on the disk."""
        with self.lock:
            before = self.content()
            yield
            if self.content() != before:
                self.save()

    def content(self) -> str:
        return json.dumps([asdict(r) for r in self.runs.values()], indent=1)

    def save(self) -> None:
        files.write(self.home / TABLE, self.content(), private=True, sync=True)

    def folder(self, run: Run) -> Path:
        return self.home / "runs" / file_name(run.name)

    def connected(self) -> set[str]:
        return {str(c.name) for c in self.engine.get_clients() if time.time() - c.last_connect_time < FRESH}

    def adopt(self, job: Any, ctx: Any) -> None:
        """A job that somebody put into the store: of a new run, or to go on with one."""
        name = str(job.meta[JobMetaKey.JOB_NAME.value])
        known = self.runs.get(name)
        if known is None or known.job != job.job_id:
            if known and known.state in ACTIVE and not known.ended:
                self.jobs.set_status(job.job_id, RunStatus.FINISHED_ABORTED, ctx)  # the run has a job already
                return
            run = Run(name, job=str(job.job_id))
            run.round = last_round(self.folder(run)).get("round", -1)
            self.runs[name] = run

    def attend(self, run: Run, ctx: Any) -> None:
        job = self.jobs.get_job(run.job, ctx)
        status = str(job.meta[JobMetaKey.STATUS.value]) if job else ""
        if run.halt and status == RunStatus.RUNNING:
            if time.time() - run.halt > HALT:
                self.engine.job_runner.stop_run(run.job, ctx)
        elif run.state not in ACTIVE:
            run.halt = 0.0
        elif run.ended:
            self.go_on(run, job, ctx)
        elif status == RunStatus.RUNNING:
            run.state, run.reason = "running", ""
            self.bring_back(run, ctx)
        elif job and not status.startswith("FINISHED"):
            run.state = "waiting"
            run.reason = "other runs are under way" if self.connected() else "no site is connected"
        else:
            self.end(run, status)

    def end(self, run: Run, status: str) -> None:
        """The job has ended: the run is over, or another job follows."""
        told, played = self.told(run), last_round(self.folder(run)).get("round", -1)
        again, run.again, run.halt = run.again, "", 0.0
        if status == RunStatus.FINISHED_COMPLETED and finished(self.folder(run)):
            run.state, run.reason = "done", ""
        elif not again and not told.get("passes") and (told.get("error") or status == RunStatus.FINISHED_COMPLETED):
            run.state, run.reason = "failed", str(told.get("error") or "its job ended without a result")
        elif status == RunStatus.FINISHED_ABORTED and not again:
            run.state, run.reason = "stopped", "its job was aborted"
        else:
            # rounds that changed nothing are recorded, too
            run.fruitless = 0 if played > run.round and not told.get("passes") else run.fruitless + 1
            why = again or str(told.get("error", "")) or f"the job ended ({status or 'deleted'})"
            if run.fruitless >= FRUITLESS and not told.get("passes"):
                run.state, run.reason = "failed", f"{why}, {FRUITLESS} times without a further round"
            else:
                run.state, run.ended, run.reason = "waiting", time.time(), why
        self.say(run, run.reason + (f"; the run goes on from round {played + 1}" if run.ended else ""))

    def go_on(self, run: Run, job: Any, ctx: Any) -> None:
        """Submits the next job: once the sites of the last round are there again, which come later than a server that was
        killed, and not at once where nothing was played. Where too few had answered, a quorum has to be there."""
        waited = time.time() - run.ended
        if waited < min(LONGEST_PAUSE, PAUSE * GROWTH**run.fruitless) * bool(run.fruitless):
            return
        last, told, record = last_round(self.folder(run)), self.told(run), read_json(self.folder(run) / "run.json")
        sites, left_out = record.get("clients", []), {*told.get("left_out", {})}
        here = self.connected()
        gone = {*sites} - {*last.get("missing", [])} - left_out - here
        few = told.get("passes") and len(here & {*sites}) < record.get("config", {}).get("quorum", 0) * len(sites)
        if few or (last and gone and waited < BACK):
            run.reason = f"waiting for {', '.join(sorted({*sites} - here if few else gone))}"
        elif job is None:
            run.state, run.ended, run.reason = "failed", 0.0, "its job was deleted"
        else:
            self.submit(run, job, ctx)

    def submit(self, run: Run, job: Any, ctx: Any) -> None:
        """A copy of the job; the table has it before the old one goes."""
        kept = {str(k): job.meta[k] for k in job.meta.keys() & {*CLONED_META_KEYS, *(s.value for s in SUBMITTER)}}
        made = self.jobs.clone(from_jid=run.job, meta=kept, fl_ctx=ctx)
        run.job, run.ended, run.state, run.reason = str(made[JobMetaKey.JOB_ID.value]), 0.0, "wanted", ""
        run.round, run.jobs = last_round(self.folder(run)).get("round", -1), run.jobs + 1
        self.save()
        self.jobs.delete(job.job_id, ctx)

    def bring_back(self, run: Run, ctx: Any) -> None:
        """Takes in a connected site that has been missing in the job for a while. One that was in it and was started anew
        gets its part of the job again; for one that came late, or does not answer then, either, the job is ended, and each
        time it has to wait longer for that: whoever cannot take part must not hold up the others."""
        told, last = self.told(run), last_round(self.folder(run))
        absent = {*last.get("missing", [])} if last.get("round", -1) > run.round else set()
        absent |= {*told.get("silent", [])}
        waiting = (absent & self.connected()) - {*last.get("quarantined", [])} - {*told.get("left_out", {})}
        waiting -= {*told.get("encoding", {})}  # the others began without it; what it encodes is not done twice
        now = time.monotonic()
        others = {key: since for key, since in self.missing.items() if key[0] != run.name}
        self.missing = others | {(run.name, s): self.missing.get((run.name, s), now) for s in waiting}
        self.started = {s for s in self.started if s[0] != run.job or s[1] in waiting}
        for site in sorted(waiting):
            patience = run.patience.get(site, REJOIN)
            if now - self.missing[run.name, site] > patience / 2 and (run.job, site) not in self.started:
                self.started.add((run.job, site))
                if self.start_again(run, site, ctx):
                    self.missing[run.name, site] = now + STARTING
            elif now - self.missing[run.name, site] > patience:
                run.patience[site] = patience * GROWTH
                run.again = f"{site} is there and not in the job"
                self.halt(run)
                return

    def halt(self, run: Run) -> None:
        """Lets the job end after the round under way: an abort would reach its sites first, and rounds without them would
        still be played."""
        files.write(halt_file(self.folder(run)), run.job, private=True)
        run.halt = time.time()

    def start_again(self, run: Run, site: str, ctx: Any) -> bool:
        """The site's process of the job, where it has the job's files (comeback.Executor knows what it was told before)."""
        job = self.engine.job_runner.running_jobs.get(run.job)
        if not job or site not in {c["name"] for c in job.meta.get(JobMetaKey.JOB_CLIENTS.value, [])}:
            return False
        able, token = self.engine.check_client_resources(job, {site: {}}, ctx).get(site, (False, None))
        if able:
            self.engine.start_client_job(job, {site: DispatchInfo("app", {}, token)}, ctx)
            self.say(run, f"{site} was started anew; it gets its part of the job again")
        return bool(able)

    def told(self, run: Run) -> dict[str, Any]:
        """What the run's last job said of itself."""
        found = read_json(status_file(self.folder(run)))
        return found if found.get("job") == run.job else {}

    def say(self, run: Run, text: str) -> None:
        """A line in the run's record, and for who reads the server's terminal."""
        self.logger.info(f"keeper: {run.name}: {run.state}{': ' * bool(text)}{text}")
        if text and self.folder(run).exists():
            with contextlib.suppress(OSError), (self.folder(run) / "log.txt").open("a", encoding="utf-8") as out:
                out.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {printable(text)}\n")

    # What the office asks for and decides

    def known(self, name: str) -> Run:
        if name not in self.runs:
            raise FedvlmError(f"the server knows no run {name}; {nearest(name, self.runs)}")
        return self.runs[name]

    def overview(self) -> dict[str, object]:
        now = time.time()
        here = {str(c.name): now - c.last_connect_time for c in self.engine.get_clients()}
        excluded = sorted(self.engine.server.client_manager.disabled_clients)
        return {"sites": here, "excluded": excluded, "runs": [self.described(r) for r in self.runs.values()]}

    def described(self, run: Run) -> dict[str, object]:
        last, told = last_round(self.folder(run)), self.told(run)
        record = read_json(self.folder(run) / "run.json")
        return {
            "name": run.name,
            "state": run.state,
            "reason": run.reason,
            "jobs": run.jobs,
            "round": last.get("round", -1),
            "rounds": record.get("config", {}).get("rounds", 0),
            "missing": last.get("missing", []),
            "left_out": told.get("left_out", {}),
        }

    def news(self, name: str, asked: dict[str, Any]) -> dict[str, object]:
        """What is new of a run since the last time; the answer waits for it a little. `at`: bytes of rounds.jsonl that the
        office has; `was`: the state that it knows."""
        run = self.runs.get(name)
        if run is None:
            return {"state": "unknown"}
        at, path = int(asked.get("at", 0)), self.folder(run) / "rounds.jsonl"
        deadline = time.monotonic() + NEWS
        while time.monotonic() < deadline and (run.state, size_of(path)) == (asked.get("was"), at):
            time.sleep(TICK / 5)
        at = 0 if size_of(path) < at else at  # it was cut when the run went on
        rounds = read_from(path, at)
        record = self.folder(run) / "run.json"
        text = record.read_text(encoding="utf-8") if not at and record.exists() else ""
        told = {k: v for k, v in self.told(run).items() if k in ("said", "encoding")}
        return {
            "state": run.state,
            "reason": run.reason,
            "job": run.job,
            "run": text,
            "at": at + len(rounds.encode()),
        } | {
            "rounds": rounds,
            **told,
        }

    def log(self, name: str) -> dict[str, object]:
        path = self.folder(self.known(name)) / "log.txt"
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []
        return {"lines": lines[-LINES:]}

    def stop(self, name: str, ctx: Any, who: str) -> None:
        run = self.known(name)
        if run.state not in ACTIVE:
            raise FedvlmError(f"{name} is not under way: it is {run.state}")
        run.state, run.reason, run.ended, run.again = "stopped", f"stopped by {who}", 0.0, ""
        job = self.jobs.get_job(run.job, ctx)
        if job and job.meta[JobMetaKey.STATUS.value] in (RunStatus.SUBMITTED, RunStatus.DISPATCHED):
            self.jobs.set_status(run.job, RunStatus.FINISHED_ABORTED, ctx)
        elif job:
            self.halt(run)
        self.say(run, run.reason)

    def resume(self, name: str, ctx: Any, who: str) -> None:
        run = self.known(name)
        if run.halt:
            raise FedvlmError(f"{name} is being stopped, after the round under way; try again then")
        if run.state in ("stopped", "failed"):
            run.state, run.reason, run.fruitless, run.ended = "waiting", f"resumed by {who}", 0, time.time()
            self.say(run, run.reason)
        elif run.state == "done":
            raise FedvlmError(f"{name} is done")

    def forget(self, name: str, ctx: Any, who: str) -> None:
        run = self.known(name)
        if run.state in ACTIVE or run.halt:
            raise FedvlmError(f"{name} is {'being stopped' if run.halt else run.state}; stop it first, or wait")
        if self.jobs.get_job(run.job, ctx):
            self.jobs.delete(run.job, ctx)
        shutil.rmtree(self.folder(run), ignore_errors=True)
        for beside in (status_file, halt_file):
            beside(self.folder(run)).unlink(missing_ok=True)
        del self.runs[name]

    def exclude(self, site: str, ctx: Any, who: str) -> None:
        """NVFlare's own list of sites that may not register; their processes of runs end first."""
        if site not in {str(c.name) for c in self.engine.get_clients()}:
            raise FedvlmError(f"no site {site} is connected; only who is can be excluded")
        for job in list(self.engine.job_runner.running_jobs):
            self.engine.job_runner.abort_client_run(job, [site], ctx)
        self.engine.disable_clients([site])
        self.logger.info(f"keeper: {site} is excluded by {who}")

    def admit(self, site: str, ctx: Any, who: str) -> None:
        if not self.engine.server.client_manager.is_client_disabled(site):
            raise FedvlmError(f"{site} is not excluded")
        self.engine.enable_clients([site])
        self.logger.info(f"keeper: {site} is admitted by {who}")


class Words(CommandModule):  # type: ignore[misc]
    """NVFlare's admin commands of the keeper; the kit's policy says who may give which (settings.RIGHTS)."""

    def __init__(self, keeper: Keeper):
        self.keeper = keeper

    def get_spec(self) -> Any:
        def command(name: str, handler: Any) -> Any:
            return CommandSpec(name, name, f"{name} WORD [NAME]", handler, lambda *_: PreAuthzReturnCode.REQUIRE_AUTHZ)

        return CommandModuleSpec("fedvlm", [command(LOOK, self.look), command(KEEP, self.decide)])

    def look(self, conn: Any, words: list[str]) -> None:
        keeper, asked = self.keeper, conn.get_prop(ConnProps.CMD_PROPS) or {}
        kinds = {"runs": keeper.overview, "log": lambda: keeper.log(words[2])}
        answer(conn, kinds.get(words[1], lambda: keeper.news(words[2], asked)))

    def decide(self, conn: Any, words: list[str]) -> None:
        keeper, who = self.keeper, str(conn.get_prop(ConnProps.USER_NAME, ""))
        known = {f.__name__: f for f in (keeper.stop, keeper.resume, keeper.forget, keeper.exclude, keeper.admit)}

        def decided() -> dict[str, object]:
            with keeper.engine.new_context() as ctx, keeper.changing():
                known[words[1]](words[2], ctx, who)
            return {}

        answer(conn, decided)


def answer(conn: Any, found: Any) -> None:
    """The answer as a dictionary; what the user can put right is in it, in words."""
    try:
        result = found()
    except FedvlmError as error:
        result = {"refused": str(error)}
    conn.append_dict(result, meta=make_meta(MetaStatusValue.OK))


def read_table(path: Path) -> dict[str, Run]:
    if not path.exists():
        return {}
    known = {f.name for f in fields(Run)}
    lines = json.loads(path.read_text(encoding="utf-8"))
    return {r["name"]: Run(**{k: v for k, v in r.items() if k in known}) for r in lines}


def read_json(path: Path) -> dict[str, Any]:
    """The object in a file; {} where there is none, or it is just being written."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def finished(folder: Path) -> bool:
    return read_json(folder / "run.json").get("result") is not None


def last_round(folder: Path) -> dict[str, Any]:
    """The last record of a round that is whole."""
    path = folder / "rounds.jsonl"
    lines = read_from(path, max(0, size_of(path) - MOST)).splitlines()
    for line in reversed(lines):
        with contextlib.suppress(ValueError):
            return dict(json.loads(line))
    return {}


def size_of(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def read_from(path: Path, at: int) -> str:
    """Whole lines from a place on, as many as an answer may have."""
    if not path.exists():
        return ""
    with path.open("rb") as file:
        file.seek(at)
        whole, end, _ = file.read(MOST).rpartition(b"\n")
    return (whole + end).decode(errors="replace")
