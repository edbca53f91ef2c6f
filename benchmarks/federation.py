"""A federation across sites on NVFlare, all on this machine, with real kits, certificates and processes:

    python benchmarks/federation.py same               # serial = loopback = NVFlare, to the bit: 3 sites of 37, 130 and 400
                                                       # images, 7 methods
    python benchmarks/federation.py processors         # sites with three processors (two are held to fewer instructions)
                                                       # finish a run, and its record says so
    python benchmarks/federation.py faults=10          # what goes wrong, each ten times, with nobody at the office from the
                                                       # moment of submission, and the final bits compared
    python benchmarks/federation.py faults=1 --only "server killed"

The package is copied first, so that editing it does not change its fingerprint while sites run. `--out FILE` keeps the
figures as JSON; exit code 1 where anything was lost.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from processors import SETTINGS  # beside this file

ROOT = Path(__file__).resolve().parent.parent
STYLES = ("noto", "openmoji", "twemoji", "fluent")
CLASSES = ("bird", "clock", "fruit", "hand", "train")
EACH, ROUNDS = 12, 5
METHODS = ("fedavg", "fedot", "fft-gp", "focoop", "feddtl", "fedavg secure=true", "moments")
KEPT = ("state.safetensors",)
SIZES = (37, 130, 400)  # images of the sites of `same`: less than a piece of an encoder's thread, several, and many
ON_PROCESSORS = ("fedavg", "fedot", "fft-gp", "moments")


def styles() -> list[str]:
    """Four styles of the embedded emoji that have all of the classes."""
    with zipfile.ZipFile(ROOT / "fedvlm" / "data" / "assets" / "emoji.zip") as box:
        names = box.namelist()
    found = sorted({n.split("/")[0] for n in names})
    enough = [s for s in found if all(sum(n.startswith(f"{s}/{c}/") for n in names) >= EACH for c in CLASSES)]
    return enough[:4]


def chosen(names: list[str], size: int) -> list[str]:
    """So many images of one style, of all classes in turn; 0: EACH of each of CLASSES."""
    by_class: dict[str, list[str]] = {}
    for name in sorted(names):
        by_class.setdefault(name.split("/")[1], []).append(name)
    if not size:
        return [name for label in CLASSES for name in by_class[label][:EACH]]
    turns = sorted((k, name) for found in by_class.values() for k, name in enumerate(found))
    return [name for _, name in turns[:size]]


class Federation:
    """A server and its sites in processes of their own."""

    def __init__(self, place: Path, sites: list[str], fault: str = "", sizes: Sequence[int] = ()):
        """sizes: of the sites' data; without it, EACH images of each of CLASSES."""
        self.place, self.sites = place, sites
        self.settings: dict[str, dict[str, str]] = {}  # further variables of a site's environment
        self.network = Network() if fault in CUTS else None
        self.disk = place / f"home-{sites[-1]}" if fault in FULL else None
        if self.disk:
            self.disk.mkdir(mode=0o700)
            subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m,mode=700", "tmpfs", str(self.disk)], check=True)
        host = self.network.host if self.network else "localhost"
        shutil.copytree(ROOT / "fedvlm", place / "code" / "fedvlm", ignore=shutil.ignore_patterns("__pycache__"))
        self.env = os.environ | {
            "PYTHONPATH": os.pathsep.join([str(place / "code"), os.environ.get("PYTHONPATH", "")]),
            "FEDVLM_CACHE": str(place / "cache"),
            "OMP_NUM_THREADS": "1",
        }
        self.images = place / "images"
        with zipfile.ZipFile(ROOT / "fedvlm" / "data" / "assets" / "emoji.zip") as box:
            for style, size in zip(sites, sizes or [0] * len(sites), strict=True):
                for name in chosen([n for n in box.namelist() if n.startswith(f"{style}/")], size):
                    (self.images / name).parent.mkdir(parents=True, exist_ok=True)
                    (self.images / name).write_bytes(box.read(name))
        with socket.socket() as free:
            free.bind(("", 0))
            port = free.getsockname()[1]
        self.fedvlm("federation", "init", *sites, f"host={host}", f"port={port}", "name=bench", f"out={place / 'kits'}")
        self.parties: dict[str, subprocess.Popen[bytes]] = {}

    def fedvlm(self, *words: str, check: bool = True) -> str:
        call = [sys.executable, "-m", "fedvlm", *words]
        done = subprocess.run(call, env=self.env, cwd=self.place, capture_output=True, text=True)
        if check and done.returncode:
            raise RuntimeError(f"{' '.join(words)}: {done.stderr[-2000:]}")
        return done.stdout + done.stderr

    def start(self, name: str, fault: str = "") -> None:
        """`fault`: what is wrong with this site (one of REFUSED)."""
        kit, home = self.place / "kits" / f"{name}.zip", self.place / f"home-{name}"
        # a feature store of its own, as on a machine of its own
        images, more = self.images / name, list[str]()
        env = self.env | {"FEDVLM_CACHE": str(self.place / f"cache-{name}")} | self.settings.get(name, {})
        if fault == "other classes":
            images = self.place / "other-classes"
            if not images.exists():
                shutil.copytree(self.images / name, images)
                (images / CLASSES[0]).rename(images / "zebra")
        if fault == "another backbone":
            more = [f"backbone={self.other_backbone()}"]
        if fault == "another version":
            env |= {"PYTHONPATH": str(self.other_version()) + os.pathsep + self.env["PYTHONPATH"]}
        rules = self.place / f"{name}.yaml"
        rules.write_text("reveals: embeddings\nsmallest_examples: 1\n")  # of feddtl; small sites
        more.append(f"rules={rules}")
        words = ["serve", str(kit)] if name == "server" else ["join", str(kit), f"data={images}", *more]
        log = (self.place / f"{name}.log").open("ab")
        call = [sys.executable, "-m", "fedvlm", *words, f"home={home}"]
        if self.network and name == self.sites[-1]:
            call = ["ip", "netns", "exec", self.network.name, *call]
        self.parties[name] = subprocess.Popen(call, env=env, cwd=self.place, stdout=log, stderr=log)

    def stop(self, name: str) -> None:
        self.parties[name].send_signal(signal.SIGTERM)
        self.parties[name].wait(90)

    def other_backbone(self) -> Path:
        """The bundled one with one number changed."""
        from safetensors.torch import load_file, save_file

        made = self.place / "other-backbone"
        if not made.exists():
            shutil.copytree(ROOT / "fedvlm" / "backbones" / "assets" / "mini-clip", made)
            weights = load_file(made / "model.safetensors")
            name = max(weights, key=lambda k: weights[k].numel())
            weights[name].view(-1)[0] += 1
            save_file(weights, made / "model.safetensors", metadata={"format": "pt"})
        return made

    def other_version(self) -> Path:
        made = self.place / "other-code"
        if not made.exists():
            shutil.copytree(self.place / "code", made)
            with (made / "fedvlm" / "core" / "state.py").open("a") as file:
                file.write("# another version\n")
        return made

    def up(self) -> None:
        for name in ("server", *self.sites):
            self.start(name)
        self.until(lambda: set(self.connected()) >= set(self.sites), 240)

    def connected(self) -> list[str]:
        told = self.fedvlm("federation", "status", str(self.place / "kits" / "admin.zip"), check=False)
        return [s for s in self.sites if any(line.split()[:1] == [s] for line in told.splitlines())]

    def until(self, ready: Callable[[], bool], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not ready():
            if time.monotonic() > deadline:
                raise RuntimeError("it took too long; see " + str(self.place))
            time.sleep(1)

    def words(self, method: str, out: str, rounds: int = ROUNDS) -> list[str]:
        name, *keys = method.split()
        unseen = [] if "secure" in method else [f"unseen={self.sites[0]}"]
        return ["run", name, *keys, *unseen, f"rounds={rounds}", f"out={self.place / out}"]

    def run(self, method: str, out: str, rounds: int = ROUNDS, *more: str) -> subprocess.Popen[bytes]:
        words = [*self.words(method, out, rounds), f"federation={self.place / 'kits' / 'admin.zip'}", *more]
        log = (self.place / f"{out}.log").open("ab")
        call = [sys.executable, "-m", "fedvlm", *words]
        return subprocess.Popen(call, env=self.env, cwd=self.place, stdout=log, stderr=log)

    def reference(self, method: str, engine: str, out: str, rounds: int = ROUNDS) -> None:
        self.fedvlm(*self.words(method, out, rounds), f"data={self.images}", f"engine={engine}")

    def differences(self, run: str, reference: str) -> list[str]:
        """Where the shared state or a site's private row differs."""
        import numpy as np
        import torch
        from safetensors.torch import load_file

        from fedvlm.engines.rows import Rows
        from fedvlm.training.folder import RunFolder

        one, other = (load_file(self.place / r / "state.safetensors") for r in (run, reference))
        found = [k for k in other if k not in one or not torch.equal(one[k].nan_to_num(), other[k].nan_to_num())]
        saved = RunFolder(self.place / reference).load()
        newcomer = saved[0].private if saved else {}
        round = int(json.loads((self.place / run / "rounds.jsonl").read_text().splitlines()[-1])["round"])
        name = json.loads((self.place / run / "received.jsonl").read_text().splitlines()[-1])["run"]
        rows = self.place / reference / "rows.bin"
        for i, site in enumerate(self.sites):
            if newcomer and rows.exists():
                own = self.place / f"home-{site}" / "runs" / name / "clients" / site / "rows.bin"
                mine = Rows(newcomer, 1, own).read(np.array([0]), round)
                theirs = Rows(newcomer, len(self.sites), rows).read(np.array([i]), round)
                found += [f"{site}'s {k}" for k in mine if not torch.equal(mine[k], theirs[k])]
        return found

    def down(self) -> None:
        for party in self.parties.values():
            party.send_signal(signal.SIGTERM)
        for party in self.parties.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                party.wait(60)
            party.kill()
        if self.network:
            self.network.close()
        if self.disk:
            subprocess.run(["umount", "-l", str(self.disk)], check=False)


class Network:
    """A network namespace, linked to this machine's by a pair of virtual devices. Needs root and Linux."""

    def __init__(self) -> None:
        number = os.getpid() % 250
        self.name, self.device = f"fvbench{os.getpid()}", f"fvb{os.getpid()}"
        self.host = f"10.79.{number}.1"
        self.ip("netns", "add", self.name)
        self.ip("link", "add", self.device, "type", "veth", "peer", "name", "eth0", "netns", self.name)
        self.ip("addr", "add", f"{self.host}/24", "dev", self.device)
        self.link("up")
        for words in (["addr", "add", f"10.79.{number}.2/24", "dev", "eth0"], ["link", "set", "eth0", "up"]):
            self.ip("-n", self.name, *words)
        self.ip("-n", self.name, "link", "set", "lo", "up")

    def ip(self, *words: str, check: bool = True) -> None:
        subprocess.run(["ip", *words], check=check)

    def link(self, state: str) -> None:
        self.ip("link", "set", self.device, state)

    def close(self) -> None:
        self.ip("netns", "del", self.name, check=False)


@contextlib.contextmanager
def federation(
    sites: list[str], fault: str = "", sizes: Sequence[int] = (), settings: Sequence[dict[str, str]] = ()
) -> Iterator[Federation]:
    with tempfile.TemporaryDirectory() as folder:
        made = Federation(Path(folder), sites, fault, sizes)
        made.settings = dict(zip(sites, settings, strict=False))
        try:
            made.up()
            yield made
        finally:
            made.down()


def same(first: int) -> tuple[int, int, list[str]]:
    """`first`: the number of methods that are left out (they were tried before)."""
    lines, lost = [], 0
    with federation(styles()[: len(SIZES)], sizes=SIZES) as fed:
        for method in METHODS[first:]:
            tag = method.split()[0] + ("-secure" if "secure" in method else "")
            fed.reference(method, "serial", f"serial-{tag}")
            fed.reference(method, "loopback", f"loopback-{tag}")
            began = time.monotonic()
            code = fed.run(method, f"nvflare-{tag}").wait()
            took = time.monotonic() - began
            odd = [f"exit code {code}: {(fed.place / f'nvflare-{tag}.log').read_text()[-300:]}"] if code else []
            if not code:
                odd = fed.differences(f"nvflare-{tag}", f"serial-{tag}")
                state = [(fed.place / f"{r}-{tag}" / "state.safetensors") for r in ("serial", "loopback")]
                odd += ["loopback's state"] if tensors(state[0]) != tensors(state[1]) else []
                odd += ledgers(fed, f"nvflare-{tag}")
            lost += bool(odd)
            lines.append(f"{method}: {'the same bits' if not odd else 'differs in ' + ', '.join(odd)} ({took:.0f} s)")
            print(lines[-1], flush=True)
    return len(METHODS) - first, lost, lines


def processors(first: int) -> tuple[int, int, list[str]]:
    """Sites whose processors differ: a run ends, and its record names each."""
    lines, lost = [], 0
    settings = list(SETTINGS.values())
    with federation(styles()[: len(settings)], sizes=(60,) * len(settings), settings=settings) as fed:
        for method in ON_PROCESSORS[first:]:
            code = fed.run(method, f"processors-{method}").wait()
            if code:
                lines.append(f"{method}: exit code {code}")
            else:
                record = json.loads((fed.place / f"processors-{method}" / "run.json").read_text())
                found = {site: record["processors"][site][-1] for site in fed.sites}
                odd = "" if len(set(found.values())) == len(fed.sites) and record["result"] else ", which are not all"
                lines.append(f"{method}: finished by {found}{odd}")
            lost += bool(code or odd)
            print(lines[-1], flush=True)
    return len(ON_PROCESSORS) - first, lost, lines


def tensors(path: Path) -> dict[str, bytes]:
    from safetensors.torch import load_file

    return {k: v.numpy().tobytes() for k, v in load_file(path).items()}


def ledgers(fed: Federation, run: str) -> list[str]:
    """Where a site's ledger and what the server received disagree."""
    from fedvlm.federation import ledger

    found = []
    for site in fed.sites:
        path = fed.place / f"home-{site}" / ledger.SENT
        if not path.exists():
            found.append(f"{site} has sent nothing")
            continue
        found += ledger.compare(path, fed.place / run / ledger.RECEIVED, site)
        found += [f"{site}'s ledger, line {fault.line}"] if (fault := ledger.verify(path)) else []
    return found


# Faults. Those during a run must leave the bits of an undisturbed one, except where a site was really absent for rounds:
# then the record must say so, everybody must be back at the end, and ledgers must agree.


def pids(*words: str) -> list[int]:
    import psutil

    found = []
    for process in psutil.process_iter(["cmdline"]):
        line = process.info["cmdline"] or []
        if all(any(w in part for part in line) for w in words):
            found.append(process.pid)
    return found


def kill(*words: str) -> None:
    found = pids(*words)
    if not found:
        raise RuntimeError(f"there is no process of {words}")
    for pid in found:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def kill_job(fed: Federation, site: str) -> None:
    kill("client.worker_process", str(fed.place / "kits" / site))


def kill_agent(fed: Federation, site: str) -> None:
    kill("fedvlm.federation.agent", str(fed.place / f"home-{site}"))


def kill_parent(fed: Federation, site: str) -> None:
    kill("fedvlm.federation.start", str(fed.place / "kits" / site))


def kill_server(fed: Federation, site: str) -> None:
    kill("fedvlm.federation.start", str(fed.place / "kits" / "server"))
    with contextlib.suppress(RuntimeError):
        kill("runner_process", str(fed.place / "kits" / "server"))


def kill_server_job(fed: Federation, site: str) -> None:
    kill("runner_process", str(fed.place / "kits" / "server"))


def kill_keeper(fed: Federation, site: str) -> None:
    """`fedvlm serve` itself, with all that it runs; it is started again, as systemd would."""
    fed.parties["server"].kill()
    fed.parties["server"].wait()
    time.sleep(10)
    fed.start("server")


def stop_and_go(fed: Federation, site: str) -> None:
    chosen = [
        *pids("worker_process", str(fed.place / "kits" / site)),
        *pids("fedvlm.federation.agent", str(fed.place / f"home-{site}")),
    ]
    for pid in chosen:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(30)
    for pid in chosen:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def cut(fed: Federation, site: str) -> None:
    """Of the last site, which lives in a network namespace of its own."""
    assert fed.network
    fed.network.link("down")
    time.sleep(20)
    fed.network.link("up")


def cut_for_long(fed: Federation, site: str) -> None:
    assert fed.network
    fed.network.link("down")
    time.sleep(600)
    fed.network.link("up")


def fill(fed: Federation) -> Path:
    """The home of the last site is a file system of its own."""
    big = fed.place / f"home-{fed.sites[-1]}" / "big"
    with contextlib.suppress(OSError), big.open("wb", buffering=0) as out:
        for size in (1 << 16, 1):  # to the last byte
            with contextlib.suppress(OSError):
                while True:
                    out.write(bytes(size))
    return big


def fill_disk(fed: Federation, site: str) -> None:
    big = fill(fed)
    time.sleep(8)
    big.unlink()


DURING: dict[str, Callable[[Federation, str], None]] = {
    "job process killed": kill_job,
    "agent killed": kill_agent,
    "site's parent killed": kill_parent,
    "server killed": kill_server,
    "server's job killed": kill_server_job,
    "keeper killed": kill_keeper,
    "site stopped for 30 s": stop_and_go,
    "network cut for 20 s": cut,
    "network cut for 10 min": cut_for_long,
    "disk of a site full": fill_disk,
}
LATE, FULL_FIRST = "site joins late", "disk of a site full from the start"
CUTS, FULL = ("network cut for 20 s", "network cut for 10 min"), ("disk of a site full", FULL_FIRST)
REFUSED = ("another backbone", "other classes", "another version")
FAULTS = (*DURING, LATE, FULL_FIRST, *REFUSED)
ROUNDS_OF_FAULTS = 60
ROUNDS_OF = {LATE: 1500, "network cut for 10 min": 6000}  # a site needs some seconds to start
OVER = ("done", "failed", "stopped")


class Outcome(NamedTuple):
    odd: list[str]  # what was lost
    note: str


def faults(times: int, only: list[str]) -> tuple[int, int, list[str]]:
    """Runs of fedot with three sites, each disturbed in a random round."""
    lines, tried, lost = list[str](), 0, 0
    draw = random.Random(times)
    for name in only or FAULTS:
        if name in (*CUTS, *FULL) and not (os.geteuid() == 0 and shutil.which("ip")):
            print(f"{name}: left out, it needs root, mount and iproute2", flush=True)
            continue
        with federation(styles()[:3], name) as fed:
            fed.reference("fedot", "serial", "serial", ROUNDS_OF.get(name, ROUNDS_OF_FAULTS))
            for k in range(times):
                began = time.monotonic()
                try:
                    found = one_fault(fed, name, k, draw)
                except RuntimeError as error:
                    found = Outcome([str(error)], "")
                tried, lost = tried + 1, lost + bool(found.odd)
                took = time.monotonic() - began
                lines.append(f"| {name} | {'; '.join(found.odd) or 'nothing lost'} | {found.note} | {took:.0f} s |")
                print(lines[-1], flush=True)
    return tried, lost, lines


def one_fault(fed: Federation, name: str, k: int, draw: random.Random) -> Outcome:
    out = f"{name.replace(' ', '-').replace(chr(39), '')}-{k}"
    table = fed.place / "home-server" / "runs.json"
    for run in json.loads(table.read_text()) if table.exists() else []:
        fed.fedvlm("federation", "forget", str(fed.place / "kits" / "admin.zip"), run["name"])
    for old in (p for site in fed.sites for p in (fed.place / f"home-{site}").glob("runs/*")):
        shutil.rmtree(old)
    if name in REFUSED:
        return refused(fed, name, out)
    last = fed.sites[-1]
    if name == LATE:
        fed.stop(last)
    if name == FULL_FIRST:
        fill(fed)
    rounds = ROUNDS_OF.get(name, ROUNDS_OF_FAULTS)
    keys = () if name in (FULL_FIRST, "network cut for 10 min") else ("grace=90", "timeout=90")
    process = fed.run("fedot", out, rounds, "quorum=0.5", *keys)
    path, at = fed.place / out / "rounds.jsonl", draw.randrange(2, ROUNDS_OF_FAULTS // 2)
    fed.until(lambda: (path.exists() and len(path.read_bytes().splitlines()) > at) or process.poll() is not None, 300)
    if process.poll() is not None:
        return Outcome(
            ["the run was over before it could be disturbed: " + (fed.place / f"{out}.log").read_text()[-200:]], ""
        )
    process.kill()  # from here on nobody is at the office
    process.wait()
    if name == LATE:
        fed.start(last)
    elif name in DURING:
        DURING[name](fed, draw.choice(fed.sites[1:]))
    newest = {}

    def over() -> bool:
        newest.update(json.loads(table.read_text())[-1])
        return newest["state"] in OVER

    fed.until(over, 600)
    if newest["state"] != "done":
        return Outcome([f"{newest['state']}: {newest['reason']}"], "")
    if fed.run("fedot", out, rounds, "quorum=0.5", *keys).wait():  # it is fetched
        return Outcome([f"it cannot be fetched: {(fed.place / f'{out}.log').read_text()[-300:]}"], "")
    records = [json.loads(x) for x in path.read_bytes().splitlines()]
    played = [r for r in records if r["round"]]
    took = [statistics.median(r["seconds"] for r in part) for part in (played[1:at], played[at + 1 :]) if part]
    pace = f"a round {took[0]:.2f} s, then {took[-1]:.2f} s; {newest['jobs']} jobs"
    away = [r["round"] for r in played if r.get("missing") or r.get("late") or r.get("answered") != len(fed.sites) - 1]
    odd = [] if len(played) == rounds else [f"{len(played)} rounds"]
    # on its way when somebody was killed; a full disk takes no ledger
    unsaid = ("was not received", *(["has sent nothing"] if name == FULL_FIRST else []))
    odd += [x for x in ledgers(fed, out) if not x.endswith(unsaid)]
    if not away:
        return Outcome(odd + fed.differences(out, "serial"), f"after round {at}; the same bits; {pace}")
    log = (fed.place / out / "log.txt").read_text()
    if name in FULL:
        odd += [] if "its disk is full" in log else ["nobody was told that the disk is full"]
    odd += [] if name in (LATE, *FULL, "network cut for 10 min") else fed.differences(out, "serial")
    odd += ["somebody is not back"] if rounds in away and name != FULL_FIRST else []
    note = f"after round {at}; absent in {len(away)} rounds, {away[0]} to {away[-1]}, as recorded; {pace}"
    if name == FULL_FIRST:
        (fed.place / f"home-{last}" / "big").unlink()
    return Outcome(odd, note)


def refused(fed: Federation, name: str, out: str) -> Outcome:
    """The last site cannot take part: the run goes on without it, as one process does without its data, and says why."""
    last = fed.sites[-1]
    fed.stop(last)
    fed.start(last, name)
    fed.until(lambda: last in fed.connected(), 120)
    process = fed.run("fedot", out, ROUNDS)
    code = process.wait()
    log = (fed.place / f"{out}.log").read_text()
    odd = [] if code == 0 else [f"exit code {code}: {log[-300:]}"]
    said = [line for line in log.splitlines() if "does not take part" in line]
    odd += [] if said else ["nobody was told why"]
    if not (fed.place / "without").exists():
        kept = fed.place / "fewer"
        for site in fed.sites[:-1]:
            shutil.copytree(fed.images / site, kept / site)
        words = [*fed.words("fedot", "without", ROUNDS), f"data={kept}", "engine=serial"]
        fed.fedvlm(*words)
    odd += differing(fed.place / out, fed.place / "without") if code == 0 else []
    return Outcome(odd, said[0][:160] if said else "")


def differing(run: Path, reference: Path) -> list[str]:
    one, other = (tensors(r / "state.safetensors") for r in (run, reference))
    return [k for k in other if k.startswith("shared/") and one.get(k) != other[k]]


DEFAULTS = {"same": 0, "processors": 0, "faults": 10}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checks", nargs="+", help="name or name=number")
    parser.add_argument("--only", nargs="+", choices=FAULTS, default=[], help="of faults")
    parser.add_argument("--out", type=Path, help="a JSON file")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # servers and sites are ended, too
    found = {}
    for word in args.checks:
        name, _, number = word.partition("=")
        count = int(number or DEFAULTS[name])
        checks = {"same": same, "processors": processors, "faults": lambda number: faults(number, args.only)}
        tried, lost, lines = checks[name](count)
        found[name] = {"tried": tried, "lost": lost, "lines": lines}
        print(f"{name}: {tried} tried, {lost} lost", flush=True)
    if args.out:
        args.out.write_text(json.dumps(found, indent=1) + "\n")
    return int(any(f["lost"] for f in found.values()))


if __name__ == "__main__":
    sys.exit(main())
