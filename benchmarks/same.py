"""Did a change of the code change a result? Every recipe, a few rounds, serial and stacked, before and after, to the bit:
`python benchmarks/same.py --base REV`.

Checks REV out beside this tree, runs the same commands with both, and compares the SHA-256 of the final shared state, of
the final logits and features on every test example, and all scores of all rounds. Data is made here: some of the embedded
emoji, disks with their masks, sentences. Both sides use one feature store.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

STYLES, CLASSES, EACH = ("noto", "twemoji", "openmoji"), ("bird", "clock", "fruit", "hand", "train"), 10
ENGINES = ("serial", "stacked")
NETWORKS = {
    "lstm": ["data={text}", "domains=0", "hidden=8", "rounds=2"],
    "resnet": ["data={images}", "unseen=noto", "backbone=pixels:16", "depth=10", "width=4", "epochs=1", "rounds=2"],
    "unet": ["data={masks}", "unseen=a", "backbone=pixels:16", "width=2", "levels=1", "rounds=2"],
    "tower": ["data={images}", "unseen=noto", "rounds=1", "shots=2"],
}
SMALL = {"outsiders": ["candidates=200", "count=8"], "lapt": ["candidates=200", "count=8"]}
RENAMED = {"seemly_mass": "class_like_mass"}  # records that were called otherwise
TIMES = ("seconds", "phases", "started", "void")  # of a record: not a result


def words_of(name: str, adapter: str) -> list[str]:
    """What keeps a recipe's run to a second or two."""
    for network, words in NETWORKS.items():
        if adapter == network:
            return words
    return ["data={images}", "unseen=noto", "rounds=3", *SMALL.get(adapter, [])]


def make(folder: Path, package: Path) -> dict[str, Path]:
    """The three kinds of data."""
    import numpy as np
    from PIL import Image

    places = {"images": folder / "images", "masks": folder / "masks", "text": folder / "roles.jsonl"}
    if places["text"].exists():
        return places
    with zipfile.ZipFile(package / "data" / "assets" / "emoji.zip") as box:
        for style in STYLES:
            for label in CLASSES:
                for name in sorted(n for n in box.namelist() if n.startswith(f"{style}/{label}/"))[:EACH]:
                    (places["images"] / name).parent.mkdir(parents=True, exist_ok=True)
                    (places["images"] / name).write_bytes(box.read(name))
    draw = np.random.default_rng(1)
    y, x = np.mgrid[:16, :16]
    for site in "abc":
        for k in range(12):
            mask = (x - draw.integers(4, 12)) ** 2 + (y - draw.integers(4, 12)) ** 2 < draw.integers(6, 20)
            shade = 60 * mask[..., None] + draw.integers(0, 120, (16, 16, 3))
            for kind, array in (("image", shade.astype(np.uint8)), ("mask", (255 * mask).astype(np.uint8))):
                (places["masks"] / site / kind).mkdir(parents=True, exist_ok=True)
                Image.fromarray(array).save(places["masks"] / site / kind / f"{k}.png")
    lines = []
    for who in ("ann", "bob", "cid"):
        sentences = ["".join(draw.choice(list("abcde "), 9)) for _ in range(4)]
        lines.append(json.dumps({"role": who, "text": " ".join(draw.choice(sentences, 60))}))
    places["text"].write_text("\n".join(lines) + "\n")
    return places


def record(folder: Path, names: list[str]) -> None:
    """Runs these recipes with the fedvlm that Python finds, and writes what came out."""
    import fedvlm
    from fedvlm.cli import main

    package = Path(fedvlm.__file__).parent
    places = make(folder.parent / "data", package)
    found: dict[str, dict[str, object]] = {}
    plan = json.loads((folder.parent / "plan.json").read_text())
    for name in names:
        for engine in ENGINES:
            out = folder / f"{name}-{engine}"
            told = [w.format(**places) for w in plan[name]]
            began = time.process_time()
            if main(["run", *told, f"engine={engine}", f"out={out}"]):
                found[f"{name} {engine}"] = {"error": "it does not run"}
                continue
            print(f"{name} {engine} {time.process_time() - began:.1f} s", file=sys.stderr, flush=True)
            found[f"{name} {engine}"] = read(out)
    (folder / f"{names[0]}.json").write_text(json.dumps(found))


def recorded(where: Path, side: Path, cache: Path, names: list[str], jobs: int) -> dict[str, dict]:
    """What came out of these recipes with the fedvlm in `where`, some of them at a time; the first one alone, since it
    makes the data and encodes them."""
    env = os.environ | {"PYTHONPATH": str(where), "FEDVLM_CACHE": str(cache), "OMP_NUM_THREADS": "1"}
    folder = side / "runs"

    def run(some: list[str]) -> None:
        subprocess.run([sys.executable, __file__, "--record", str(folder), *some], env=env, cwd=where, check=True)

    shares = [names[:1], *([n] for n in names[1:])] if jobs > 1 else [names]
    run(shares[0])
    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(run, shares[1:]))
    return {k: v for some in shares for k, v in json.loads((folder / f"{some[0]}.json").read_text()).items()}


