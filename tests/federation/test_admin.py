"""Who starts a run at a federation: the run's folder there, without the network."""

from __future__ import annotations

import contextlib
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers import train_small

from fedvlm import api
from fedvlm.cli import main
from fedvlm.core.records import RunRecord
from fedvlm.errors import FedvlmError
from fedvlm.federation import admin, provision, start
from fedvlm.federation.plan import Plan
from fedvlm.report.page import run_facts
from fedvlm.report.tables import table_notes
from fedvlm.system import allowed
from fedvlm.training.folder import RunFolder

KEYS = {"rounds": "1", "lr": "0.05", "unseen": "openmoji"}


@pytest.fixture(autouse=True)
def stranger(tmp_path, monkeypatch):
    monkeypatch.setattr(allowed, "_given", set())
    monkeypatch.setattr(allowed, "memory_folder", lambda: tmp_path / "trusted")


@pytest.fixture(scope="module")
def record(images, tmp_path_factory) -> RunRecord:
    return train_small(images, tmp_path_factory.mktemp("following") / "run", rounds=1).record


@pytest.fixture
def begun(record, tmp_path) -> Path:
    """The folder of an unfinished run, as it is mirrored while it goes on."""
    content = json.loads(record.to_json())
    content["config"] |= {"data": "federation:hearts", "engine": "nvflare", "federation": str(tmp_path / "admin.zip")}
    content["given"].pop("data")
    content |= {"engine": {"name": "nvflare", "settings": {}}, "result": None}
    folder = tmp_path / "mirrored"
    folder.mkdir()
    (folder / "run.json").write_text(json.dumps(content))
    return folder


def asked(kit: Path, **more: str):
    return api.chosen("fedot", KEYS | {"federation": str(kit)} | more)


def test_a_run_that_is_resumed_is_the_one_that_was_begun(begun, tmp_path, monkeypatch):
    setup = asked(tmp_path / "admin.zip", out=str(begun))
    sites = RunFolder(begun).record.clients
    again = RunFolder(begun).setup()  # no --trust is needed for what was asked for here
    assert admin.run_name(again, "hearts", sites) == admin.run_name(setup, "hearts", sites)

    plans: list[Plan] = []

    def run(follower: admin.Follower) -> RunFolder:
        plans.append(follower.plan)
        raise FedvlmError("seen")

    about = SimpleNamespace(sites=sites[:1], federation="hearts")
    late = {"sites": {"west": 1.0}, "runs": []}
    monkeypatch.setattr(admin, "session", lambda kit: contextlib.nullcontext((Server(late), about)))
    monkeypatch.setattr(admin, "open_kit", lambda kit, kind: (None, about))
    monkeypatch.setattr(admin.Follower, "run", run)
    for chosen, out in ((setup, None), (again, begun)):
        with pytest.raises(FedvlmError, match="seen"):
            admin.run_on_sites(chosen, lambda record: None, out)
    assert [p.sites for p in plans] == [sites, sites] and plans[0].name == plans[1].name
    other = asked(tmp_path / "admin.zip", out=str(begun), rounds="2")
    with pytest.raises(FedvlmError, match="holds another run; choose another out="):
        admin.run_on_sites(other, lambda record: None)


@pytest.fixture
def kit(tmp_path, monkeypatch) -> Path:
    """The kit of who starts runs, of a federation of three sites."""
    pytest.importorskip("nvflare")
    monkeypatch.setattr(admin, "session", lambda kit: pytest.fail("it was contacted"))
    provision.new_federation(["north", "south", "west"], "hearts", "localhost", 8102, tmp_path / "kits")
    return tmp_path / "kits" / "admin.zip"


def test_dry_submits_nothing(kit, capsys):
    assert main(["run", "fedot", "rounds=10", "unseen=west", f"federation={kit}", "--dry"]) == 0
    said = capsys.readouterr().out
    assert "north" in said and "held out" in said and "10 rounds" in said and "nothing was submitted" in said


