"""`fedvlm run … federation=KIT`: submits a run to a federation's server, follows it, and fetches its folder.

The server's keeper (keeper.py) carries it to its end, whether anybody follows it or not.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from fedvlm.config import catalogue
from fedvlm.config.config import Setup
from fedvlm.core.records import RoundRecord, RunRecord
from fedvlm.errors import FedvlmError
from fedvlm.federation.plan import FETCHED, Plan
from fedvlm.federation.provision import open_kit
from fedvlm.federation.settings import LOOK
from fedvlm.federation.status import Unreachable, ask, flare_errors, session
from fedvlm.privacy.secure.sums import needs_replies
from fedvlm.system import allowed, console, files
from fedvlm.system.machine import runs_home
from fedvlm.system.names import file_name
from fedvlm.training.folder import RunFolder

LOST = 600.0  # seconds that the server may be away
TICK = 1.0  # seconds between two looks while the server has not begun
AGAIN = 3.0  # seconds before it is tried again
LARGEST_DELTA = 0.01  # that is taken without being given

OnRound = Callable[[RoundRecord], None]


def run_on_sites(setup: Setup, on_round: OnRound, out: Path | None = None) -> RunFolder:
    """The finished run, fetched to `out` or to its usual place."""
    planned(setup)  # what cannot be is refused before the server is asked
    kit = allowed.absolute(setup.config.federation)
    given = out or (Path(setup.config.out) if setup.config.out else None)
    with session(kit) as (flare, about):
        here = ask(flare, LOOK, "runs")["sites"]
    sites = sites_of(given, setup) or sorted({*about.sites, *here})
    name = run_name(setup, about.federation, sites)
    folder = given or runs_home() / file_name(name)
    if (folder / "run.json").exists() and RunFolder(folder).done:
        return RunFolder(folder)
    if not here:
        raise FedvlmError(f"no site of {about.federation} is connected; start `fedvlm join` at the sites first")
    try:
        return Follower(kit, Plan.of(setup, about.federation, name, sites), folder, on_round).run()
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"{name} goes on at the server of {about.federation}") from None


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


class Follower:
    def __init__(self, kit: str, plan: Plan, folder: Path, on_round: OnRound):
        self.kit, self.plan, self.folder, self.on_round = kit, plan, folder, on_round
        self.state, self.at = "", 0  # of the run, and the bytes of its rounds that are here
        self.seen = 0  # rounds that were told
        self.told: set[str] = set()
        self.heard = time.monotonic()  # when the server last answered
        self.job = ""  # that was submitted here, until the server's keeper has it
        self.submitted = False

    def run(self) -> RunFolder:
        """Submits the run, unless the server keeps it already, and follows it to its end."""
        while True:
            try:
                with session(self.kit) as (flare, _):
                    while (found := self.look(flare)) is None:
                        pass
                    return found
            except Unreachable as error:
                if time.monotonic() - self.heard > LOST:
                    raise FedvlmError(f"{error}; the same command follows the run when the server is back") from error
                self.tell([f"{error}; waiting for it, up to {LOST / 60:.0f} minutes"])
                time.sleep(AGAIN)

    def look(self, flare: Any) -> RunFolder | None:
        """Mirrors what the server has recorded since the last time; the run's folder, once the run is done."""
        told = ask(flare, LOOK, "news", self.plan.name, at=self.at, was=self.state)
        self.heard, before, self.state = time.monotonic(), self.state, str(told["state"])
        if self.state in ("unknown", "stopped", "failed") and not self.submitted:
            self.submit(flare)
            return None
        if self.state in ("unknown", "stopped", "failed") and self.job and told.get("job") != self.job:
            time.sleep(TICK)
            return None
        self.submitted, self.job = True, ""
        self.mirror(str(told.get("run", "")), str(told.get("rounds", "")))
        self.at = int(told.get("at", 0))
        encoding = {str(k): str(v).split() for k, v in told.get("encoding", {}).items()}
        tenths = {k: 10 * int(v[0]) // max(1, int(v[1])) for k, v in encoding.items() if are_numbers(v)}
        self.tell([f"{k} encodes its data: {10 * n} %" for k, n in tenths.items()], console.note)
        self.tell([str(line) for line in told.get("said", [])])
        if self.state == "done":
            return self.fetch(flare, str(told["job"]))
        if self.state in ("stopped", "failed"):
            raise FedvlmError(f"{self.plan.name} {self.state}: {told['reason']}; the same command goes on with it")
        if self.state == "waiting" and before != self.state:
            console.note(f"{self.plan.name} waits: {told['reason']}")
        return None

    def submit(self, flare: Any) -> None:
        with tempfile.TemporaryDirectory() as place:
            write_job(Path(place) / "job", self.plan)
            with flare_errors():
                self.job = str(flare.submit_job(str(Path(place) / "job")))
        self.submitted = True
        console.note(f"{self.plan.name}: submitted to {self.plan.federation}; Ctrl-C leaves it running")

    def tell(self, lines: list[str], say: Callable[[str], None] = console.warn) -> None:
        """Each line once."""
        for line in lines:
            if line not in self.told:
                say(line)
        self.told |= {*lines}

    def mirror(self, record: str, rounds: str) -> None:
        """The server's record here, so that `fedvlm resume` knows where the run is."""
        if record and not (self.folder / "run.json").exists():
            found = RunRecord.from_json(record)
            config = found.config | {"federation": self.kit}
            files.write(self.folder / "run.json", replace(found, config=config, result=None).to_json())
        for one in (json.loads(line) for line in rounds.splitlines()):
            if one["round"] >= self.seen:
                RunFolder(self.folder).append(one)
                self.seen = one["round"] + 1
                self.on_round(one)

    def fetch(self, flare: Any, job: str) -> RunFolder:
        """The run's folder, as the server left it."""
        with tempfile.TemporaryDirectory() as place:
            with flare_errors():
                flare.download_job_result(job, place)
            found = sorted(Path(place).rglob(f"{FETCHED}/run.json"))
            if not found:
                raise FedvlmError(f"{self.plan.name} is done, and its result is gone from the server's store of jobs")
            copy_run(found[0].parent, self.folder, self.kit)
        return RunFolder(self.folder)


def are_numbers(words: list[str]) -> bool:
    """Whether a site's progress is what it should be: done and total."""
    return len(words) == 2 and all(w.isdecimal() and w.isascii() for w in words)


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
