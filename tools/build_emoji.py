"""Build the emoji data set: one class per emoji category, one domain per drawing style.

Usage: python tools/build_emoji.py fedvlm/data/assets/emoji.zip

Needs `npm` on the PATH and `pip install resvg-py pillow`. The artwork comes from the npm packages in PACKAGES only; their
licences are in fedvlm/data/assets/EMOJI-LICENSES.md, which is copied into the archive. Entries are
`<style>/<class>/<code points>-<name>.png`: the file stem names the emoji and is the same in every style, so that a split
by stem keeps all drawings of an emoji in one split. The same versions of resvg-py and Pillow give the same bytes.
"""

from __future__ import annotations

import argparse
import io
import json
import re
import shutil
import subprocess
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import resvg_py
from PIL import Image

PACKAGES = {
    "emoji-datasource": "16.0.0",
    "emoji-datasource-google": "16.0.0",
    "emoji-datasource-twitter": "16.0.0",
    "openmoji": "17.0.0",
    "fluentui-emoji": "1.3.0",
}
# The path of a drawing in each style, starting with the package's name
STYLES = {
    "noto": "emoji-datasource-google/img/google/64/{image}",
    "twemoji": "emoji-datasource-twitter/img/twitter/64/{image}",
    "openmoji": "openmoji/color/svg/{hexcode}.svg",
    "openmoji-black": "openmoji/black/svg/{hexcode}.svg",
    "fluent-flat": "fluentui-emoji/icons/flat/{fluent}.svg",
    "fluent-modern": "fluentui-emoji/icons/modern/{fluent}.svg",
    "fluent-contrast": "fluentui-emoji/icons/high-contrast/{fluent}.svg",
}
# Unicode's subcategories, merged and reduced: no flags, signs, skin tones or gender variants, and only emoji that all
# styles have. The class names fit into "a photo of a {}".
CLASSES = {
    "animal face": "🐵 🐶 🐺 🦊 🦝 🐱 🦁 🐯 🐴 🫎 🦄 🐮 🐷 🐭 🐹 🐰 🐻 🐻‍❄️ 🐨 🐼 🐸 🐲",
    "mammal": "🐒 🦧 🐕 🐈 🐅 🐆 🫏 🐎 🦓 🦌 🦬 🐄 🐖 🐏 🐑 🐐 🐫 🦙 🦒 🐘 🦏 🦛 🐁 🐇 🦫 🦔 🦥 🦦 🦘 🦡",
    "bird": "🦃 🐔 🐓 🐣 🐤 🐥 🐦 🐧 🕊️ 🦅 🦆 🦢 🦉 🦤 🦩 🦚 🦜 🪿",
    "sea animal": "🐳 🐋 🐬 🦭 🐟 🐠 🐡 🦈 🐙 🪼 🦀 🦞 🦐 🦑 🦪",
    "bug": "🐌 🦋 🐛 🐜 🐝 🪲 🐞 🦗 🪳 🕷️ 🦂 🦟 🪰 🪱",
    "flower": "💐 🌸 💮 🪷 🏵️ 🌹 🥀 🌺 🌻 🌼 🌷 🪻",
    "green plant": "🌱 🪴 🌲 🌳 🌴 🌵 🌾 🌿 ☘️ 🍀 🍃 🎄 🎋 🎍",
    "fruit": "🍇 🍈 🍉 🍊 🍋 🍋‍🟩 🍌 🍍 🥭 🍎 🍏 🍐 🍑 🍒 🍓 🫐 🥝 🍅 🫒 🥥",
    "vegetable": "🥑 🍆 🥔 🥕 🌽 🌶️ 🫑 🥒 🥬 🥦 🧄 🧅 🥜 🫘 🌰 🫚 🫛 🍄‍🟫 🍠",
    "meal": "🍖 🍗 🥩 🥓 🍔 🍟 🍕 🌭 🥪 🌮 🌯 🫔 🧆 🍳 🥘 🍲 🫕 🥣 🥗 🍱 🍙 🍚 🍛 🍜 🍝 🍢 🍣 🍤 🥟 🥡",
    "drink": "🍼 🥛 ☕ 🫖 🍵 🍶 🍾 🍷 🍸 🍹 🍺 🍻 🥂 🥃 🥤 🧋 🧃 🧉",
    "road vehicle": "🚌 🚍 🚎 🚐 🚑 🚒 🚓 🚕 🚖 🚗 🚘 🚙 🛻 🚚 🚛 🚜 🏎️ 🛺",
    "train": "🚂 🚃 🚄 🚅 🚆 🚇 🚈 🚉 🚊 🚝 🚞 🚋 🚟",
    "building": "🏟️ 🏛️ 🛖 🏘️ 🏚️ 🏠 🏡 🏢 🏣 🏤 🏥 🏦 🏨 🏩 🏪 🏫 🏬 🏭 🏯 🏰 💒 ⛪ 🕌 🛕 🕍",
    "clothing": "🥋 🎽 🥼 🦺 👔 👕 👖 🧣 🧤 🧥 🧦 👗 👘 🥻 🩱 🩲 🩳 👙 👚",
    "tool": "🔪 ✂️ 🔨 🪓 ⛏️ ⚒️ 🛠️ 🪚 🔧 🪛 🔩 ⚙️ 🗜️ 🔗 ⛓️ 🪝 🧰 🧲 🪜 🪠 🧹",
    "electronic device": "🎙️ 🎧 📻 📱 📲 ☎️ 📞 📟 📠 🔋 💻 🖥️ 🖨️ ⌨️ 🖱️ 💾 🎥 📽️ 📺 📷 📸 📹 📼",
    "clock": "⌚ ⏰ ⏱️ ⏲️ 🕰️ 🕛 🕐 🕑 🕒 🕓 🕔 🕕 🕖 🕗 🕘 🕙 🕚",
    "heart shape": "💘 💝 💖 💓 💞 💕 💟 ❣️ 💔 ❤️‍🔥 ❤️‍🩹 ❤️",
    "hand": "👋 🤚 🖐️ ✋ 🖖 🫳 🫴 👌 🤌 🤏 ✌️ 🤞 🤟 🤘 🤙 👉 👆 🖕 👇 👍 👎 ✊ 👊 👏 🙌 👐 🤲 🙏",
    "smiling face": "😀 😃 😄 😆 😅 🤣 😂 🙂 😉 😊 😇 🥰 😍 🤩 ☺️ 😋 😛 😜 😝 😎",
    "worker": "🧑‍⚕️ 🧑‍🎓 🧑‍🏫 🧑‍⚖️ 🧑‍🌾 🧑‍🍳 🧑‍🔧 🧑‍🏭 🧑‍💼 🧑‍🔬 🧑‍💻 🧑‍🎤 🧑‍🎨 🧑‍✈️ 🧑‍🚀 🧑‍🚒 👮 🕵️ 💂 👷",
    "athlete": "🏃 🧗 🤺 🏇 ⛷️ 🏂 🏌️ 🏄 🚣 🏊 ⛹️ 🏋️ 🚴 🚵 🤸 🤽 🤾 🤹",
    "weather": "☀️ 🌞 ☁️ ⛅ ⛈️ 🌤️ 🌥️ 🌦️ 🌧️ 🌨️ 🌩️ 🌪️ 🌫️ 🌬️ 🌈 ⚡ ❄️",
}
SIZE = 64  # pixels; the most that the two PNG sources have, and the same for all so that size does not reveal the style
COLOURS = 128  # per image
LICENSES = Path(__file__).resolve().parents[1] / "fedvlm/data/assets/EMOJI-LICENSES.md"


