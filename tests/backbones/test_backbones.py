"""Every kind of frozen encoder: its output is right, and wrong input is an error that says what to do."""

from __future__ import annotations

import http.client
import json
import pickle
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BytesIO
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import pytest
import torch
from helpers import all_answered
from PIL import Image
from safetensors.numpy import load as unpacked
from safetensors.numpy import save as packed
from transformers.image_utils import OPENAI_CLIP_MEAN, OPENAI_CLIP_STD

from fedvlm.backbones import load
from fedvlm.backbones.base import checked_embeddings
from fedvlm.backbones.http import BINARY, Endpoint, _png
from fedvlm.backbones.onnx import CLIP_NORMALISATION
from fedvlm.data import images as decoder
from fedvlm.data.encode_server import serve
from fedvlm.errors import FedvlmError

COLOURS = [(200, 30, 90), (10, 240, 40), (0, 0, 0), (90, 90, 255), (255, 128, 1)]
INFO = {"name": "fake", "fingerprint": "f", "dim": 2, "scale": 9, "texts": False}
INFO |= {"limit_images": 8, "limit_bytes": 9999}


@pytest.fixture(autouse=True)
def no_proxy_and_no_token(monkeypatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.delenv("FEDVLM_TOKEN", raising=False)


@pytest.fixture(scope="module")
def clip():
    return load("mini-clip")


def pictures(count: int = 5) -> list[Image.Image]:
    rng = np.random.default_rng(3)
    return [Image.fromarray(rng.integers(0, 256, (20 + 7 * i, 31, 3), dtype=np.uint8)) for i in range(count)]


def close(a: torch.Tensor | None, b: torch.Tensor | None, within: float = 1e-6) -> bool:
    assert a is not None and b is not None and a.dtype == b.dtype == torch.float32
    return a.shape == b.shape and float((a - b).abs().max()) <= within


class Means:
    """A small encoder (mean colour) that records the size of each batch."""

    name, fingerprint, dim, scale, black_box = "means", "1", 3, 7.0, True

    def __init__(self):
        self.batches: list[int] = []

    def images(self, images):
        self.batches.append(len(images))
        return checked_embeddings(
            [np.asarray(i, dtype=np.float32).mean((0, 1)) + 1 for i in images], len(images), "means"
        )

    def texts(self, phrases):
        return None


# checked_embeddings


def test_checked_embeddings_normalises_any_container():
    expected = torch.tensor([[0.6, 0.8], [1.0, 0.0]])
    rows = [[3.0, 4.0], [5.0, 0.0]]
    backwards = np.array(rows[::-1])[::-1]  # a negative stride, which torch does not support
    for found in (rows, np.array(rows), backwards, torch.tensor(rows).half(), list(torch.tensor(rows))):
        assert close(checked_embeddings(found, 2, "x"), expected)
    assert close(checked_embeddings(np.array([[3e300, 4e300], [1e-300, 0.0]]), 2, "x"), expected)


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (np.ones((3, 4)), "shape"),
        (np.ones(4), "shape"),
        (np.ones((2, 2, 2)), "shape"),
        (np.ones((2, 0)), "shape"),
        (np.ones((2, 5)), r"\(2, 4\)"),
        (np.ones((2, 4), dtype=np.int64), "floating"),
        (np.array([[1.0] * 4, [np.nan] * 4]), "embedding 1 "),
        (np.array([[np.inf] * 4, [1.0] * 4]), "embedding 0 "),
        (np.array([[1.0] * 4, [0.0] * 4]), "all zero"),
        ([[1.0], [1.0, 2.0]], "list"),
        (None, "NoneType"),
        ("abc", "str"),
    ],
)
def test_checked_embeddings_refuses(found, message):
    with pytest.raises(FedvlmError, match=message) as caught:
        checked_embeddings(found, 2, "backbone=this", 4)
    assert "backbone=this" in str(caught.value)


# Hugging Face


def test_mini_clip(clip):
    assert clip.dim == 256 and clip.scale == pytest.approx(20.5, abs=0.1) and not clip.black_box
    images, texts = clip.images(pictures(2)), clip.texts(["a photo of a cat", "a drawing of a tree"])
    for found in (images, texts):
        assert found.shape == (2, 256) and found.dtype == torch.float32
        assert torch.allclose(found.norm(dim=-1), torch.ones(2), atol=1e-5)
    assert not close(texts[:1], texts[1:], 1e-3) and not close(images[:1], images[1:], 1e-3)


