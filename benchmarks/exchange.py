"""Seconds, bytes and memory of an exchange between the server and all of its sites, of three ways in one run:

    python benchmarks/exchange.py                          # 4 sites, 1 kB to 100 MB
    python benchmarks/exchange.py --sites 4 16 --large     # also 16 sites, and 500 MB
    python benchmarks/exchange.py --sizes 1e3 1e6 --times 3 --out exchange.json

links: ours (fedvlm/federation/links.py, site.py, and an agent that answers with the tensors it got, written down in its
ledger).
bare: NVFlare's Collab call with the same bytes, answered by a method that returns its argument: what NVFlare itself costs.
loopback: engine=loopback's processes, without a network. Kits, certificates and processes are real, all on this machine.

cpu s is the processor's time of one exchange in all processes, which others on the machine change least.
Memory is the highest above what a process had before the first message, in multiples of the message; a site has two
processes (NVFlare's for the job, and the agent). The bars: links takes at most RATIO times bare's median, and a site at most
MEMORY times the message. Exit code 1 where a bar is missed.

This file is also part of a job: it is copied into the frozen package (as fedvlm.federation.exchange) and named in its list
of allowed classes. In that copy alone, agents answer a step "echo".
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import psutil
import torch
from nvflare.collab import collab
from nvflare.collab.api.context import get_call_context, set_call_context

from fedvlm.federation.frames import LIMIT
from fedvlm.federation.links import Links
from fedvlm.federation.site import Site
from fedvlm.federation.wire import Header, pack

if TYPE_CHECKING:
    from federation import Federation

SIZES, LARGE = (10**3, 10**5, 10**6, 10**7, 10**8), 5 * 10**8
WAYS = ("links", "bare", "loopback")
RATIO, MEMORY = 1.3, 3.0
SECONDS = 900.0  # that an exchange may take
MODULE = "fedvlm.federation.exchange"


# What runs inside the job, and in loopback's place


class Figures(NamedTuple):
    """Of exchanges of one size."""

    size: int  # bytes of the frame, each way and for each site
    seconds: list[float]
    memory: dict[str, int]  # by kind of process, the bytes above the start; the most of any site
    cpu: float  # seconds that one exchange takes of all processes together: the same whatever else the machine does


class Memory:
    """Of processes on this machine, by kind. Linux keeps the highest of each, and can be told to begin anew."""

    def __init__(self, kinds: dict[str, list[int]]):
        self.kinds = kinds
        self.before = {pid: reading(pid, "VmRSS") for pids in kinds.values() for pid in pids}

    def reset(self) -> None:
        for pid in self.before:
            with contextlib.suppress(OSError):
                Path(f"/proc/{pid}/clear_refs").write_text("5")

    def most(self) -> dict[str, int]:
        return {
            kind: max((reading(pid, "VmHWM") - self.before[pid] for pid in pids), default=0)
            for kind, pids in self.kinds.items()
        }


def reading(pid: int, key: str) -> int:
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith(key):
                return 1024 * int(line.split()[1])
    return 0


def cpu_seconds(pids: list[int]) -> float:
    found = 0.0
    for pid in pids:
        with contextlib.suppress(psutil.Error):
            found += sum(psutil.Process(pid).cpu_times()[:2])
    return found


def processes(*words: str) -> list[int]:
    found = psutil.process_iter(["cmdline"])
    return [p.pid for p in found if all(any(w in part for part in p.info["cmdline"] or []) for w in words)]


def frame_of(size: int, ticket: int) -> bytes:
    """An echo request of about so many bytes."""
    draw = torch.Generator().manual_seed(ticket)
    value = torch.randint(0, 256, (max(1, size - 400),), generator=draw, dtype=torch.uint8)
    return pack(Header("echo", 1, 1, ticket), {"values": {"x": value}})


def measure(
    sizes: list[int], times: int, kinds: Callable[[], dict[str, list[int]]], echo: Callable[[bytes, int], int]
) -> list[Figures]:
    """`echo`: sends a frame with a ticket to everybody; how many answered with as many bytes."""
    ticket, found = 1000, list[Figures]()
    for _ in range(3):  # processes and connections are there
        ticket += 1
        echo(frame_of(1000, ticket), ticket)
    memory = Memory(kinds())
    for size in sizes:
        seconds = []
        memory.reset()
        everything = [pid for pids in kinds().values() for pid in pids]
        used = cpu_seconds(everything)
        for _ in range(max(times, 20 if size <= 10**5 else times)):
            ticket += 1
            frame = frame_of(size, ticket)
            began = time.perf_counter()
            answered = echo(frame, ticket)
            seconds.append(time.perf_counter() - began)
            if not answered:
                raise RuntimeError(f"not everybody answered {size:,} bytes")
        cpu = (cpu_seconds(everything) - used) / len(seconds)
        found.append(Figures(len(frame), seconds, {k: v for k, v in memory.most().items() if k != "parents"}, cpu))
    return found


class Echo(Site):
    """A site that also returns bytes as they are."""

    @collab.publish  # type: ignore[untyped-decorator]
    def echo(self, data: bytes) -> bytes:
        return data


class Server:
    def __init__(self, way: str, sizes: list[int], times: int, place: str):
        self.way, self.sizes, self.times, self.place = way, sizes, times, Path(place)

    @collab.main  # type: ignore[untyped-decorator]
    def go(self) -> str:
        context = get_call_context()
        sites = {p.name: p for p in context.clients}
        links = Links("echo", sites, lambda: set_call_context(context))

        def through_links(frame: bytes, ticket: int) -> int:
            frames = dict.fromkeys(sites, frame)
            found = links.exchange(frames, dict.fromkeys(sites, LIMIT), ticket, SECONDS, 1.0, SECONDS)
            return all(isinstance(a, bytes) and len(a) > len(frame) // 2 for a in found.values())

        def bare(frame: bytes, ticket: int) -> int:
            found = dict(collab.clients(timeout=SECONDS).echo(frame))
            return len(found) == len(sites) and all(a == frame for a in found.values())

        def kinds() -> dict[str, list[int]]:
            return {
                "relay": processes("worker_process", str(self.place / "kits")),
                "agent": processes("fedvlm.federation.agent", str(self.place / "home-")),
                "server": [os.getpid()],
                "parents": processes("fedvlm.federation.start", str(self.place / "kits")),
            }

        echo = through_links if self.way == "links" else bare
        try:
            write(self.place / f"{self.way}.json", measure(self.sizes, self.times, kinds, echo))
        except Exception as error:
            (self.place / f"{self.way}.json").write_text(json.dumps(str(error)))
            raise
        finally:
            links.close()
        return ""


def loopback(folder: Path, sizes: list[int], times: int, out: Path) -> None:
    """Of the clients in a run's folder."""
    from fedvlm.federation.engines.loopback import Inbox, Loopback, Worker

    engine = object.__new__(Loopback)
    engine.folders = sorted((folder / "clients").iterdir())
    engine.inbox = Inbox()
    engine.workers = {i: Worker(i, f, engine.inbox) for i, f in enumerate(engine.folders)}
    engine.timeout, engine.quorum, engine.grace = SECONDS, 1.0, SECONDS

    def echo(frame: bytes, ticket: int) -> int:
        engine.tickets = ticket
        everybody = range(len(engine.folders))
        found = engine.exchange(dict.fromkeys(everybody, frame), dict.fromkeys(everybody, LIMIT))
        return all(isinstance(a, bytes) and len(a) > len(frame) // 2 for a in found.values())

    def kinds() -> dict[str, list[int]]:
        return {"agent": [w.process.pid for w in engine.workers.values()], "server": [os.getpid()]}

    try:
        write(out, measure(sizes, times, kinds, echo))
    finally:
        engine.close()


def write(path: Path, found: list[Figures]) -> None:
    part = path.with_suffix(".part")
    part.write_text(json.dumps([f._asdict() for f in found]))
    part.replace(path)


# The federation


def prepared(place: Path, number: int) -> Federation:
    from federation import CLASSES, ROOT, Federation, styles

    fed = Federation(place, [f"site-{k + 1:02}" for k in range(number)])
    package = place / "code" / "fedvlm"
    (package / "federation" / "exchange.py").write_bytes(Path(__file__).read_bytes())
    for kind, name in (("server", "Server"), ("site", "Echo")):
        patch(package / "federation" / "settings.py", f'"{kind}": [', f'"{kind}": ["{MODULE}.{name}", ')
    look, answer = "            if header.step == LOOK:\n", '            if header.step == "echo":\n'
    patch(package / "federation" / "agent.py", look, f"{answer}                return self.told(header, parts)\n{look}")
    first, answer = "        if header.step == OUTPUTS:\n", '        if header.step == "echo":\n'
    patch(package / "federation" / "worker.py", first, f"{answer}            return done, parts\n{first}")
    style = styles()[0]
    with zipfile.ZipFile(ROOT / "fedvlm" / "data" / "assets" / "emoji.zip") as box:
        for label in CLASSES:
            for name in sorted(n for n in box.namelist() if n.startswith(f"{style}/{label}/"))[:4]:
                for site in fed.sites:
                    path = fed.images / site / name.partition("/")[2]
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.write_bytes(box.read(name))
    return fed


def patch(path: Path, old: str, new: str) -> None:
    """In the frozen copy."""
    text = path.read_text(encoding="utf-8")
    if text.count(old) != 1:
        raise RuntimeError(f"{path.name} has changed: {old!r} is {text.count(old)} times in it")
    path.write_text(text.replace(old, new), encoding="utf-8")


def submit(fed: Federation, folder: Path, **args: object) -> None:
    """A job with this file's classes in place of ours, until it has ended."""
    from fedvlm.core.records import MethodRecord, PartRecord
    from fedvlm.federation import admin
    from fedvlm.federation.plan import Plan
    from fedvlm.federation.status import session

    part = PartRecord("")
    plan = Plan(
        "bench", "echo", fed.sites, MethodRecord(""), part, part, part, [], {}, {}, "", ""
    )  # only its name counts
    admin.write_job(folder, plan)
    for party, name, more in (("server", "Server", args), ("client", "Echo", {})):
        path = folder / "app" / "config" / f"config_fed_{party}.json"
        config = json.loads(path.read_text())
        config["components"] = [config["components"][0] | {"path": f"{MODULE}.{name}", "args": more}]
        path.write_text(json.dumps(config))
    with session(str(fed.place / "kits" / "admin.zip")) as (flare, _):
        job = flare.submit_job(str(folder))
        while "FINISHED" not in str((flare.get_job_meta(job) or {}).get("status")):
            time.sleep(1)


def play(number: int, sizes: list[int], times: int, ways: list[str]) -> dict[str, list[Figures]]:
    found: dict[str, list[Figures]] = {}
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        fed = prepared(place, number)
        try:
            if set(ways) - {"loopback"}:
                fed.up()
            for way in (w for w in ways if w != "loopback"):
                submit(fed, place / f"job-{way}", way=way, sizes=sizes, times=times, place=str(place))
        finally:
            fed.down()
        if "loopback" in ways:
            fed.fedvlm("run", "fedavg", f"data={fed.images}", "engine=loopback", "rounds=1", f"out={place / 'loop'}")
            given = [str(place / "loop"), json.dumps(sizes), str(times), str(place / "loopback.json")]
            subprocess.run([sys.executable, "-m", MODULE, *given], env=fed.env, cwd=place, check=True)
        for way in ways:
            raw = json.loads((place / f"{way}.json").read_text())
            if isinstance(raw, str):
                raise RuntimeError(f"{way}: {raw}")
            found[way] = [Figures(**f) for f in raw]
    return found


def table(number: int, found: dict[str, list[Figures]]) -> Iterator[str]:
    yield (
        f"{number} sites".ljust(10)
        + "  bytes        way       median s     p99 s    best s  of bare     cpu s   relay   agent  site  server"
    )
    bare = {f.size: float(np.median(f.seconds)) for f in found.get("bare", [])}
    for way, figures in found.items():
        for f in figures:
            median, p99, best = np.median(f.seconds), np.quantile(f.seconds, 0.99), min(f.seconds)
            ratio = f"{median / bare[f.size]:7.2f}" if f.size in bare else "      –"
            memory = {k: v / f.size for k, v in f.memory.items()}
            shown = [f"{memory[k]:7.1f}" if k in memory and f.size >= 10**6 else "      –" for k in ("relay", "agent")]
            shown += [f"{of_site(f):5.1f}" if f.size >= 10**6 else "    –"]
            shown += [f"{memory['server'] / number:7.1f}" if f.size >= 10**6 else "      –"]
            yield f"{f.size:>19,}  {way:9} {median:9.4f} {p99:9.4f} {best:9.4f}  {ratio} {f.cpu:9.4f} {' '.join(shown)}"


def of_site(f: Figures) -> float:
    return sum(v for k, v in f.memory.items() if k != "server") / f.size


def missed(number: int, found: dict[str, list[Figures]]) -> list[str]:
    """The bars that links does not keep."""
    bare = {f.size: float(np.median(f.seconds)) for f in found.get("bare", [])}
    lines = []
    for f in found.get("links", []):
        ratio = float(np.median(f.seconds)) / bare[f.size] if f.size in bare else 0.0
        if ratio > RATIO:
            lines.append(f"{number} sites, {f.size:,} bytes: {ratio:.2f} times as long as the bare echo")
        if f.size >= 10**7 and of_site(f) > MEMORY:
            lines.append(f"{number} sites, {f.size:,} bytes: a site takes {of_site(f):.1f} times the message")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sites", type=int, nargs="+", default=[4])
    parser.add_argument("--sizes", type=float, nargs="+", default=SIZES, help="bytes")
    parser.add_argument("--times", type=int, default=5, help="exchanges of each size; of small ones at least 20")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    parser.add_argument("--large", action="store_true", help="also 500 MB")
    parser.add_argument("--out", type=Path, help="a JSON file")
    args = parser.parse_args()
    sizes = [int(s) for s in args.sizes] + [LARGE] * args.large
    kept, lost = {}, list[str]()
    for number in args.sites:
        found = play(number, sizes, args.times, [w for w in WAYS if w in args.ways])
        print("\n".join(table(number, found)), flush=True)
        lost += missed(number, found)
        kept[str(number)] = {way: [f._asdict() for f in figures] for way, figures in found.items()}
    print("\n".join(lost) or "all bars are kept", flush=True)
    if args.out:
        args.out.write_text(json.dumps(kept, indent=1) + "\n")
    return int(bool(lost))


if __name__ == "__main__":
    if __spec__ is not None:  # python -m fedvlm.federation.exchange, in the frozen copy
        loopback(Path(sys.argv[1]), json.loads(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
    else:
        sys.exit(main())