def fetch(folder: Path) -> None:
    """Downloads every package and unpacks it into folder/<package name>."""
    npm = shutil.which("npm")
    if npm is None:
        raise SystemExit("npm was not found on the PATH; it is needed to fetch the emoji packages")
    for name, version in PACKAGES.items():
        command = [npm, "pack", "--silent", "--ignore-scripts", f"{name}@{version}"]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
        archive = folder / f"{name}-{version}.tgz"
        if done.returncode or not archive.exists():
            raise SystemExit(f"npm could not fetch {name}@{version}:\n{done.stderr.strip()}")
        with tarfile.open(archive) as tar:
            tar.extractall(folder / "unpacked", filter="data")
        (folder / "unpacked" / "package").rename(folder / name)


def code_points(emoji: str) -> str:
    """The emoji's code points without the variation selector, which the sources use differently."""
    return "-".join(f"{ord(char):04X}" for char in emoji if char != "\ufe0f")


def slug(name: str) -> str:
    """The name as Fluent writes it in file names: lower case, words separated by hyphens."""
    return re.sub(r"[^a-z0-9]+", "-", re.sub("['’]", "", name.lower())).strip("-")


def read_metadata(folder: Path) -> dict[str, dict[str, str]]:
    """Code points → the emoji's name and the fields of the paths in STYLES."""
    datasource = json.loads((folder / "emoji-datasource/emoji.json").read_text("utf-8"))
    images = {
        entry["unified"].replace("-FE0F", ""): entry["image"]
        for entry in datasource
        if entry["has_img_google"] and entry["has_img_twitter"]
    }
    metadata = {}
    for entry in json.loads((folder / "openmoji/data/openmoji.json").read_text("utf-8")):
        key = code_points(entry["emoji"])
        if key not in images:
            continue
        name = slug(entry["annotation"])
        # Fluent's name for the drawing without a skin tone ends in "-default"
        toned = folder / f"fluentui-emoji/icons/flat/{name}-default.svg"
        metadata[key] = {
            "name": name,
            "image": images[key],
            "hexcode": entry["hexcode"],
            "fluent": toned.stem if toned.exists() else name,
        }
    return metadata


