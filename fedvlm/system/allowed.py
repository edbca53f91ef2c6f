"""What this user allowed on this machine: addresses, paths, and code by its digest (config/trust.py asks)."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
from pathlib import Path
from typing import NamedTuple

from fedvlm.errors import FedvlmError
from fedvlm.system import files
from fedvlm.system.machine import cache_home

HOSTS = "FEDVLM_TOKEN_HOSTS"
ADDRESS = re.compile(r"(https?)://(\[[\da-f:.]+\]|[\w.-]+)(?::(\d{1,5}))?(?:/[^\s\\@?#]*)?", re.IGNORECASE)
_given: set[str] = set()  # in this process, where the cache cannot be written


class Need(NamedTuple):
    """Something that needs the user's word."""

    does: str  # "run code:", "contact", "read" or "follow"
    what: str
    mark: tuple[str, ...]  # by which it is remembered; (): never

    @property
    def file(self) -> str:
        return hashlib.sha256(json.dumps(self.mark).encode()).hexdigest()


def allow(need: Need) -> None:
    """A file per entry: several processes write at a time, and none of them has to read what is there."""
    if need.mark and not known(need):
        _given.add(need.file)
        with contextlib.suppress(FedvlmError):  # the cache cannot be written
            files.write(memory_folder() / need.file, f"{need.does} {need.what}\n", private=True)


def memory_folder() -> Path:
    return cache_home() / "trusted"


def known(need: Need) -> bool:
    """Whether this user gave it before."""
    if not need.mark:
        return False
    if need.mark[0] == "host" and need.mark[1] in listed_hosts():
        return True
    user = getattr(os, "getuid", None)  # not on Windows
    with contextlib.suppress(OSError):
        found = (memory_folder() / need.file).stat()
        return user is None or found.st_uid == user()  # a cache may be shared
    return need.file in _given


def gets_token(url: str) -> bool:
    return known(host_need(url))


def listed_hosts() -> set[str]:
    """Origins of FEDVLM_TOKEN_HOSTS; an entry without http:// or https:// stands for both."""
    found = set()
    for entry in filter(None, (e.strip() for e in os.environ.get(HOSTS, "").split(","))):
        for url in [entry] if "://" in entry else [f"http://{entry}", f"https://{entry}"]:
            with contextlib.suppress(FedvlmError):
                found.add(origin(url))
    return found


def origin(url: str) -> str:
    """scheme://host:port of an address: the same host on another port is another one."""
    match = ADDRESS.fullmatch(url)
    if not match:  # not repeated: it may hold a secret
        raise FedvlmError(
            "backbone=http…: not an address; write http://host:port or https://host/path, and a token in the environment "
            "variable FEDVLM_TOKEN"
        )
    scheme, host, port = match[1].lower(), match[2].lower(), match[3]
    return f"{scheme}://{host}:{int(port or (443 if scheme == 'https' else 80))}"


def host_need(url: str) -> Need:
    return Need("contact", origin(url), ("host", origin(url)))


def path_need(key: str, given: str) -> Need:
    path = absolute(given)
    return Need("read", f"{path} ({key}=)", ("path", path))


def absolute(path: str | Path) -> str:
    """The absolute path, without asking the file system as Path.resolve does: on Windows a path alone can name another
    machine."""
    return os.path.normpath(Path.cwd() / os.path.expanduser(path))  # noqa: PTH111 (Path's raises for an unknown user)
