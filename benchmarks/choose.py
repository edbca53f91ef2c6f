"""What `fedvlm choose` loses against running all of its candidates in full, and what it saves.

    python benchmarks/choose.py [--data ../shared/data] [--only emoji,digits,pacs,caltech101-dirichlet,caltech101-disjoint]
                                [--methods moments,fedavg,…] [--rounds 0] [--out runs/choose-benchmark]

For each data set: `choose` without a limit of time, then every candidate with its recipe's settings, the same rounds, three
seeds and all held-out domains. Regret: points of all cells (C; where nobody can be held out, of own clients, P) that the
chosen method lacks to the best candidate, both measured in full on test images. Time: seconds of all runs of `choose` over
those of the candidates in full, as their records have them (encoding is the same for both). digits: scikit-learn's
8×8 digits as three cameras (as they are, inverted, with noise), 60 a class. Run again, it goes on where it stopped.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from PIL import Image

import fedvlm
from fedvlm import api
from fedvlm.report.gains import FROZEN
from fedvlm.studies.choose import CANDIDATES, Chosen
from fedvlm.training.folder import RunFolder

SETS = {
    "emoji": {"data": "emoji"},
    "digits": {"data": "digits"},
    "pacs": {"data": "pacs"},
    "caltech101-dirichlet": {"data": "caltech101", "partition": "dirichlet", "clients": 10, "alpha": 0.5},
    "caltech101-disjoint": {"data": "caltech101", "partition": "disjoint", "clients": 10},
}


def digits(root: Path) -> Path:
    """Written once."""
    from sklearn.datasets import load_digits

    folder, rng = root / "digits", np.random.default_rng(0)
    found = load_digits()
    cameras = {
        "plain": lambda x: x,
        "inverted": lambda x: 255 - x,
        "noisy": lambda x: np.clip(x + rng.normal(0, 60, x.shape), 0, 255),
    }
    for k, (camera, change) in enumerate(cameras.items()):
        for label in range(10):
            here = folder / camera / str(label)
            here.mkdir(parents=True, exist_ok=True)
            for i in np.nonzero(found.target == label)[0][k * 60 : (k + 1) * 60 or None]:
                path = here / f"{i}.png"
                if not path.is_file():
                    pixels = change(found.images[i] * 255 / 16).astype(np.uint8)
                    Image.fromarray(pixels).resize((64, 64)).save(path)
    return folder


def seconds(folder: Path) -> float:
    """Of all finished runs below."""
    runs = [RunFolder(p.parent) for p in folder.rglob("run.json")]
    return sum(r.record.finished.seconds for r in runs if r.done)


def in_full(name: str, keys: dict[str, object], methods: list[str], rounds: int, out: Path) -> api.Runs:
    return fedvlm.bench([m for m in methods if m != FROZEN], **keys, rounds=rounds, out=str(out))


def measured(name: str, chosen: Chosen, full: api.Runs, folder: Path) -> str:
    values = {str(v["method"]): v for v in full.table().values}
    measure = "C" if any(v.get("C") is not None for v in values.values()) else "P"
    known = {m: float(v[measure]) for m, v in values.items() if v.get(measure) is not None}  # type: ignore[arg-type]
    ours = next(float(v[measure]) for v in chosen.table.values if str(v["method"]).split()[0] == chosen.method)  # type: ignore[arg-type]
    best = max(known, key=lambda m: known[m])
    spent, whole = seconds(folder / "choose"), seconds(folder / "full")
    return (
        f"| {name} | {chosen.method} {chosen.settings or ''} | {measure} {ours:.2f} | {best} {known[best]:.2f} | "
        f"{max(0.0, known[best] - ours):.2f} | {spent:.0f} | {whole:.0f} | {100 * spent / whole:.0f} % | {len(known)} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    parser.add_argument("--only", default=",".join(SETS))
    parser.add_argument("--methods", default=",".join(CANDIDATES))
    parser.add_argument("--rounds", type=int, default=0, help="0: those of fedavg's recipe")
    parser.add_argument("--out", type=Path, default=Path("runs/choose-benchmark"))
    args = parser.parse_args()
    methods, lines = args.methods.split(","), list[str]()
    for name in args.only.split(","):
        keys: dict[str, object] = dict(SETS[name])
        place = digits(args.out) if keys["data"] == "digits" else args.data / str(keys["data"])
        keys["data"] = "emoji" if name == "emoji" else str(place)
        folder = args.out / name
        rounds = args.rounds or fedvlm.describe("fedavg", **keys).setup.config.rounds
        chosen = fedvlm.choose(
            **keys,
            methods=methods,
            rounds=rounds,
            minutes=10_000,
            out=str(folder / "choose"),  # type: ignore[arg-type]
        )
        print(repr(chosen), flush=True)
        lines.append(measured(name, chosen, in_full(name, keys, methods, rounds, folder / "full"), folder))
    print("| data | chosen | its value | best of all in full | regret | s chosen | s in full | share | candidates |")
    print("| --- " * 9 + "|")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