def test_padding_changes_no_text(clip):
    alone = clip.texts(["a cat"])
    beside = clip.texts(["a cat", "a very long phrase about a great many animals in a green field under the sun"])
    assert close(alone, beside[:1], 1e-5)


def test_the_error_for_a_hub_name_offline_says_what_to_do(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)  # read once, at import
    with pytest.raises(FedvlmError, match=r"nobody/nothing-here.*backbone=path/to/model"):
        load("nobody/nothing-here")


@pytest.mark.parametrize("name", ["./not/there/at-all", "not-there", "/not/there"])
def test_the_error_for_a_missing_folder_lists_the_alternatives(name):
    with pytest.raises(FedvlmError, match=r"no such folder.*mini-clip"):
        load(name)


def test_a_folder_without_a_model(tmp_path):
    with pytest.raises(FedvlmError, match=r"config\.json"):
        load(str(tmp_path))


def test_a_vision_only_model(tmp_path):
    from transformers import ViTConfig, ViTModel

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    ViTModel(ViTConfig(**sizes, image_size=32, patch_size=16), add_pooling_layer=False).save_pretrained(tmp_path)
    own = {"image_processor_type": "ViTImageProcessor", "size": {"height": 32, "width": 32}, "image_mean": [0.5] * 3}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(own | {"image_std": [0.5] * 3, "do_normalize": True}))
    backbone = load(str(tmp_path))
    found = backbone.images(pictures(3))
    assert found.shape == (3, backbone.dim) == (3, 32) and backbone.texts(["a cat"]) is None
    assert torch.allclose(found.norm(dim=-1), torch.ones(3), atol=1e-5)


# ONNX


def sidecar(folder: Path, size: int) -> None:
    config = CLIP_NORMALISATION | {"size": {"shortest_edge": size}, "crop_size": {"height": size, "width": size}}
    (folder / "preprocessor_config.json").write_text(json.dumps(config))


WEIGHT = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)


def encoder(file: Path, shape=("n", 3, 32, 32), weight=WEIGHT, flat=True, inputs=1) -> str:
    """Mean colour times a matrix."""
    onnx = pytest.importorskip("onnx")
    h = onnx.helper
    nodes = [h.make_node("GlobalAveragePool", ["pixels"], ["mean"])]
    if flat:
        nodes += [h.make_node("Flatten", ["mean"], ["flat"]), h.make_node("Gemm", ["flat", "w"], ["out"], transB=1)]
    taken = [h.make_tensor_value_info(n, 1, list(shape)) for n in ("pixels", "more")[:inputs]]
    given = h.make_tensor_value_info("out" if flat else "mean", 1, None)
    graph = h.make_graph(nodes, "g", taken, [given], [onnx.numpy_helper.from_array(weight, "w")])
    onnx.save(h.make_model(graph, opset_imports=[h.make_opsetid("", 17)], ir_version=8), file)
    return f"onnx:{file}"


def expected(colours=COLOURS) -> torch.Tensor:
    pixels = (np.array(colours) / 255 - OPENAI_CLIP_MEAN) / OPENAI_CLIP_STD
    found = torch.from_numpy(pixels @ WEIGHT.T)
    return (found / found.norm(dim=1, keepdim=True)).float()


def solid(colours=COLOURS) -> list[Image.Image]:
    return [Image.new("RGB", (50, 40 + 9 * i), c) for i, c in enumerate(colours)]


@pytest.mark.parametrize("shape", [("n", 3, 32, 32), ("n", 3, 24, 32), (2, 3, 32, 32), (1, 3, 32, 32)])
def test_onnx_equals_the_closed_form(tmp_path, shape):
    backbone = load(encoder(tmp_path / "m.onnx", shape))
    assert close(backbone.images(solid()), expected(), 1e-5)
    assert backbone.images([]).shape == (0, 4)
    assert (backbone.dim, backbone.scale, backbone.black_box, backbone.texts(["a"])) == (4, 20.0, True, None)


