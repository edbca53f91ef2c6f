"""Kits of a federation: what is in them, who may read them, what is refused; and the processes that run them."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
import zipfile
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

pytest.importorskip("nvflare")
import psutil
from cryptography import x509
from cryptography.x509.oid import NameOID

from fedvlm.cli import main
from fedvlm.errors import FedvlmError
from fedvlm.federation import health, provision, start
from fedvlm.federation.provision import ABOUT, ROOT_KEY, open_kit
from fedvlm.federation.settings import CLASSES, KEEP, LONGEST_MESSAGE, LOOK, About, kit_settings

POSIX = pytest.mark.skipif(os.name != "posix", reason="signals and rights of POSIX")
SITES = ["north", "south"]
KINDS = {"server": "server", "north": "site", "south": "site", "admin": "admin"}


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("federation") / "hearts"
    kits = provision.new_federation(SITES, "hearts", "localhost", 8102, out)
    assert [k.name for k in kits] == ["server.zip", "north.zip", "south.zip", "admin.zip"]
    return out


@pytest.fixture
def kits(made, tmp_path) -> Path:
    """A copy of the zip files, to unpack."""
    for path in made.glob("*.zip"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    return tmp_path


def content(path: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def setting(path: Path, name: str) -> dict:
    return json.loads(content(path)[name])


def test_what_is_made(made):
    names = {p.name for p in made.iterdir()}
    assert names == {*(f"{n}.zip" for n in KINDS), "root.key", "root.crt", "federation.json"}
    startup = {"server": ["fed_server.json", "server.crt", "server.key"], "admin": ["client.crt", "client.key"]}
    for name, kind in KINDS.items():
        found = content(made / f"{name}.zip")
        expected = startup.get(kind, ["client.crt", "client.key", "fed_client.json", "server.crt", "server.key"])
        assert {f"startup/{n}" for n in [*expected, "rootCA.pem"]} <= found.keys()
        assert not [n for n in found if n.endswith((".sh", ".default", ".sample", ".txt", ".ipynb"))]
        about = About(**json.loads(found[ABOUT]))
        assert (about.kind, about.name, about.federation, about.port) == (kind, name, "hearts", 8102)
        assert about.sites == (SITES if kind == "admin" else [])


@POSIX
def test_nobody_else_reads_them(made, kits):
    for path in [made, *made.rglob("*")]:
        assert path.stat().st_mode & 0o077 == 0, path
    for name, kind in KINDS.items():
        folder, _ = open_kit(str(kits / f"{name}.zip"), kind)
        for path in [folder, *folder.rglob("*")]:
            assert path.stat().st_mode & 0o077 == 0, path


def test_the_root_key_is_in_no_kit_and_every_party_has_keys_of_its_own(made):
    root = (made / ROOT_KEY).read_bytes()
    keys = [c for n in KINDS for f, c in content(made / f"{n}.zip").items() if f.endswith(".key")]
    assert len(keys) == len(set(keys)) == 6 and root not in keys


def test_certificates_name_their_party_and_are_signed_by_the_root(made):
    root = x509.load_pem_x509_certificate((made / "root.crt").read_bytes())
    for name, kind in KINDS.items():
        file = "startup/server.crt" if kind == "server" else "startup/client.crt"
        found = x509.load_pem_x509_certificate(content(made / f"{name}.zip")[file])
        found.verify_directly_issued_by(root)
        named = provision.USER if kind == "admin" else name
        assert found.subject.get_attributes_for_oid(NameOID.COMMON_NAME)[0].value == named
        assert found.not_valid_after_utc.isoformat() == setting(made / f"{name}.zip", ABOUT)["ends"]


@pytest.mark.parametrize("name", ["server", "north"])
def test_policies(made, name):
    kit = made / f"{name}.zip"
    rights = setting(kit, "local/authorization.json")["permissions"]
    assert rights.keys() == {"project_admin"}  # nobody else has any
    for right in ("byoc", "shell_commands", "operate", "show_errors", "clone_job", "server-predeployed-flwr"):
        assert rights["project_admin"][right] == "none"
    resources = setting(kit, "local/resources.json")
    assert resources["class_list_enforcement_mode"] == "enforce"
    assert resources["class_allow_list"] == CLASSES[KINDS[name]] and "*" not in resources["class_allow_list"]
    ids = {c["id"]: c["path"] for c in resources["components"]}
    assert not {"site_log_streamer", "log_receiver"} & ids.keys()
    connections = setting(kit, "local/comm_config.json")
    assert connections["streaming_max_blob_size"] == LONGEST_MESSAGE
    assert connections["internal"]["resources"]["connection_security"] == "mtls"
    handlers = setting(kit, "local/log_config.json")["loggers"]["root"]["handlers"]
    assert handlers == ["file"]
    if name == "north":
        assert ids["process_launcher"] == "fedvlm.federation.comeback.Launcher"
        assert resources["allow_log_streaming"] is False


def test_nvflare_takes_the_policies(made):
    """Its own evaluation of them, for who starts runs and for others."""
    from nvflare.fuel.sec.authz import AuthzContext, Person
    from nvflare.security.security import FLAuthorizer

    authorizer = FLAuthorizer("fedvlm", setting(made / "north.zip", "local/authorization.json"))

    def may(right: str, role: str = "project_admin") -> bool:
        user = Person("admin@fedvlm.local", "fedvlm", role)
        return authorizer.authorize(AuthzContext(right=right, user=user, submitter=user))[0]

    assert all(map(may, ["submit_job", "abort_job", "check_status", "list_jobs", "download_job", LOOK, KEEP]))
    refused = ["byoc", "ls", "cat", "pwd", "head", "tail", "grep", "report_env", "sys_info", "shutdown", "restart"]
    refused += [
        "show_errors",
        "configure_site_log",
        "configure_job_log",
        "call",
        "anything_new",
        "delete_workspace",
        "app_command",
    ]
    assert not any(map(may, refused))
    assert not any(may(r, role) for r in ("submit_job", "check_status", "byoc") for role in ("lead", "org_admin"))


def test_one_port_and_only_this_machine_with_localhost(made):
    found = setting(made / "server.zip", "startup/fed_server.json")["servers"][0]
    assert found["service"]["target"] == "localhost:8102" and found["admin_port"] == 8102
    assert setting(made / "admin.zip", "startup/fed_admin.json")["admin"]["port"] == 8102
    assert setting(made / "north.zip", "startup/fed_client.json")["servers"][0]["service"]["target"] == "localhost:8102"


def test_jobs_and_snapshots_stay_in_the_kit(kits):
    folder, about = open_kit(str(kits / "server.zip"), "server")
    provision.write_settings(folder, about, folder)
    text = (folder / "local" / "resources.json").read_text(encoding="utf-8")
    assert str(folder / "jobs") in text and str(folder / "snapshots") in text and "/tmp/nvflare" not in text


def plain(value: object) -> object:
    return json.loads(json.dumps(value))


@pytest.mark.parametrize(("name", "kind"), [("server", "server"), ("client", "site")])
def test_settings_hold_what_nvflare_would_write(name, kind, tmp_path):
    """Its own files for the same party: ours say the same where they do not say less."""
    from nvflare.lighter.utils import load_yaml

    templates = Path(sys.modules["nvflare.lighter"].__file__).parent / "templates" / "master_template.yml"
    theirs = load_yaml(str(templates))
    text = (
        theirs[f"fed_{name}"].replace("{~~auth_identity_config~~}", "").replace("{~~require_signed_jobs_config~~}", "")
    )
    values = {"name": "hearts", "target": "hub:1", "scheme": "http", "admin_server": "server", "conn_sec": "mtls"}
    values |= {"server_identity": "server", "fqsn": "north", "is_leaf": "true", "admin_port": "1"}
    for key, value in values.items():
        text = text.replace(f"{{~~{key}~~}}", value)
    about = About(kind, "north", "hearts", "hub", 1, "", "", "")
    ours = plain(kit_settings(about, tmp_path))
    assert ours[f"startup/fed_{name}.json"] == json.loads(text)
    text = theirs[f"local_{name}_resources"].replace("{~~class_allow_list~~}", "[]")
    text = (
        text.replace("{~~allow_log_streaming~~}", "false").replace("{~~num_gpus~~}", "0").replace("{~~gpu_mem~~}", "0")
    )
    known = json.loads(text)
    assert ours["local/resources.json"].keys() == known.keys()
    kept = {c["id"]: c["path"] for c in known["components"]} | {"keeper": "fedvlm.federation.keeper.Keeper"}
    for part in ours["local/resources.json"]["components"]:
        assert part["path"] in (kept[part["id"]], "fedvlm.federation.comeback.Launcher")
    left = kept.keys() - {c["id"] for c in ours["local/resources.json"]["components"]}
    assert left <= {"site_log_streamer", "log_receiver"} | ({"keeper"} if kind == "site" else set())


def test_no_kit_names_a_path_of_the_machine_where_it_was_made(made):
    for name in KINDS:
        for file, data in content(made / f"{name}.zip").items():
            assert str(made).encode() not in data and str(Path.home()).encode() + b"/" not in data, file


@pytest.mark.parametrize(
    "site", ["", "a/b", "..", ".", "a b", "ä", "-a", "server", "Admin", "con", "x" * 64, "a.b", "a\n", "a;b", "$x"]
)
def test_names_that_are_refused(site, tmp_path):
    with pytest.raises(FedvlmError, match="name"):
        provision.new_federation(["north", site], "hearts", "localhost", 8102, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["init"], "name the sites"),
        (["init", "north", "North"], "twice"),
        (["init", "north", "port=0"], "port=0"),
        (["init", "north", "port=x"], "port=x"),
        (["init", "north", "host=a_b"], "host=a_b"),
        (["init", "north", "host=http://a"], "no host name"),
        (["init", "north", "name=a/b"], "name=a/b"),
        (["init", "north", "hosts=a"], "did you mean host?"),
        (["add"], "name the site"),
        (["add", "west", "in=nowhere"], "nowhere holds no federation"),
        (["status"], "give the kit"),
        (["stop", "admin.zip"], "give the kit that starts runs and a RUN: fedvlm federation stop admin.zip RUN"),
        (["status", "nowhere.zip"], "nowhere.zip is not a kit"),
        (["status", "a.zip", "x=1"], "x="),
    ],
)
def test_words_that_are_refused(words, why, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["federation", *words]) == 1
    assert why in capsys.readouterr().err and list(tmp_path.iterdir()) == []


def test_a_folder_that_is_not_empty_is_kept(tmp_path):
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(FedvlmError, match="choose another out="):
        provision.new_federation(SITES, "hearts", "localhost", 8102, tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.tex"]


def test_nothing_is_left_where_making_kits_fails(tmp_path, monkeypatch):
    monkeypatch.setattr(provision, "zip_kit", lambda folder, path: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        provision.new_federation(SITES, "hearts", "localhost", 8102, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_without_nvflare(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "nvflare.lighter.utils", None)
    assert main(["federation", "init", "north", f"out={tmp_path / 'out'}"]) == 1
    assert "pip install 'fedvlm[nvflare]'" in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_the_commands_say_what_comes_next(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["federation", "init", "north", "name=hearts", "host=hub.example.org"]) == 0
    said = capsys.readouterr().out
    for words in ("fedvlm serve server.zip", "fedvlm join north.zip data=", "hub.example.org:8002", "root.key stays"):
        assert words in said
    before = (tmp_path / "hearts" / "server.zip").read_bytes()
    assert main(["federation", "add", "west", "in=hearts"]) == 0
    assert "fedvlm join west.zip data=FOLDER" in capsys.readouterr().out
    root = x509.load_pem_x509_certificate((tmp_path / "hearts" / "root.crt").read_bytes())
    west = content(tmp_path / "hearts" / "west.zip")
    x509.load_pem_x509_certificate(west["startup/client.crt"]).verify_directly_issued_by(root)
    assert (tmp_path / "hearts" / "server.zip").read_bytes() == before
    assert main(["federation", "add", "WEST", "in=hearts"]) == 1 and "only in case" in capsys.readouterr().err
    assert main(["federation", "add", "west", "server", "admin", "in=hearts"]) == 0  # renewed
    assert content(tmp_path / "hearts" / "west.zip")[ABOUT] != west[ABOUT]
    assert provision.read_federation(tmp_path / "hearts").sites == ["north", "west"]


@pytest.mark.parametrize(
    ("command", "kit", "why"),
    [
        (["serve"], "north.zip", "is the kit of site north, for `fedvlm join`"),
        (["join", "data=emoji"], "server.zip", "for `fedvlm serve`"),
        (["join"], "north.zip", "data=FOLDER"),
        (["join", "data=nowhere"], "north.zip", "data=nowhere: no such folder"),
        (["join", "data=emoji", "backbone=nowhere"], "north.zip", "nowhere"),
        (["join", "data=emoji", "rules=nowhere.yaml"], "north.zip", "rules="),
        (["serve"], "nowhere.zip", "is not a kit"),
        (["serve"], "odd.zip", "is not a kit"),
    ],
)
def test_kits_and_words_that_are_refused(command, kit, why, kits, monkeypatch, capsys):
    monkeypatch.chdir(kits)
    monkeypatch.setenv("FEDVLM_DATA_HOME", str(kits / "data"))
    monkeypatch.setattr(start.Party, "run", lambda *_: pytest.fail("it was started"))
    (kits / "odd.zip").write_bytes(b"no zip file")
    assert main([command[0], kit, *command[1:]]) == 1
    said = capsys.readouterr().err
    assert why in said and "defect" not in said


def test_a_key_that_never_leaves_its_site(made, tmp_path, monkeypatch, capsys):
    """Request at the site, sign at the office, join; and a renewal with the same keys."""
    office, site = tmp_path / "office", tmp_path / "site"
    shutil.copytree(made, office)
    site.mkdir()
    monkeypatch.chdir(site)
    assert (
        main(["join", "west", "--request"]) == 0
        and "fedvlm federation sign west.request.zip" in capsys.readouterr().out
    )
    keys = {p.name: p.read_bytes() for p in (site / "west" / "startup").glob("*.key")}
    assert keys.keys() == {"client.key", "server.key"}
    assert content(site / "west.request.zip").keys() == {"client.csr", "server.csr"}
    assert b"PRIVATE" not in b"".join(content(site / "west.request.zip").values())
    if os.name == "posix":
        assert all(p.stat().st_mode & 0o077 == 0 for p in [site / "west", *(site / "west").rglob("*")])
    for _ in range(2):
        assert main(["federation", "sign", "west.request.zip", f"in={office}"]) == 0
        answer = content(office / "west.zip")
        assert not [n for n in answer if n.endswith(".key")]
        (site / "west.zip").write_bytes((office / "west.zip").read_bytes())
        folder, about = open_kit("west.zip", "site")
        assert folder == site / "west" and about.name == "west"
        assert {p.name: p.read_bytes() for p in (folder / "startup").glob("*.key")} == keys
        for purpose in provision.PURPOSES:
            ssl.create_default_context().load_cert_chain(
                folder / f"startup/{purpose}.crt", folder / f"startup/{purpose}.key"
            )
        expected = content(made / "north.zip").keys()
        assert {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()} == expected
    assert provision.read_federation(office).sites == [*SITES, "west"]
    root = x509.load_pem_x509_certificate((office / "root.crt").read_bytes())
    x509.load_pem_x509_certificate(answer["startup/client.crt"]).verify_directly_issued_by(root)
    assert main(["join", "west", "--request"]) == 1 and "west exists" in capsys.readouterr().err
    (folder / "startup" / "client.key").write_bytes(keys["server.key"])
    (folder / ABOUT).unlink()
    with pytest.raises(FedvlmError, match="is another key than the kit is for"):
        open_kit("west.zip", "site")
    shutil.rmtree(folder)
    with pytest.raises(FedvlmError, match=r"client\.key is missing: this kit is for keys that"):
        open_kit("west.zip", "site")
    (site / "odd.request.zip").write_bytes(b"nothing")
    assert main(["federation", "sign", "odd.request.zip", f"in={office}"]) == 1


def changed(path: Path, out: Path, **files: bytes | None) -> Path:
    with zipfile.ZipFile(out, "w") as archive:
        for name, data in (content(path) | files).items():
            if data is not None:
                archive.writestr(name, data)
    return out


@pytest.mark.parametrize(
    "member", ["../outside.txt", "/outside.txt", "startup/../../outside.txt", "a/b/c.txt", "x\\y.z"]
)
def test_a_kit_that_would_write_elsewhere(made, tmp_path, member):
    odd = changed(made / "north.zip", tmp_path / "odd.zip", **{member: b"x"})
    with pytest.raises(FedvlmError, match="is not a kit: it holds"):
        open_kit(str(odd), "site")
    assert [p.name for p in tmp_path.rglob("*")] == ["odd.zip"]


def test_a_kit_without_its_description_or_after_its_time(made, tmp_path):
    bare = changed(made / "north.zip", tmp_path / "bare.zip", **{ABOUT: None})
    with pytest.raises(FedvlmError, match="is not a kit"):
        open_kit(str(bare), "site")
    about = setting(made / "north.zip", ABOUT) | {"ends": "2020-01-01"}
    old = changed(made / "north.zip", tmp_path / "old.zip", **{ABOUT: json.dumps(about).encode()})
    with pytest.raises(FedvlmError, match=r"ended on 2020-01-01; .*federation add north"):
        open_kit(str(old), "site")
    just = about | {"ends": (datetime.now(UTC) - timedelta(seconds=1)).isoformat()}  # on its last day
    with pytest.raises(FedvlmError, match="federation add north"):
        open_kit(str(changed(made / "north.zip", tmp_path / "just.zip", **{ABOUT: json.dumps(just).encode()})), "site")


@pytest.mark.parametrize(("days", "said"), [(31, []), (29.5, ["the certificate ends on "])])
def test_the_end_of_a_certificate_is_told_before(kits, days, said):
    folder, about = open_kit(str(kits / "north.zip"), "site")
    about = replace(about, ends=(datetime.now(UTC) + timedelta(days=days)).isoformat())
    party, told = start.Party(folder, about, {}), []
    for _ in range(2):
        party.warn(told.append)
    assert [t[:24] for t in told if "certificate" in t] == said  # once


def test_a_certificate_that_ends_while_a_site_runs_is_told_and_nothing_is_started_again(kits):
    folder, about = open_kit(str(kits / "north.zip"), "site")
    party = start.Party(folder, replace(about, ends="2020-01-01"), {})
    with pytest.raises(FedvlmError, match="north: the certificate ended on 2020-01-01: fedvlm federation add north"):
        party.warn(print)


def fetched(port: int, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as reply:
            return reply.status, reply.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_health_and_metrics(kits, tmp_path):
    _, about = open_kit(str(kits / "server.zip"), "server")
    runs = [
        {"name": "fedot-hearts", "state": "failed", "reason": "too few", "round": 7, "jobs": 2, "missing": ["south"]}
    ]
    runs[0]["left_out"] = {"south": "its disk is full"}
    (tmp_path / health.OVERVIEW).write_text(json.dumps({"sites": {"north": 3.5}, "runs": runs}))
    port, up = free(), [True]
    with health.answering(str(port), lambda: health.look(about, tmp_path, up[0], 1)):
        code, text = fetched(port, "/health")
        found = json.loads(text)
        assert code == 200 and found["overview"]["sites"] == {"north": 3.5} and found["faults"] == []
        assert "run fedot-hearts failed: too few" in found["warnings"]
        assert "run fedot-hearts: south does not take part: its disk is full" in found["warnings"]
        code, text = fetched(port, "/metrics")
        lines = text.splitlines()
        assert code == 200 and "fedvlm_up{} 1" in lines and 'fedvlm_run_round{run="fedot-hearts"} 7' in lines
        assert 'fedvlm_site_heard_seconds{site="north"} 3.5' in lines and "fedvlm_restarts_total{} 1" in lines
        assert all(re.fullmatch(r"fedvlm_[a-z_]+\{.*\} [0-9.e+-]+", line) for line in lines)
        assert fetched(port, "/runs.json")[0] == 404
        up[0] = False
        assert fetched(port, "/health")[0] == 503 and "fedvlm_up{} 0" in fetched(port, "/metrics")[1]
        up[0] = True
        os.utime(tmp_path / health.OVERVIEW, (1, 1))
        assert "the keeper of runs does not work any more" in fetched(port, "/health")[1]
        with pytest.raises(FedvlmError, match="cannot be listened on"), health.answering(str(port), lambda: None):
            pass
    with pytest.raises(urllib.error.URLError):
        fetched(port, "/health")


@pytest.mark.parametrize(
    "odd", [{"name": "../../x"}, {"federation": "a/b"}, {"host": "a b"}, {"port": "1"}, {"more": 1}]
)
def test_a_kit_whose_description_is_no_ordinary_one(made, tmp_path, odd):
    text = json.dumps(setting(made / "north.zip", ABOUT) | odd).encode()
    with pytest.raises(FedvlmError, match="kit"):
        open_kit(str(changed(made / "north.zip", tmp_path / "odd.zip", **{ABOUT: text})), "site")


def test_a_kit_is_unpacked_once(kits):
    folder, about = open_kit(str(kits / "north.zip"), "site")
    (folder / "kept").touch()
    assert open_kit(str(kits / "north.zip"), "site") == open_kit(str(folder), "site") == (folder, about)
    assert (folder / "kept").exists()
    (kits / "north.zip").write_bytes((kits / "south.zip").read_bytes())
    with pytest.raises(FedvlmError, match="holds another kit; move it away"):
        open_kit(str(kits / "north.zip"), "site")


def test_what_could_leave_is_said_and_nothing_is_started(kits, monkeypatch, capsys):
    monkeypatch.chdir(kits)
    monkeypatch.setattr(start.Party, "run", None)
    (kits / "site.yaml").write_text("epsilon: 8\nreveals: [pixels]\nmethods: [fedavg, feddtl]\n", encoding="utf-8")
    assert main(["join", "north.zip", "data=emoji", "rules=site.yaml", "--check"]) == 0
    said = capsys.readouterr().out
    assert "1 methods are allowed: fedavg." in said and "Not feddtl: this site's rules allow no method whose" in said
    assert "epsilon=8 of an example; no scores leave" in said and "pixels" in said


def test_a_sites_home(kits, monkeypatch, capsys, images):
    monkeypatch.chdir(kits)
    begun = []
    monkeypatch.setattr(start.Party, "run", lambda party, say: begun.append(party))
    (kits / "site.yaml").write_text("counts: false\n", encoding="utf-8")
    given = os.path.relpath(images)
    assert main(["join", "north.zip", f"data={given}", "rules=site.yaml", "home=place"]) == 0
    home = kits / "place"
    expected = {"site": "north", "federation": "hearts", "data": str(images.resolve()), "backbone": "mini-clip"}
    expected["rules"] = str((kits / "site.yaml").resolve())
    assert json.loads((home / "site.json").read_text(encoding="utf-8")) == expected
    assert begun[0].environment == {"FEDVLM_SITE": str(home.resolve())}
    assert "8102 does not answer; north joins as soon as it does" in capsys.readouterr().out
    if os.name == "posix":
        assert home.stat().st_mode & 0o077 == 0 and (home / "site.json").stat().st_mode & 0o077 == 0


def test_a_servers_own_backbone(kits, monkeypatch, capsys):
    """As hub.server_backbone advises: a run may name a backbone only if the server's owner gave it."""
    monkeypatch.chdir(kits)
    begun = []
    monkeypatch.setattr(start.Party, "run", lambda party, say: begun.append(party))
    monkeypatch.setattr(start, "free_port", lambda about: None)
    assert main(["serve", "server.zip", "home=place"]) == 0
    assert main(["serve", "server.zip", "home=place", "backbone=mini-clip"]) == 0
    home = {"FEDVLM_HOME": str((kits / "place").resolve())}
    assert [p.environment for p in begun] == [home, home | {"FEDVLM_BACKBONE": "mini-clip"}]
    assert main(["serve", "server.zip", "home=place", "backbone=nowhere"]) == 1 and len(begun) == 2
    assert "nowhere" in capsys.readouterr().err


