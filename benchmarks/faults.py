"""What goes wrong, many times over, and what was lost: `python benchmarks/faults.py [kills=200] [disks=100]
[messages=100000] [files] [server=3600] [wire]` (all of them, with these numbers, if none is named).

kills: kill -9 at a random moment and resume, over six methods and two engines, until the bits are compared · disks: a disk
that fills at a random byte · messages: malformed replies, structure-aware · files: the corpus of bad data files ·
server: seconds of load on the encode server, good and bad requests, and its memory · wire: throughput of messages.
Each prints how many were tried and how many were lost (crashed, hung, or ended with other bits); exit code 1 if any was.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "faults")]
DEFAULTS = {"kills": 200, "disks": 100, "messages": 100_000, "files": 1, "server": 3600, "wire": 1}
METHODS = ("fedot", "fedavg", "ditto", "scaffold", "fedrep", "fft-gp")
ENGINES = ("stacked", "loopback")
PAUSE = 0.25  # seconds between the requests of each of eight clients to the encode server
KEPT = ("state.safetensors", "outputs.safetensors", "rows.bin")


class Outcome(NamedTuple):
    tried: int
    lost: int
    words: str = ""


def run_words(method: str, engine: str, folder: Path, data: Path) -> list[str]:
    words = ["run", method, f"data={data}", "unseen=noto", "rounds=30", "seed=7", f"engine={engine}", f"out={folder}"]
    return [sys.executable, "-m", "fedvlm", *words]


def bits(folder: Path) -> list[bytes]:
    return [path.read_bytes() for name in KEPT if (path := folder / name).exists()]


def small_images(folder: Path) -> Path:
    """Twelve emoji of each of three styles and five classes."""
    import zipfile

    with zipfile.ZipFile(ROOT / "fedvlm" / "data" / "assets" / "emoji.zip") as box:
        for style in ("noto", "twemoji", "openmoji"):
            for label in ("bird", "clock", "fruit", "hand", "train"):
                for name in sorted(n for n in box.namelist() if n.startswith(f"{style}/{label}/"))[:12]:
                    (folder / name).parent.mkdir(parents=True, exist_ok=True)
                    (folder / name).write_bytes(box.read(name))
    return folder


def killed_and_resumed(method: str, engine: str, kills: int, place: Path, data: Path, seed: int) -> tuple[int, int]:
    """Kills, and 1 if the end differs from an undisturbed run."""
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    whole, cut = place / f"{method}-{engine}-whole", place / f"{method}-{engine}-cut"
    began = time.monotonic()
    subprocess.run(run_words(method, engine, whole, data), check=True, **quiet)  # type: ignore[call-overload]
    longest, draw, done = time.monotonic() - began, random.Random(seed), 0
    while done < kills:
        command = run_words(method, engine, cut, data)  # the same command goes on
        process = subprocess.Popen(command, start_new_session=True, **quiet)  # type: ignore[call-overload]
        try:
            process.wait(timeout=draw.uniform(0.3, 1.0) * longest)
            if process.returncode or bits(whole) != bits(cut):
                return done, 1
            shutil.rmtree(cut)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            done += 1
    code = subprocess.run(run_words(method, engine, cut, data), **quiet).returncode  # type: ignore[call-overload]
    return done, int(code != 0 or bits(whole) != bits(cut))


def kills(count: int, place: Path) -> Outcome:
    data = small_images(place / "images")
    cases = [(m, e) for m in METHODS for e in ENGINES]
    each = -(-count // len(cases))
    with ThreadPoolExecutor(max(1, (os.cpu_count() or 2) // 2)) as pool:
        tasks = [pool.submit(killed_and_resumed, m, e, each, place, data, k) for k, (m, e) in enumerate(cases)]
        found = [t.result() for t in tasks]
    return Outcome(
        sum(n for n, _ in found), sum(x for _, x in found), f"{len(METHODS)} methods, {len(ENGINES)} engines"
    )


def disks(count: int, place: Path) -> Outcome:
    """Half of them full disks, half of them kills, at random bytes of what a run writes, up to three times in a run."""
    import fullness

    trials, draw = fullness.Trials(place), random.Random(count)
    different = 0
    for k in range(count):
        rooms = [draw.randrange(trials.bytes) for _ in range(draw.choice((1, 1, 2, 3)))]
        different += bool(trials.resumed(place / str(k), *rooms, dies=bool(k % 2)))
    return Outcome(count, different, f"a run writes {trials.bytes:,} bytes")


def messages(count: int, place: Path) -> Outcome:
    workers = os.cpu_count() or 2
    step = -(-count // (4 * workers))
    parts = [(first, min(first + step, count)) for first in range(0, count, step)]
    ends: Counter[str] = Counter()
    with ProcessPoolExecutor(workers) as pool:
        for found in pool.map(malformed_messages, parts):
            ends += found
    lost = sum(n for end, n in ends.items() if end.startswith("lost"))
    return Outcome(sum(ends.values()), lost, ", ".join(f"{n:,} {end}" for end, n in ends.most_common()))


def malformed_messages(part: tuple[int, int]) -> Counter[str]:
    import malformed
    import numpy as np
    import torch
    from helpers import random_data, random_task

    from fedvlm.errors import BadMessage
    from fedvlm.federation import wire
    from fedvlm.parts.adapters.head import Head
    from fedvlm.parts.local.sgd import Sgd
    from fedvlm.parts.merge.classwise import Classwise
    from fedvlm.rounds.guard import Guard
    from fedvlm.rounds.method import Method

    torch.set_num_threads(1)
    task = random_task()
    data = random_data(task)
    method = Method.build(Head(), Sgd(), Classwise(), task)
    declared = np.diff(data.bounds, axis=1)
    message, ends = method.init(len(data)).message(), Counter[str]()
    for seed in range(*part):
        guard = Guard(method, tuple(map(str, data.ids)), declared, {}, 5.0, lambda text: None)
        frame = malformed.reply(seed, guard.schema("train"), message.shared, int(declared[1, 0]))
        try:
            _, parts = wire.unpack(frame)
            inspection = guard.inspect("train", message, 1)
            accepted = [*inspection.passed(wire.to_reply(1, parts)), *inspection.rest()]
            harmless = all(v.isfinite().all() for r in accepted for v in (*r.values.values(), *r.shared.values()))
            ends["accepted and harmless" if accepted and harmless else "lost" if accepted else "refused by range"] += 1
        except BadMessage:
            ends["unreadable"] += 1
        except Exception as error:
            ends[f"lost ({type(error).__name__}, seed {seed})"] += 1
    return ends


def files(count: int, place: Path) -> Outcome:
    import re

    import corpus

    from fedvlm import backbones

    with contextlib.chdir(place):  # relative paths are short enough for sockets
        results = list(corpus.tried(Path("corpus"), backbones.load("mini-clip")))
    wrong = [t.bad.name for t in results if not re.search(t.bad.reason, t.said)]
    slowest = max(results, key=lambda t: t.seconds)
    return Outcome(len(results), len(wrong), f"slowest {slowest.bad.name} {slowest.seconds:.1f} s {wrong or ''}")


def resident(pid: int) -> int:
    """Bytes; Linux only."""
    with contextlib.suppress(OSError, ValueError):
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0


def server(seconds: int, place: Path) -> Outcome:
    import io

    import corpus
    from PIL import Image

    call = [sys.executable, "-m", "fedvlm", "encode-server", "backbone=mini-clip", "port=0"]
    log = (place / "server.log").open("w+")
    process = subprocess.Popen(call, stdout=log, stderr=subprocess.STDOUT)
    address, deadline = "", time.monotonic() + 120
    while not address and time.monotonic() < deadline:
        time.sleep(0.5)
        words = (place / "server.log").read_text().split()
        address = next((w.removeprefix("http://").strip("/") for w in words if w.startswith("http://")), "")
    stream = io.BytesIO()
    Image.linear_gradient("L").convert("RGB").save(stream, "PNG")
    good = request(stream.getvalue(), stream.getvalue())
    bodies = [request(corpus.encoded("PNG", (60000, 1), "1")), request(b"junk"), b"junk", b"", os.urandom(5000)]
    ends: Counter[str] = Counter()
    stop, sizes = time.monotonic() + seconds, list[int]()

    def ask(worker: int) -> None:
        draw = random.Random(worker)
        while time.monotonic() < stop:
            body = good if draw.random() < 0.6 else draw.choice(bodies)
            try:
                link = http.client.HTTPConnection(address, timeout=60)
                link.request("POST", "/", body, {"Content-Type": "application/octet-stream"})
                status = link.getresponse().status
                ends["answered" if status == 200 else f"refused with {status}"] += 1
                link.close()
            except OSError as error:
                ends[f"lost ({type(error).__name__})"] += 1
            time.sleep(PAUSE)

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    while time.monotonic() < stop:
        time.sleep(min(5, seconds / 20))
        sizes.append(resident(process.pid))
    for thread in threads:
        thread.join()
    alive = process.poll() is None
    process.kill()
    early, late = sizes[len(sizes) // 5], sizes[-1]
    words = f"memory {early / 1e6:.0f} MB after a fifth, {late / 1e6:.0f} MB at the end; "
    words += ", ".join(f"{n:,} {end}" for end, n in ends.most_common())
    lost = sum(n for end, n in ends.items() if end.startswith("lost")) + (not alive) + (late > 1.2 * early)
    lost += not ends["answered"]  # good requests are answered
    return Outcome(sum(ends.values()), lost, words)


def request(*images: bytes) -> bytes:
    import numpy as np
    from safetensors.numpy import save

    return save({str(i): np.frombuffer(image, np.uint8) for i, image in enumerate(images)})


def wire(count: int, place: Path) -> Outcome:
    """A request of so many megabytes to a client process and back, as the loopback engine does it; the best of three."""
    import torch

    from fedvlm.federation.engines.loopback import connected_process
    from fedvlm.federation.wire import Header, pack, receive, send, unpack

    client = (
        "import os\nfrom fedvlm.federation.wire import Header, pack, receive, send, unpack\n"
        "requests, replies = (os.fdopen(os.dup(n), mode, buffering=0) for n, mode in ((0, 'rb'), (1, 'wb')))\n"
        "while frame := receive(requests):\n    header, parts = unpack(frame)\n    send(replies, pack(header, parts))\n"
    )
    words, slow = [], 0
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    for megabytes in (16, 64, 256):
        with Path(os.devnull).open("wb") as log:
            process, reader, writer = connected_process([sys.executable, "-c", client], log, environment)
        send(writer, pack(Header(), {"shared": {"w": torch.ones(1)}}))
        receive(reader)
        sent, posts, trips = {"shared": {"w": torch.randn(megabytes << 18)}}, [], []
        for _ in range(3):
            began = time.perf_counter()
            frame = pack(Header(), sent)
            packed = time.perf_counter()
            send(writer, frame)
            posts.append(time.perf_counter() - packed)
            answer = receive(reader)
            _, parts = unpack(answer or b"")
            trips.append(time.perf_counter() - began)
            slow += not torch.equal(parts["shared"]["w"], sent["shared"]["w"])
        process.kill()
        post, both = (n * len(frame) / 1e6 / min(times) for n, times in ((1, posts), (2, trips)))
        words.append(f"{megabytes} MiB: posted at {post:,.0f} MB/s, there and back at {both:,.0f} MB/s")
    return Outcome(len(words), slow, "; ".join(words))


CHECKS: dict[str, Callable[[int, Path], Outcome]] = {
    "kills": kills,
    "disks": disks,
    "messages": messages,
    "files": files,
    "server": server,
    "wire": wire,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checks", nargs="*", help="name or name=number")
    parser.add_argument("--out", type=Path, help="a JSON file")
    args = parser.parse_args()
    wanted = dict(word.partition("=")[::2] for word in args.checks) or dict.fromkeys(DEFAULTS, "")
    outcomes: dict[str, dict[str, object]] = {}
    for name, number in wanted.items():
        if name not in CHECKS:
            parser.error(f"no check '{name}'; there is {', '.join(CHECKS)}")
        began = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            os.environ.setdefault("FEDVLM_CACHE", str(Path(folder) / "cache"))
            found = CHECKS[name](int(number or DEFAULTS[name]), Path(folder))
        outcomes[name] = found._asdict() | {"seconds": round(time.monotonic() - began, 1)}
        print(
            f"{name}: {found.tried:,} tried, {found.lost} lost; {found.words} ({outcomes[name]['seconds']} s)",
            flush=True,
        )
    if args.out:
        args.out.write_text(json.dumps(outcomes, indent=1) + "\n")
    return int(any(o["lost"] for o in outcomes.values()))


if __name__ == "__main__":
    sys.exit(main())