def test_onnx_sidecars(tmp_path):
    name = encoder(tmp_path / "m.onnx", ("n", 3, "h", "w"))
    with pytest.raises(FedvlmError, match=r"preprocessor_config\.json"):
        load(name)
    sidecar(tmp_path, 16)
    first = load(name)
    assert close(first.images(solid()), expected(), 1e-5)
    sidecar(tmp_path, 24)
    (tmp_path / "classes.json").write_text('{"scale": 33.5}')
    second = load(name)
    assert second.scale == 33.5 and second.fingerprint != first.fingerprint
    (tmp_path / "m.onnx.data").write_bytes(b"weights kept outside the file")
    assert load(name).fingerprint != second.fingerprint


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("classes.json", '{"scale": -1}', "scale=-1"),
        ("classes.json", "[]", "JSON object"),
        ("classes.json", "{", r"classes\.json is not readable"),
        ("preprocessor_config.json", '{"size": {"height": 32, "width": 32}}', "lacks image_mean, image_std, crop_size"),
        (
            "preprocessor_config.json",
            json.dumps(CLIP_NORMALISATION | {"size": "big", "crop_size": 3}),
            "preprocessor_config",
        ),
        (
            "preprocessor_config.json",
            json.dumps(CLIP_NORMALISATION | {"size": 16, "crop_size": 16}),
            "preprocessor_config",
        ),
    ],
)
def test_onnx_bad_sidecars(tmp_path, file, text, message):
    name = encoder(tmp_path / "m.onnx")
    (tmp_path / file).write_text(text)
    with pytest.raises(FedvlmError, match=message):
        load(name)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"flat": False}, "first output"),
        ({"weight": np.full((4, 3), np.nan, np.float32)}, "finite"),
        ({"shape": ("n", 32, 32, 3), "flat": False}, "image tower"),
        ({"shape": ("n", 1, 32, 32), "flat": False}, "image tower"),
        ({"inputs": 2}, "image tower"),
    ],
)
def test_onnx_bad_models(tmp_path, options, message):
    with pytest.raises(FedvlmError, match=message):
        load(encoder(tmp_path / "m.onnx", **options))


def test_onnx_bad_files(tmp_path, monkeypatch):
    with pytest.raises(FedvlmError, match="no such file"):
        load("onnx:not-there.onnx")
    (tmp_path / "m.onnx").write_bytes(b"not a model")
    with pytest.raises(FedvlmError, match="cannot load"):
        load(str(tmp_path / "m.onnx"))
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(FedvlmError, match=r"pip install \"fedvlm\[onnx\]\""):
        load(str(tmp_path / "m.onnx"))


# a Python function

ENCODE = """
import numpy as np
def encode(images):
    return np.stack([np.asarray(i, dtype=float).mean((0, 1)) + 1 for i in images])
def texts(phrases):
    return [[float(len(p)), 1.0, 0.0] for p in phrases]
def wrong(images):
    return np.ones((7, 3))
def broken(images):
    raise KeyError("weights")
"""


def test_a_function_from_a_file(tmp_path, monkeypatch):
    (tmp_path / "enc.py").write_text(ENCODE)
    monkeypatch.chdir(tmp_path)
    plain = load("python:./enc.py:encode")
    assert (plain.dim, plain.scale, plain.black_box, plain.texts(["a"])) == (3, 20.0, True, None)
    assert close(plain.images(solid()), Means().images(solid()))
    assert plain.images([]).shape == (0, 3)
    (tmp_path / "enc.py").write_text(ENCODE + "encode.scale, encode.texts = 5, texts\n")
    more = load("python:./enc.py:encode")
    assert more.scale == 5 and more.fingerprint != plain.fingerprint
    assert close(more.texts(["", "abc"]), torch.tensor([[0, 1, 0], [0.9486833, 0.31622777, 0]]))
    assert close(more.images(solid()), plain.images(solid()), 0)


def test_a_function_from_a_module(tmp_path, monkeypatch):
    (tmp_path / "some_encoder.py").write_text(ENCODE + "encode.fingerprint = 'v1'\n")
    monkeypatch.syspath_prepend(tmp_path)
    first = load("python:some_encoder:encode")
    sys.modules["some_encoder"].encode.fingerprint = "v2"
    assert load("python:some_encoder:encode").fingerprint != first.fingerprint
    del sys.modules["some_encoder"]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("encode", "module:function"),
        ("not_a_module_at_all:encode", "ModuleNotFoundError"),
        ("FILE:nothing", "no function 'nothing'"),
        ("FILE:wrong", r"shape \(7, 3\)"),
        ("FILE:broken", r"enc\.py:10 \(KeyError"),
        ("gone.py:encode", "no such file"),
    ],
)
def test_invalid_functions(tmp_path, spec, message):
    (tmp_path / "enc.py").write_text(ENCODE)
    spec = spec.replace("FILE", str(tmp_path / "enc.py"))
    with pytest.raises(FedvlmError, match=message) as caught:
        load(f"python:{spec}")
    assert spec.split(":")[0] in str(caught.value)


