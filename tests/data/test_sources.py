"""Data as people have it: class names, official splits, tables, shards, datasets on disk, unusual image files; and what
is refused before anything is encoded."""

from __future__ import annotations

import csv
import io
import json
import tarfile
import zipfile
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from colours import Colours
from PIL import Image
from torch.nn import functional as F

from fedvlm import backbones
from fedvlm.cli import main
from fedvlm.config.config import Layout, resolve
from fedvlm.config.key_files import CLIP, templates_of
from fedvlm.core.data import SPLITS
from fedvlm.core.tasks import SEGMENTATION
from fedvlm.data import partition, store
from fedvlm.data.clients import Federation, federate
from fedvlm.data.images import BadImage, decode
from fedvlm.data.pool import Pool, Pools, image_pool, task_of
from fedvlm.data.sample import MOST, sampled_pool
from fedvlm.data.source import Source, open_source
from fedvlm.data.wording import class_phrases, doubtful_names
from fedvlm.errors import FedvlmError
from fedvlm.system import console
from fedvlm.system.formatting import duration, size
from fedvlm.training import planning


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("FEDVLM_CACHE", str(tmp_path / "cache"))


def picture(path: Path, number: int = 0) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (4, 4), (number % 256, number // 256, 7)).save(path)
    return path


def grow(root: Path, folders: dict[str, int]) -> Path:
    number = 0
    for folder, count in folders.items():
        for _ in range(count):
            picture(root / folder / f"{number:04d}.png", number)
            number += 1
    return root


def table(path: Path, rows: list[dict[str, str]]) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return str(path)


def hospital(root: Path, count: int = 48) -> list[dict[str, str]]:
    """Two sites; a patient has four images, of both classes."""
    rows = []
    for k in range(count):
        picture(root / "scans" / f"{k}.png", k)
        about = {"site": f"site-{k // 4 % 2}", "patient": f"p{k // 4}", "label": ("ill", "well")[k % 2]}
        rows.append({"path": f"scans/{k}.png", **about})
    return rows


def pool_of(source: Source) -> Pool:
    return image_pool(source, Colours(), "{}")


def split_paths(federation: Federation, source: Source) -> dict[str, set[str]]:
    """Split → the paths of all clients."""
    found: dict[str, set[str]] = {s: set() for s in SPLITS}
    for bounds in federation.data.bounds:
        for k, name in enumerate(SPLITS):
            found[name] |= {source.items[i].path for i in federation.items[bounds[k] : bounds[k + 1]]}
    return found


# class names and prompts


@pytest.mark.parametrize(
    "file, content",
    [
        ("names.json", json.dumps({"1": "pink primrose", "2": "orchid", "10": "rose", "11": "never there"})),
        ("names.json", json.dumps(["pink primrose", "orchid", "rose"])),
        ("names.csv", "folder,name\n1,pink primrose\n2, orchid\n10,rose\n"),
    ],
)
def test_numbered_folders_get_their_names(tmp_path, file, content):
    root = grow(tmp_path / "flowers", {"1": 3, "2": 3, "10": 3})
    (tmp_path / file).write_text(content)
    source = open_source(str(root), names=str(tmp_path / file))
    assert {i.path.split("/")[0]: i.label for i in source.items} == {"1": "pink primrose", "2": "orchid", "10": "rose"}
    model = Colours()
    image_pool(source, model, "a photo of a {}")
    assert model.phrases[-1] == ["a photo of a orchid", "a photo of a pink primrose", "a photo of a rose"]


@pytest.mark.parametrize(
    "content, error",
    [
        ('{"1": "rose"}', r"has no name for the class 2"),
        ('{"1": "rose", "2": "rose"}', r"the classes 1 and 2 are both called rose"),
        ('["rose"]', r"a list of 1 names, and there are 2 classes"),
        ('{"1": 5, "2": "x"}', r"expected a name for each folder"),
        ("[[[", r"cannot be read"),
    ],
)
def test_names_that_do_not_fit_are_refused(tmp_path, content, error):
    (tmp_path / "n.json").write_text(content)
    with pytest.raises(FedvlmError, match=error):
        open_source(str(grow(tmp_path / "f", {"1": 2, "2": 2})), names=str(tmp_path / "n.json"))


@pytest.mark.parametrize(
    "codes", [["1", "2", "10"], ["n01440764", "n01443537"], ["class_0", "class_1"], ["c1", "c2", "cat"]]
)
def test_codes_are_doubted(codes):
    assert "names=FILE" in doubtful_names(codes)


@pytest.mark.parametrize(
    "names", [["cat", "dog"], ["A", "B"], ["type 2 diabetes", "healthy"], ["boeing 747", "1", "cat", "dog"]]
)
def test_words_are_not_doubted(names):
    assert doubtful_names(names) == ""


def test_codes_are_warned_of_once(tmp_path, capsys):
    data = grow(tmp_path / "flowers", {"1": 6, "2": 6})
    setups = [resolve(m, {"data": str(data), "rounds": 1}) for m in ("fedot", "zero-shot")]
    pools = Pools()
    for setup in setups:
        planning.checked(setup, pools)
    assert capsys.readouterr().err.count("names=FILE") == 1


def test_templates():
    assert templates_of("a photo of a {}, a type of flower.") == ("a photo of a {}, a type of flower.",)
    assert templates_of("a photo of a {}, art of the {}") == ("a photo of a {}", "art of the {}")
    assert templates_of("a {}, b\nthe {}") == ("a {}, b", "the {}")
    assert templates_of("clip") == CLIP and len(CLIP) == 7
    with pytest.raises(FedvlmError, match=r"template='no name' must hold \{\}"):
        templates_of("a {}\nno name")


def test_names_of_classes_are_in_small_letters_with_spaces():
    phrases = class_phrases("a photo of a {}.", ["German_Shepherd", "cat"])
    assert phrases == ("a photo of a german shepherd.", "a photo of a cat.")
    assert class_phrases("a {}\nthe {}", ["cat"]) == ()  # of several there is no single one


def test_several_templates_are_averaged():
    clip, classes, both = backbones.load("mini-clip"), ("cat", "polar_bear"), ("a photo of a {}.", "art of the {}.")
    found = task_of(clip, classes, ",".join(both))
    each = torch.stack([clip.texts([t.replace("{}", n) for n in ("cat", "polar bear")]) for t in both])
    assert torch.allclose(found.text, F.normalize(F.normalize(each, dim=-1).mean(0), dim=-1), atol=1e-6)
    assert found.phrases == ()
    single = task_of(clip, classes, "the {}")
    assert torch.equal(single.text, clip.texts(["the cat", "the polar bear"])) and len(single.phrases) == 2


def test_template_and_classes_may_be_files(tmp_path):
    (tmp_path / "t.txt").write_text("a photo of a {}, big\n\nart of the {}\n")
    (tmp_path / "c.json").write_text('["cat", "dog, wet"]')
    given = {"template": str(tmp_path / "t.txt"), "classes": str(tmp_path / "c.json"), "split": "s.json"}
    setup = resolve("fedot", given)
    assert templates_of(setup.config.template) == ("a photo of a {}, big", "art of the {}")
    assert setup.config.classes == ("cat", "dog, wet") and setup.config.split_file == "s.json"
    assert resolve("fedot", {"classes": "cat,dog"}).config.classes == ("cat", "dog")
    assert resolve("fedot", {"template": ["a {}", "the {}"]}).config.template == "a {}\nthe {}"
    with pytest.raises(FedvlmError, match=r"template=.*none.txt: cannot be read"):
        resolve("fedot", {"template": "none.txt"})


# official splits


@pytest.mark.parametrize("val", ["val", "valid", "Validation"])
def test_split_folders_are_the_split(tmp_path, val):
    root = grow(tmp_path / "d", {"train/a": 8, "train/b": 8, f"{val}/a": 3, f"{val}/b": 3, "test/a": 4, "test/b": 4})
    source = open_source(str(root))
    assert source.domains == ["all"] and source.classes == ["a", "b"]
    assert "are kept as the split" in source.notes[0]
    found = split_paths(federate(pool_of(source), Layout(clients=2, partition="iid"), 3), source)
    assert {s: {p.split("/")[0] for p in paths} for s, paths in found.items()} == {
        "train": {"train"},
        "val": {val},
        "test": {"test"},
    }
    assert [len(found[s]) for s in SPLITS] == [16, 6, 8]


def test_a_missing_val_is_drawn_from_train(tmp_path):
    source = open_source(str(grow(tmp_path / "d", {"train/a": 8, "train/b": 8, "test/a": 4, "test/b": 5})))
    assert source.notes == ("train/, test/ are kept as the split; val images are drawn from train",)
    found = split_paths(federate(pool_of(source), Layout(clients=1, partition="iid"), 3), source)
    assert [len(found[s]) for s in SPLITS] == [12, 4, 9]  # 60 : 20 of the training images
    assert all(p.startswith("test/") for p in found["test"])


def test_folders_of_other_classes_are_no_split(tmp_path):
    source = open_source(str(grow(tmp_path / "d", {"train/a": 2, "train/b": 2, "test/c": 2})))
    assert source.domains == ["test", "train"] and "taken as domains" in source.notes[0]
    assert open_source(str(grow(tmp_path / "e", {"train/a": 2, "train/b": 2, "photo/a": 2}))).notes == ()


def test_a_split_of_domains(tmp_path):
    source = open_source(
        str(grow(tmp_path / "d", {f"{s}/{d}/{c}": 2 for s in ("train", "test") for d in "xy" for c in "ab"}))
    )
    assert source.domains == ["x", "y"] and Counter(i.split for i in source.items) == {"train": 8, "test": 8}


@pytest.mark.parametrize("site", ["", "north/"])
def test_a_split_of_images_with_masks(tmp_path, site):
    for split in ("train", "test"):
        for k in range(3):
            for kind in ("image", "mask"):
                picture(tmp_path / "d" / split / f"{site}{kind}" / f"{k}.png", k)
    source = open_source(str(tmp_path / "d"))
    assert source.task_type is SEGMENTATION and source.domains == [site.rstrip("/") or "all"]
    assert [i.split for i in source.items] == ["test"] * 3 + ["train"] * 3
    assert [m.path for m in source.masks] == [i.path.replace("image", "mask") for i in source.items]


def test_a_patient_on_both_sides_of_a_given_split_is_refused(tmp_path):
    for k, name in enumerate(("train/a/p1_0", "train/b/p2_0", "test/a/p1_1", "test/b/p3_0")):
        picture(tmp_path / "d" / f"{name}.png", k)
    with pytest.raises(FedvlmError, match=r"the group p1 is in test \(test/a/p1_1.png\) and in train"):
        open_source(str(tmp_path / "d"), group=r"(p\d+)")


def test_coops_split_file(tmp_path):
    root = grow(tmp_path / "flowers", {"jpg": 12})
    parts = {"train": range(0, 6), "val": range(6, 8), "test": range(8, 12)}
    lines = {p: [[f"{k:04d}.png", k % 2, ("Rose", "tulip")[k % 2]] for k in rows] for p, rows in parts.items()}
    file = tmp_path / "split.json"
    file.write_text(json.dumps(lines))
    source = open_source(str(root), split_file=str(file))
    assert source.classes == ["Rose", "tulip"] and source.notes == ("the split of split.json is kept",)
    found = split_paths(federate(pool_of(source), Layout(clients=2, partition="iid"), 1), source)
    assert found == {p: {f"{k:04d}.png" for k in rows} for p, rows in parts.items()}
    lines["test"].append(["../../etc/passwd", 0, "Rose"])
    file.write_text(json.dumps(lines))
    with pytest.raises(FedvlmError, match="no such image"):
        open_source(str(root), split_file=str(file))
    file.write_text(json.dumps({"train": []}))
    with pytest.raises(FedvlmError, match="not a split file"):
        open_source(str(root), split_file=str(file))


def test_a_given_split_is_part_of_the_fingerprint(tmp_path):
    rows = [r | {"split": ("train", "test")[k >= 24]} for k, r in enumerate(hospital(tmp_path))]
    one = pool_of(open_source(table(tmp_path / "t.csv", rows))).fingerprint
    swapped = [r | {"split": ("test", "train")[k >= 24]} for k, r in enumerate(rows)]
    regrouped = [r | {"patient": r["patient"] + "x"} for r in rows]
    for other in (swapped, regrouped):
        assert pool_of(open_source(table(tmp_path / "t.csv", other))).fingerprint != one


# tables


def test_a_table_of_sites_and_patients(tmp_path):
    rows = [r | {"age": "7"} for r in hospital(tmp_path)]
    source = open_source(table(tmp_path / "table.csv", rows))
    assert source.notes == ("ignored columns: age",) and source.classes == ["ill", "well"]
    federation = federate(pool_of(source), Layout(), 5)
    assert federation.names == ("site-0", "site-1") == federation.domains
    sides: dict[str, set[str]] = {}
    for split, paths in split_paths(federation, source).items():
        for path in paths:
            sides.setdefault(rows[int(Path(path).stem)]["patient"], set()).add(split)
    assert all(len(s) == 1 for s in sides.values()) and set().union(*sides.values()) == set(SPLITS)


def test_groups_of_several_classes_stay_on_one_side():
    rng = np.random.default_rng(0)
    groups = [f"p{k}" for k in rng.integers(0, 40, 300)]
    labels = [str(c) for c in rng.integers(0, 3, 300)]
    parts = partition.split(labels, ["x"] * 300, groups, 1, (60, 20, 20))
    assert all(len({p for p, g in zip(parts, groups, strict=True) if g == one}) == 1 for one in set(groups))
    assert set(parts.tolist()) == {0, 1, 2}


def test_clients_and_domains_of_a_table(tmp_path):
    rows = [{**r, "domain": ("ct", "mr")[r["site"] == "site-1"]} for r in hospital(tmp_path)]
    federation = federate(pool_of(open_source(table(tmp_path / "t.csv", rows))), Layout(unseen=("mr",)), 5)
    assert (federation.names, federation.domains, federation.unseen) == (("site-0", "site-1"), ("ct", "mr"), (1,))
    rows[0]["domain"] = "mr"
    with pytest.raises(FedvlmError, match=r"the client site-0 is in the domains mr \(scans/0.png\) and ct"):
        open_source(table(tmp_path / "t.csv", rows))


@pytest.mark.parametrize(
    "text", ["path;label\nscans/0.png;a\nscans\\1.png;b\n", "\ufeffPath\tClass\nscans/0.png\ta\nscans/1.png\tb\n"]
)
def test_tables_as_spreadsheets_write_them(tmp_path, text):
    hospital(tmp_path, 2)
    (tmp_path / "t.csv").write_text(text, encoding="utf-8")
    assert [(i.path, i.label) for i in open_source(str(tmp_path / "t.csv")).items] == [
        ("scans/0.png", "a"),
        ("scans/1.png", "b"),
    ]


@pytest.mark.parametrize(
    "change, error",
    [
        ({"path": "/etc/passwd"}, r"row 3: '/etc/passwd' leads out of the table's folder"),
        ({"path": "../secret.png"}, r"row 3: '../secret.png' leads out"),
        ({"path": "C:\\a.png"}, r"row 3: .* leads out"),
        ({"path": "scans/none.png"}, r"row 3 names a file that is not there \(scans/none.png\)"),
        ({"path": "scans/0.png"}, r"rows 2 and 3 are the same image, scans/0.png"),
        ({"label": ""}, r"row 3 has no label"),
        ({"split": "trian"}, r"row 3: split=trian; expected train, val or test"),
        ({"split": ""}, r"row 3 has no split"),
        ({"site": ""}, r"row 3 has no client"),
        ({"split": "test"}, r"the group p0 is in train \(scans/0.png\) and in test \(scans/1.png\)"),
    ],
)
def test_faults_of_a_table_are_named_with_their_row(tmp_path, change, error):
    rows = [r | {"split": "train"} for r in hospital(tmp_path)]
    rows[1] |= change
    with pytest.raises(FedvlmError, match=error):
        open_source(table(tmp_path / "table.csv", rows))


def test_columns_of_a_table_are_checked(tmp_path):
    rows = hospital(tmp_path, 4)
    with pytest.raises(FedvlmError, match=r"no column label; it has path, site"):
        open_source(table(tmp_path / "a.csv", [{"path": r["path"], "site": r["site"]} for r in rows]))
    with pytest.raises(FedvlmError, match=r"the columns site and client mean the same"):
        open_source(table(tmp_path / "b.csv", [r | {"client": "x"} for r in rows]))
    (tmp_path / "c.csv").write_bytes(b"path,label\n\xff\xfe,\n")
    with pytest.raises(FedvlmError, match=r"not a table in UTF-8"):
        open_source(str(tmp_path / "c.csv"))


# archives


def test_a_zip_with_a_top_folder(tmp_path):
    root = grow(tmp_path / "pets", {"cat": 3, "dog": 3})
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as box:
        for path in root.rglob("*.png"):
            box.write(path, Path("archive") / path.relative_to(root))
    source = open_source(str(tmp_path / "a.zip"))
    assert source.domains == ["all"] and source.classes == ["cat", "dog"] and "archive/" in source.notes[0]
    assert torch.equal(pool_of(source).x, pool_of(open_source(str(root))).x)


def shard(path: Path, members: dict[str, bytes]) -> None:
    with tarfile.open(path, "w") as box:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            box.addfile(info, io.BytesIO(data))


def shards(root: Path, ending: str) -> None:
    """Three shards of eight images."""
    root.mkdir()
    for s in range(3):
        members = {}
        for k in range(s * 8, s * 8 + 8):
            label = ("cat", "dog")[k % 2]
            about = {"label": label, "site": f"s{k % 3}", "patient": f"p{k // 4}", "source": "web"}
            members[f"x/{k:03d}.png"] = picture(root / "one.png", k).read_bytes()
            members[f"x/{k:03d}.{ending}"] = (json.dumps(about) if ending == "json" else f"{label}\n").encode()
        shard(root / f"data-{s:03d}.tar", members)
    (root / "one.png").unlink()


@pytest.mark.parametrize("ending", ["cls", "txt", "json"])
def test_webdataset_shards(tmp_path, ending):
    shards(tmp_path / "w", ending)
    source = open_source(str(tmp_path / "w" / "data-{000..002}.tar"))
    assert len(source.items) == 24 and source.classes == ["cat", "dog"]
    assert open_source(str(tmp_path / "w")).items == source.items
    assert source.domains == (["s0", "s1", "s2"] if ending == "json" else ["all"])
    assert source.notes == (("ignored columns: source",) if ending == "json" else ())
    reds = [decode(data).getpixel((0, 0))[0] for _, data in source.read()]
    assert reds == list(range(24))
    some = replace(source, items=source.items[::-5])
    assert [decode(data).getpixel((0, 0))[0] for _, data in some.read()] == list(range(24))[::-5]


def test_faulty_shards_are_named(tmp_path):
    shards(tmp_path / "w", "cls")
    with pytest.raises(FedvlmError, match=r"data-003.tar: no such folder; it is in the range of shards"):
        open_source(str(tmp_path / "w" / "data-{000..003}.tar"))
    (tmp_path / "w" / "data-001.tar").write_bytes(b"nothing" * 99)
    with pytest.raises(FedvlmError, match=r"data-001.tar: cannot be read"):
        open_source(str(tmp_path / "w"))
    shard(tmp_path / "b.tar", {"0.png": b"", "0.json": b"[1]", "1.png": b""})
    with pytest.raises(FedvlmError, match=r"0.json is no JSON object"):
        open_source(str(tmp_path / "b.tar"))
    with tarfile.open(tmp_path / "c.tar", "w") as box:
        link = tarfile.TarInfo("0.png")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        box.addfile(link)
    with pytest.raises(FedvlmError, match=r"no image with a class"):
        open_source(str(tmp_path / "c.tar"))


def arrow_part(folder: Path, rows: list[dict[str, object]], names: list[str]) -> None:
    """As save_to_disk writes it."""
    pyarrow = pytest.importorskip("pyarrow")
    folder.mkdir(parents=True)
    arrow_table = pyarrow.Table.from_pylist(rows)
    file = folder / "data-00000-of-00001.arrow"
    with pyarrow.OSFile(str(file), "wb") as sink, pyarrow.ipc.new_stream(sink, arrow_table.schema) as writer:
        writer.write_table(arrow_table)
    features = {"image": {"_type": "Image"}, "label": {"names": names, "_type": "ClassLabel"}}
    (folder / "dataset_info.json").write_text(json.dumps({"features": features}))
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}))


