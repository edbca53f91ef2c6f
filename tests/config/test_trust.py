"""A run or an export that came from others: nothing of it runs, is contacted or read elsewhere without the user's word."""

from __future__ import annotations

import json
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import small_setup, train_small
from safetensors.torch import load_file, save_file

import fedvlm
from fedvlm import backbones
from fedvlm.backbones import http
from fedvlm.cli import main
from fedvlm.config import trust
from fedvlm.core.records import LARGEST, ExportRecord, RunRecord
from fedvlm.errors import FedvlmError
from fedvlm.parts import user_code
from fedvlm.predict.export.folder import export
from fedvlm.system import allowed
from fedvlm.training.folder import RunFolder

CODE = {
    "adapter": "from fedvlm.parts import find\n\n\nclass Mine(find('adapter', 'rotation')):\n    pass\n",
    "local": "from fedvlm.parts import Local\n\n\nclass Mine(Local):\n    pass\n",
    "merge": "from fedvlm.parts import Mean\n\n\nclass Mine(Mean):\n    pass\n",
    "metric-mine": "from fedvlm.parts import find\n\n\nclass Mine(find('metric', 'macro_f1')):\n    pass\n",
    "engine": "from fedvlm.parts import Serial\n\n\nclass Mine(Serial):\n    pass\n",
}


@pytest.fixture(scope="module")
def done(images, tmp_path_factory) -> RunFolder:
    return train_small(images, tmp_path_factory.mktemp("loading") / "run", rounds=1)


