"""The provider of http.py: serves a frozen encoder over HTTP. The model encodes one request at a time.

It has no TLS: to serve other machines, put a TLS proxy in front. Nothing that clients send is logged or unpickled, and
what they are told holds no path of this machine. Connections, bodies and decoded pixels in memory are bounded; a request
beyond the bounds waits for a while and is then answered 503.
"""

from __future__ import annotations

import hmac
import io
import ipaddress
import json
import logging
import os
import re
import socket
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler
from socketserver import ThreadingTCPServer
from typing import Any, cast

import torch
from PIL import Image
from safetensors.torch import save

from fedvlm.backbones.base import Backbone
from fedvlm.backbones.http import BINARY, Info, unpack_tensors
from fedvlm.data import images
from fedvlm.errors import FedvlmError

log = logging.getLogger(__name__)

CONNECTIONS = 64  # at once; a further one is answered 503
BODIES = 8  # requests whose body is in memory
DECODING = 2  # requests whose pixels are in memory: while the model encodes one, another is decoded
PATIENCE = 60.0  # seconds that a request waits until its body may be sent
IDLE = 30.0  # seconds without a byte until the connection is closed; also the longest for a request's head, and a reply
SLOWEST = 100_000  # bytes per second at which a body must arrive, beside these seconds
LONGEST_PHRASE = 10_000  # characters
RETRY_AFTER = 2  # seconds

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
) -> EncodeServer:
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
    if min(limit_images, limit_bytes) < 1:
        raise FedvlmError(f"{label}: limit_images={limit_images} and limit_bytes={limit_bytes} must be at least 1")
    if not token and not ipaddress.ip_address(address[0].partition("%")[0]).is_loopback:
        raise FedvlmError(f"{label}: other machines could use it; give a token (FEDVLM_TOKEN), or host=127.0.0.1")
    # loads the model, and fails now rather than at the first request; a black image could have an all-zero embedding
    backbone.images([Image.linear_gradient("L").resize((64, 64)).convert("RGB")])
    if texts and backbone.texts(["a photo"]) is None:
        raise FedvlmError(f"{label}: texts=true, but backbone={backbone.name} has no text tower; leave texts out")
    info = Info(
        name=re.split(r"[/\\]", backbone.name.rstrip("/\\"))[-1] or "encoder",  # without the folders of this machine
        fingerprint=backbone.fingerprint,
        dim=backbone.dim,
        scale=backbone.scale,
        limit_images=limit_images,
        limit_bytes=limit_bytes,
        texts=texts,
    )
    try:
        server = EncodeServer(family, address, backbone, info, token)
    except OSError as error:
        raise FedvlmError(
            f"{label}: cannot listen there ({error}); choose another port, or port=0 for any free one"
        ) from error
    if on_ready:
        on_ready(server.url)
    return server


class EncodeServer(ThreadingTCPServer):
    allow_reuse_address = os.name == "posix"  # elsewhere it lets two servers listen on one port
    daemon_threads = True

    def __init__(self, family: int, address: Address, backbone: Backbone, info: Info, token: str | None):
        self.address_family = family
        super().__init__(address, _Handler)
        self.backbone, self.info, self.token = backbone, info, token
        self.lock = threading.Lock()  # held while the model runs
        self.connections = threading.Semaphore(CONNECTIONS)
        self.bodies = threading.Semaphore(BODIES)
        self.decoding = threading.Semaphore(DECODING)
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

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self.connections.acquire(blocking=False):
            request.sendall(f"HTTP/1.0 503 Busy\r\nRetry-After: {RETRY_AFTER}\r\nContent-Length: 0\r\n\r\n".encode())
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:  # no thread could be started
            self.connections.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self.connections.release()

    def handle_error(self, *_: object) -> None:
        """Ignored: the client has closed the connection."""


class _Refused(Exception):
    """A request that is answered with an error status."""

    def __init__(self, status: int, reason: str):
        self.status, self.reason = status, reason


class _Received(io.RawIOBase):
    """The bytes that a client sends, until a time: a byte now and then does not keep the connection open."""

    def __init__(self, connection: socket.socket):
        self.connection, self.until = connection, time.monotonic() + IDLE

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        left = self.until - time.monotonic()
        if left <= 0:
            raise TimeoutError
        self.connection.settimeout(min(left, IDLE))
        return self.connection.recv_into(buffer)


