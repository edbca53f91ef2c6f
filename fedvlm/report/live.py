"""The page while runs go on (`fedvlm report RUN … --watch`): made anew from the run folders, served to this machine only.

It answers GET of / and /state and nothing else; it reads run folders and writes nothing.
"""

from __future__ import annotations

import contextlib
import hashlib
import threading
from collections.abc import Callable
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from fedvlm.errors import FedvlmError
from fedvlm.report.page import Options, html
from fedvlm.training import folder
from fedvlm.training.folder import RunFolder

LOOPBACK = "127.0.0.1"
WATCHED = ("run.json", "rounds.jsonl")


class Live:
    """The page of these paths, made again when a file that it shows has changed."""

    def __init__(self, paths: list[str], options: Options):
        self.paths, self.options = paths, options
        self.lock = threading.Lock()
        self.made = ("", b"")

    def runs(self) -> list[RunFolder]:
        """Those that there are by now: a bench makes its folders one by one."""
        try:
            return folder.find(self.paths)
        except FedvlmError:
            return []

    def state(self) -> str:
        seen = hashlib.sha256()
        for path in (run.folder / name for run in self.runs() for name in WATCHED):
            try:
                found = path.stat()
            except OSError:
                continue
            seen.update(f"{path} {found.st_size} {found.st_mtime_ns}\n".encode())
        return seen.hexdigest()[:16]

    def page(self) -> bytes:
        with self.lock:
            state = self.state()
            if self.made[0] != state:
                self.made = (state, html(self.runs(), replace(self.options, live=state)).encode())
            return self.made[1]


def server(live: Live, port: int) -> ThreadingHTTPServer:
    """Port 0 is any free one."""
    answers: dict[str, tuple[str, Callable[[], bytes]]] = {
        "/": ("text/html; charset=utf-8", live.page),
        "/state": ("text/plain; charset=utf-8", lambda: live.state().encode()),
    }

    class Handler(BaseHTTPRequestHandler):
        server_version, sys_version = "fedvlm", ""

        def do_GET(self) -> None:
            # a page elsewhere may resolve its own name to this machine: only our own names are answered
            at = made.server_port
            if self.headers.get("Host") not in (f"{LOOPBACK}:{at}", f"localhost:{at}"):
                return self.say(403, "text/plain", b"this page is served to this machine only\n")
            if self.path not in answers:
                return self.say(404, "text/plain", b"there is / and nothing else\n")
            kind, answer = answers[self.path]
            try:
                body = answer()
            except Exception as error:  # the server goes on: the next state of the folders may be whole
                return self.say(500, "text/plain; charset=utf-8", f"no page: {error}\n".encode())
            return self.say(200, kind, body)

        def say(self, status: int, kind: str, body: bytes) -> None:
            self.send_response(status)
            headers = {"Content-Type": kind, "Content-Length": str(len(body)), "Cache-Control": "no-store"}
            headers |= {
                "X-Content-Type-Options": "nosniff",
                "X-Frame-Options": "DENY",
                "Referrer-Policy": "no-referrer",
            }
            for name, value in headers.items():
                self.send_header(name, value)
            with contextlib.suppress(ConnectionError):  # the tab was closed meanwhile
                self.end_headers()
                self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Nothing: requests come every few seconds."""

    try:
        made = ThreadingHTTPServer((LOOPBACK, port), Handler)
    except OSError as error:
        raise FedvlmError(f"port {port} cannot be used ({error.strerror}); choose another with --port") from error
    return made