def test_hugging_face_datasets_on_disk(tmp_path):
    rows = []
    for k in range(20):
        data = picture(tmp_path / "one.png", k).read_bytes()
        rows.append({"image": {"bytes": data, "path": None}, "label": k % 2, "site": f"s{k % 3}", "age": k})
    arrow_part(tmp_path / "one", rows, ["cat", "dog"])
    source = open_source(str(tmp_path / "one"))
    assert source.classes == ["cat", "dog"] and source.domains == ["s0", "s1", "s2"]
    assert source.notes == ("ignored columns: age",)
    assert [decode(data).getpixel((0, 0))[0] for _, data in source.read()] == list(range(20))
    arrow_part(tmp_path / "two" / "train", rows[:14], ["cat", "dog"])
    arrow_part(tmp_path / "two" / "test", rows[14:], ["cat", "dog"])
    (tmp_path / "two" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    both = open_source(str(tmp_path / "two"))
    assert Counter(i.split for i in both.items) == {"train": 14, "test": 6}
    assert len(pool_of(both).x) == 20
    outside = [r | {"image": {"bytes": None, "path": "/etc/passwd"}} for r in rows[:4]]
    arrow_part(tmp_path / "paths", outside + rows[4:8], ["cat", "dog"])
    skipped = pool_of(open_source(str(tmp_path / "paths"))).skipped.values()
    assert len(skipped) == 4 and all(why.startswith("its bytes are not in") for why in skipped)


# image files


def bytes_of(image: Image.Image, kind: str, **options: object) -> bytes:
    out = io.BytesIO()
    image.save(out, kind, **options)  # type: ignore[arg-type]
    return out.getvalue()


def corners(image: Image.Image) -> list[tuple[int, ...]]:
    w, h = image.size
    return [image.getpixel(at) for at in ((1, 1), (w - 2, 1), (1, h - 2))]  # type: ignore[misc]


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF"])
def test_turned_photographs_are_upright(kind):
    lying = Image.new("RGB", (32, 16), "white")
    lying.paste((250, 0, 0), (0, 0, 16, 16))
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was turned: rotate by 90 degrees clockwise to see it upright
    data = bytes_of(lying, kind, exif=exif, **({"quality": 100} if kind in ("JPEG", "WEBP") else {}))
    found = decode(data)
    assert found.size == (16, 32)
    above, _, below = corners(found)
    assert above[1] < 60 and below[1] > 200
    if kind != "TIFF":
        assert store.content_key(data) != store.digest(data)
    assert store.content_key(bytes_of(lying, kind)) == store.digest(bytes_of(lying, kind))


def test_sixteen_bits_are_scaled_and_more_are_refused():
    grey = np.linspace(0, 65535, 256).reshape(16, 16).astype(np.uint16)
    for kind in ("PNG", "TIFF"):
        found = np.asarray(decode(bytes_of(Image.fromarray(grey), kind)))[..., 0]
        assert np.abs(found.ravel().astype(int) - np.arange(256)).max() <= 1
    wide = Image.fromarray((grey.astype(np.int32) + 1) * 1000)
    with pytest.raises(BadImage, match="32-bit pixels"):
        decode(bytes_of(wide, "TIFF"))


def test_other_modes_and_damaged_files():
    red = Image.new("RGB", (8, 8), (255, 0, 0))
    frames = [red, Image.new("RGB", (8, 8), (0, 0, 255))]
    pictures = {
        "cmyk": bytes_of(red.convert("CMYK"), "JPEG", quality=100),
        "palette": bytes_of(red.convert("P"), "PNG"),
        "animated": bytes_of(frames[0], "GIF", save_all=True, append_images=frames[1:]),
    }
    for name, data in pictures.items():
        r, g, b = decode(data).getpixel((4, 4))  # type: ignore[misc]
        assert r > 240 and g < 15 and b < 15, name
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 255, (64, 64, 3), dtype=np.uint8))
    for data, reason in ((bytes_of(noise, "JPEG")[:900], "not a readable image"), (b"", "the file is empty")):
        with pytest.raises(BadImage, match=reason):
            decode(data)


