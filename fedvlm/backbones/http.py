"""An encoder behind HTTP: images go up, embeddings come back, the weights stay with the provider.

GET  url/info   → JSON {name, fingerprint, dim, scale, limit_images, limit_bytes, texts}
POST url        safetensors of uint8 vectors "0", "1", …, a PNG each → safetensors, "embeddings" float32 [images, dim]
POST url/texts  JSON {"phrases": […]}, where info says texts → safetensors, "embeddings" float32 [phrases, dim]

Refusals are JSON {"error": why}. Images go as they are, lossless, never downscaled, without their EXIF. The bearer
token is read from FEDVLM_TOKEN at every request and kept nowhere. Nothing is pickled. `server.py` is a provider.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError
from urllib.request import HTTPRedirectHandler, Request, build_opener

import numpy as np
import torch
from PIL import Image
from safetensors.numpy import load, save
from torch import Tensor

from fedvlm.backbones.base import checked
from fedvlm.core import FedvlmError

BINARY = "application/octet-stream"
TIMEOUT = 120.0  # seconds without a byte
TRIES = 3
PATIENCE = 10.0  # the longest Retry-After, in seconds, that we sit out
AT_ONCE = 64  # images a request, even where the provider takes more: a slow encoder must answer within TIMEOUT
ENTRY = 128  # bytes: more than any entry of a safetensors header takes

INFO: dict[str, tuple[tuple[type, ...], Callable[[Any], bool]]] = {
    "name": ((str,), bool),
    "fingerprint": ((str,), bool),
    "dim": ((int,), lambda d: 0 < d <= 1 << 16),  # what a reply may weigh follows from it
    "scale": ((int, float), lambda s: 0 < s < 1e6),
    "limit_images": ((int,), lambda n: n > 0),
    "limit_bytes": ((int,), lambda n: n > 0),
    "texts": ((bool,), lambda _: True),
}


class _Stay(HTTPRedirectHandler):
    """urllib would carry the token along to wherever a redirect points."""

    def redirect_request(self, *_: Any) -> None:
        return None


class Endpoint:
    black_box = True

    def __init__(self, url: str):
        if {"@", "?", "#"} & set(url):  # not repeated here: it may hold a secret
            raise FedvlmError("backbone=http…: give the bare address, and a token in the variable FEDVLM_TOKEN")
        if not url.startswith(("http://", "https://")):
            raise FedvlmError(f"backbone={url}: not an address; write http://host:port or https://host/path")
        self.name, self.url, self.who = url, url.rstrip("/"), f"backbone={url}"
        self.opener = build_opener(_Stay)
        info = self._info()
        self.dim, self.scale, self.has_texts = info["dim"], float(info["scale"]), info["texts"]
        self.count, self.size = min(AT_ONCE, info["limit_images"]), info["limit_bytes"]
        # hashed: what a provider calls itself must not choose the name of a file here
        known = json.dumps(["http", info["name"], info["fingerprint"], self.dim])
        self.fingerprint = hashlib.blake2b(known.encode(), digest_size=8).hexdigest()

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

    def _embeddings(self, route: str, bodies: Iterable[tuple[bytes, int]], kind: str) -> Tensor:
        parts = [torch.empty(0, self.dim)]
        for body, count in bodies:
            reply = self._request(route, BINARY, 4 * count * self.dim + 4096, body, kind)
            try:
                found = unpack(reply)["embeddings"]
            except (ValueError, KeyError) as error:
                raise FedvlmError(f"{self.who}: the reply is not safetensors with a tensor 'embeddings'") from error
            if found.dtype != np.float32:
                raise FedvlmError(f"{self.who}: replied {found.dtype} embeddings; the provider must send float32")
            parts.append(checked(found, count, self.who, self.dim))
        return torch.cat(parts)

    def _batches(self, what: str, pieces: Iterable[bytes]) -> Iterator[list[bytes]]:
        """As many as the provider's limits let through at once."""
        batch: list[bytes] = []
        used = ENTRY
        for at, piece in enumerate(pieces):
            need = len(piece) + ENTRY
            if ENTRY + need > self.size:
                raise FedvlmError(
                    f"{self.who}: {what} {at} takes {need} bytes and the provider's limit_bytes is {self.size}; "
                    "make it smaller yourself (it is never done silently) or ask the provider for more"
                )
            if batch and (len(batch) == self.count or used + need > self.size):
                yield batch
                batch, used = [], ENTRY
            batch.append(piece)
            used += need
        if batch:
            yield batch

    def _info(self) -> dict[str, Any]:
        try:
            info = json.loads(self._request("/info", "application/json", 1 << 16))
        except (ValueError, RecursionError) as error:
            raise FedvlmError(f"{self.who}: {self.url}/info is not JSON; is it a fedvlm encode-server?") from error
        for key, (kind, valid) in INFO.items():
            value = info.get(key) if isinstance(info, dict) else None
            if type(value) not in kind or not valid(value):
                raise FedvlmError(f"{self.who}: {self.url}/info says {key}={value!r:.40}; is it an encode-server?")
        return dict(info)

    def _request(self, route: str, expect: str, limit: int, body: bytes | None = None, kind: str = BINARY) -> bytes:
        """One exchange, tried again where trying again can help (encoding twice does no harm)."""
        why, pause = "", 0.0
        for attempt in range(TRIES):
            time.sleep(pause)
            pause = 0.2 * 4**attempt
            request = Request(self.url + route, body, {"Content-Type": kind, **_authorization(self.who)})
            try:
                with self.opener.open(request, timeout=TIMEOUT) as reply:
                    found, data = reply.headers.get_content_type(), reply.read(limit + 1)
            except HTTPError as error:
                with error:
                    why = f"HTTP {error.code} {_said(error)}".rstrip()
                    asked = error.headers.get("Retry-After", "")
                if error.code != 429 and error.code < 500:
                    raise FedvlmError(f"{self.who}: {why}; {_remedy(error)}") from None
                if asked.isdecimal():
                    pause = float(asked)
                if pause > PATIENCE:
                    raise FedvlmError(f"{self.who}: {why}; it asks to come back in {asked} s: try again then") from None
            except (OSError, ValueError, HTTPException) as error:  # ValueError: a port that is no number
                why = f"no answer ({getattr(error, 'reason', None) or error or type(error).__name__})"
            else:
                if found != expect:
                    raise FedvlmError(f"{self.who}: replied {found}, not {expect}; is it a fedvlm encode-server?")
                if len(data) > limit:
                    raise FedvlmError(f"{self.who}: the reply is larger than the {limit} bytes it can need; refused")
                return bytes(data)
        raise FedvlmError(f"{self.who}: {why}, {TRIES} times; check that the provider runs and can be reached")


