"""A stranger's way from the wheel to a model in use, on data that nothing else here has:

    python -m build && python benchmarks/stranger.py dist/*.whl [--folder FOLDER] [--minutes 3]

Three cameras photograph ten things with German names (spaces and umlauts): 20 drawings each, 12 files that are there twice,
one that is broken, and one thing that the third camera never saw. In a fresh virtual environment: install, choose, train
what it names by the command that it prints, look at it, predict, export, and load the export in Python. Each command is
printed with its time; the first that fails ends this with its output.
"""

from __future__ import annotations

import argparse
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFilter

CAMERAS = ("Eingang Süd", "Halle 3", "Nachtkamera")
THINGS = {
    "große Mutter": ("hexagon", "#b87333"),
    "kleine Mutter": ("hexagon-small", "#b87333"),
    "Unterlegscheibe": ("ring", "#999999"),
    "rotes Rohr": ("bar", "#c0392b"),
    "blaues Rohr": ("bar", "#2455a4"),
    "Öl auf dem Boden": ("blot", "#3b2f1e"),
    "Warnschild": ("triangle", "#f1c40f"),
    "leere Kiste": ("frame", "#8d6e4a"),
    "volle Kiste": ("box", "#8d6e4a"),
    "Schraube lang": ("screw", "#7f8c8d"),
}
EACH, TWICE, SIDE = 20, 12, 96


def drawing(shape: str, colour: str, draw: np.random.Generator) -> Image.Image:
    """The thing somewhere on a noisy floor, a little larger or smaller and turned."""
    floor = draw.normal(draw.integers(120, 190), 12, (SIDE, SIDE, 3)).clip(0, 255).astype(np.uint8)
    image = Image.fromarray(floor)
    layer = Image.new("RGBA", (SIDE, SIDE))
    pen, r = ImageDraw.Draw(layer), int(draw.integers(20, 32)) // (2 if "small" in shape else 1)
    x, y = (int(v) for v in draw.integers(34, SIDE - 34, 2))
    around = [x - r, y - r, x + r, y + r]
    if shape.startswith("hexagon") or shape == "triangle":
        pen.regular_polygon((x, y, r), 3 if shape == "triangle" else 6, fill=colour)
        pen.ellipse([x - r // 3, y - r // 3, x + r // 3, y + r // 3], fill="#333333" if shape != "triangle" else colour)
    elif shape == "ring":
        pen.ellipse(around, outline=colour, width=max(3, r // 3))
    elif shape in ("bar", "screw"):
        pen.rectangle([x - r, y - r // 5, x + r, y + r // 5], fill=colour)
        if shape == "screw":
            pen.rectangle([x - r, y - r // 2, x - r + r // 3, y + r // 2], fill=colour)
    elif shape == "blot":
        for _ in range(6):
            dx, dy = draw.integers(-r // 2, r // 2, 2)
            pen.ellipse([x + dx - r // 2, y + dy - r // 2, x + dx + r // 2, y + dy + r // 2], fill=colour)
    else:
        pen.rectangle(around, outline=colour, width=5, fill=colour if shape == "box" else None)
    layer = layer.rotate(float(draw.uniform(-40, 40)), center=(x, y))
    image.paste(layer, mask=layer)
    return image


def seen_by(camera: int, image: Image.Image) -> Image.Image:
    if camera == 1:
        return image.filter(ImageFilter.GaussianBlur(1.2)).rotate(90)
    return image.convert("L").point(lambda v: int(v * 0.5)).convert("RGB") if camera == 2 else image


def photographed(root: Path) -> None:
    draw = np.random.default_rng(7)
    written = []
    for k, camera in enumerate(CAMERAS):
        for thing, (shape, colour) in THINGS.items():
            folder = root / camera / thing
            if (camera, thing) == (CAMERAS[2], "Warnschild"):
                continue
            folder.mkdir(parents=True)
            for n in range(EACH):
                path = folder / f"Bild {n:02}.png"
                seen_by(k, drawing(shape, colour, draw)).save(path)
                written.append(path)
    for path in draw.permutation(np.array(written, dtype=object))[:TWICE]:
        shutil.copy(path, path.with_name(f"{path.stem} (Kopie).png"))
    (root / CAMERAS[0] / "Warnschild" / "kaputt.png").write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(40))


def tried(words: list[str], folder: Path) -> str:
    """The output of a command, which is printed with its time; the end where it fails."""
    began = time.perf_counter()
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    shown = shlex.join([Path(words[0]).name, *words[1:]])
    print(f"{time.perf_counter() - began:7.1f} s  {shown[:150]}", flush=True)
    if done.returncode:
        sys.exit(done.stdout + done.stderr)
    return done.stdout + done.stderr


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--folder", type=Path, help="keep data, environment and runs there")
    parser.add_argument("--minutes", default="3", help="for choose")
    parser.add_argument("--pip", default="", help="more words for pip install, as -c constraints-cpu.txt")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        home = (args.folder or Path(temporary)).resolve()
        if not (home / "Werkstatt").is_dir():
            photographed(home / "Werkstatt")
        if not (home / "env").is_dir():
            venv.create(home / "env", with_pip=True)
        python, fedvlm = (str(home / "env" / "bin" / name) for name in ("python", "fedvlm"))
        more = shlex.split(args.pip)
        tried([python, "-m", "pip", "install", "-q", *more, f"{args.wheel.resolve()}[report]"], home)
        out = tried([fedvlm, "choose", "data=Werkstatt", f"minutes={args.minutes}", "out=wahl"], home)
        print(out)
        (following,) = [line for line in out.splitlines() if line.startswith("next: fedvlm run ")]
        trained = shlex.split(following.removeprefix("next: "))
        print(tried([fedvlm, *trained[1:]], home))
        where = next(word.removeprefix("out=") for word in trained if word.startswith("out="))
        tried([fedvlm, "show", where], home)
        picture = str(next((home / "Werkstatt" / CAMERAS[1] / "rotes Rohr").glob("*.png")))
        print(tried([fedvlm, "predict", where, picture], home))
        tried([fedvlm, "export", where, "--out", "modell"], home)
        code = "import sys, fedvlm; print(fedvlm.load('modell').predict(sys.argv[1])[:3])"
        print(tried([python, "-c", code, picture], home))
        tried([fedvlm, "report", "wahl", "--out", "wahl.html"], home)


if __name__ == "__main__":
    main()