# HTTP: our server


def ask(url: str, method: str, path: str, body: bytes | None = None, **headers: str) -> tuple[int, dict]:
    """One request without Endpoint, so that invalid requests can be sent."""
    wire = http.client.HTTPConnection(urlsplit(url).netloc, timeout=10)
    wire.request(method, path, body, {k.replace("_", "-"): v for k, v in headers.items()})
    reply = wire.getresponse()
    found = reply.read()
    wire.close()
    decode = json.loads if reply.headers.get_content_type() == "application/json" else unpacked
    return reply.status, decode(found)


def png(image: Image.Image, format: str = "PNG") -> np.ndarray:
    stream = BytesIO()
    image.save(stream, format)
    return np.frombuffer(stream.getvalue(), np.uint8)


def test_the_round_trip_equals_direct_encoding(clip):
    ready: list[str] = []
    images = [*pictures(), *(pictures()[2].convert(mode) for mode in ("1", "L", "P", "CMYK"))]
    images.append(Image.new("RGBA", (40, 30), (9, 99, 200, 40)))
    with serve(clip, on_ready=ready.append, texts=True, limit_images=3) as running:
        assert ready == [running.url]
        remote = load(running.url)
        assert (remote.dim, remote.scale, remote.black_box, remote.name) == (clip.dim, clip.scale, True, running.url)
        assert close(remote.images(images), clip.images(images))
        assert close(remote.texts(["a cat", "naïve “dog”", "x", "y"]), clip.texts(["a cat", "naïve “dog”", "x", "y"]))
        assert load(running.url + "/").fingerprint == remote.fingerprint != clip.fingerprint
    with pytest.raises(FedvlmError, match="3 times"):
        remote.images(images)


def test_requests_keep_to_the_limits():
    direct, images = Means().images(pictures()), pictures()
    size = max(len(png(i)) for i in images)
    for limits, batches in (({"limit_images": 2}, [2, 2, 1]), ({"limit_bytes": 2 * size}, None)):
        backbone = Means()
        with serve(backbone, **limits) as running:
            remote = Endpoint(running.url)
            assert close(remote.images(images), direct)
            assert remote.images([]).shape == (0, 3) and remote.texts(["a"]) is None
            assert backbone.batches[1:] == batches if batches else len(backbone.batches) > 2
    with serve(Means(), limit_bytes=999) as running, pytest.raises(FedvlmError, match=r"image 0 .*limit_bytes is 999"):
        Endpoint(running.url).images(images)


def test_exif_data_is_not_sent():
    exif, stream = Image.Exif(), BytesIO()
    exif[0x010E] = "taken at home"
    solid()[0].save(stream, "JPEG", exif=exif)
    assert b"at home" in stream.getvalue() and b"at home" not in _png(Image.open(stream))


def test_many_clients_at_once():
    with serve(Means()) as running, ThreadPoolExecutor(6) as pool:
        remote = Endpoint(running.url)
        found = list(pool.map(lambda i: remote.images([i]), solid() * 4))
    assert close(torch.cat(found), Means().images(solid() * 4))


def test_the_token(monkeypatch):
    with serve(Means(), token="right-one") as running:
        monkeypatch.setenv("FEDVLM_TOKEN_HOSTS", urlsplit(running.url).netloc)
        for given in (None, "wrong-one"):
            if given:
                monkeypatch.setenv("FEDVLM_TOKEN", given)
            with pytest.raises(FedvlmError, match=r"401.*FEDVLM_TOKEN") as caught:
                Endpoint(running.url)
            assert "-one" not in str(caught.value)
        assert ask(running.url, "POST", "/", bytes(3 << 20), Authorization="Bearer wrong")[0] == 401
        monkeypatch.setenv("FEDVLM_TOKEN", "right-one\n")
        remote = Endpoint(running.url)
        assert close(remote.images(solid()), Means().images(solid()))
        assert "right-one" not in str(vars(remote))
    monkeypatch.setenv("FEDVLM_TOKEN", "secret\nline")
    with pytest.raises(FedvlmError, match="FEDVLM_TOKEN") as caught:
        Endpoint(running.url)
    assert "secret" not in str(caught.value)