def read(run: Path) -> dict[str, object]:
    """SHA-256 of the shared state and of the outputs, and every score of every round."""
    from safetensors.torch import load_file

    state = load_file(run / "state.safetensors")
    shared = {}
    for name, value in state.items():  # task embeddings that a server trained were once called shared/task.…
        kind, _, key = name.partition("/")
        if kind in ("shared", "task"):
            shared[key.removeprefix("task.")] = value
    rounds = [json.loads(line) for line in (run / "rounds.jsonl").read_text().splitlines()]
    scores = [{RENAMED.get(k, k): v for k, v in r.items() if k not in TIMES} for r in rounds]
    return {"state": sha(shared), "outputs": sha(load_file(run / "outputs.safetensors")), "scores": scores}


def sha(tensors: dict) -> str:
    seen = hashlib.sha256()
    for name, value in sorted(tensors.items()):
        seen.update(f"{name} {tuple(value.shape)} {value.dtype}".encode())
        seen.update(value.contiguous().numpy().tobytes())
    return seen.hexdigest()


def plans(before: Path) -> dict[str, dict[str, list[str]]]:
    """The commands of both sides: recipe names as they were, and what they are called today."""
    from fedvlm.config import recipe

    plan: dict[str, dict[str, list[str]]] = {"before": {}, "after": {}}
    known = set(recipe.recipe_names())
    found = [*before.glob("fedvlm/parts/recipes/*.yaml"), *before.glob("fedvlm/recipes/*.yaml")]  # now, and formerly
    for path in sorted(found):
        name = path.stem
        today = [name] if name in known else combined(name)
        network = today[-1].removeprefix("on=") if len(today) > 1 else ""
        adapter = recipe.load(today[0], network).adapter
        plan["before"][name] = [name, *words_of(name, adapter)]
        plan["after"][name] = [*today, *words_of(name, adapter)]
    return plan


def combined(name: str) -> list[str]:
    """A former recipe as a method on a preset: ga-unet, promptfl-ga, fft-gp-promptfl, fedclip-ga."""
    for word, preset in {"promptfl": "prompt", "fedclip": "attention"}.items():
        if word in name:
            return [name.replace(f"{word}-", "").replace(f"-{word}", ""), f"on={preset}"]
    method, _, network = name.rpartition("-")
    return [method, f"on={network}"]


def compare(before: dict, after: dict) -> int:
    """A line a difference; how many runs differ."""
    differ = 0
    for name in before:
        one, other = before[name], after.get(name, {})
        odd = [k for k in ("error", "state", "outputs") if one.get(k) != other.get(k)]
        for r, (a, b) in enumerate(zip(one.get("scores", []), other.get("scores", []), strict=False)):
            odd += [f"round {r} {k}: {a[k]} → {b.get(k)}"[:160] for k in a if a[k] != b.get(k)]
        if odd:
            differ += 1
            print(f"{name}: {'; '.join(odd[:3])}{f' and {len(odd) - 3} more' if len(odd) > 3 else ''}")
    print(f"{len(before) - differ} of {len(before)} runs are the same to the bit; {differ} differ")
    return differ


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--base", default="HEAD", help="the revision to compare with")
    parser.add_argument("--work", help="a folder to keep runs in; runs of REV found there are not made again")
    parser.add_argument("--only", default="", help="recipes whose name holds this")
    parser.add_argument("--jobs", type=int, default=1, help="recipes at a time")
    parser.add_argument("--record", help=argparse.SUPPRESS)
    parser.add_argument("names", nargs="*", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.record:
        record(Path(args.record), args.names)
        return 0
    root = Path(__file__).resolve().parents[1]
    work = Path(args.work or tempfile.mkdtemp()).resolve()
    tree = work / "tree"
    if not tree.exists():
        subprocess.run(["git", "worktree", "add", "--detach", str(tree), args.base], cwd=root, check=True)
    plan = plans(tree)
    names = [n for n in plan["before"] if args.only in n]
    found = {}
    for side, where in (("before", tree), ("after", root)):
        (work / side / "runs").mkdir(parents=True, exist_ok=True)
        known = work / side / "found.json"
        if side == "before" and known.exists():
            found[side] = json.loads(known.read_text())
            continue
        data, shared = work / side / "data", work / "before" / "data"
        if data != shared and not data.exists():
            data.symlink_to(shared)
        (work / side / "plan.json").write_text(json.dumps(plan[side]))
        found[side] = recorded(where, work / side, work / "cache", names, args.jobs)
        known.write_text(json.dumps(found[side]))
    return 1 if compare(found["before"], found["after"]) else 0


if __name__ == "__main__":
    sys.exit(main())
