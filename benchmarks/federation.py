"""A federation across sites on NVFlare, all on this machine, with real kits, certificates and processes:

    python benchmarks/federation.py same               # serial = loopback = NVFlare, to the bit (4 sites, 6 methods)
    python benchmarks/federation.py faults [times=10]  # what goes wrong, and the final bits compared

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
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
STYLES = ("noto", "openmoji", "twemoji", "fluent")
CLASSES = ("bird", "clock", "fruit", "hand", "train")
EACH, ROUNDS = 12, 5
METHODS = ("fedavg", "fedot", "fft-gp", "focoop", "feddtl", "fedavg secure=true")
KEPT = ("state.safetensors",)


def styles() -> list[str]:
    """Four styles of the embedded emoji that have all of the classes."""
    with zipfile.ZipFile(ROOT / "fedvlm" / "data" / "assets" / "emoji.zip") as box:
        names = box.namelist()
    found = sorted({n.split("/")[0] for n in names})
    enough = [s for s in found if all(sum(n.startswith(f"{s}/{c}/") for n in names) >= EACH for c in CLASSES)]
    return enough[:4]


class Federation:
    """A server and its sites in processes of their own."""

    def __init__(self, place: Path, sites: list[str]):
        self.place, self.sites = place, sites
        shutil.copytree(ROOT / "fedvlm", place / "code" / "fedvlm", ignore=shutil.ignore_patterns("__pycache__"))
        self.env = os.environ | {
            "PYTHONPATH": str(place / "code"),
            "FEDVLM_CACHE": str(place / "cache"),
            "OMP_NUM_THREADS": "1",
        }
        self.images = place / "images"
        with zipfile.ZipFile(ROOT / "fedvlm" / "data" / "assets" / "emoji.zip") as box:
            for style in sites:
                for label in CLASSES:
                    for name in sorted(n for n in box.namelist() if n.startswith(f"{style}/{label}/"))[:EACH]:
                        (self.images / name).parent.mkdir(parents=True, exist_ok=True)
                        (self.images / name).write_bytes(box.read(name))
        with socket.socket() as free:
            free.bind(("", 0))
            port = free.getsockname()[1]
        self.fedvlm(
            "federation", "init", *sites, "host=localhost", f"port={port}", "name=bench", f"out={place / 'kits'}"
        )
        self.parties: dict[str, subprocess.Popen[bytes]] = {}

    def fedvlm(self, *words: str, check: bool = True) -> str:
        call = [sys.executable, "-m", "fedvlm.cli", *words]
        done = subprocess.run(call, env=self.env, cwd=self.place, capture_output=True, text=True)
        if check and done.returncode:
            raise RuntimeError(f"{' '.join(words)}: {done.stderr[-2000:]}")
        return done.stdout + done.stderr

    def start(self, name: str) -> None:
        kit, home = self.place / "kits" / f"{name}.zip", self.place / f"home-{name}"
        words = ["serve", str(kit)] if name == "server" else ["join", str(kit), f"data={self.images / name}"]
        log = (self.place / f"{name}.log").open("ab")
        call = [sys.executable, "-m", "fedvlm.cli", *words, f"home={home}"]
        self.parties[name] = subprocess.Popen(call, env=self.env, cwd=self.place, stdout=log, stderr=log)

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
        call = [sys.executable, "-m", "fedvlm.cli", *words]
        return subprocess.Popen(call, env=self.env, cwd=self.place, stdout=log, stderr=log)

    def reference(self, method: str, engine: str, out: str, rounds: int = ROUNDS) -> None:
        self.fedvlm(*self.words(method, out, rounds), f"data={self.images}", f"engine={engine}")

    def differences(self, run: str, reference: str) -> list[str]:
        """Where the shared state or a site's private row differs."""
        import numpy as np
        import torch
        from safetensors.torch import load_file

        from fedvlm.engines.rows import Rows

        one, other = (load_file(self.place / r / "state.safetensors") for r in (run, reference))
        found = [k for k in other if k not in one or not torch.equal(one[k].nan_to_num(), other[k].nan_to_num())]
        newcomer = {k.partition("/")[2]: v for k, v in other.items() if k.startswith("private/")}
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


@contextlib.contextmanager
def federation(sites: list[str]) -> Iterator[Federation]:
    with tempfile.TemporaryDirectory() as folder:
        made = Federation(Path(folder), sites)
        try:
            made.up()
            yield made
        finally:
            made.down()


def same(first: int) -> tuple[int, int, list[str]]:
    """`first`: the number of methods that are left out (they were tried before)."""
    lines, lost = [], 0
    with federation(styles()) as fed:
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


