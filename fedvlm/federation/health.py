"""How a server or a site is: in words at its terminal, and for others as `/health` (JSON; 503 where it cannot work) and
`/metrics` (Prometheus' text). On this machine alone, unless an address is given."""

from __future__ import annotations

import contextlib
import json
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from fedvlm.errors import FedvlmError
from fedvlm.federation.settings import OVERVIEW, About

LEAST_DISK = 200 << 20  # bytes that should be free
WARN_DAYS = 30  # before a certificate ends
SILENT = 60.0  # seconds after which a keeper that wrote nothing does not work


@dataclass
class Health:
    """What is known of a party now."""

    name: str
    federation: str
    up: bool  # NVFlare's process runs
    restarts: int  # of it
    disk_free: int  # bytes, where its home is
    certificate_days: float
    overview: dict[str, Any] = field(default_factory=dict)  # of a server: sites and runs (keeper.py)
    faults: list[str] = field(default_factory=list)  # why it cannot work
    warnings: list[str] = field(default_factory=list)


def look(about: About, home: Path, up: bool, restarts: int) -> Health:
    days = (end_of(about) - datetime.now(UTC)).total_seconds() / 86400
    found = Health(about.name, about.federation, up, restarts, shutil.disk_usage(home).free, round(days, 2))
    if not up:
        found.faults.append("NVFlare's process does not run")
    if days <= 0:
        found.faults.append(f"the certificate ended on {about.ends}: fedvlm federation add {about.name}")
    elif days < WARN_DAYS:
        found.warnings.append(f"the certificate ends on {about.ends}: fedvlm federation add {about.name}")
    if found.disk_free < LEAST_DISK:
        found.warnings.append(f"the disk of {home} is nearly full")
    path = home / OVERVIEW
    if about.kind == "server" and path.exists():
        age = time.time() - path.stat().st_mtime
        with contextlib.suppress(ValueError):
            found.overview = json.loads(path.read_text(encoding="utf-8"))
        if age > SILENT:
            found.faults.append("the keeper of runs does not work any more")
        for run in found.overview.get("runs", []):
            if run["state"] == "failed":
                found.warnings.append(f"run {run['name']} failed: {run['reason']}")
            for site, why in run["left_out"].items():
                found.warnings.append(f"run {run['name']}: {site} does not take part: {why}")
    return found


def end_of(about: About) -> datetime:
    """The moment at which the certificate of a kit ends."""
    ends = datetime.fromisoformat(about.ends)
    return ends if ends.tzinfo else ends.replace(tzinfo=UTC)


def metrics(health: Health) -> str:
    """Prometheus' text format."""
    numbers: list[tuple[str, dict[str, str], float]] = [
        ("up", {}, health.up and not health.faults),
        ("restarts_total", {}, health.restarts),
        ("disk_free_bytes", {}, health.disk_free),
        ("certificate_days", {}, health.certificate_days),
    ]
    for site, ago in health.overview.get("sites", {}).items():
        numbers.append(("site_heard_seconds", {"site": site}, ago))
    for run in health.overview.get("runs", []):
        named = {"run": run["name"]}
        numbers += [
            ("run_state", named | {"state": run["state"]}, 1),
            ("run_round", named, run["round"]),
            ("run_jobs_total", named, run["jobs"]),
            ("run_missing_sites", named, len(run["missing"])),
        ]
    # names of sites, runs and states are letters, digits, -, + and _: nothing in them needs quoting
    lines = []
    for name, labels, value in sorted(numbers, key=lambda n: n[0]):
        inside = ",".join(f'{k}="{v}"' for k, v in labels.items())
        lines.append(f"fedvlm_{name}{{{inside}}} {float(value):.10g}\n")
    return "".join(lines)


@contextlib.contextmanager
def answering(address: str, now: Callable[[], Health]) -> Iterator[None]:
    """Answers at [HOST:]PORT while it is open; "": nobody asks."""
    if not address:
        yield
        return

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            found = now()
            kinds = {"/health": json.dumps(asdict(found), indent=1) + "\n", "/metrics": metrics(found)}
            body = kinds.get(self.path, "").encode()
            self.send_response(404 if not body else 503 if found.faults and self.path == "/health" else 200)
            self.send_header(
                "Content-Type", "application/json" if self.path == "/health" else "text/plain; version=0.0.4"
            )
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    host, _, port = address.rpartition(":")
    try:
        server = ThreadingHTTPServer((host or "127.0.0.1", int(port)), Handler)
    except (OSError, ValueError, OverflowError) as error:
        raise FedvlmError(f"health={address} cannot be listened on ({error}); give a free PORT or HOST:PORT") from error
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