def draw(path: Path) -> bytes:
    """The drawing as a palette PNG, centred on a white square."""
    if path.suffix == ".svg":
        source = io.BytesIO(resvg_py.svg_to_bytes(svg_path=str(path), width=SIZE, height=SIZE, skip_system_fonts=True))
    else:
        source = io.BytesIO(path.read_bytes())
    drawing = Image.open(source).convert("RGBA")
    square = Image.new("RGBA", (SIZE, SIZE), "white")
    corner = ((SIZE - drawing.width) // 2, (SIZE - drawing.height) // 2)
    square.alpha_composite(drawing, corner)
    png = io.BytesIO()
    square.convert("RGB").quantize(COLOURS, kmeans=2).save(png, "PNG", optimize=True)
    return png.getvalue()


def draw_all(folder: Path) -> Iterator[tuple[str, bytes]]:
    """The name in the archive and the PNG of every image."""
    metadata = read_metadata(folder)
    for label, emojis in CLASSES.items():
        for emoji in emojis.split():
            key = code_points(emoji)
            if key not in metadata:
                raise SystemExit(f"{emoji} ({key}) of class {label!r} is not in the metadata")
            entry = metadata[key]
            for style, pattern in STYLES.items():
                path = folder / pattern.format(**entry)
                if not path.exists():
                    raise SystemExit(f"{emoji} ({key}) of class {label!r} has no {style} drawing")
                stem = f"{key.lower()}-{entry['name']}"
                yield f"{style}/{label.replace(' ', '_')}/{stem}.png", draw(path)


def write_zip(entries: dict[str, bytes], output: Path) -> None:
    """Stores the entries in sorted order with a fixed time and system, so that the archive is reproducible."""
    output.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(output, "w") as archive:
        for name in sorted(entries):
            info = zipfile.ZipInfo(name)
            info.create_system = 3  # Unix
            info.external_attr = 0o644 << 16
            archive.writestr(info, entries[name])


def main() -> None:
    parser = argparse.ArgumentParser(description="Build the emoji data set from npm packages.")
    parser.add_argument("output", type=Path, help="the zip archive to write")
    output = parser.parse_args().output
    with tempfile.TemporaryDirectory() as folder:
        fetch(Path(folder))
        entries = dict(draw_all(Path(folder)))
    images = len(entries)
    write_zip({**entries, "LICENSES.md": LICENSES.read_bytes()}, output)
    for label, emojis in CLASSES.items():
        print(f"{label:18} {len(emojis.split()):3} emoji x {len(STYLES)} styles")
    print(f"{len(CLASSES)} classes, {images} images, {output.stat().st_size / 1e6:.1f} MB: {output}")


if __name__ == "__main__":
    main()
