"""The provider of http.py: serves a frozen encoder over HTTP. The model encodes one request at a time.

It has no TLS: to serve other machines, put a TLS proxy in front. Nothing that clients send is logged or unpickled.
"""

from __future__ import annotations

import hmac
import io
import ipaddress
import json
import logging
import os
import socket
import threading
import traceback
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler
from socketserver import ThreadingTCPServer
from typing import cast

import numpy as np
import torch
from PIL import Image
from safetensors.torch import save

from fedvlm.backbones.base import PIXELS, Backbone
from fedvlm.backbones.http import BINARY, Info, unpack
from fedvlm.core import FedvlmError

log = logging.getLogger(__name__)

Address = tuple[str, int] | tuple[str, int, int, int]  # IPv4, IPv6


def serve(
    backbone: Backbone,
    host: str = "127.0.0.1",
    port: int = 0,
    token: str | None = None,
    limit_images: int = 256,
    limit_bytes: int = 64 << 20,
    on_ready: Callable[[str], object] | None = None,
    texts: bool = False,
) -> Server:
    """A server that runs in its own thread: `.url`, `.wait()` until it is closed or interrupted, `.close()`.

    port=0: any free port. token=None: no authentication, which is allowed on a loopback address only."""
    label = f"encode-server host={host} port={port}"
    if not 0 <= port < 1 << 16:  # some systems would take it modulo 65536
        raise FedvlmError(f"{label}: not a port; choose one up to 65535, or port=0 for any free one")
    try:
        family, _, _, _, found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise FedvlmError(f"{label}: not an address of this machine ({error}); try host=127.0.0.1") from error
    address = cast(Address, found)
    if not token and not ipaddress.ip_address(address[0].partition("%")[0]).is_loopback:
        raise FedvlmError(f"{label}: other machines could use it; give a token (FEDVLM_TOKEN), or host=127.0.0.1")
    # loads the model, and fails now rather than at the first request; a black image could have an all-zero embedding
    backbone.images([Image.linear_gradient("L").resize((64, 64)).convert("RGB")])
    if texts and backbone.texts(["a photo"]) is None:
        raise FedvlmError(f"{label}: texts=true, but backbone={backbone.name} has no text tower; leave texts out")
    info = Info(
        name=backbone.name,
        fingerprint=backbone.fingerprint,
        dim=backbone.dim,
        scale=backbone.scale,
        limit_images=limit_images,
        limit_bytes=limit_bytes,
        texts=texts,
    )
    try:
        server = Server(family, address, backbone, info, token)
    except OSError as error:
        raise FedvlmError(
            f"{label}: cannot listen there ({error}); choose another port, or port=0 for any free one"
        ) from error
    if on_ready:
        on_ready(server.url)
    return server


class Server(ThreadingTCPServer):
    allow_reuse_address = os.name == "posix"  # elsewhere it lets two servers listen on one port
    daemon_threads = True

    def __init__(self, family: int, address: Address, backbone: Backbone, info: Info, token: str | None):
        self.address_family = family
        super().__init__(address, _Handler)
        self.backbone, self.info, self.token = backbone, info, token
        self.lock = threading.Lock()  # held while the model runs
        host, port = self.socket.getsockname()[:2]
        self.url = f"http://[{host}]:{port}" if family == socket.AF_INET6 else f"http://{host}:{port}"
        self.thread = threading.Thread(target=self.serve_forever, args=(0.1,), daemon=True)
        self.thread.start()

    def wait(self) -> None:
        while self.thread.is_alive():
            self.thread.join(1.0)  # with a timeout, so that Ctrl-C interrupts it on Windows too

    def close(self) -> None:
        self.shutdown()
        self.server_close()

    def __exit__(self, *_: object) -> None:
        self.close()

    def handle_error(self, *_: object) -> None:
        """Ignored: the client has closed the connection."""


class _Refused(Exception):
    """A request that is answered with an error status."""

    def __init__(self, status: int, reason: str):
        self.status, self.reason = status, reason


