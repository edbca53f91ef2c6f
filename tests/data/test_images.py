"""The decoder of the client and of the encode server: what it bounds, what it leaves as it is; and the server's bounds."""

from __future__ import annotations

import http.client
import io
import json
import socket
import struct
import threading
import time
import warnings
import weakref
import zlib
from urllib.parse import urlsplit

import numpy as np
import pytest
import torch
from corpus import IMAGES, changed, chunk, encoded, good_images, many_scans, png
from helpers import all_answered
from PIL import Image
from safetensors.numpy import load as unpacked
from safetensors.numpy import save as packed

from fedvlm.backbones.http import Endpoint
from fedvlm.data import encode_server as server
from fedvlm.data import images
from fedvlm.data.encode_server import serve
from fedvlm.data.formats.arrays import as_image
from fedvlm.data.images import BadImage, Unreadable, decode
from fedvlm.data.pool import image_pool
from fedvlm.data.source import open_source
from fedvlm.errors import FedvlmError


def plainly(data: bytes) -> Image.Image:
    """Pillow's decoding on white, without any bound."""
    image = Image.open(io.BytesIO(data))
    if image.mode in ("RGBA", "LA", "PA") or (image.mode == "P" and "transparency" in image.info):
        flat = Image.new("RGBA", image.size, "white")
        flat.alpha_composite(image.convert("RGBA"))
        image = flat
    return image.convert("RGB")


def see_through(form: str, mode: str, **options: object) -> bytes:
    values = np.random.default_rng(1).integers(0, 256, (31, 47, len(mode)), dtype=np.uint8)
    stream = io.BytesIO()
    Image.fromarray(values if len(mode) > 2 else values[..., : len(mode)], mode).save(stream, form, **options)
    return stream.getvalue()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    "data",
    [
        *(encoded(form, (227, 227), "RGB") for form in ("JPEG", "PNG", "BMP", "GIF", "WEBP", "TIFF", "PPM")),
        encoded("JPEG", (2500, 1700), "RGB", progressive=True),
        encoded("JPEG", (300, 200), "CMYK"),
        encoded("JPEG", (300, 200), "L"),
        encoded("TIFF", (300, 200), "RGB", compression="tiff_lzw"),
        encoded("PNG", (100, 1)),
        see_through("PNG", "RGBA"),
        see_through("PNG", "LA"),
        see_through("WEBP", "RGBA", lossless=True),
        encoded("PNG", mode="P", transparency=3),
    ],
)
def test_ordinary_images_are_decoded_as_ever(data):
    found, expected = decode(data), plainly(data)
    assert (found.mode, found.size) == ("RGB", expected.size) and found.tobytes() == expected.tobytes()


@pytest.mark.parametrize("form", ["GIF", "WEBP", "PNG", "TIFF"])
def test_of_several_frames_the_first_is_read(form):
    frames = [Image.new("RGB", (20, 10), (k * 100, 0, 255 - k * 100)) for k in range(3)]
    stream = io.BytesIO()
    lossless = {"lossless": True} if form == "WEBP" else {}
    frames[0].save(stream, form, save_all=True, append_images=frames[1:], **lossless)
    assert Image.open(io.BytesIO(stream.getvalue())).n_frames == 3
    assert decode(stream.getvalue()).tobytes() == frames[0].tobytes()


def test_ordinary_scans_are_few():
    found = [encoded("JPEG", mode=m, progressive=p) for m in ("L", "RGB", "CMYK") for p in (False, True)]
    assert {len(images.SCAN.findall(data)) for data in found} <= set(range(1, 19))