def test_serve_refuses():
    for host in ("0.0.0.0", "::"):
        for token in (None, ""):
            with pytest.raises(FedvlmError, match="token"):
                serve(Means(), host=host, token=token)
    with pytest.raises(FedvlmError, match="no text tower"):
        serve(Means(), texts=True)
    with serve(Means()) as running, pytest.raises(FedvlmError, match="port=0"):
        serve(Means(), port=urlsplit(running.url).port)
    with pytest.raises(FedvlmError, match="port=0"):
        serve(Means(), port=65536)
    with pytest.raises(FedvlmError, match=r"host=127\.0\.0\.1"):
        serve(Means(), host="not a host")


@pytest.fixture(scope="module")
def provider():
    with serve(Means(), limit_images=2, limit_bytes=300_000) as running:
        yield running


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (400, b"garbage"),
        (400, pickle.dumps({"0": b"x"})),
        (400, (1 << 60).to_bytes(8, "little") + b"{}"),
        (400, packed({"a": png(solid()[0])})),
        (400, packed({"0": png(solid()[0], "JPEG")})),
        (400, packed({"0": png(pictures()[0])[:-300]})),
        (400, packed({"0": np.zeros((0,), np.uint8)})),
        (400, packed({})),
        (413, packed({str(i): png(im) for i, im in enumerate(solid()[:3])})),
        (413, packed({"0": png(Image.new("1", (9000, 9000)))})),
        (413, bytes(400_000)),
        (411, b""),
    ],
)
def test_the_server_refuses_bodies(provider, status, body):
    found, said = ask(provider.url, "POST", "/", body)
    assert found == status and isinstance(said["error"], str)
    assert ask(provider.url, "POST", "/", packed({"0": png(solid()[0])}))[0] == 200


def test_the_server_refuses_requests(provider):
    assert ask(provider.url, "GET", "/nothing")[0] == 404
    assert ask(provider.url, "POST", "/texts", b"{}")[0] == 404
    assert ask(provider.url, "PUT", "/", b"{}")[0] == 501
    # the length is checked before any byte of the body is read
    assert ask(provider.url, "POST", "/", None, Content_Length=str(1 << 50))[0] == 413
    assert ask(provider.url, "POST", "/", None, Content_Length="-1")[0] == 411


def test_the_server_refuses_phrases(clip):
    with serve(clip, texts=True) as running:
        for body in (b"{", b"[]", b'{"phrases": 3}', b'{"phrases": [3]}', b'{"phrases": []}', b"[" * 99999):
            assert ask(running.url, "POST", "/texts", body)[0] == 400


def test_images_are_decoded_in_batches_of_limited_size(monkeypatch):
    backbone = Means()
    monkeypatch.setattr(decoder, "PIXELS", 5000)
    with serve(backbone) as running:
        assert close(Endpoint(running.url).images(solid()), Means().images(solid()))
    assert backbone.batches[1:] == [2, 1, 1, 1]


def test_clients_do_not_see_the_message_of_a_failing_encoder(caplog):
    secret = "hunter2"

    class Failing(Means):
        def images(self, images):
            if images[0].width != 64:
                raise RuntimeError(secret)
            return super().images(images)

    with serve(Failing()) as running:
        status, said = ask(running.url, "POST", "/", packed({"0": png(solid()[0])}))
        all_answered(running)
    assert status == 500 and secret not in str(said)
    assert "RuntimeError" in caplog.text and "hunter2" not in caplog.text


# HTTP: servers of others


