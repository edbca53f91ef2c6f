"""Whether an image's features depend on it, the weights and the processor alone:

    python benchmarks/processors.py                  # native, held to AVX2, held to SSE4.2; some ten minutes on two cores
    python benchmarks/processors.py --predictions    # the same run on each: how many predictions differ (minutes)
    python benchmarks/processors.py --short          # 8 images, no other tests: what the suite runs (half a minute)

For each setting, in a process of its own: images grouped in six ways and computed with 1, 2 and 4 threads, by the feature
store, by `Predictor.probabilities` and by `backbone.encode`, and texts alone and together; rows that differ in any bit from
those of the first way. Then the tests of what rests on it. Exit code 1 where something differs or a test fails.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SETTINGS = {
    "native": {},
    "AVX2": {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"},
    "SSE4.2": {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41", "MKL_ENABLE_INSTRUCTIONS": "SSE4_2"},
}
TESTS = (
    "tests/towers/test_products.py",
    "tests/backbones/test_alone.py",
    "tests/data/test_encoding.py",
    "tests/parts/test_moments.py",
    "tests/engines",
    "tests/parts/test_reductions.py",
    "tests/project/test_operations.py",
)
THREADS, SEED = (1, 2, 4), 0


def groupings(count: int) -> dict[str, list[list[int]]]:
    whole, third, ninth = list(range(count)), -(-count // 3), -(-count // 9)
    shuffled = random.Random(SEED).sample(whole, count)

    def by(size: int) -> list[list[int]]:
        return [whole[k : k + size] for k in range(0, count, size)]

    named = {"together": [whole], f"by {third}": by(third), f"by {ninth}": by(ninth), "by 5": by(5)}
    return named | {"one by one": by(1), "shuffled": [shuffled]}


def measure(count: int, place: Path) -> dict[str, dict[str, int]]:
    """By way of computing, grouping and threads: rows that differ from those of all images together with one thread."""
    import torch

    import fedvlm
    from fedvlm import backbones
    from fedvlm.backbones.arithmetic import arithmetic
    from fedvlm.data import store
    from fedvlm.data.source import decode, open_source
    from fedvlm.predict.predictor import from_run
    from fedvlm.training.folder import RunFolder

    images_of(place / "images", count)
    source, model = open_source(str(place / "images")), backbones.load("mini-clip")
    images = [decode(data) for _, data in source.read()]
    run = fedvlm.run("fedot", data=str(place / "images"), rounds=1, out=str(place / "run"))
    predictor = from_run(RunFolder(run.folder))
    phrases = [f"a photo of a {name}." for name in sorted({Path(item.path).stem for item in source.items})]

    def stored(group: list[int]) -> torch.Tensor:
        os.environ["FEDVLM_CACHE"] = tempfile.mkdtemp(dir=place)
        return store.features(replace(source, items=tuple(source.items[k] for k in group)), model, view="raw")[0]

    def encoded(view: str) -> Callable[[list[int]], torch.Tensor]:
        return lambda group: model.encode([images[k] for k in group], view).flatten(1)

    def worded(group: list[int]) -> torch.Tensor:
        found = model.texts([phrases[k % len(phrases)] for k in group])
        assert found is not None
        return found

    ways: dict[str, Callable[[list[int]], torch.Tensor]] = {
        "store": stored,
        "predict": lambda group: predictor.probabilities([images[k] for k in group]),
        "encode raw": encoded("raw"),
        "texts": worded,
    }
    few = {"encode hidden@-2": encoded("hidden@-2"), "encode patches": encoded("patches")}
    print(f"{arithmetic()}, torch {torch.__version__}", file=sys.stderr)
    found: dict[str, dict[str, int]] = {}
    for way, compute in (ways | few).items():
        number = min(count, 24) if way in few else count
        first: torch.Tensor | None = None
        for threads in THREADS if count > 100 else THREADS[:2]:
            for name, groups in groupings(number).items():
                torch.set_num_threads(threads)
                rows = torch.cat([compute(group) for group in groups])
                ordered = rows[torch.tensor([k for group in groups for k in group]).argsort()]
                first = ordered if first is None else first
                odd = int((ordered != first).any(1).sum())
                found.setdefault(way, {})[f"{name}, {threads} threads"] = odd
    return found


def images_of(folder: Path, count: int) -> None:
    """So many of the embedded emoji, evenly spaced."""
    with zipfile.ZipFile(ROOT / "fedvlm" / "data" / "assets" / "emoji.zip") as box:
        names = [n for n in box.namelist() if n.endswith(".png") or n.endswith(".webp")]
        for k in range(count):
            name = names[k * len(names) // count]
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(box.read(name))


def run_setting(name: str, count: int, tests: bool) -> bool:
    """Whether everything is the same under this setting; prints what is not."""
    env = os.environ | SETTINGS[name] | {"PYTHONPATH": str(ROOT)}
    env.pop("OMP_NUM_THREADS", None)
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as place:
        call = [sys.executable, __file__, "--measure", place, "--images", str(count)]
        done = subprocess.run(call, env=env, capture_output=True, text=True)
    if done.returncode:
        print(f"{name}: {done.stderr[-3000:]}")
        return False
    print(f"{name}: {done.stderr.strip().splitlines()[-1]}")
    found: dict[str, dict[str, int]] = json.loads(done.stdout.strip().splitlines()[-1])
    for way, cases in found.items():
        odd = {case: rows for case, rows in cases.items() if rows}
        print(f"  {way}: {len(cases)} ways, rows that differ: {max(cases.values())}" + (f" {odd}" if odd else ""))
    good = not any(rows for cases in found.values() for rows in cases.values())
    print(f"  {time.monotonic() - began:.0f} s", flush=True)
    if tests:
        call = [sys.executable, "-m", "pytest", "-q", "-n", "2", *TESTS]
        asked = subprocess.run(call, env=env, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        print("  tests: " + asked.stdout.strip().splitlines()[-1], flush=True)
        good &= asked.returncode == 0
    return good


METHODS = ("fedavg", "fedot", "fft-gp", "moments")


def predictions(place: Path) -> dict[str, list[list[float]]]:
    """By method, the probabilities that the shared and the first client's model give to test images, after ten rounds."""
    import torch

    import fedvlm
    from fedvlm.data.source import decode, open_source
    from fedvlm.predict.predictor import from_run
    from fedvlm.training.folder import RunFolder

    images_of(place / "images", 999)
    source = open_source(str(place / "images"))
    images = [decode(data) for _, data in source.read()][::3]
    found = {}
    for method in METHODS:
        run = fedvlm.run(method, data=str(place / "images"), rounds=10, engine="serial", out=str(place / method))
        client = run.record.clients[0]
        for whose in ("", client):
            predictor = from_run(RunFolder(run.folder), whose)
            found[f"{method}, {predictor.whose}"] = predictor.probabilities(images).tolist()
    print(f"{torch.__version__}", file=sys.stderr)
    return found


