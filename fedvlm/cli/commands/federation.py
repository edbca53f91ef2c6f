"""`fedvlm federation init SITE … [name= host= port= out=]`, `federation add SITE … [in=]`, `federation status KIT`"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from fedvlm.cli.commands.values import values
from fedvlm.config.keys import Key
from fedvlm.errors import FedvlmError
from fedvlm.federation import provision, status
from fedvlm.system import console

INIT = [
    Key("name", "str", "federation"),
    Key("host", "str", "localhost"),
    Key("port", "int", 8002),
    Key("out", "str", ""),
]
ADD = [Key("in", "str", "federation")]


def main(args: argparse.Namespace) -> None:
    names, pairs = [w for w in args.words if "=" not in w], [w for w in args.words if "=" in w]
    {"init": init, "add": add, "status": show}[args.what](names, pairs)


def init(sites: list[str], pairs: list[str]) -> None:
    given = values(INIT, pairs)
    name, host, port = str(given["name"]), str(given["host"]), int(str(given["port"]))
    out = Path(str(given["out"]) or name).expanduser()
    provision.new_federation(sites, name, host, port, out)
    console.line(f"{out}: the kits of federation {name}, with certificates for {provision.KIT_DAYS} days")
    console.line(f"server.zip goes to the machine that the sites reach as {host}:{port}: fedvlm serve server.zip")
    for site in sites:
        console.line(f"{site}.zip goes to {site}: fedvlm join {site}.zip data=FOLDER")
    console.line(f"admin.zip is for you: fedvlm run METHOD federation={out / 'admin.zip'}")
    console.note(
        f"a kit is as secret as a key: hand each to its party alone. {out / provision.ROOT_KEY} stays with you: "
        "whoever has it can make kits"
    )
    if host in ("localhost", "127.0.0.1"):
        console.note(
            "host=localhost is for a trial on one machine; give host= the name at which sites reach the server"
        )


def add(names: list[str], pairs: list[str]) -> None:
    if not names:
        raise FedvlmError("name the site to add: fedvlm federation add west in=FOLDER")
    out = Path(str(values(ADD, pairs)["in"])).expanduser()
    for kit in provision.add_sites(names, out):
        command = {"server": f"fedvlm serve {kit.name}", "admin": f"fedvlm run METHOD federation={kit}"}
        console.line(f"{kit}: {command.get(kit.stem, f'fedvlm join {kit.name} data=FOLDER')}")
    console.note("hand each kit to its party alone; the server needs nothing new to let a further site in")


def show(names: list[str], pairs: list[str]) -> None:
    values([], pairs)
    if len(names) != 1:
        raise FedvlmError("give the kit that starts runs: fedvlm federation status admin.zip")
    found = status.status(names[0])
    console.line(f"server of {found.federation} at {found.address}: up since {clock(found.since)}")
    rows = [[s.name, f"{max(0.0, time.time() - s.heard):.0f} s ago"] for s in found.sites]
    if rows:
        console.rows(["site", "last heard"], rows)
    else:
        console.line("no site is connected; each types: fedvlm join SITE.zip data=FOLDER")
    for job in found.jobs:
        console.line(f"run {job.name} ({job.state}), submitted {job.submitted}: job {job.id}")
    if not found.jobs:
        console.line("no run is under way; start one: fedvlm run METHOD federation=admin.zip")


def clock(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