class _Handler(BaseHTTPRequestHandler):
    server: EncodeServer
    server_version, sys_version = "fedvlm", ""
    error_content_type = "application/json"
    error_message_format = '{"error": "HTTP %(code)d"}'  # of errors that the standard library reports

    def setup(self) -> None:
        super().setup()
        self.rfile.close()
        self.received = _Received(self.connection)
        self.rfile = io.BufferedReader(self.received)

    def do_GET(self) -> None:
        self._answer({"/info": lambda: json.dumps(self.server.info).encode()}, "application/json")

    def do_POST(self) -> None:
        routes = {"/": self._images} | ({"/texts": self._texts} if self.server.info["texts"] else {})
        self._answer({path: partial(self._in_turn, work) for path, work in routes.items()}, BINARY)

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
        self.connection.settimeout(IDLE)
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        if status == 401:
            self.send_header("WWW-Authenticate", "Bearer")
        if status == 503:
            self.send_header("Retry-After", str(RETRY_AFTER))
        self.end_headers()
        self.wfile.write(body)
        # most clients read the reply only after sending the whole body; they would miss it if the connection was closed
        left = min(self.unread, 2 * self.server.info["limit_bytes"])
        while left > 0 and (block := self.rfile.read(min(left, 1 << 16))):
            left -= len(block)

    def _length(self) -> int:
        length = self.headers.get("Content-Length", "")
        return int(length) if length.isdecimal() and len(length) < 20 else 0

    def _in_turn(self, work: Callable[[bytes], bytes]) -> bytes:
        """The result for the body, which is received when few others are in memory."""
        if not self.unread:
            raise _Refused(411, "a body with a Content-Length is needed")
        if self.unread > self.server.info["limit_bytes"]:
            raise _Refused(413, f"{self.unread} bytes; limit_bytes is {self.server.info['limit_bytes']}")
        if not self.server.bodies.acquire(timeout=PATIENCE):
            raise _Refused(503, "too many requests at once; try again later")
        try:
            return work(self._body())
        finally:
            self.server.bodies.release()

    def _body(self) -> bytes:
        self.received.until = time.monotonic() + IDLE + self.unread / SLOWEST
        body, expected, self.unread = self.rfile.read(self.unread), self.unread, 0
        if len(body) < expected:
            raise _Refused(400, "the body is shorter than its Content-Length")
        return body

    def _check_count(self, count: int) -> None:
        if not 0 < count <= self.server.info["limit_images"]:
            raise _Refused(413 if count else 400, f"{count} in one request; at most {self.server.info['limit_images']}")

    def _images(self, body: bytes) -> bytes:
        try:
            tensors = unpack_tensors(body)
        except ValueError as error:
            raise _Refused(400, str(error)) from error
        self._check_count(len(tensors))
        if any(str(i) not in tensors for i in range(len(tensors))):
            raise _Refused(400, 'tensors must be named "0", "1", … without a gap')
        files = [tensors.pop(str(i)).tobytes() for i in range(len(tensors))]
        for at, file in enumerate(files):
            _opened(at, file)  # all sizes are checked before the first pixel is decoded
        with self.server.decoding:
            return save({"embeddings": torch.cat([self._encoded(batch) for batch in _decoded(files)])})

    def _encoded(self, batch: list[Image.Image]) -> torch.Tensor:
        with self.server.lock:
            return self.server.backbone.images(batch)

    def _texts(self, body: bytes) -> bytes:
        try:
            phrases = json.loads(body)["phrases"]
            json.dumps(phrases, ensure_ascii=False).encode()  # an error where a string is not valid Unicode
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise _Refused(400, 'the body must be JSON, {"phrases": [...]}') from error
        if not isinstance(phrases, list) or not all(isinstance(p, str) for p in phrases):
            raise _Refused(400, "phrases must be a list of strings")
        self._check_count(len(phrases))
        if max(map(len, phrases)) > LONGEST_PHRASE:
            raise _Refused(413, f"a phrase has more than {LONGEST_PHRASE} characters")
        with self.server.lock:
            found = self.server.backbone.texts(phrases)
        assert found is not None  # `serve` has checked that there is a text tower
        return save({"embeddings": found.contiguous()})

    def log_message(self, *_: object) -> None:
        """Nothing: requests are not logged."""


def _opened(at: int, file: bytes) -> Image.Image:
    try:
        return images.opened(file, ("PNG",))
    except images.BadImage as error:
        raise _Refused(413 if isinstance(error, images.TooLarge) else 400, f"image {at}: {error}") from error


def _decoded(files: list[bytes]) -> Iterator[list[Image.Image]]:
    """Batches of images that may be in memory together: a body of a few megabytes can decode to a hundred gigabytes. A
    batch is emptied when the next is asked for."""
    batch: list[Image.Image] = []
    for at, file in enumerate(files):
        image = _opened(at, file)
        if batch and images.too_many([*batch, image]):
            yield batch
            batch.clear()
        try:
            images.load(image)
        except images.BadImage as error:
            raise _Refused(400, f"image {at}: {error}") from error
        batch.append(image)
    yield batch
