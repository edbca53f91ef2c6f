"""A Hugging Face dataset on disk (a folder of save_to_disk) with the columns image and label.

Columns named client (or site), domain, group (or patient) and split are understood as in a manifest; the parts of a
DatasetDict are its split. Only Arrow files in the folder are read, by pyarrow (which `datasets` needs, too): no script is
run, and an image that is given by its path or address instead of its bytes is an error.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from fedvlm.data.format import Format, Options, folder_at
from fedvlm.data.formats.table import checked, columns, item_of
from fedvlm.data.images import BadImage, bad_image, check_length
from fedvlm.data.source import MAX_ITEMS, Item, Source
from fedvlm.data.splits import FOLDERS
from fedvlm.errors import FedvlmError

if TYPE_CHECKING:
    import pyarrow

IMAGE = ("image", "img")  # names of the column of images
PARTS = "dataset_dict.json"


class HuggingFace(Format):
    def recognises(self, name: str) -> bool:
        root = folder_at(name)
        return root is not None and is_dataset(root)

    def open(self, name: str, options: Options) -> Source:
        return open_dataset(Path(name).expanduser(), options.group)

    def reader(self, root: Path) -> AbstractContextManager[Callable[[str], bytes]]:
        return arrow_reader(root)


def is_dataset(root: Path) -> bool:
    return (root / PARTS).is_file() or ((root / "state.json").is_file() and (root / "dataset_info.json").is_file())


def open_dataset(root: Path, group: str) -> Source:
    if find_spec("pyarrow") is None:
        raise FedvlmError(f"data={root} is a Hugging Face dataset, which needs: pip install 'fedvlm[datasets]'")
    items, notes = list[Item](), dict[str, None]()
    for part in parts_of(root):
        found, said = part_items(root, part, group)
        items += found
        notes |= dict.fromkeys(said)
        if len(items) > MAX_ITEMS:
            raise FedvlmError(f"data={root}: more than {MAX_ITEMS:,} examples; give a smaller dataset")
    if not items:
        raise FedvlmError(f"data={root}: no examples in it")
    return checked(Source(root.resolve().name, root, tuple(items), notes=tuple(notes)))


def parts_of(root: Path) -> list[str]:
    """The folders of a DatasetDict, which must be those of a split; "" for a single dataset."""
    if not (root / PARTS).is_file():
        return [""]
    found = [str(p) for p in listed(root / PARTS, "splits")]
    for part in found:
        if part.lower() not in FOLDERS:
            raise FedvlmError(
                f"data={root}: its part {part} is none of train, val and test; give one part, such as data={root / part}"
            )
    return found


def part_items(root: Path, part: str, group: str) -> tuple[list[Item], tuple[str, ...]]:
    folder = root / part
    features = dictionary(folder / "dataset_info.json").get("features")
    names = {k: f.get("names") for k, f in features.items()} if isinstance(features, dict) else {}
    items, notes = list[Item](), tuple[str, ...]()
    for file in listed(folder / "state.json", "_data_files"):
        name = str(file.get("filename") if isinstance(file, dict) else "")
        if not name.endswith(".arrow") or "/" in name or "\\" in name:
            raise FedvlmError(f"data={folder}: {name!r} in state.json is no Arrow file of this folder")
        table = table_of(folder / name)
        what = f"data={folder / name}"
        image = image_column(table, what)
        fields, notes = columns([c for c in table.column_names if c != image], ("label",), what)
        if part:
            fields.pop("split", None)
        values = {k: texts(table, column, names.get(column)) for k, column in fields.items()}
        for k in range(table.num_rows):
            row = {key: column[k] for key, column in values.items()} | ({"split": part} if part else {})
            if not row["label"]:
                raise FedvlmError(f"{what}: row {k} has no label")
            items.append(item_of(row, f"{part}/{name}#{k}".lstrip("/"), group, f"{what}: row {k}"))
    return items, notes


def table_of(file: Path) -> pyarrow.Table:
    import pyarrow

    try:
        with pyarrow.memory_map(str(file)) as mapped:
            return pyarrow.ipc.open_stream(mapped).read_all()
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        raise FedvlmError(f"data={file}: cannot be read as an Arrow file ({error})") from None


def image_column(table: pyarrow.Table, what: str) -> str:
    """The column of images, each with its bytes."""
    import pyarrow

    found = next((c for c in IMAGE if c in table.column_names), None)
    if found is None:
        raise FedvlmError(f"{what}: no column image; it has {', '.join(table.column_names)}")
    kind = table.schema.field(found).type
    if not (pyarrow.types.is_struct(kind) and kind.get_field_index("bytes") >= 0):
        raise FedvlmError(f"{what}: the column {found} is {kind}, not of images; cast it to datasets.Image()")
    return found


def texts(table: pyarrow.Table, column: str, names: object) -> list[str]:
    """A column as texts; the numbers of a ClassLabel by their names."""
    values = table.column(column).to_pylist()
    if isinstance(names, list):
        return [str(names[v]) if isinstance(v, int) and 0 <= v < len(names) else "" for v in values]
    return ["" if v is None else str(v) for v in values]


def dictionary(file: Path) -> dict[str, object]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise FedvlmError(f"{file}: cannot be read ({error}); save the dataset again with save_to_disk") from None
    if not isinstance(found, dict):
        raise FedvlmError(f"{file}: no JSON object; save the dataset again with save_to_disk")
    return found


def listed(file: Path, key: str) -> list[object]:
    found = dictionary(file).get(key)
    if not isinstance(found, list):
        raise FedvlmError(f"{file}: no list '{key}' in it; save the dataset again with save_to_disk")
    return found


@contextmanager
def arrow_reader(root: Path) -> Iterator[Callable[[str], bytes]]:
    """Reads `part/FILE.arrow#row`; one file is open at a time."""
    current: dict[str, pyarrow.ChunkedArray] = {}

    def read(path: str) -> bytes:
        file, _, row = path.rpartition("#")
        if file not in current:
            current.clear()
            with bad_image("cannot be read from the Arrow file"):
                table = table_of(root / file)
                current[file] = table.column(image_column(table, file))
        value = current[file][int(row)].as_py() or {}
        data = value.get("bytes")
        if data is None:
            raise BadImage("its bytes are not in the dataset, only a path; load it with decode, and save it again")
        check_length(len(data))
        return bytes(data)

    yield read