class _Handler(BaseHTTPRequestHandler):
    server: Server
    timeout = 30  # seconds without a byte until the connection is closed
    server_version, sys_version = "fedvlm", ""
    error_content_type = "application/json"
    error_message_format = '{"error": "HTTP %(code)d"}'  # of errors that the standard library reports

    def do_GET(self) -> None:
        self._answer({"/info": lambda: json.dumps(self.server.info).encode()}, "application/json")

    def do_POST(self) -> None:
        self._answer({"/": self._images} | ({"/texts": self._texts} if self.server.info["texts"] else {}), BINARY)

    def _answer(self, routes: dict[str, Callable[[], bytes]], content_type: str) -> None:
        status = 200
        self.unread = self._length()  # bytes of the body that are still to be read
        try:
            authorization = self.headers.get("Authorization", "").encode()
            if self.server.token and not hmac.compare_digest(authorization, f"Bearer {self.server.token}".encode()):
                raise _Refused(401, "the token is missing or wrong")
            if self.path not in routes:
                raise _Refused(404, "no such route; there are GET /info, POST / and, where info says so, POST /texts")
            body = routes[self.path]()
        except _Refused as refused:
            status, content_type = refused.status, "application/json"
            body = json.dumps({"error": refused.reason}).encode()
        except TimeoutError:
            raise  # while reading: the base class closes the connection
        except Exception as error:
            # the traceback without the message, which may quote what the client sent
            log.error("%s\n%s", type(error).__name__, "".join(traceback.format_tb(error.__traceback__)))
            status, content_type, body = 500, "application/json", b'{"error": "the encoder failed; see its log"}'
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        if status == 401:
            self.send_header("WWW-Authenticate", "Bearer")
        self.end_headers()
        self.wfile.write(body)
        # most clients read the reply only after sending the whole body; they would miss it if the connection was closed
        left = min(self.unread, 2 * self.server.info["limit_bytes"])
        while left > 0 and (block := self.rfile.read(min(left, 1 << 16))):
            left -= len(block)

    def _length(self) -> int:
        length = self.headers.get("Content-Length", "")
        return int(length) if length.isdecimal() and len(length) < 20 else 0

    def _body(self) -> bytes:
        if not self.unread:
            raise _Refused(411, "a body with a Content-Length is needed")
        if self.unread > self.server.info["limit_bytes"]:
            raise _Refused(413, f"{self.unread} bytes; limit_bytes is {self.server.info['limit_bytes']}")
        body, expected, self.unread = self.rfile.read(self.unread), self.unread, 0
        if len(body) < expected:
            raise _Refused(400, "the body is shorter than its Content-Length")
        return body

    def _check_count(self, count: int) -> None:
        if not 0 < count <= self.server.info["limit_images"]:
            raise _Refused(413 if count else 400, f"{count} in one request; at most {self.server.info['limit_images']}")

    def _images(self) -> bytes:
        try:
            tensors = unpack(self._body())
        except ValueError as error:
            raise _Refused(400, str(error)) from error
        self._check_count(len(tensors))
        if any(str(i) not in tensors for i in range(len(tensors))):
            raise _Refused(400, 'tensors must be named "0", "1", … without a gap')
        opened = [_opened(str(i), tensors[str(i)]) for i in range(len(tensors))]
        with self.server.lock:  # decoding too: one batch of pixels in memory, however many clients there are
            return save({"embeddings": torch.cat([self.server.backbone.images(b) for b in _decoded(opened)])})

    def _texts(self) -> bytes:
        try:
            phrases = json.loads(self._body())["phrases"]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise _Refused(400, 'the body must be JSON, {"phrases": [...]}') from error
        if not isinstance(phrases, list) or not all(isinstance(p, str) for p in phrases):
            raise _Refused(400, "phrases must be a list of strings")
        self._check_count(len(phrases))
        with self.server.lock:
            found = self.server.backbone.texts(phrases)
        assert found is not None  # `serve` has checked that there is a text tower
        return save({"embeddings": found.contiguous()})

    def log_message(self, *_: object) -> None:
        """Nothing: requests are not logged."""


def _opened(name: str, vector: np.ndarray) -> Image.Image:
    """Reads the header only, so that the size is checked before any pixel is decoded."""
    try:
        image = Image.open(io.BytesIO(vector.tobytes()), formats=["PNG"])
    except Image.DecompressionBombError as error:
        raise _Refused(413, f"image {name} has more than {PIXELS} pixels") from error
    except Exception as error:  # untrusted bytes: decoders may fail in any way
        raise _Refused(400, f"image {name} is not a PNG") from error
    if image.width * image.height > PIXELS:
        raise _Refused(413, f"image {name} has {image.width * image.height} pixels; {PIXELS} at most")
    return image


def _decoded(opened: list[Image.Image]) -> Iterator[list[Image.Image]]:
    """Batches of at most PIXELS pixels in all: a body of a few megabytes can decode to a hundred gigabytes."""
    batch: list[Image.Image] = []
    pixels = 0
    for at, image in enumerate(opened):
        pixels += image.width * image.height
        if batch and pixels > PIXELS:
            yield batch
            batch, pixels = [], image.width * image.height
        try:
            image.load()
        except Exception as error:
            raise _Refused(400, f"image {at} is damaged") from error
        batch.append(image)
    yield batch