@pytest.mark.parametrize(
    "error",
    [
        *(MemoryError, RecursionError, OverflowError, ZeroDivisionError, ValueError, TypeError, KeyError, IndexError),
        *(EOFError, SyntaxError, OSError, struct.error, zlib.error, AssertionError, Image.DecompressionBombError),
        *(Image.DecompressionBombWarning, UserWarning, NotImplementedError, AttributeError, UnicodeDecodeError),
    ],
)
@pytest.mark.parametrize("where", ["open", "load"])
def test_whatever_a_decoder_raises_is_a_bad_image(monkeypatch, error, where):
    def fail(*_: object, **__: object) -> None:
        raise error("utf-8", b"", 0, 1, "x") if error is UnicodeDecodeError else error("x")

    monkeypatch.setattr(Image if where == "open" else Image.Image, where, fail)
    if where == "load":
        monkeypatch.setattr("PIL.ImageFile.ImageFile.load", fail)
        monkeypatch.setattr("PIL.PngImagePlugin.PngImageFile.load", fail)
    with pytest.raises(BadImage, match=r"not a readable image|more than"):
        decode(png(8, 8, chunk(b"IDAT", zlib.compress(bytes(72)))))


def test_an_interruption_is_not_a_bad_image(monkeypatch):
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Image, "open", interrupt)
    with pytest.raises(KeyboardInterrupt):
        decode(encoded("PNG"))


def test_pillows_warning_about_size_is_not_shown():
    data = encoded("PNG", (9_500, 9_500), "1")  # between what we refuse and what Pillow refuses
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        with pytest.raises(BadImage, match="9500×9500 pixels, more than 64,000,000"):
            decode(data)
        assert [str(w.message) for w in seen] == []


def test_an_unreadable_file_says_why_it_is_empty():
    gone = Unreadable("cannot be read (Permission denied)")
    assert gone == b"" and isinstance(gone, bytes)
    with pytest.raises(BadImage, match="Permission denied"):
        decode(gone)


def test_no_program_is_started_for_a_file(monkeypatch, tmp_path):
    """Pillow decodes EPS by Ghostscript."""
    monkeypatch.setattr("subprocess.Popen", None)
    monkeypatch.setattr("subprocess.check_call", None)
    IMAGES["postscript.png"][0](tmp_path / "x.png")
    with pytest.raises(BadImage, match="UnidentifiedImageError"):
        decode((tmp_path / "x.png").read_bytes())


class Means:
    """The mean colour as an embedding; keeps weak references to the images of all calls."""

    name, fingerprint, dim, scale, black_box = "means", "0123456789abcdef", 3, 8.0, True

    def __init__(self) -> None:
        self.calls: list[list[weakref.ref[Image.Image]]] = []
        self.most_pixels = 0

    def images(self, images):
        alive = [i for call in self.calls for r in call if (i := r()) is not None]
        self.most_pixels = max(self.most_pixels, sum(i.width * i.height for i in (*alive, *images)))
        self.calls.append([weakref.ref(i) for i in images])
        found = [torch.tensor(i.convert("RGB").resize((1, 1)).getpixel((0, 0))).float() + 1 for i in images]
        return torch.nn.functional.normalize(torch.stack(found), dim=1)

    def texts(self, phrases):
        return torch.ones(len(phrases), 3)


def test_few_large_images_are_in_memory_at_once(tmp_path, monkeypatch):
    root = good_images(tmp_path / "pets")
    for k in range(20):
        Image.new("RGB", (40, 30), (k * 10, 9, 9)).save(root / "cat" / f"large{k}.png")
    monkeypatch.setattr(images, "PIXELS", 4 * 40 * 30)
    model = Means()
    pool = image_pool(open_source(str(root)), model, "{}")
    assert pool.skipped == {} and len(pool.x) == 24
    assert model.most_pixels <= images.PIXELS + 40 * 30 and len(model.calls) >= 4
    monkeypatch.undo()
    whole = image_pool(open_source(str(root)), replaced := Means(), "{}")
    assert torch.equal(whole.x, pool.x) and replaced.calls == []


def test_damaged_objects_are_one_sentence():
    lazily = Image.open(io.BytesIO(encoded("BMP", (300, 200))[:900]))
    for one in (lazily, np.zeros((0, 4, 3), np.uint8), np.zeros((4, 4, 5), np.uint8), np.full((2, 2, 3), np.nan)):
        with pytest.raises(FedvlmError, match="image"):
            as_image(one)