@pytest.mark.parametrize(
    ("keys", "why"),
    [
        (["dp=client", "epsilon=8"], "with 3 sites the default δ of 1/n^1.1 is 0.3, which promises nothing"),
        (["secure=true", "cosine=true"], "compares single clients with cosine=true; give cosine=false"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_submitted(kit, keys, why, capsys):
    for more in ([], ["--dry"]):
        assert main(["run", "fedavg", *keys, f"federation={kit}", *more]) == 1
        assert why in capsys.readouterr().err
    assert main(["run", "fedavg", "dp=client", "epsilon=8", "delta=1e-5", f"federation={kit}", "--dry"]) == 0


def test_ctrl_c_says_that_the_run_goes_on(kit, monkeypatch, capsys):
    def stopped(follower):
        raise KeyboardInterrupt

    about = SimpleNamespace(sites=["noto"], federation="hearts")
    here = Server({"sites": {"noto": 1.0}, "runs": []})
    monkeypatch.setattr(admin, "session", lambda kit: contextlib.nullcontext((here, about)))
    monkeypatch.setattr(admin.Follower, "run", stopped)
    assert main(["run", "fedot", "rounds=1", f"federation={kit}"]) == 130
    assert "goes on at the server of hearts; continue with: fedvlm run fedot" in capsys.readouterr().err


def test_a_folder_from_others_contacts_no_federation(begun, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(admin, "session", lambda kit: pytest.fail("it was contacted"))
    (begun / "admin.zip").write_bytes(b"a kit inside the folder is as foreign as one elsewhere")
    for kit in (tmp_path / "admin.zip", begun / "admin.zip"):
        content = json.loads((begun / "run.json").read_text())
        content["config"]["federation"] = str(kit)
        (begun / "run.json").write_text(json.dumps(content))
        assert main(["resume", str(begun)]) == 1
        said = capsys.readouterr().err
        assert "it would contact the federation of " in said and f"{kit}"[-20:] + ". Nothing" in said  # or shortened


def test_tables_do_not_count_what_the_server_does_not_have(record):
    def told(found: RunRecord) -> str:
        return (
            "\n".join(table_notes({"fedot": [found]}, ["G"], "last", False, {})) + run_facts({"fedot": [found]})["data"]
        )

    assert told(record).count(f"{record.data.images} examples") == 2
    assert "examples" not in told(replace(record, data=replace(record.data, images=0)))


def test_a_second_join_changes_nothing_of_the_first(tmp_path, monkeypatch, images, capsys):
    pytest.importorskip("nvflare")
    monkeypatch.chdir(tmp_path)
    assert main(["federation", "init", "north", "out=kits"]) == 0
    monkeypatch.setattr(start.Party, "run", lambda party, say: None)
    join = ["join", "kits/north.zip", f"data={images}", "home=home"]
    assert main(join) == 0
    before = Path("home/site.json").read_bytes()
    with start.alone(Path("kits/north")):
        assert main([*join[:2], "data=emoji", "home=home"]) == 1
    assert "another process runs this kit" in capsys.readouterr().err and Path("home/site.json").read_bytes() == before


class Server:
    """The server as the office sees it: what its keeper answers, in turn."""

    def __init__(self, *answers: dict):
        self.answers, self.submitted, self.asked = list(answers), [], []

    def submit_job(self, folder):
        self.submitted.append(f"job {len(self.submitted)}")
        return self.submitted[-1]

    def do_command(self, command, props):
        self.asked.append(props)
        found = self.answers.pop(0)
        if isinstance(found, Exception):
            raise found
        return {"status": "ok", "data": [{"type": "dict", "data": found}]}

    def download_job_result(self, job, place):
        (Path(place) / "workspace" / "fedvlm").mkdir(parents=True)
        (Path(place) / "workspace" / "fedvlm" / "run.json").write_text(self.record)


@pytest.fixture
def follower(record, tmp_path, monkeypatch):
    """Follows a server that answers this."""

    def made(*answers: dict) -> tuple[admin.Follower, Server]:
        server = Server(*answers)
        server.record = record.to_json()
        monkeypatch.setattr(admin, "session", lambda kit: contextlib.nullcontext((server, None)))
        monkeypatch.setattr(admin, "write_job", lambda folder, plan: None)
        for pause in ("TICK", "AGAIN"):
            monkeypatch.setattr(admin, pause, 0.0)
        plan = SimpleNamespace(name="the run", federation="hearts", sites=["north"])
        return admin.Follower("", plan, tmp_path / "out", seen.append), server  # type: ignore[arg-type]

    seen: list[dict] = []
    made.seen = seen
    return made


def test_a_run_is_submitted_once_and_mirrored_to_its_end(follower, record, capsys):
    left_out = "west does not take part: its rules"
    zero, one = (json.dumps({"round": k}) + "\n" for k in (0, 1))
    answers = [
        {"state": "unknown"},
        {"state": "unknown"},  # the keeper has not seen the job yet
        {"state": "waiting", "reason": "no site is connected", "job": "job 0"},
        {"state": "running", "job": "job 0", "run": record.to_json(), "rounds": zero, "at": 13, "said": [left_out]},
        ConnectionError(),
        {"state": "running", "job": "job 1", "run": record.to_json(), "rounds": zero + one, "at": 26},  # from the start
        {"state": "done", "job": "job 1", "at": 26, "said": [left_out]},
    ]
    office, server = follower(*answers)
    assert office.run().done and server.submitted == ["job 0"]
    assert [r["round"] for r in follower.seen] == [0, 1]
    assert [(a or {}).get("at") for a in server.asked] == [0, 0, 0, 0, 13, 13, 26]
    told = capsys.readouterr()
    assert "waits: no site is connected" in told.out
    assert "the server does not answer (ConnectionError); waiting for it" in told.err
    assert told.err.count(left_out) == 1


@pytest.mark.parametrize("state", ["stopped", "failed"])
def test_the_same_command_goes_on_with_a_run_that_had_ended_otherwise(follower, state):
    before = {"state": state, "reason": "stopped by office", "job": "an old one"}
    after = {"state": state, "reason": "too few sites", "job": "job 0"}
    office, server = follower(before, before, {"state": "running", "job": "job 0"}, after)
    with pytest.raises(FedvlmError, match=f"the run {state}: too few sites; the same command goes on with it"):
        office.run()
    assert server.submitted == ["job 0"]


def test_an_error_of_this_machine_is_told_and_not_waited_out(follower, monkeypatch):
    def full(self, record, rounds):
        raise FedvlmError("the disk is full")

    monkeypatch.setattr(admin.Follower, "mirror", full)
    with pytest.raises(FedvlmError, match="the disk is full"):
        follower({"state": "running", "job": ""})[0].run()


def test_what_sites_encode_is_told(follower, capsys):
    told = {"state": "running", "job": "", "encoding": {"north": "30 60", "south": "a b", "west": "1"}}
    office, server = follower(told, told)
    office.look(server)
    office.look(server)
    told = capsys.readouterr()
    assert (told.out + told.err).count("north encodes its data: 50 %") == 1 and "south" not in told.out + told.err


RUN = {"state": "waiting", "reason": "no site is connected", "jobs": 2, "round": 7, "rounds": 10, "missing": ["south"]}
KNOWN = {
    "sites": {"north": 3.0},
    "excluded": ["west"],
    "runs": [RUN | {"name": n, "left_out": {"south": "its disk is full"}} for n in ("fedot-a", "fedot-b", "fedavg-a")],
}


@pytest.fixture
def words(monkeypatch):
    """`fedvlm federation …` with a server that answers this after what it knows."""
    from fedvlm.federation import status

    def said(*given: str, answer: dict | None = None) -> tuple[int, list]:
        server = Server(KNOWN, answer or {})
        sent = []
        server.do_command = lambda command, props, ask=server.do_command: (sent.append(command), ask(command, props))[1]
        about = SimpleNamespace(federation="hearts", host="hub", port=1)
        monkeypatch.setattr(status, "session", lambda kit: contextlib.nullcontext((server, about)))
        return main(["federation", given[0], "admin.zip", *given[1:]]), sent

    return said


def test_the_words_of_the_office(words, capsys):
    assert words("status")[0] == 0
    said = capsys.readouterr().out
    assert "3 s ago" in said and "excluded" in said and "7 of 10" in said and "no site is connected" in said
    assert "fedot-a: south does not take part: its disk is full" in said
    assert words("runs", "--json")[0] == 0
    assert json.loads(capsys.readouterr().out)["runs"] == KNOWN["runs"]
    assert words("stop", "fedavg") == (0, ["fedvlm_look runs", "fedvlm_keep stop fedavg-a"])
    assert words("exclude", "south")[1][-1] == "fedvlm_keep exclude south"
    assert "south is excluded" in capsys.readouterr().out
    assert words("logs", "fedot-b", answer={"lines": ["1 healed"]})[0] == 0 and "1 healed" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("given", "answer", "why"),
    [
        (["stop", "fedot"], {}, "fedot is the beginning of several runs"),
        (["stop", "prompts"], {}, "prompts is no run there; there is fedot-a"),
        (["stop", "fedot-a"], {"refused": "fedot-a is not under way: it is done"}, "it is done"),
    ],
)
def test_words_that_cannot_be_are_refused(words, capsys, given, answer, why):
    code, sent = words(*given, answer=answer)
    assert code == 1 and why in capsys.readouterr().err and len(sent) == (2 if answer else 1)