def tensors(path: Path) -> dict[str, bytes]:
    from safetensors.torch import load_file

    return {k: v.numpy().tobytes() for k, v in load_file(path).items()}


def ledgers(fed: Federation, run: str) -> list[str]:
    """Where a site's ledger and what the server received disagree."""
    from fedvlm import ledger

    found = []
    for site in fed.sites:
        path = fed.place / f"home-{site}" / ledger.SENT
        found += ledger.compare(path, fed.place / run / ledger.RECEIVED, site)
        found += [f"{site}'s ledger, line {fault.line}"] if (fault := ledger.verify(path)) else []
    return found


# Faults: each is done to a run under way, which must end with the bits of an undisturbed one.


def pids(*words: str) -> list[int]:
    import psutil

    found = []
    for process in psutil.process_iter(["cmdline"]):
        line = process.info["cmdline"] or []
        if all(any(w in part for part in line) for w in words):
            found.append(process.pid)
    return found


def kill(*words: str) -> None:
    for pid in pids(*words):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def kill_job(fed: Federation, site: str) -> None:
    kill("client.worker_process", str(fed.place / "kits" / site))


def kill_agent(fed: Federation, site: str) -> None:
    kill("fedvlm.deploy.agent", str(fed.place / f"home-{site}"))


def kill_parent(fed: Federation, site: str) -> None:
    kill("fedvlm.deploy.start", str(fed.place / "kits" / site))


def kill_server(fed: Federation, site: str) -> None:
    kill("fedvlm.deploy.start", str(fed.place / "kits" / "server"))
    kill("runner_process", str(fed.place / "kits" / "server"))


def stop_and_go(fed: Federation, site: str) -> None:
    chosen = [
        *pids("worker_process", str(fed.place / "kits" / site)),
        *pids("fedvlm.deploy.agent", str(fed.place / f"home-{site}")),
    ]
    for pid in chosen:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(30)
    for pid in chosen:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


FAULTS = {
    "job process killed": kill_job,
    "agent killed": kill_agent,
    "site's parent killed": kill_parent,
    "server killed": kill_server,
    "site stopped for 30 s": stop_and_go,
}


def faults(times: int) -> tuple[int, int, list[str]]:
    """Runs of fedot, disturbed in a random round; with quorum=1 a round without somebody is void and repeated, so that the
    end must be the same to the bit."""
    rounds, lines, tried, lost = 40, [], 0, 0
    draw = random.Random(times)
    with federation(styles()[:3]) as fed:
        fed.reference("fedot", "serial", "serial", rounds)
        for name, harm in FAULTS.items():
            for k in range(times):
                out = f"{name.replace(' ', '-').replace(chr(39), '')}-{k}"
                for old in fed.place.glob("home-*/runs/*"):
                    shutil.rmtree(old)
                process = fed.run("fedot", out, rounds)
                path, at, began = fed.place / out / "rounds.jsonl", draw.randrange(2, rounds - 5), time.monotonic()
                fed.until(lambda p=path, r=at: p.exists() and len(p.read_bytes().splitlines()) > r, 300)
                harm(fed, draw.choice(fed.sites[1:]))
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(600)
                process.kill()
                tried += 1
                odd = fed.differences(out, "serial") if process.returncode == 0 else [f"exit code {process.returncode}"]
                records = [json.loads(x) for x in path.read_bytes().splitlines()]
                absent = sorted({n for r in records for n in (*r.get("missing", []), *r.get("late", []))})
                lost += bool(odd)
                lines.append(
                    f"{name} after round {at}: {odd or 'the same bits'}; absent {absent} ({time.monotonic() - began:.0f} s)"
                )
                print(lines[-1], flush=True)
    return tried, lost, lines


CHECKS = {"same": same, "faults": faults}
DEFAULTS = {"same": 0, "faults": 10}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checks", nargs="+", help="name or name=number")
    parser.add_argument("--out", type=Path, help="a JSON file")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # servers and sites are ended, too
    found = {}
    for word in args.checks:
        name, _, number = word.partition("=")
        tried, lost, lines = CHECKS[name](int(number or DEFAULTS[name]))
        found[name] = {"tried": tried, "lost": lost, "lines": lines}
        print(f"{name}: {tried} tried, {lost} lost", flush=True)
    if args.out:
        args.out.write_text(json.dumps(found, indent=1) + "\n")
    return int(any(f["lost"] for f in found.values()))


if __name__ == "__main__":
    sys.exit(main())