# The encode server


def body(*files: bytes) -> bytes:
    return packed({str(k): np.frombuffer(f, np.uint8) for k, f in enumerate(files)})


def ask(url: str, path: str, data: bytes | None = None, **headers: str) -> tuple[int, dict, dict[str, str]]:
    wire = http.client.HTTPConnection(urlsplit(url).netloc, timeout=10)
    wire.request("GET" if data is None else "POST", path, data, headers)
    reply = wire.getresponse()
    said = reply.read()
    wire.close()
    kind = reply.headers.get_content_type()
    return reply.status, json.loads(said) if kind == "application/json" else unpacked(said), dict(reply.headers)


def raw(url: str) -> socket.socket:
    place = urlsplit(url)
    return socket.create_connection((place.hostname, place.port), timeout=10)


GOOD = encoded("PNG", (20, 10))


def scans() -> bytes:
    class Kept:
        def write_bytes(self, data: bytes) -> None:
            self.data = data

    many_scans(kept := Kept())  # type: ignore[arg-type]
    return kept.data


@pytest.mark.parametrize(
    ("status", "file", "words"),
    [
        (413, encoded("PNG", (60_000, 1), "1"), "one side is more than 100 times"),
        (413, encoded("PNG", (9_500, 9_500), "1"), "more than"),
        (413, png(50_000, 50_000), "more than"),
        (400, scans(), "not a readable image"),
        (400, encoded("TIFF"), "not a readable image"),
        (400, GOOD[:-40], "not a readable image"),
        (400, changed(GOOD, 30, 1, 2), "not a readable image"),
        (400, b"", "empty"),
    ],
    ids=["strip", "large", "bomb", "jpeg", "tiff", "cut", "damaged", "empty"],
)
def test_the_server_has_the_same_bounds(status, file, words):
    with serve(Means()) as running:
        found, said, _ = ask(running.url, "/", body(GOOD, file))
        assert found == status and words in said["error"] and said["error"].startswith("image 1: ")
        assert ask(running.url, "/", body(GOOD))[0] == 200


def test_the_server_keeps_one_batch_of_pixels(monkeypatch):
    model = Means()
    with serve(Means()) as plain, serve(model) as running:
        monkeypatch.setattr(images, "PIXELS", 20 * 10 * 3)
        status, found, _ = ask(running.url, "/", body(*[GOOD] * 10))
        assert status == 200 and model.most_pixels <= max(64 * 64, images.PIXELS) and len(model.calls) == 1 + 4
        monkeypatch.undo()
        assert np.array_equal(found["embeddings"], ask(plain.url, "/", body(*[GOOD] * 10))[1]["embeddings"])


def test_the_server_decodes_while_the_model_is_busy():
    with serve(Means()) as running, running.lock:
        assert ask(running.url, "/", body(GOOD, GOOD[:-40]))[0] == 400


def test_a_byte_now_and_then_does_not_keep_a_connection(monkeypatch):
    monkeypatch.setattr(server, "IDLE", 0.3)
    with serve(Means()) as running:
        for start in (b"GET /info HT", b"POST / HTTP/1.0\r\nContent-Length: 100\r\n\r\n"):
            with raw(running.url) as wire:
                wire.sendall(start)
                began = time.monotonic()
                with pytest.raises(OSError, match=r".*"):
                    while time.monotonic() - began < 5:
                        wire.sendall(b"x")
                        wire.settimeout(0.05)
                        try:
                            if wire.recv(99) == b"":
                                raise ConnectionError  # closed by the server
                        except TimeoutError:
                            pass
                assert time.monotonic() - began < 3
        assert ask(running.url, "/info")[0] == 200


