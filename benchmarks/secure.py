"""What secure aggregation costs: `python benchmarks/secure.py [--write docs/secure.md] [--seconds 60]`.

All clients in one process, one after the other; 10 % of them drop out after they sent their shares, which costs the server
most. CPU seconds of one core, a client's as the mean over those that stay; every sum is checked. The floor of a client is
the time that bare ChaCha20 takes for its (neighbours + 1) masks, measured in the same run; a row that would take longer
than --seconds by this floor is left out.
"""

from __future__ import annotations

import argparse
import platform
import sys
import time
from collections.abc import Iterator
from functools import partial
from math import ceil
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20

from fedvlm.privacy.secure.client import Client
from fedvlm.privacy.secure.keys import BLOCK, ZEROS
from fedvlm.privacy.secure.messages import Integers
from fedvlm.privacy.secure.server import aggregate, draw

BEGIN, END = "<!-- secure -->", "<!-- /secure -->"
CLIENTS, LENGTHS = (4, 64, 1000), (10_000, 100_000, 1_000_000)
DROPPED = 0.1
COLUMNS = ("clients", "neighbours", "numbers", "a client, s", "floor, s", "server, s", "plain sum, s")
SIZES = ("up, kB", "down, kB", "plain up, kB")


def stream_rate() -> float:
    """Bytes a second of bare ChaCha20."""
    buffer, rounds = np.empty(BLOCK, np.uint8), 4000
    cipher = Cipher(ChaCha20(bytes(32), bytes(16)), mode=None).encryptor()
    began = time.process_time()
    for _ in range(rounds):
        cipher.update_into(ZEROS, buffer)  # type: ignore[arg-type]
    return rounds * BLOCK / (time.process_time() - began)


class Simulation:
    def __init__(self, clients: int, length: int):
        self.length, self.spent, self.seconds, self.down, self.up = length, 0.0, 0.0, 0, 0
        self.clients = {i: Client(i) for i in range(clients)}
        self.absent = set(range(ceil(DROPPED * clients)))

    def vector(self, client: int) -> Integers:
        return np.arange(client, client + self.length, dtype=np.uint64) - np.uint64(self.length // 2)

    def ask(self, kind: str, questions: dict[int, bytes]) -> Iterator[tuple[int, bytes]]:
        for i, question in questions.items():
            if kind in ("masked", "unmask") and i in self.absent:
                continue
            began = time.process_time()
            answer = self.clients[i].answer(kind, question, partial(self.vector, i))
            took = time.process_time() - began
            self.spent += took
            if i not in self.absent:
                self.seconds, self.down, self.up = self.seconds + took, self.down + len(question), self.up + len(answer)
            yield i, answer

    def plain(self) -> float:
        """Seconds of adding up the same vectors, as float32."""
        spent, total = 0.0, np.zeros(self.length)
        for i in self.clients.keys() - self.absent:
            vector = self.vector(i).view(np.int64).astype(np.float32)
            began = time.process_time()
            total += vector
            spent += time.process_time() - began
        return spent


def row(clients: int, length: int, rate: float) -> str:
    made = Simulation(clients, length)
    parameters = draw(made.clients, max(3, ceil(0.6 * clients)), clients, 64.0)
    k = parameters.size.neighbours
    began = time.process_time()
    total = aggregate(parameters, length, np.uint64, made.ask)
    server = time.process_time() - began - made.spent
    expected = np.zeros(length, np.uint64)
    for i in total.ids:
        expected += made.vector(i)
    assert set(total.ids) == made.clients.keys() - made.absent and (total.sum == expected).all()
    floor = (k + 1) * 8 * length / rate
    cells = (f"{made.seconds / len(total.ids):.2g}", f"{floor:.2g}", f"{server:.2g}", f"{made.plain():.2g}")
    sizes = (made.up / len(total.ids), made.down / len(total.ids), 4 * length)
    return f"| {clients:,} | {k} | {length:,} | {' | '.join(cells)} | {' | '.join(f'{s / 1000:,.0f}' for s in sizes)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", nargs="*", type=int, default=list(CLIENTS))
    parser.add_argument("--lengths", nargs="*", type=int, default=list(LENGTHS))
    parser.add_argument("--seconds", type=float, default=60.0, help="rows that would take longer are left out")
    parser.add_argument("--write", type=Path, help="a page with a place for the table")
    given = parser.parse_args()
    rate = stream_rate()
    lines = [f"| {' | '.join(COLUMNS + SIZES)} |", "|" + "---|" * len(COLUMNS + SIZES)]
    for clients in given.clients:
        for length in given.lengths:
            k = draw(range(clients), max(3, ceil(0.6 * clients)), clients, 64.0).size.neighbours
            if clients * (k + 1) * 8 * length / rate > given.seconds:
                print(f"{clients} clients × {length:,} numbers is left out (--seconds)")
                continue
            lines.append(row(clients, length, rate))
            print(lines[-1], flush=True)
    caption = (
        f"`python benchmarks/secure.py` ({time.strftime('%Y-%m-%d')}; {platform.machine()}, Python "
        f"{platform.python_version()}, CPU seconds of one core; bare ChaCha20 {rate / 1e9:.1f} GB/s; 64-bit integers; "
        "10 % of the clients drop out after sending shares). Rows whose masks alone take a core more "
        f"than {given.seconds:.0f} s are left out."
    )
    table = "\n".join([BEGIN, caption, "", *lines, END])
    if given.write:
        before, rest = given.write.read_text(encoding="utf-8").split(BEGIN)
        given.write.write_text(before + table + rest.split(END)[1], encoding="utf-8")
    else:
        print(table)


if __name__ == "__main__":
    main()