@pytest.fixture(scope="module")
def exported(done, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("loading") / "export"
    export(done, folder)
    return folder


@pytest.fixture(autouse=True)
def stranger(tmp_path, monkeypatch) -> Path:
    """As if this user had never run anything; returns where trust is remembered."""
    monkeypatch.setattr(allowed, "_given", set())
    monkeypatch.setattr(allowed, "memory_folder", lambda: tmp_path / "trusted")
    monkeypatch.delenv("FEDVLM_TOKEN", raising=False)
    monkeypatch.delenv(allowed.HOSTS, raising=False)
    return tmp_path / "trusted"


@pytest.fixture
def picture(images) -> str:
    return str(next((images / "noto" / "bird").glob("*.png")))


def edited(folder: Path, file: str = "run.json", **changes: Any) -> Path:
    """A record with other entries; `a__b=` is b in a."""
    record = json.loads((folder / file).read_text())
    for key, value in changes.items():
        *path, last = key.split("__")
        inner = record
        for name in path:
            inner = inner[name]
        inner[last] = value
    (folder / file).write_text(json.dumps(record))
    return folder


@pytest.fixture
def received(done, tmp_path) -> Callable[..., Path]:
    """A copy of the run, with changes to its record, as somebody else may have sent it."""

    def make(**changes: Any) -> Path:
        shutil.copytree(done.folder, tmp_path / "received")
        return edited(tmp_path / "received", **changes)

    return make


@pytest.fixture
def model(exported, tmp_path) -> Callable[..., Path]:
    def make(**changes: Any) -> Path:
        shutil.copytree(exported, tmp_path / "model")
        return edited(tmp_path / "model", "config.json", **changes)

    return make


def with_code(folder: Path, home: str, marker: Path, file: str = "run.json") -> Path:
    """The folder with code of its own for one part, which leaves a file behind where it runs."""
    (folder / "code" / home).mkdir(parents=True)
    text = f"from pathlib import Path\nPath({str(marker)!r}).write_text('ran')\n{CODE[home]}"
    (folder / "code" / home / "idea.py").write_text(text)
    if home == "metric-mine":
        return edited(folder, metrics=[{"name": "mine", "settings": {}, "code": "idea.py", "digest": "1" * 16}])
    return edited(folder, file, **{f"{home}__name": "idea.py", f"{home}__code": "idea.py", f"{home}__digest": "1" * 16})


def said(words: list[str], capsys) -> str:
    """What a command that must fail says, in one sentence."""
    capsys.readouterr()
    assert main(words) == 1
    err = capsys.readouterr().err
    assert err.startswith("fedvlm: ") and err.count("\n") == 1 and "defect" not in err and "Traceback" not in err, err
    return err


@pytest.mark.parametrize("home", CODE)
def test_code_in_a_run_does_not_run(home, received, picture, tmp_path, capsys):
    marker = tmp_path / "marker"
    folder = with_code(received(result=None), home, marker)
    kind, seal = home.partition("-")[0], user_code.stored_code(folder / "code" / home, "idea.py").seal[:8]
    name = "mine" if kind == "metric" else "idea.py"
    calls = [["resume", str(folder)]]
    if kind in ("adapter", "local", "merge"):
        calls += [["predict", str(folder), picture], ["export", str(folder), "--out", str(tmp_path / "out")]]
    for words in calls:
        err = said(words, capsys)
        assert f"would run code: {kind} {name} (in code/{home}, sha {seal})" in err and "give --trust" in err
    assert not marker.exists() and not (tmp_path / "out").exists()


def test_what_a_prediction_does_not_use_is_not_asked_for(received, picture, tmp_path):
    folder = with_code(received(), "engine", tmp_path / "marker")
    assert main(["predict", str(folder), picture]) == 0  # and data= is not read
    assert not (tmp_path / "marker").exists()


def test_code_runs_with_trust(received, picture, tmp_path):
    folder = with_code(received(), "adapter", tmp_path / "marker")
    assert main(["predict", str(folder), picture, "--trust"]) == 0 and (tmp_path / "marker").exists()
    with pytest.raises(FedvlmError, match="would run code: adapter"):
        fedvlm.Run(folder).predict(picture)  # the word is given each time
    assert fedvlm.Run(folder, trust=True).predict(picture) == fedvlm.runs(folder, trust=True)[0].predict(picture)


def test_code_in_an_export_does_not_run(model, picture, tmp_path, capsys):
    folder = with_code(model(), "adapter", tmp_path / "marker", "config.json")
    assert "would run code: adapter idea.py (in code/adapter, sha " in said(["predict", str(folder), picture], capsys)
    with pytest.raises(FedvlmError, match="trust=True"):
        fedvlm.load(folder)
    assert not (tmp_path / "marker").exists()
    assert fedvlm.load(folder, trust=True).predict(picture) and (tmp_path / "marker").exists()


NAMES = ["os.path", "this", "evil_module", "../../evil", "/evil", "base", "a\nb", "", "x.py"]


@pytest.mark.parametrize(
    ("home", "name"),
    [*(("adapter", name) for name in NAMES), *((home, "evil_module") for home in ("local", "merge", "engine"))],
)
def test_a_name_alone_imports_nothing(home, name, received, tmp_path, monkeypatch, capsys):
    for file in (tmp_path / "evil_module.py", tmp_path / "x.py"):
        file.write_text(f"from pathlib import Path\nPath({str(tmp_path / 'marker')!r}).write_text('ran')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    folder = received(**{f"{home}__name": name, "result": None})
    for more in ([], ["--trust"]):
        assert "its code is not there" in said(["resume", str(folder), *more], capsys)
    assert not (tmp_path / "marker").exists() and "this" not in sys.modules


def test_a_part_of_an_installed_package_needs_trust(received, picture, tmp_path, monkeypatch, capsys):
    site = tmp_path / "site"
    (site / "lab-1.0.dist-info").mkdir(parents=True)
    (site / "lab-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: lab\nVersion: 1.0\n")
    (site / "lab-1.0.dist-info" / "entry_points.txt").write_text("[fedvlm.adapters]\nlab-part = lab_part\n")
    (site / "lab_part.py").write_text(CODE["adapter"])
    monkeypatch.syspath_prepend(str(site))
    folder = received(adapter__name="lab-part")
    assert "would run code: adapter lab-part (of lab 1.0)" in said(["predict", str(folder), picture], capsys)
    assert "lab_part" not in sys.modules
    assert main(["predict", str(folder), picture, "--trust"]) == 0


@pytest.mark.parametrize("form", ["python:{file}:encode", "python:evil_encoder:encode"])
def test_a_python_backbone_is_not_imported(form, received, model, picture, tmp_path, monkeypatch, capsys):
    file = tmp_path / "evil_encoder.py"
    file.write_text(
        f"import pathlib\npathlib.Path({str(tmp_path / 'marker')!r}).write_text('ran')\n"
        "def encode(images): return [[1.0, 2.0]] * len(images)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    name = form.format(file=file)
    for folder in (received(config__backbone=name, backbone__name=name), model(backbone__name=name)):
        text = said(["predict", str(folder), picture], capsys)
        assert "would run code: backbone python:" in text and f"{name[-20:]} (sha " in text  # a long path is shortened
    assert not (tmp_path / "marker").exists()
    assert "fingerprint" in said(["predict", str(folder), picture, "--trust"], capsys)
    assert (tmp_path / "marker").exists()


def test_a_module_that_cannot_be_found_is_never_remembered(tmp_path):
    """One digest for all that is unknown would let the next unknown one run."""
    for name in ("python:sys:encode", "python:no_such_module:encode", f"python:{tmp_path}/none.py:encode"):
        (need,) = trust.backbone_needs(name)
        trust.remember_backbone(name)
        assert need.mark == () and not allowed.known(need)
    (need,) = trust.backbone_needs("python:json.decoder:encode")
    assert "json.decoder" in sys.modules and need.mark


def test_the_code_that_runs_is_the_code_that_was_looked_at(tmp_path):
    """A file that changes between the two is refused; a folder's code is in memory before it is looked at."""
    file = tmp_path / "encoder.py"
    file.write_text("def encode(images): return [[1.0]] * len(images)\n")
    name = f"python:{file}:encode"
    trust.remember_backbone(name)
    file.write_text("raise SystemExit('evil')\n")
    with pytest.raises(FedvlmError, match="changed while it was looked at"):
        backbones.load(name)
    file.write_text("def encode(images): return [[1.0]] * len(images)\n")
    assert backbones.load(name).dim == 1


class Provider:
    """An HTTP server that records what it is asked, and with which headers."""

    def __init__(self, status: int = 401):
        self.asked: list[dict[str, str]] = []
        asked = self.asked

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                asked.append(dict(self.headers))
                self.send_response(status)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = self.server.server_port
        self.url = f"http://127.0.0.1:{self.port}"
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()


@pytest.fixture
def provider() -> Iterator[Provider]:
    made = Provider()
    yield made
    made.server.shutdown()
    made.server.server_close()


def test_an_address_in_a_folder_is_not_contacted_and_gets_no_token(
    provider, received, model, picture, monkeypatch, capsys
):
    monkeypatch.setenv("FEDVLM_TOKEN", "secret")
    run = received(config__backbone=provider.url, backbone__name=provider.url, result=None)
    for words in (["predict", str(run), picture], ["resume", str(run)], ["export", str(run)]):
        assert f"contact {provider.url}" in said(words, capsys)
    folder = model(backbone__name=provider.url)
    assert f"would contact {provider.url}. Nothing" in said(["predict", str(folder), picture], capsys)
    assert provider.asked == []
    for words in (["predict", str(run), picture], ["resume", str(run)], ["predict", str(folder), picture]):
        err = said([*words, "--trust"], capsys)
        assert "no token was sent" in err and f"{allowed.HOSTS}=127.0.0.1:{provider.port}" in err
    assert len(provider.asked) == 3 and all("Authorization" not in headers for headers in provider.asked)


def test_the_token_goes_to_hosts_that_the_user_gave(provider, model, images, monkeypatch, capsys):
    monkeypatch.setenv("FEDVLM_TOKEN", "secret")
    monkeypatch.setenv(allowed.HOSTS, f"example.org, 127.0.0.1:{provider.port + 1}")
    with pytest.raises(FedvlmError, match="no token was sent"):
        backbones.load(provider.url)  # the same host on another port is another host
    monkeypatch.setenv(allowed.HOSTS, f"example.org, 127.0.0.1:{provider.port}")
    with pytest.raises(FedvlmError, match="set the environment variable FEDVLM_TOKEN"):
        backbones.load(provider.url)
    monkeypatch.delenv(allowed.HOSTS)
    said(["run", "fedavg", f"data={images}", f"backbone={provider.url}"], capsys)
    with pytest.raises(FedvlmError, match="401"):
        fedvlm.load(model(backbone__name=provider.url))  # known from now on
    found = [headers.get("Authorization") for headers in provider.asked]
    assert found == [None, "Bearer secret", "Bearer secret", "Bearer secret"]


@pytest.mark.parametrize(
    ("url", "wanted"),
    [
        ("http://Host", "http://host:80"),
        ("https://host/path", "https://host:443"),
        ("https://[::1]:8000/a", "https://[::1]:8000"),
        *(
            (bad, "")
            for bad in ("http://a@b", "http://a\\b", "http://h:p", "http://a b", "http://a\n", "http://", "ftp://a")
        ),
    ],
)
def test_an_address_is_read_in_one_way_only(url, wanted):
    if wanted:
        assert allowed.origin(url) == wanted
    else:
        with pytest.raises(FedvlmError, match="not an address"):
            allowed.origin(url)


def test_a_provider_that_drips_is_late_as_a_whole(monkeypatch):
    """A byte now and then restarted the socket's timeout: such a request never ended."""
    import socket

    monkeypatch.setattr(http, "TIMEOUT", 0.3)
    monkeypatch.setattr(http, "TRIES", 1)
    for head in (b"", b"HTTP/1.0 200 OK\r\nContent-Type: application/json\r\n\r\n"):  # in the head, in the body
        with socket.create_server(("127.0.0.1", 0)) as server:

            def drip(server: socket.socket = server, head: bytes = head) -> None:
                connection, _ = server.accept()
                with connection:
                    connection.recv(4096)
                    try:
                        connection.sendall(head)
                        for _ in range(200):
                            connection.sendall(b"H")
                            time.sleep(0.05)
                    except OSError:
                        pass

            threading.Thread(target=drip, daemon=True).start()
            began = time.monotonic()
            with pytest.raises(FedvlmError, match="no answer"):
                http.Endpoint(f"http://127.0.0.1:{server.getsockname()[1]}")
            assert time.monotonic() - began < 3


def test_paths_and_the_hub_need_trust(received, images, tmp_path, picture, capsys):
    folder = received(result=None)
    assert f"would read {images} (data=)" in said(["resume", str(folder)], capsys)
    for name, says in (
        ("owner/model", "contact the Hugging Face hub for owner/model"),
        ("~/model", f"read {Path.home() / 'model'} (backbone=)"),
        ("onnx:/etc/model.onnx", f"read {Path('/etc/model.onnx').absolute()} (backbone=)"),
        ("\\\\host\\share\\model", "read "),
        ("//host/share", "read "),
    ):
        edited(folder, config__backbone=name)
        assert f"would {says}" in said(["predict", str(folder), picture], capsys), name
    shutil.copytree(backbones.ASSETS / "mini-clip", folder / "clip", ignore=shutil.ignore_patterns("*.md"))
    edited(folder, config__backbone=str(folder / "clip"))  # what lies in the folder itself is free
    assert main(["predict", str(folder), picture]) == 0


@pytest.mark.skipif(sys.platform == "win32", reason="needs symbolic links")
def test_links_out_of_a_folder_need_trust(received, model, picture, tmp_path, capsys):
    (tmp_path / "victim").write_text("precious\n")
    for folder in (received(result=None), model()):
        (folder / "log.txt").unlink(missing_ok=True)
        (folder / "log.txt").symlink_to(tmp_path / "victim")
        assert f"would follow the link log.txt to {tmp_path / 'victim'}" in said(
            ["predict", str(folder), picture], capsys
        )
    assert (tmp_path / "victim").read_text() == "precious\n"


def test_what_the_user_ran_needs_no_word(images, picture, tmp_path, stranger, monkeypatch):
    (tmp_path / "idea.py").write_text(CODE["adapter"])
    words = ["run", "fedavg", f"adapter={tmp_path / 'idea.py'}", f"data={images}", "unseen=noto", "rounds=1"]
    assert main([*words, f"out={tmp_path / 'run'}"]) == 0
    assert {p.stat().st_mode & 0o777 for p in stranger.iterdir()} <= {0o600, 0o666}  # Windows has no such modes
    monkeypatch.setattr(allowed, "_given", set())  # as in another process
    (tmp_path / "idea.py").unlink()
    edited(tmp_path / "run", result=None)
    assert main(["resume", str(tmp_path / "run")]) == 0 and main(["predict", str(tmp_path / "run"), picture]) == 0
    code = tmp_path / "run" / "code" / "adapter" / "idea.py"
    code.write_text(code.read_text() + "x = 1\n")  # the record still says the digest of what the user ran
    with pytest.raises(FedvlmError, match="would run code: adapter"):
        fedvlm.Run(tmp_path / "run").predict(picture)
    code.write_text(CODE["adapter"])
    (code.parent / "torch.py").write_text("raise SystemExit\n")  # what it imports counts too
    with pytest.raises(FedvlmError, match="would run code: adapter"):
        fedvlm.Run(tmp_path / "run").predict(picture)


def test_a_memory_that_cannot_be_used_is_no_obstacle(images, picture, tmp_path, stranger, monkeypatch):
    stranger.write_text("not a folder")
    (tmp_path / "idea.py").write_text(CODE["adapter"] + "# unwritable\n")
    run = fedvlm.run(
        "fedavg", adapter=str(tmp_path / "idea.py"), data=images, unseen="noto", rounds=1, out=tmp_path / "run"
    )
    assert run.predict(picture)  # in this process it is known
    monkeypatch.setattr(allowed, "_given", set())
    with pytest.raises(FedvlmError, match="would run code"):
        run.predict(picture)


@pytest.mark.skipif(not hasattr(os, "getuid"), reason="needs owners of files")
def test_what_another_user_remembered_does_not_count(images, monkeypatch):
    trust.remember(small_setup(images))
    need = allowed.path_need("data", str(images))
    monkeypatch.setattr(allowed, "_given", set())
    assert allowed.known(need)
    mine = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: mine + 1)
    assert not allowed.known(need)


def test_code_is_written_beside_no_other_code(tmp_path):
    """A folder that already holds a module of that name, such as torch.py, would have it imported."""
    (tmp_path / "torch.py").write_text("raise SystemExit\n")
    with pytest.raises(FedvlmError, match=r"holds other code \(torch.py\)"):
        user_code.Code({"idea.py": "import torch\n"}, "idea.py").write(tmp_path)
    assert not (tmp_path / "idea.py").exists()


SETTINGS = [
    {"adapter__settings": {"rank": 3}},
    {"adapter__settings": {"__class__": 1}},
    {"local__settings": {"lr": "fast"}},
    {"local__settings": {"lr": [[1]]}},
    {"local__settings": {"epochs": 1e400}},
    {"merge__settings": {"weights": 7}},
    {"config__rounds": {}},
    {"config__split": "x,y"},
    {"config__threads": None},
    {"config__template": "no place for the class"},
    {"adapter__settings": {"private": ["nosuch"]}},
    {"data__classes": []},
    {"data__classes": ["one"]},
    {"backbone__fingerprint": "0" * 16},
    {"config__backbone": "pixels:999999"},
    {"config__backbone": "object:../../../../etc/passwd"},
    {"config__backbone": "a" * 5000},
    {"config__backbone": "~nosuchuser/x"},
    {"config__backbone": "x\0y"},
]


@pytest.mark.parametrize("changes", SETTINGS, ids=lambda c: next(iter(c)) + "=" + repr(next(iter(c.values())))[:30])
def test_values_in_a_record_are_answered_in_one_sentence(changes, received, picture, capsys):
    said(["predict", str(received(**changes)), picture, "--trust"], capsys)


WRONG = [
    {"clients": "abc"},
    {"clients": [1, 2]},
    {"config__seed": "x"},
    {"config": {}},
    {"data__classes": {"a": 1}},
    {"data__images": "many"},
    {"backbone__dim": None},
    {"adapter__settings": [1]},
    {"adapter__code": 7},
    {"adapter__name": None},
    {"homes": []},
    {"versions": {"a": 1}},
    {"result__last": 3},
    {"result__last": {"loss": 1}},
    {"result__parameters": {"shared": "x"}},
    {"metrics": [{"name": "../../x", "settings": {}}]},
    {"published": {"G": []}},
]


@pytest.mark.parametrize("changes", WRONG, ids=repr)
def test_a_record_of_other_types_is_refused(changes, received, picture, capsys):
    folder = received(**changes)
    for words in (["predict", str(folder), picture], ["compare", str(folder)], ["resume", str(folder)]):
        assert "is damaged or of another version" in said(words, capsys)


EXPORTS = [
    {"format": 9},
    {"classes": "ab"},
    {"classes": []},
    {"classes": ["one"]},
    {"phrases": None},
    {"dim": -1},
    {"dim": "x"},
    {"scale": float("nan")},
    {"adapter": None},
    {"adapter__name": "nosuch"},
    {"adapter__settings": {"nosuch": 1}},
    {"adapter__code": "../../../x.py"},
    {"backbone": "mini-clip"},
    {"backbone__name": 5},
    {"backbone__fingerprint": "other"},
    {"whose": []},
    {"colour": "blue"},
]


@pytest.mark.parametrize("changes", EXPORTS, ids=repr)
def test_a_wrong_export_is_answered_in_one_sentence(changes, model, picture, capsys):
    assert "model" in said(["predict", str(model(**changes)), picture, "--trust"], capsys)


@pytest.mark.parametrize("text", ["", "[]", "7", "[" * 100_000, '{"a":' * 100_000, "\ud800", "{}", '{"format": 2}'])
def test_text_that_is_no_record(text, received, model, picture, capsys):
    for folder, file in ((received(), "run.json"), (model(), "config.json")):
        (folder / file).write_bytes(text.encode("utf-8", "surrogatepass"))
        said(["predict", str(folder), picture], capsys)


def test_a_huge_record_is_not_read(received, model, picture, capsys):
    for folder, file in ((received(), "run.json"), (model(), "config.json")):
        os.truncate(folder / file, LARGEST + 1)
        assert "larger than 64 MiB" in said(["predict", str(folder), picture], capsys)


def tamper_state(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    """Saved again as fedvlm saves it: a checksum keeps nobody from writing another one."""
    run = RunFolder(folder)
    state, round = run.load()
    change(state.shared)
    run.save(state, round)


def tamper_export(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(folder / "adapter.safetensors")
    change(tensors)
    save_file(tensors, folder / "adapter.safetensors")


def other_name(tensors: dict[str, torch.Tensor]) -> None:
    name = min(tensors)
    tensors[f"{name}x"] = tensors.pop(name)


def other_shape(tensors: dict[str, torch.Tensor]) -> None:
    tensors.update({k: v.flatten()[:3].contiguous() for k, v in tensors.items()})


def other_type(tensors: dict[str, torch.Tensor]) -> None:
    tensors.update({k: v.half() for k, v in tensors.items()})


def not_finite(tensors: dict[str, torch.Tensor]) -> None:
    for value in tensors.values():
        value.fill_(torch.nan)


@pytest.mark.parametrize("change", [other_name, other_shape, other_type, not_finite, dict.clear])
def test_parameters_are_checked(change, received, model, picture, capsys):
    run, folder = received(), model()
    tamper_state(run, change)
    tamper_export(folder, change)
    assert "state.safetensors holds" in said(["predict", str(run), picture], capsys)
    err = said(["predict", str(folder), picture], capsys)
    assert "adapter.safetensors holds" in err or change is dict.clear


def test_another_backbone_is_refused_everywhere(received, model, picture, images, tmp_path, capsys):
    """A tokenizer that exchanges two words exchanged two classes, and the fingerprint did not tell."""
    clip = tmp_path / "clip"
    shutil.copytree(backbones.ASSETS / "mini-clip", clip)
    assert backbones.load(str(clip)).fingerprint == backbones.load("mini-clip").fingerprint == "f5529f9e04cb513b"
    about = json.loads((clip / "tokenizer.json").read_text(encoding="utf-8"))
    words = about["model"]["vocab"]
    words["bird</w>"], words["clock</w>"] = words["clock</w>"], words["bird</w>"]
    (clip / "tokenizer.json").write_text(json.dumps(about), encoding="utf-8")
    folder, out = model(), str(tmp_path / "out")
    run = received(config__backbone=str(clip), result=None)
    for words in (["predict", str(run), picture], ["export", str(run), "--out", out], ["resume", str(run)]):
        assert "trained on" in said([*words, "--trust"], capsys)
    for use in (
        lambda: fedvlm.load(folder, backbone=str(clip)),
        lambda: fedvlm.Run(run).predictor(backbone=str(clip)),
        lambda: fedvlm.Run(run).export(out, backbone=str(clip)),
    ):
        with pytest.raises(FedvlmError, match="its fingerprint differs"):
            use()


def test_records_are_read_as_they_are_written(done, exported):
    text = (exported / "config.json").read_text()
    assert json.loads(ExportRecord.from_json(text).to_json()) == json.loads(text)
    assert RunRecord.from_json(done.record.to_json()) == done.record