def dicom(pixels: np.ndarray, **values: object) -> bytes:
    pydicom = pytest.importorskip("pydicom")
    meta = pydicom.dataset.FileMetaDataset()
    meta.TransferSyntaxUID = pydicom.uid.ExplicitVRLittleEndian
    meta.MediaStorageSOPClassUID = pydicom.uid.CTImageStorage
    meta.MediaStorageSOPInstanceUID = "1.2.3"
    file = pydicom.dataset.FileDataset("", {}, file_meta=meta, preamble=b"\0" * 128)
    file.Rows, file.Columns = pixels.shape[:2]
    file.SamplesPerPixel = 1 if pixels.ndim == 2 else 3
    file.PhotometricInterpretation = "MONOCHROME2" if pixels.ndim == 2 else "RGB"
    file.BitsAllocated = file.BitsStored = 8 * pixels.itemsize
    file.HighBit, file.PixelRepresentation = file.BitsStored - 1, int(pixels.dtype.kind == "i")
    if pixels.ndim == 3:
        file.PlanarConfiguration = 0
    file.PixelData = pixels.tobytes()
    for name, value in values.items():
        setattr(file, name, value)
    out = io.BytesIO()
    pydicom.dcmwrite(out, file)
    return out.getvalue()


def test_dicom_is_rescaled_windowed_and_inverted():
    raw = np.arange(0, 2000, 20, dtype=np.int16).reshape(10, 10)
    scaled = {"RescaleSlope": 2, "RescaleIntercept": -1024, "WindowCenter": [40, 300], "WindowWidth": [400, 1500]}
    grey = np.asarray(decode(dicom(raw, **scaled)))[..., 0].ravel()
    value = raw.ravel() * 2.0 - 1024
    expected = np.where(value <= -160, 0, np.where(value > 239, 255, ((value - 39.5) / 399 + 0.5) * 255))  # PS3.3
    assert np.abs(grey - expected).max() <= 0.5 + 1e-9
    inverted = decode(dicom(raw, **scaled, PhotometricInterpretation="MONOCHROME1"))
    assert np.array_equal(np.asarray(inverted)[..., 0].ravel(), 255 - grey)
    spread = np.asarray(decode(dicom(raw)))[..., 0]
    assert spread.min() == 0 and spread.max() == 255
    colours = np.random.default_rng(0).integers(0, 256, (6, 5, 3), dtype=np.uint8)
    assert np.array_equal(np.asarray(decode(dicom(colours))), colours)


