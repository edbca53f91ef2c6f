"""A model's folder that somebody handed over: nothing in it leads out of it, asks for code, or is larger than a model."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from fedvlm.backbones.model_folder import fingerprint, folder_of
from fedvlm.errors import FedvlmError

MINI = Path(__file__).parents[2] / "fedvlm" / "backbones" / "assets" / "mini-clip"


@pytest.fixture
def folder(tmp_path) -> Path:
    return Path(shutil.copytree(MINI, tmp_path / "given"))


def change(folder: Path, name: str, **entries: object) -> None:
    path = folder / name
    path.write_text(json.dumps(json.loads(path.read_text()) | entries))


def test_a_folder_as_it_should_be_is_read_and_keeps_its_fingerprint(folder):
    assert folder_of(str(folder), False) == folder and fingerprint(folder) == fingerprint(MINI)
    change(folder, "config.json", _attn_implementation="sdpa", quantization_config=None)
    folder_of(str(folder), False)


@pytest.mark.parametrize(
    ("name", "entries", "reason"),
    [
        ("config.json", {"attn_implementation": "evil/kernel@main"}, "asks for other code"),
        ("config.json", {"_attn_implementation": "evil/kernel"}, "asks for other code"),
        (
            "config.json",
            {"vision_config": {"deeper": [{"attn_implementation": {"": "evil/k"}}]}},
            "asks for other code",
        ),
        ("config.json", {"text_config": {"quantization_config": {"quant_method": "gptq"}}}, "asks for other code"),
        ("config.json", {"vision_config": {"num_hidden_layers": 10**6}}, "512 is the most"),
        ("config.json", {"vision_config": {"hidden_size": 10**9}}, "is the most"),
        ("config.json", {"hidden_sizes": [64, 10**12]}, "is the most"),
        ("preprocessor_config.json", {"size": {"shortest_edge": 60_000}}, "4,096 is the most"),
        ("preprocessor_config.json", {"crop_size": {"height": 1e300, "width": 96}}, "4,096 is the most"),
    ],
)
def test_entries_that_ask_for_code_or_for_too_much_are_refused(folder, name, entries, reason):
    change(folder, name, **entries)
    with pytest.raises(FedvlmError, match=reason):
        folder_of(str(folder), False)


@pytest.mark.parametrize("file", ["../outside.safetensors", "/etc/hostname", "sub/a.safetensors", "model.bin", "..", 7])
def test_an_index_names_files_of_the_folder(folder, file):
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"logit_scale": file}}))
    with pytest.raises(FedvlmError, match=r"weights are files of the folder|not readable"):
        folder_of(str(folder), False)


def test_which_file_has_which_weights_is_part_of_what_a_model_is(folder):
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    for part in ("a", "b"):
        save_file(weights, folder / f"{part}.safetensors")
    found = set()
    for part in ("a", "b"):
        index = {"metadata": {}, "weight_map": dict.fromkeys(weights, f"{part}.safetensors")}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        found.add(fingerprint(folder_of(str(folder), False)))
    assert len(found) == 2
