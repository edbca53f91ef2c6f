"""`fedvlm federation init SITE … [name= host= port= out=]`, `federation add SITE … [in=]`,
`federation sign REQUEST … [in=]`, and with the office's kit:
`federation runs KIT`, `status KIT [RUN]`, `stop|resume|forget|logs KIT RUN`, `exclude|admit KIT SITE`"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import Any

from fedvlm.cli.commands.values import values
from fedvlm.config.keys import Key
from fedvlm.errors import FedvlmError, nearest
from fedvlm.federation import provision, status
from fedvlm.federation.settings import KEEP, LOOK, About
from fedvlm.system import console

INIT = [
    Key("name", "str", "federation"),
    Key("host", "str", "localhost"),
    Key("port", "int", 8002),
    Key("out", "str", ""),
]
ADD = [Key("in", "str", "federation")]
RUNS = ["run", "state", "round", "jobs", "missing", "reason"]
SAID = {
    "stop": "{} is stopped; what it has played is kept",
    "resume": "{} goes on",
    "forget": "{} is forgotten: the server has neither its folder nor its job any more",
    "exclude": "{} is excluded: it takes part in no run until it is admitted",
    "admit": "{} is admitted; it joins by itself",
}


def main(args: argparse.Namespace) -> None:
    names, pairs = [w for w in args.words if "=" not in w], [w for w in args.words if "=" in w]
    known = {"init": init, "add": add, "sign": sign, "status": show, "runs": runs, "logs": logs}
    known.get(args.what, partial(decide, args.what))(names, pairs)


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


def sign(requests: list[str], pairs: list[str]) -> None:
    out = Path(str(values(ADD, pairs)["in"])).expanduser()
    if not requests:
        raise FedvlmError(f"give the request: fedvlm federation sign SITE{provision.REQUEST} in=FOLDER")
    for kit in [provision.sign(Path(request).expanduser(), out) for request in requests]:
        console.line(f"{kit} goes back to {kit.stem}: fedvlm join {kit.name} data=FOLDER; it holds no key")


def show(words: list[str], pairs: list[str]) -> None:
    """Who is connected and which runs there are; of one run, where it stands."""
    about, found, name = asked("status", words, pairs)
    runs = [r for r in found["runs"] if r["name"] == name or not name]
    console.collect("status", found | {"runs": runs, "federation": about.federation})
    if not name:
        console.line(f"server of {about.federation} at {about.host}:{about.port}")
        rows = [[site, f"{ago:.0f} s ago"] for site, ago in sorted(found["sites"].items())]
        rows += [[site, "excluded"] for site in found["excluded"]]
        show_rows(["site", "last heard"], rows, "no site is connected; each types: fedvlm join SITE.zip data=FOLDER")
    show_rows(RUNS, [run_row(r) for r in runs], "no run yet; start one: fedvlm run METHOD federation=admin.zip")
    for run in runs:
        for site, why in run["left_out"].items():
            console.line(f"{run['name']}: {site} does not take part: {why}")


def runs(words: list[str], pairs: list[str]) -> None:
    _, found, _ = asked("runs", words, pairs)
    console.collect("runs", found["runs"])
    show_rows(
        RUNS, [run_row(r) for r in found["runs"]], "no run yet; start one: fedvlm run METHOD federation=admin.zip"
    )


def logs(words: list[str], pairs: list[str]) -> None:
    """What the server has written about a run: who was left out, and what was healed."""
    _, _, name = asked("logs", words, pairs, "RUN")
    with status.session(words[0]) as (flare, _):
        lines = status.ask(flare, LOOK, "log", name)["lines"]
    console.collect("lines", lines)
    for line in lines:
        console.line(line)


def decide(word: str, words: list[str], pairs: list[str]) -> None:
    """stop, resume or forget a run; exclude or admit a site."""
    _, _, name = asked(word, words, pairs, "SITE" if word in ("exclude", "admit") else "RUN")
    with status.session(words[0]) as (flare, _):
        status.ask(flare, KEEP, word, name)
    console.collect(word, name)
    console.line(SAID[word].format(name))


def asked(what: str, words: list[str], pairs: list[str], needed: str = "") -> tuple[About, dict[str, Any], str]:
    """What the server knows, and the run or site that is meant: a run may be shortened to a beginning that only it has."""
    values([], pairs)
    if not words or len(words) > 2 or (needed and len(words) < 2):
        usual = f"fedvlm federation {what} admin.zip {needed}".strip()
        raise FedvlmError(f"give the kit that starts runs{f' and a {needed}' if needed else ''}: {usual}")
    with status.session(words[0]) as (flare, about):
        found = status.ask(flare, LOOK, "runs")
    word = words[1] if len(words) > 1 else ""
    known = [r["name"] for r in found["runs"]]
    fits = [n for n in known if n.startswith(word)]
    if not word or needed == "SITE" or word in known:
        return about, found, word
    if len(fits) != 1:
        raise FedvlmError(
            f"{word} is {'the beginning of several runs' if fits else 'no run there'}; {nearest(word, known)}"
        )
    return about, found, fits[0]


def run_row(run: dict[str, Any]) -> list[str]:
    absent = ", ".join(run["missing"])
    return [
        run["name"],
        run["state"],
        f"{max(0, run['round'])} of {run['rounds']}",
        str(run["jobs"]),
        absent,
        run["reason"],
    ]


def show_rows(head: list[str], rows: list[list[str]], without: str) -> None:
    if console.Mode.collected is None:
        console.rows(head, rows) if rows else console.line(without)