def test_a_port_that_is_in_use(tmp_path, monkeypatch, capsys):
    with socket.socket() as other:
        other.bind(("localhost", 0))
        other.listen()
        port = other.getsockname()[1]
        provision.new_federation(["north"], "busy", "localhost", port, tmp_path / "busy")
        assert main(["serve", str(tmp_path / "busy" / "server.zip"), f"home={tmp_path / 'home'}"]) == 1
    assert f"port {port} cannot be listened on" in capsys.readouterr().err


def test_a_path_that_nvflare_would_split(made, tmp_path):
    (tmp_path / "a b").mkdir()
    (tmp_path / "a b" / "north.zip").write_bytes((made / "north.zip").read_bytes())
    with pytest.raises(FedvlmError, match="takes no spaces"):
        start.Party(*open_kit(str(tmp_path / "a b" / "north.zip"), "site"), {})


def test_the_log_in_plain_words(kits):
    party, said = start.Party(*open_kit(str(kits / "server.zip"), "server"), {}), []
    party.tell(said.append)
    log = party.folder / start.LOG
    joined = "2026 - ClientManager - INFO - Client: New client north@10.0.0.1 joined. Sent token.  Total clients: 1\n"
    log.write_text(f"2026 - root - INFO - Server started\nother\n{joined}{joined[:40]}", encoding="utf-8")
    party.tell(said.append)
    assert said == ["listening at localhost:8102; Ctrl-C ends it", "north has joined"]
    with log.open("a", encoding="utf-8") as out:
        out.write(joined[40:])
    party.tell(said.append)
    party.tell(said.append)
    assert said[2:] == ["north has joined"]
    healed = "fedot-hearts: waiting: the job ended (FINISHED:ABNORMAL); the run goes on from round 7"
    log.write_text(f"2026 - Keeper - INFO - [run=?] - keeper: {healed}\n" * 2 + "x\n" * 99, encoding="utf-8")
    party.read = 0
    party.tell(said.append)
    assert said[3:] == [healed] * 2
    del said[3:]
    log.write_text("2026 - root - INFO - Server started\n", encoding="utf-8")  # a new file was begun
    party.tell(said.append)
    assert said[3:] == ["listening at localhost:8102; Ctrl-C ends it"]