def test_dicom_in_folders_and_broken(tmp_path):
    rng = np.random.default_rng(0)
    for k in range(6):
        path = tmp_path / "scans" / "ab"[k % 2] / f"{k}.dcm"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(dicom(rng.integers(0, 4000, (8, 8), dtype=np.int16)))
    (tmp_path / "scans" / "a" / "0.dcm").write_bytes(dicom(np.zeros((8, 8), np.int16))[:300])
    pool = pool_of(open_source(str(tmp_path / "scans")))
    assert len(pool.x) == 5 and list(pool.skipped) == ["a/0.dcm"]


def test_dicom_without_its_package_is_one_sentence(tmp_path, monkeypatch):
    (tmp_path / "scans" / "a").mkdir(parents=True)
    (tmp_path / "scans" / "a" / "0.dcm").write_bytes(b"\0" * 128 + b"DICM")
    monkeypatch.setattr("fedvlm.data.formats.dicom.find_spec", lambda name: None)
    with pytest.raises(FedvlmError, match=r"pip install 'fedvlm\[dicom\]'"):
        open_source(str(tmp_path / "scans"))


# before anything is encoded


class Encoded(Exception):
    pass


@pytest.mark.parametrize(
    "words, error",
    [
        (["fedot", "clients=20"], r"clients=20 has no effect with partition=domain"),
        (["fedot", "alpha=0.1", "partition=domain-iid"], r"alpha=0.1 has no effect with partition=domain-iid"),
        (["fedot", "per_client=2", "partition=iid"], r"per_client=2 has no effect"),
        (["fedot", "unseen=nowhere"], r"unseen=nowhere: no such domain"),
        (["promptfl", "backbone=black"], r"has no text tower"),
        (["fedot", "backbone=black"], r"no text tower"),
        (["fedot", "merge=text_server"], r"merge=text_server"),
        (["fedot", "template=nothing"], r"must hold \{\}"),
    ],
)
def test_what_cannot_run_is_refused_before_encoding(images, monkeypatch, capsys, words, error):
    def refuse(*args: object, **keys: object) -> None:
        raise Encoded

    black = Colours(has_text=False)
    loaded = backbones.load
    monkeypatch.setattr(backbones, "load", lambda name: black if name == "black" else loaded(name))
    monkeypatch.setattr("fedvlm.data.pool.features", refuse)
    given = dict(w.split("=", 1) for w in words[1:])
    with pytest.raises(FedvlmError, match=error):
        planning.checked(resolve(words[0], {"data": str(images)} | given), Pools())


