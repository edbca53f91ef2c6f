"""An encoder behind HTTP: images are sent, embeddings come back, the weights stay with the provider.

GET  url/info   → JSON {name, fingerprint, dim, scale, limit_images, limit_bytes, texts}
POST url        safetensors of uint8 vectors "0", "1", …, a PNG each → safetensors, "embeddings" float32 [images, dim]
POST url/texts  JSON {"phrases": […]}, where info says texts → safetensors, "embeddings" float32 [phrases, dim]

Errors are JSON {"error": reason}. Images are sent lossless and in full resolution, without their EXIF data. The bearer
token is read from FEDVLM_TOKEN at every request and not stored, and goes only to addresses that the user gave (trust.py).
Nothing is pickled. `data/encode_server.py` implements the provider.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from socket import socket
from typing import Any, TypedDict, cast
from urllib.error import HTTPError
from urllib.request import HTTPHandler, HTTPRedirectHandler, HTTPSHandler, Request, build_opener

import numpy as np
import torch
from PIL import Image
from safetensors.numpy import load, save
from torch import Tensor

from fedvlm.backbones.base import checked_embeddings
from fedvlm.errors import FedvlmError
from fedvlm.system import allowed
from fedvlm.system.names import printable

BINARY = "application/octet-stream"
TIMEOUT = 120.0  # seconds for a whole reply, and before it for the connection and for sending the request
TRIES = 3
LONGEST_WAIT = 10.0  # seconds; a provider that asks by Retry-After for a longer wait is an error
BATCH = 64  # images per request, even where the provider takes more: a slow encoder must answer within TIMEOUT
ENTRY = 128  # bytes: an upper bound for an entry of a safetensors header


class Info(TypedDict):
    """What a provider says about itself at /info."""

    name: str
    fingerprint: str
    dim: int
    scale: float
    limit_images: int  # most images, or phrases, per request
    limit_bytes: int  # longest body of a request
    texts: bool  # whether POST /texts is available


INFO: dict[str, tuple[tuple[type, ...], Callable[[Any], bool]]] = {  # type and valid values of each field
    "name": ((str,), bool),
    "fingerprint": ((str,), bool),
    "dim": ((int,), lambda d: 0 < d <= 1 << 16),  # bounded, since it decides how long a reply may be
    "scale": ((int, float), lambda s: 0 < s < 1e6),
    "limit_images": ((int,), lambda n: n > 0),
    "limit_bytes": ((int,), lambda n: n > 0),
    "texts": ((bool,), lambda _: True),
}


class _NoRedirect(HTTPRedirectHandler):
    """Follows no redirect: urllib would send the token along to another host."""

    def redirect_request(self, *_: object) -> None:
        return None


class _Timed(io.RawIOBase):
    """What arrives at a socket within TIMEOUT in all. The socket's own timeout starts anew with every byte, so that a
    provider that sends a few now and then would never be late."""

    def __init__(self, sock: socket):
        self.sock, self.raw = sock, sock.makefile("rb", 0)
        self.deadline = time.monotonic() + TIMEOUT

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int | None:  # type: ignore[override]
        left = self.deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError(f"the reply took longer than {TIMEOUT:g} s")
        self.sock.settimeout(left)
        return self.raw.readinto(buffer)

    def close(self) -> None:
        self.raw.close()
        super().close()


class _Reply(HTTPResponse):
    def __init__(self, sock: socket, *args: Any, **options: Any):
        super().__init__(sock, *args, **options)
        self.fp.close()
        self.fp = io.BufferedReader(_Timed(sock))


class _Http(HTTPConnection):
    response_class = _Reply


class _Https(HTTPSConnection):
    response_class = _Reply


class _HttpHandler(HTTPHandler):
    def http_open(self, req: Request) -> HTTPResponse:
        return self.do_open(_Http, req)


class _HttpsHandler(HTTPSHandler):
    def https_open(self, req: Request) -> HTTPResponse:
        return self.do_open(_Https, req)


class Endpoint:
    black_box, elsewhere = True, True

    def __init__(self, url: str):
        allowed.origin(url)  # an error where it is no address
        self.name, self.url = url, url.rstrip("/")
        self.label = f"backbone={url}"  # starts every error message
        self.opener = build_opener(_NoRedirect, _HttpHandler, _HttpsHandler)
        info = self._info()
        self.dim, self.scale, self.has_texts = info["dim"], float(info["scale"]), info["texts"]
        self.batch, self.limit_bytes = min(BATCH, info["limit_images"]), info["limit_bytes"]
        # hashed, because the fingerprint names files here and a provider's strings are untrusted
        identity = json.dumps(["http", info["name"], info["fingerprint"], self.dim])
        self.fingerprint = hashlib.blake2b(identity.encode(), digest_size=8).hexdigest()

    def images(self, images: Sequence[Image.Image]) -> Tensor:
        bodies = (
            (save({str(i): np.frombuffer(png, np.uint8) for i, png in enumerate(batch)}), len(batch))
            for batch in self._batches("image", map(_png, images))
        )
        return self._embeddings("", bodies, BINARY)

    def texts(self, phrases: Sequence[str]) -> Tensor | None:
        if not self.has_texts:
            return None
        bodies = (
            (b'{"phrases": [' + b",".join(batch) + b"]}", len(batch))
            for batch in self._batches("phrase", (json.dumps(p).encode() for p in phrases))
        )
        return self._embeddings("/texts", bodies, "application/json")

    def _embeddings(self, route: str, bodies: Iterable[tuple[bytes, int]], content_type: str) -> Tensor:
        parts = [torch.empty(0, self.dim)]
        for body, count in bodies:
            reply = self._request(route, BINARY, 4 * count * self.dim + 4096, body, content_type)
            try:
                found = unpack_tensors(reply)["embeddings"]
            except (ValueError, KeyError) as error:
                raise FedvlmError(f"{self.label}: the reply is not safetensors with a tensor 'embeddings'") from error
            if found.dtype != np.float32:
                raise FedvlmError(f"{self.label}: replied {found.dtype} embeddings; the provider must send float32")
            parts.append(checked_embeddings(found, count, self.label, self.dim))
        return torch.cat(parts)

    def _batches(self, what: str, pieces: Iterable[bytes]) -> Iterator[list[bytes]]:
        """Batches as large as the provider's limits allow."""
        batch: list[bytes] = []
        used = ENTRY
        for at, piece in enumerate(pieces):
            need = len(piece) + ENTRY
            if ENTRY + need > self.limit_bytes:
                raise FedvlmError(
                    f"{self.label}: {what} {at} takes {need} bytes and the provider's limit_bytes is "
                    f"{self.limit_bytes}; make it smaller (this is never done automatically) or ask the provider to "
                    "raise the limit"
                )
            if batch and (len(batch) == self.batch or used + need > self.limit_bytes):
                yield batch
                batch, used = [], ENTRY
            batch.append(piece)
            used += need
        if batch:
            yield batch

    def _info(self) -> Info:
        try:
            info = json.loads(self._request("/info", "application/json", 1 << 16))
        except (ValueError, RecursionError) as error:
            raise FedvlmError(f"{self.label}: {self.url}/info is not JSON; is it a fedvlm encode-server?") from error
        for key, (types, valid) in INFO.items():
            value = info.get(key) if isinstance(info, dict) else None
            if type(value) not in types or not valid(value):
                raise FedvlmError(f"{self.label}: {self.url}/info says {key}={value!r:.40}; is it an encode-server?")
        return cast(Info, info)

    def _request(
        self, route: str, expect: str, limit: int, body: bytes | None = None, content_type: str = BINARY
    ) -> bytes:
        """The body of the reply. Tried again after errors that may be temporary; encoding twice does no harm."""
        why, pause = "", 0.0
        for attempt in range(TRIES):
            time.sleep(pause)
            pause = 0.2 * 4**attempt
            request = Request(self.url + route, body, {"Content-Type": content_type, **self._authorization()})
            try:
                with self.opener.open(request, timeout=TIMEOUT) as reply:
                    found, data = reply.headers.get_content_type(), reply.read(limit + 1)
            except HTTPError as error:
                with error:
                    why = f"HTTP {error.code} {_reason(error)}".rstrip()
                    asked = error.headers.get("Retry-After", "")
                if error.code != 429 and error.code < 500:
                    raise FedvlmError(f"{self.label}: {why}; {self._remedy(error)}") from None
                if asked.isdecimal():
                    pause = float(asked)
                if pause > LONGEST_WAIT:
                    raise FedvlmError(f"{self.label}: {why}; it asks to wait {asked} s: try again then") from None
            except (OSError, ValueError, HTTPException) as error:  # ValueError: the port is not a number
                why = f"no answer ({getattr(error, 'reason', None) or error or type(error).__name__})"
            else:
                if found != expect:
                    raise FedvlmError(f"{self.label}: replied {found}, not {expect}; is it a fedvlm encode-server?")
                if len(data) > limit:
                    raise FedvlmError(f"{self.label}: the reply is larger than the {limit} bytes expected; refused")
                return bytes(data)
        raise FedvlmError(f"{self.label}: {why}, {TRIES} times; check that the provider runs and can be reached")

    def _authorization(self) -> dict[str, str]:
        token = os.environ.get("FEDVLM_TOKEN", "").strip()
        if not (token.isascii() and token.isprintable()):  # the error of http.client would contain the token
            raise FedvlmError(
                f"{self.label}: FEDVLM_TOKEN holds characters that are not allowed in a header; set it again"
            )
        return {"Authorization": f"Bearer {token}"} if token and allowed.gets_token(self.url) else {}

    def _remedy(self, error: HTTPError) -> str:
        if error.code in (401, 403) and os.environ.get("FEDVLM_TOKEN") and not allowed.gets_token(self.url):
            return (
                "no token was sent, since you did not give this address yourself: if its provider may have your token, "
                f"set {allowed.HOSTS}={allowed.origin(self.url).partition('://')[2]}"
            )
        if error.code in (401, 403):
            return "set the environment variable FEDVLM_TOKEN to the token the provider gave you"
        if error.code == 413:
            return "make the images smaller, or ask the provider to raise its limits"
        if 300 <= error.code < 400:
            place = printable(error.headers.get("Location", "elsewhere"), 200)
            return f"it redirects to {place!r}; give that address if you trust it"
        return "is there a fedvlm encode-server at this address?"


def unpack_tensors(body: bytes) -> dict[str, np.ndarray]:
    """The tensors of a safetensors body; ValueError for anything else."""
    try:
        return load(body)
    except Exception as error:  # untrusted bytes: the parser may fail in any way
        raise ValueError("not a safetensors body") from error


def _png(image: Image.Image) -> bytes:
    stream = io.BytesIO()
    # only modes that PNG does not have are converted: the encoder decides what to do with transparency
    converted = image if image.mode in ("1", "L", "LA", "P", "RGB", "RGBA", "I;16") else image.convert("RGB")
    converted.save(stream, "PNG", compress_level=1)
    return stream.getvalue()


def _reason(error: HTTPError) -> str:
    """The reason in the provider's reply, shortened, printable characters only; "" where there is none."""
    try:
        reason = str(json.loads(error.read(4096))["error"])
    except (ValueError, KeyError, TypeError, RecursionError, OSError, HTTPException):
        return ""
    return f"({printable(reason, 200)})"