# A stand-in for NVFlare: it starts a process for a job, which would outlive it.
STUB = """
import os, subprocess, sys, threading, time
if os.environ.get("STUB") == "dies":
    sys.exit(3)
from fedvlm.federation.start import end_with
threading.Thread(target=end_with, args=(int(sys.argv[4]),), daemon=True).start()
for words in (["nvflare.private.stub", sys.argv[2]], ["fedvlm.federation.agent", os.environ["FEDVLM_SITE"]]):
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)", *words], start_new_session=True)
open(os.path.join(sys.argv[2], "log.txt"), "a").write("Successfully registered client\\n")
time.sleep(60)
"""
RUN = """
import sys
from fedvlm.federation import start
from fedvlm.federation.provision import open_kit
start.MODULE, start.GRACE, start.PAUSE, start.TICK = "stub_party", 0.3, 0.0, 0.05
start.Party(*open_kit(sys.argv[1], "site"), {start.SITE_HOME: sys.argv[2]}).run(lambda text: print(text, flush=True))
"""


ALL = ("supervisor", "party", "job", "agent")


class Running:
    """A supervisor in a process of its own."""

    def __init__(self, kits: Path, **environment: str):
        (kits / "stub_party.py").write_text(STUB, encoding="utf-8")
        self.folder, _ = open_kit(str(kits / "north.zip"), "site")
        (kits / "home").mkdir(exist_ok=True)
        self.places = {str(self.folder), str(kits / "home")}
        env = os.environ | {"PYTHONPATH": os.pathsep.join([str(kits), *filter(None, sys.path)]), **environment}
        pipe, call = subprocess.PIPE, [sys.executable, "-c", RUN, str(self.folder), str(kits / "home")]
        self.process = subprocess.Popen(call, stdout=pipe, stderr=pipe, text=True, env=env, start_new_session=True)

    @property
    def resources(self) -> dict:
        return json.loads((self.folder / "local" / "resources.json").read_text(encoding="utf-8"))

    def line(self) -> str:
        return self.process.stdout.readline().strip()

    def all(self) -> dict[str, psutil.Process]:
        """The processes that name the kit, by what they are."""
        found = {}
        for process in psutil.process_iter(["cmdline", "status"]):
            words = process.info["cmdline"] or []
            if self.places & set(words) and process.info["status"] != psutil.STATUS_ZOMBIE:
                marks = {"stub_party": "party", "nvflare.private.stub": "job", "fedvlm.federation.agent": "agent"}
                found[next((kind for mark, kind in marks.items() if mark in words), "supervisor")] = process
        return found

    def until(self, *kinds: str) -> dict[str, psutil.Process]:
        deadline = time.monotonic() + 20
        while (found := self.all()).keys() != set(kinds):
            assert time.monotonic() < deadline, found
            time.sleep(0.05)
        return found