def test_a_gpu_that_is_not_there_is_refused_before_encoding(images, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(FedvlmError, match="device=cuda: torch finds no GPU here"):
        planning.checked(resolve("fedot", {"data": str(images), "device": "cuda"}), Pools())


def test_keys_of_recipes_and_defaults_are_not_refused(images):
    planning.checked(resolve("fedot", {"data": str(images)}), Pools())
    planning.checked(resolve("fedot", {"data": str(images), "partition": "domain-iid", "clients": 2}), Pools())


def test_dry_encodes_a_few_images(images, monkeypatch, tmp_path, capsys):
    seen = []
    encode = store.encoded_images
    monkeypatch.setattr("fedvlm.data.sample.encoded_images", lambda *a: seen.append(len(a[3])) or encode(*a))
    assert main(["run", "fedot", f"data={images}", "corrupt=2", "--dry"]) == 0
    text = capsys.readouterr().out
    count = len(open_source(str(images)).items)
    assert sum(seen) <= MOST < count
    assert "partition=domain (chosen for this data): 3 clients" in text
    assert f"encoding {3 * count:,} images: about" in text and "kB down" in text
    assert not list((tmp_path / "cache").rglob("*mini-clip*raw/*.rows"))


def test_a_sample_stands_for_all(tmp_path):
    setup = resolve("fedot", {"data": str(grow(tmp_path / "pets", {"cat": 25, "dog": 25}))})
    pools = Pools()
    found = sampled_pool(setup, pools.outline(setup))
    whole = pools.load(setup)
    assert found.pool.x.shape == whole.x.shape and found.pool.task.classes == whole.task.classes
    assert found.images == len(whole.x) and found.sample is not None and found.sample.stored == 0
    nearest = (found.pool.x[:1] - whole.x).abs().amax(1).min()
    assert nearest < 1e-5
    again = sampled_pool(setup, pools.outline(setup)).sample
    assert again is not None and again.stored == 1


def test_units():
    shown = {
        0.031: "0.031 s",
        9.6: "9.6 s",
        42.2: "42 s",
        59.9: "1 min",
        320: "5 min 20 s",
        1500: "25 min",
        3599: "1 h",
    }
    shown |= {11_100: "3 h 5 min", 43_200: "12 h"}
    assert {s: duration(s) for s in shown} == shown
    assert [size(n) for n in (0, 12, 172_000, 3.2e9)] == ["0", "12 B", "172 kB", "3.2 GB"]


def test_progress_without_a_terminal_is_a_line_every_few_seconds(monkeypatch, capsys):
    now = [0.0]
    monkeypatch.setattr(console.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(console, "shows_bars", lambda: False)
    with console.progress("encoding", 1000) as update:
        for done in range(1, 1001):
            now[0] += 0.0625
            update(done)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 13 and lines[0] == "encoding 80/1000 58 s left"


def test_the_time_left_does_not_count_what_came_before_the_first_image(monkeypatch, capsys):
    """Loading a model took 20 s, and 17 hours were announced after one image."""
    now = [0.0]
    monkeypatch.setattr(console.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(console, "shows_bars", lambda: False)
    with console.progress("encoding", 3000) as update:
        now[0] = 20.0
        update(1)
        now[0] = 25.0
        update(501)
    assert capsys.readouterr().out.splitlines() == ["encoding 1/3000", "encoding 501/3000 25 s left"]


def test_a_tar_with_a_head_of_many_megabytes_is_refused_before_it_is_read(tmp_path):
    """A header of pax is read into memory whole."""
    with tarfile.open(tmp_path / "big.tar", "w", format=tarfile.PAX_FORMAT) as archive:
        member = tarfile.TarInfo("a.cls")
        member.pax_headers = {"comment": "x" * (3 << 20)}
        archive.addfile(member, io.BytesIO(b""))
    with pytest.raises(FedvlmError, match="cannot be read"):
        open_source(str(tmp_path / "big.tar"))