def unpack(body: bytes) -> dict[str, np.ndarray]:
    """The tensors of a safetensors body; ValueError for anything else."""
    try:
        return load(body)
    except Exception as error:  # foreign bytes: whatever the parser trips over, they are not safetensors
        raise ValueError("not a safetensors body") from error


def _png(image: Image.Image) -> bytes:
    stream = io.BytesIO()
    # how transparency turns into colour is the encoder's business: only what PNG cannot hold is converted here
    held = image if image.mode in ("1", "L", "LA", "P", "RGB", "RGBA", "I;16") else image.convert("RGB")
    held.save(stream, "PNG", compress_level=1)
    return stream.getvalue()


def _authorization(who: str) -> dict[str, str]:
    token = os.environ.get("FEDVLM_TOKEN", "").strip()
    if not (token.isascii() and token.isprintable()):  # http.client would print it in its complaint
        raise FedvlmError(f"{who}: FEDVLM_TOKEN holds characters that cannot go into a header; set it again")
    return {"Authorization": f"Bearer {token}"} if token else {}


def _said(error: HTTPError) -> str:
    """The provider's own words, if it is one: short and printable."""
    try:
        said = str(json.loads(error.read(4096))["error"])
    except (ValueError, KeyError, TypeError, RecursionError, OSError, HTTPException):
        return ""
    return "(" + "".join(c for c in said if c.isprintable())[:200] + ")"


def _remedy(error: HTTPError) -> str:
    if error.code in (401, 403):
        return "set the environment variable FEDVLM_TOKEN to the token the provider gave you"
    if error.code == 413:
        return "make the images smaller, or ask the provider to raise its limits"
    if 300 <= error.code < 400:
        return f"it points to {error.headers.get('Location', 'elsewhere')!r}; give that address if you trust it"
    return "is it a fedvlm encode-server, at this very address?"
