"""The office's session with a federation's server: what is asked of its keeper (keeper.py), and what is told it."""

from __future__ import annotations

import contextlib
import io
import logging
from collections.abc import Iterator
from typing import Any

from fedvlm.errors import FedvlmError
from fedvlm.federation.provision import USER, nvflare, open_kit
from fedvlm.federation.settings import About
from fedvlm.federation.start import reachable

LOGIN_SECONDS = 15.0
ANSWER_SECONDS = 30.0


class Unreachable(FedvlmError):
    """The server does not answer, or not yet."""


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
        with flare_errors():
            opened.set_timeout(ANSWER_SECONDS)
        yield opened, about
    finally:
        opened.close()


@contextlib.contextmanager
def flare_errors() -> Iterator[None]:
    """NVFlare's own kinds of errors mean here that the server is away."""
    try:
        yield
    except FedvlmError:
        raise
    except Exception as error:
        raise Unreachable(f"the server does not answer ({type(error).__name__})") from error


def ask(flare: Any, command: str, word: str, name: str = "", **more: object) -> dict[str, Any]:
    """The keeper's answer to one of its admin commands; an error in its own words."""
    with flare_errors():
        reply = flare.do_command(f"{command} {word} {name}".strip(), more or None)
        found = next((i["data"] for i in reply.get("data", []) if i.get("type") == "dict"), None)
    if found is None:
        if "not authorized" in str(reply).lower():
            raise FedvlmError(f"this kit may not: {word} {name}".strip())
        raise Unreachable(f"the server does not answer ({reply.get('status', 'no reason')})")
    if "refused" in found:
        raise FedvlmError(str(found["refused"]))
    return dict(found)
