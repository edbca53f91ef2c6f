"""Rehearse a federation of two hospitals on one machine: python examples/two_hospitals.py

Each hospital is a process with a folder of its own that nobody else reads; only bytes pass between it and the server
(engine=loopback). We look at what left the hospitals, see that both sides have written down the same, and that the result
is the same, bit for bit, as in one process. With the commands that are printed last, the hospitals are on machines of their
own; docs/federation.md explains them.
"""

from collections import Counter
from pathlib import Path

import shapes
import torch

import fedvlm
from fedvlm.federation import ledger

HOSPITALS = ("north", "south")


def main() -> fedvlm.Run:
    data = str(shapes.write(Path("hospitals"), HOSPITALS))
    apart = fedvlm.run("fedot", data=data, rounds=3, engine="loopback", out="runs/apart")
    print(apart.table())

    received = apart.folder / "received.jsonl"
    sent: Counter[tuple[str, str]] = Counter()
    for entry in ledger.entries(received):
        if not entry.tensors:
            continue  # an answer without values
        sent[entry.site, f"{entry.step}: {' '.join(t.name for t in entry.tensors)}"] += entry.bytes
    for (hospital, what), size in sent.items():
        print(f"left {hospital}: {size:,} bytes, {what}")
    private = sorted(set(apart.parameters("north")) - set(apart.parameters()))
    print("stayed in each hospital: its images, and its own", ", ".join(private) or "nothing")
    for hospital in HOSPITALS:
        differences = ledger.compare(apart.folder / "clients" / hospital / "ledger.jsonl", received, hospital)
        print(f"{hospital}'s ledger and the server's:", "; ".join(differences) or "the same")

    together = fedvlm.run("fedot", data=data, rounds=3, engine="serial", out="runs/together")
    same = all(torch.equal(value, together.parameters()[name]) for name, value in apart.parameters().items())
    print("shared model as in one process:", "the same bits" if same else "DIFFERENT")
    print(
        "between machines: office$ fedvlm federation init north south host=HOST out=heart",
        "server$ fedvlm serve server.zip",
        "north$ fedvlm join north.zip data=images",
        "office$ fedvlm run fedot federation=heart/admin.zip",
        sep="\n  ",
    )
    return apart


if __name__ == "__main__":
    main()
