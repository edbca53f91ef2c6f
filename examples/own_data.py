"""From images and models of your own to a result that can be handed on, command by command.

    python examples/own_data.py                                          # on images that it makes, with mini-clip
    python examples/own_data.py --siglip FOLDER --open-clip FOLDER       # also with models of your own

Each line that starts with $ is what you would type in a shell. Everything is written to ./own-data.
"""

from __future__ import annotations

import argparse
import csv
import json
import shlex
from pathlib import Path

import numpy as np
from PIL import Image

import fedvlm
from fedvlm.cli import main as command

HOME = Path("own-data")
COLOURS = {"rose": (200, 40, 60), "daisy": (240, 230, 120), "violet": (110, 60, 190)}
SITES = ("north", "south", "east")


def picture(colour: tuple[int, int, int], rng: np.random.Generator) -> Image.Image:
    noise = rng.integers(-60, 60, (40, 40, 3))
    return Image.fromarray(np.clip(np.array(colour) + noise, 0, 255).astype(np.uint8))


def numbered_classes(folder: Path, rng: np.random.Generator) -> None:
    """Folders 1, 2, 3, and a file that says what they are."""
    for number, colour in enumerate(COLOURS.values(), 1):
        (folder / str(number)).mkdir(parents=True)
        for k in range(12):
            picture(colour, rng).save(folder / str(number) / f"{k:02}.png")
    names = {str(number): name for number, name in enumerate(COLOURS, 1)}
    (folder.parent / "names.json").write_text(json.dumps(names))


def table_of_sites(folder: Path, rng: np.random.Generator) -> None:
    """Images of several hospitals, two of each patient, listed in table.csv."""
    (folder / "images").mkdir(parents=True)
    with (folder / "table.csv").open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["path", "label", "site", "patient"])
        for site in SITES:
            for name, colour in COLOURS.items():
                for k in range(12):
                    path = f"images/{site}-{name}-{k:02}.png"
                    picture(colour, rng).save(folder / path)
                    rows.writerow([path, name, site, f"{site}-{name}-{k // 2}"])


def run(*words: str) -> None:
    print(f"\n$ fedvlm {shlex.join(words)}", flush=True)
    if code := command(list(words)):
        raise SystemExit(code)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--siglip", default="", help="a folder of a SigLIP model")
    parser.add_argument("--open-clip", default="", help="a folder of an open_clip model")
    args = parser.parse_args()
    rng = np.random.default_rng(0)
    flowers, hospitals = HOME / "flowers", HOME / "hospitals"
    numbered_classes(flowers, rng)
    table_of_sites(hospitals, rng)
    table, short = str(hospitals / "table.csv"), ["rounds=2", "jobs=1"]

    # numbered folders: with their names, prompts are "a photo of a rose" instead of "a photo of a 1"
    named = [f"data={flowers}", f"names={HOME / 'names.json'}"]
    run("run", "fedot", *named, "partition=iid", "clients=2", *short, "--dry")
    run("run", "fedot", *named, "partition=iid", "clients=2", *short, f"out={HOME / 'flowers-run'}")

    # a table: each site is a client, and no patient is on two sides of the split; lr is chosen on validation
    grid = ["lr=0.01,0.1", "seeds=1,2"]
    run("bench", "fedavg", "moments", f"data={table}", "unseen=east", *grid, *short, f"out={HOME / 'bench'}")
    run("run", "fedot", f"data={table}", "unseen=east", *short, f"out={HOME / 'run'}")

    # questions that come later, and a folder to hand on: the model card, and ONNX for those who have no fedvlm
    run("evaluate", str(HOME / "run"), f"outsiders={flowers}", "corrupt=brightness,fog")
    run("export", str(HOME / "run"), "--out", str(HOME / "export"), "--with-backbone", "--onnx")
    image = str(hospitals / "images" / "east-rose-00.png")
    run("predict", str(HOME / "export"), image, "--top", "3")
    moved = (HOME / "export").rename(HOME / "elsewhere")
    print("\nfedvlm.load elsewhere:", fedvlm.load(moved).predict(image))

    for name, folder in (("siglip", args.siglip), ("open-clip", args.open_clip)):
        if folder:
            run("run", "fedavg", f"data={table}", f"backbone={folder}", *short, f"out={HOME / name}")


if __name__ == "__main__":
    main()
