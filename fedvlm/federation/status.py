"""`fedvlm federation status`: who is connected, and which runs are under way; and the session with the server."""

from __future__ import annotations

import contextlib
import io
import logging
from collections.abc import Iterator
from typing import Any, NamedTuple

from fedvlm.errors import FedvlmError
from fedvlm.federation.provision import USER, nvflare, open_kit
from fedvlm.federation.settings import About
from fedvlm.federation.start import reachable

LOGIN_SECONDS = 15.0
WAITING = ("SUBMITTED", "APPROVED", "DISPATCHED")


class Unreachable(FedvlmError):
    """The server does not answer, or not yet."""


class SiteState(NamedTuple):
    name: str
    heard: float  # time.time() of its last sign of life


class StartedRun(NamedTuple):
    id: str
    name: str
    state: str
    submitted: str


class FederationStatus(NamedTuple):
    federation: str
    address: str
    since: float  # time.time() of the server's start
    sites: list[SiteState]
    jobs: list[StartedRun]


@contextlib.contextmanager
def session(kit: str) -> Iterator[tuple[Any, About]]:
    """NVFlare's session of the kit that starts runs, and what the kit says of itself."""
    folder, about = open_kit(kit, "admin")
    api = nvflare("fuel.flare_api.flare_api")
    where = f"the server of {about.federation} at {about.host}:{about.port}"
    if not reachable(about):
        raise Unreachable(f"{where} does not answer; is `fedvlm serve` running there, and the port open?")
    logging.getLogger("nvflare").setLevel(logging.CRITICAL)  # what goes wrong is told below
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            opened = api.new_secure_session(USER, str(folder), timeout=LOGIN_SECONDS)
    except Exception as error:  # NVFlare raises its own kinds and the system's
        raise Unreachable(
            f"{where}: login failed ({type(error).__name__}); does {kit} belong to this federation?"
        ) from error
    try:
        yield opened, about
    finally:
        opened.close()


def status(kit: str) -> FederationStatus:
    with session(kit) as (opened, about):
        found = opened.get_system_info()
        # a job whose server was killed is RUNNING in the list for ever: only the server knows what really runs
        running = {j.job_id for j in found.job_info}
        jobs = [j for j in opened.list_jobs() if j["job_id"] in running or j["status"] in WAITING]
    sites = [SiteState(str(c.name), float(c.last_connect_time)) for c in found.client_info]
    return FederationStatus(
        about.federation,
        f"{about.host}:{about.port}",
        float(found.server_info.start_time),
        sorted(sites),
        [StartedRun(str(j["job_id"]), str(j["job_name"]), str(j["status"]), str(j["submit_time"])[:19]) for j in jobs],
    )