def test_connections_are_bounded(monkeypatch):
    monkeypatch.setattr(server, "CONNECTIONS", 2)
    with serve(Means()) as running:
        with raw(running.url), raw(running.url):
            time.sleep(0.3)  # until the server has taken them
            with raw(running.url) as third:
                said = third.recv(999)
            assert said.startswith(b"HTTP/1.0 503") and b"Retry-After: 2" in said
        for _ in range(50):
            time.sleep(0.05)
            with raw(running.url) as wire:
                wire.sendall(b"GET /info HTTP/1.0\r\n\r\n")
                if wire.recv(999).startswith(b"HTTP/1.0 200"):
                    return
        pytest.fail("the places were not given back")


def test_bodies_in_memory_are_bounded(monkeypatch):
    monkeypatch.setattr(server, "BODIES", 1)
    monkeypatch.setattr(server, "PATIENCE", 0.2)
    with serve(Means()) as running:
        with raw(running.url) as slow:
            slow.sendall(b"POST / HTTP/1.0\r\nContent-Length: 1000\r\n\r\nabc")
            time.sleep(0.2)
            status, said, headers = ask(running.url, "/", body(GOOD))
            assert status == 503 and headers["Retry-After"] == "2" and "try again" in said["error"]
            assert ask(running.url, "/info")[0] == 200
        for _ in range(50):
            if ask(running.url, "/", body(GOOD))[0] == 200:
                return
        pytest.fail("the place was not given back")


def test_requests_wait_for_their_turn(monkeypatch):
    monkeypatch.setattr(server, "BODIES", 1)
    monkeypatch.setattr(server, "DECODING", 1)
    found: list[int] = []
    with serve(Means()) as running:
        threads = [
            threading.Thread(target=lambda: found.append(ask(running.url, "/", body(GOOD))[0])) for _ in range(8)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert found == [200] * 8


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("mini-clip", "mini-clip"),
        ("/home/someone/models/clip-vit/", "clip-vit"),
        ("onnx:C:\\Users\\someone\\tower.onnx", "tower.onnx"),
        ("python:/home/someone/enc.py:encode", "enc.py:encode"),
        ("/", "encoder"),
    ],
)
def test_the_server_does_not_tell_where_its_model_is(name, told):
    model = Means()
    model.name = name
    with serve(model) as running:
        _, info, _ = ask(running.url, "/info")
        assert info["name"] == told and "someone" not in json.dumps(info)
        assert Endpoint(running.url).images([Image.new("RGB", (4, 4), "red")]).shape == (1, 3)


def test_replies_and_log_hold_nothing_of_the_request_or_the_machine(caplog, tmp_path):
    secret = f"{tmp_path}/weights\n" + "-".join(["forged", "line"])

    class Failing(Means):
        def images(self, images):
            if self.calls:
                raise FileNotFoundError(secret)
            return super().images(images)

    with serve(Failing()) as running:
        status, said, _ = ask(running.url, "/", body(GOOD))
        assert status == 500 and said == {"error": "the encoder failed; see its log"}
        for start in (
            b"GET /%0aforged-line",
            b"GET /\tforged-line",
            b"forged-line /",
            b"GET /x\r\nforged-line: x\nforged-line",
        ):
            with raw(running.url) as wire:
                wire.sendall(start + b" HTTP/1.0\r\n\r\n")
                assert wire.recv(999)
        assert "forged-line" not in str(ask(running.url, "/nowhere", b"forged-line"))
        all_answered(running)
    assert "forged-line" not in caplog.text and str(tmp_path) not in caplog.text
    assert [r.levelname for r in caplog.records if r.name == server.__name__] == ["ERROR"]


def test_phrases_are_bounded():
    with serve(Means(), texts=True) as running:
        for status, phrases in ((200, ["a photo"]), (413, ["x" * 10_001]), (400, ["\ud800"])):
            assert ask(running.url, "/texts", json.dumps({"phrases": phrases}).encode())[0] == status


@pytest.mark.parametrize("limits", [{"limit_images": 0}, {"limit_bytes": -1}])
def test_limits_of_nothing_are_refused(limits):
    with pytest.raises(FedvlmError, match="at least 1"):
        serve(Means(), **limits)