@contextmanager
def fake(*replies: tuple[int, str, bytes, dict], info: dict | bytes = INFO) -> Iterator[tuple[str, list[str]]]:
    """Answers /info, then each POST with the next reply."""
    asked: list[str] = []
    queue = list(replies)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            body = info if isinstance(info, bytes) else json.dumps(info).encode()
            self.answer(200, "application/json", body, {})

        def do_POST(self):
            self.rfile.read(int(self.headers["Content-Length"]))
            self.answer(*queue.pop(0))

        def answer(self, status, kind, body, headers):
            asked.append(self.path)
            self.send_response(status)
            for key, value in ({"Content-Type": kind, "Content-Length": str(len(body))} | headers).items():
                self.send_header(key, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as running:
        threading.Thread(target=running.serve_forever, args=(0.05,), daemon=True).start()
        yield f"http://127.0.0.1:{running.server_port}", asked
        running.shutdown()


def rows(array: object, dtype: type = np.float32) -> bytes:
    return packed({"embeddings": np.array(array, dtype=dtype)})


class Exploit:
    def __reduce__(self):
        return (Path.touch, (Path("pickle-was-run"),))


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (rows([[1, np.nan]]), "not finite"),
        (rows([[0, 0]]), "all zero"),
        (rows([[1, 2], [3, 4]]), r"shape \(2, 2\)"),
        (rows([[1, 2, 3]]), r"shape \(1, 3\)"),
        (rows([1, 2]), "shape"),
        (rows([[1, 2]], np.float64), "float64"),
        (packed({"other": np.ones((1, 2), np.float32)}), "'embeddings'"),
        (pickle.dumps(Exploit()), "not safetensors"),
        (rows(np.ones((999, 2))), "larger than"),
        (b"", "not safetensors"),
    ],
)
def test_bad_replies(body, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with fake((200, BINARY, body, {})) as (url, _), pytest.raises(FedvlmError, match=message) as caught:
        Endpoint(url).images(solid()[:1])
    assert url in str(caught.value) and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *[("dim", 0), ("dim", "2"), ("dim", 1 << 40), ("scale", float("nan")), ("scale", True), ("scale", 10**400)],
        *[("limit_images", 0), ("limit_bytes", -1), ("name", ""), ("fingerprint", 3), ("texts", "yes")],
    ],
)
def test_bad_info(key, value):
    with fake(info=INFO | {key: value}) as (url, _), pytest.raises(FedvlmError, match=f"info says {key}="):
        Endpoint(url)


@pytest.mark.parametrize(("body", "message"), [(b"<html>", "not JSON"), (b"[]", "says name"), (bytes(99999), "larger")])
def test_invalid_info(body, message):
    with fake(info=body) as (url, _), pytest.raises(FedvlmError, match=message):
        Endpoint(url)


GOOD = (200, BINARY, rows([[3, 4]]), {})


@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_busy_provider_is_retried(status):
    busy = (status, "text/plain", b"", {"Retry-After": "0"})
    with fake(busy, busy, GOOD) as (url, asked):
        assert close(Endpoint(url).images(solid()[:1]), torch.tensor([[0.6, 0.8]]))
    assert asked == ["/info", "/", "/", "/"]


def test_retries_are_limited():
    busy = (503, "application/json", b'{"error": "lunch\\u001b[31m"}', {})
    with fake(*[busy] * 9) as (url, asked), pytest.raises(FedvlmError, match=r"503 \(lunch\?\[31m\), 3 times"):
        Endpoint(url).images(solid()[:1])
    assert len(asked) == 4
    late = (503, "text/plain", b"", {"Retry-After": "60"})
    with fake(late, GOOD) as (url, asked), pytest.raises(FedvlmError, match="60 s"):
        Endpoint(url).images(solid()[:1])
    assert len(asked) == 2


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        ((403, "text/html", b"", {}), "403.*FEDVLM_TOKEN"),
        ((413, "application/json", b'{"error": "too big"}', {}), r"413 \(too big\).*smaller"),
        ((404, "text/html", b"", {}), "404.*encode-server"),
        ((200, "text/html", b"<html>", {}), "text/html.*encode-server"),
    ],
)
def test_refused_requests_are_not_retried(reply, message):
    with fake(reply, GOOD) as (url, asked), pytest.raises(FedvlmError, match=message):
        Endpoint(url).images(solid()[:1])
    assert len(asked) == 2


def test_redirects_are_not_followed(monkeypatch):
    monkeypatch.setenv("FEDVLM_TOKEN", "right-one")
    with fake() as (elsewhere, visits), fake((302, "text/html", b"", {"Location": elsewhere})) as (url, _):
        with pytest.raises(FedvlmError, match=f"302.*{elsewhere}"):
            Endpoint(url).images(solid()[:1])
        assert visits == []


@pytest.mark.parametrize("url", ["http://me:hunter2@host", "https://host/?token=hunter2", "ftp://host", "http://h:p"])
def test_invalid_addresses(url):
    with pytest.raises(FedvlmError) as caught:
        Endpoint(url)
    assert "hunter2" not in str(caught.value)