@pytest.fixture
def running(kits):
    found = Running(kits)
    yield found
    for process in found.all().values():
        process.kill()
    found.process.communicate()


@POSIX
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_all_of_it(running, number):
    assert "has joined" in running.line()
    running.until(*ALL)
    running.process.send_signal(number)
    running.process.send_signal(number)  # an impatient user
    out, err = running.process.communicate(timeout=20)
    assert (running.process.returncode, out, err) == (0, "north is stopped\n", "") and running.all() == {}


@POSIX
def test_a_killed_supervisor_leaves_nothing_that_the_next_does_not_end(running, kits):
    running.line()
    running.until(*ALL)
    running.process.kill()
    left = running.until("job", "agent")  # the party ends with its parent; NVFlare's jobs would end with theirs
    again = Running(kits)
    again.line()
    assert again.until(*ALL)["job"].pid != left["job"].pid
    again.process.send_signal(signal.SIGTERM)
    again.process.communicate(timeout=20)
    assert again.all() == {}


@POSIX
def test_what_dies_is_started_again(running, kits):
    running.line()
    for path in (running.folder / "audit.log", kits / "home" / "agent.log"):
        with path.open("wb") as grown:
            grown.truncate(21 << 20)
    before = running.until(*ALL)
    second = Running(kits)
    assert "another process runs this kit" in second.process.communicate(timeout=20)[1]
    (running.folder / "local" / "resources.json").write_text(
        '{"components": [{"path": "os.system"}]}', encoding="utf-8"
    )
    before["party"].kill()
    assert "it is started again" in running.line() and "has joined" in running.line()
    after = running.until(*ALL)
    assert (running.folder / "audit.old").exists() and (kits / "home" / "agent.old").exists()  # logs begin anew
    assert running.resources["class_allow_list"] == CLASSES["site"]  # written anew
    assert after["party"].pid != before["party"].pid and after["job"].pid != before["job"].pid