def compare_predictions() -> int:
    """A table: images whose most probable class differs between settings, and the largest difference of a probability."""
    found = {}
    for name, setting in SETTINGS.items():
        with tempfile.TemporaryDirectory() as place:
            own = {"PYTHONPATH": str(ROOT), "FEDVLM_CACHE": f"{place}/cache", "OMP_NUM_THREADS": "1"}
            env = os.environ | setting | own
            call = [sys.executable, __file__, "--predict", place]
            done = subprocess.run(call, env=env, capture_output=True, text=True)
            if done.returncode:
                print(done.stderr[-3000:])
                return 1
            found[name] = json.loads(done.stdout.strip().splitlines()[-1])
    print("| model | " + " | ".join(f"native and {name}" for name in list(SETTINGS)[1:]) + " |")
    print("|---|" + "---|" * (len(SETTINGS) - 1))
    for model, native in found["native"].items():
        cells = []
        for name in list(SETTINGS)[1:]:
            pairs = list(zip(native, found[name][model], strict=True))
            odd = sum(one.index(max(one)) != other.index(max(other)) for one, other in pairs)
            most = max(abs(a - b) for one, other in pairs for a, b in zip(one, other, strict=True))
            cells.append(f"{odd} of {len(pairs)}; at most {most:.1e}")
        print(f"| {model} | " + " | ".join(cells) + " |", flush=True)
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true")
    parser.add_argument("--images", type=int, default=0)
    parser.add_argument("--only", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--no-tests", action="store_true")
    parser.add_argument("--predictions", action="store_true")
    parser.add_argument("--predict", metavar="FOLDER", help=argparse.SUPPRESS)
    parser.add_argument("--measure", metavar="FOLDER", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    count = asked.images or (8 if asked.short else 333)
    if asked.measure:
        print(json.dumps(measure(count, Path(asked.measure))))
        return 0
    if asked.predict:
        print(json.dumps(predictions(Path(asked.predict))))
        return 0
    if asked.predictions:
        return compare_predictions()
    good = [run_setting(name, count, not (asked.short or asked.no_tests)) for name in asked.only]
    print("the same bits everywhere" if all(good) else "something differs")
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main())