@POSIX
def test_what_dies_again_and_again_is_given_up(kits):
    running = Running(kits, STUB="dies")
    out, err = running.process.communicate(timeout=60)
    assert out.count("it is started again") == start.STARTS - 1 and running.all() == {}
    assert f"NVFlare ended {start.STARTS} times" in err and str(running.folder / start.LOG) in err


def free() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return int(probe.getsockname()[1])


def read_until(process: subprocess.Popen[str], words: str) -> None:
    for line in process.stdout:
        if words in line:
            return
    pytest.fail(f"it ended without saying: {words}")


@pytest.mark.nvflare
@POSIX
def test_a_server_and_a_site(tmp_path, monkeypatch, capsys):
    """For real: start, join, status, a stranger, a clean end."""
    port, kits = free(), tmp_path / "hearts"
    provision.new_federation(["north"], "hearts", "localhost", port, kits)
    calls = {"server": ["serve", "server.zip", "home=a"], "north": ["join", "north.zip", "data=emoji", "home=b"]}
    said = {"server": "listening", "north": "has joined"}
    parties: dict[str, subprocess.Popen[str]] = {}
    try:
        for name, words in calls.items():
            call = [sys.executable, "-m", "fedvlm", *words]
            parties[name] = subprocess.Popen(call, cwd=kits, stdout=subprocess.PIPE, text=True, start_new_session=True)
            read_until(parties[name], said[name])
        read_until(parties["server"], "north has joined")
        assert main(["federation", "status", str(kits / "admin.zip")]) == 0
        out = capsys.readouterr().out
        assert "north" in out and "no run yet" in out
        assert answered(port, kits / "north") and not answered(port, None)
    finally:
        for party in parties.values():
            party.send_signal(signal.SIGINT)
        ended = [party.wait(60) for party in parties.values()]
    assert ended == [0, 0]
    assert not [p for name in calls for p in start.processes_of(str((kits / name).resolve()))]


def answered(port: int, kit: Path | None) -> bool:
    """Whether the server says anything to a party with, or without, a certificate."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    if kit:
        context.load_cert_chain(kit / "startup" / "client.crt", kit / "startup" / "client.key")
    try:
        with socket.create_connection(("localhost", port), timeout=10) as raw, context.wrap_socket(raw) as secure:
            secure.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
            return bool(secure.recv(100))
    except OSError:
        return False
