"""The list of nouns is clean and can be rebuilt, and the nouns chosen are the farthest from the classes."""

from __future__ import annotations

import gzip
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from fedvlm.data import nouns as module
from fedvlm.data.nouns import NOUNS, farthest_nouns, nouns
from fedvlm.errors import FedvlmError

TOOL = Path(__file__).parents[2] / "tools" / "build_nouns.py"


def test_the_list_is_clean():
    found = nouns()
    assert 30_000 < len(found) < 60_000
    assert found == sorted(set(found))
    assert all(n.strip() == n and n.islower() and not any(c.isdigit() or c in "_#.()" for c in n) for n in found)
    assert max(len(n.split()) for n in found) == 3


def test_the_list_holds_visible_things_only():
    found = set(nouns())
    assert found >= {"aardvark", "violin", "elbow", "pizza", "glacier", "rainbow", "oak tree", "triangle", "copper"}
    assert not found & {"happiness", "monday", "teacher", "jealousy", "kilogram", "canis lupus", "paris", "entity"}


def test_the_list_is_small_and_has_its_licence():
    assert NOUNS.stat().st_size < 300_000
    assert "Princeton University" in gzip.decompress(NOUNS.read_bytes()).decode().splitlines()[2]
    text = NOUNS.with_name("WORDNET-LICENSE.txt").read_text("utf-8")
    assert text.startswith("This software and database") and "WordNet 3.0 Copyright 2006 by Princeton" in text
    assert text.rstrip().endswith("agrees to preserve same.")


def test_the_tool_filters_nouns(tmp_path):
    """Of six meanings, names with a capital, a digit or four words, an act and a vulgar word are left out."""
    (tmp_path / "data.noun").write_text(
        "  1 Some licence.  \n"
        "00000001 05 n 03 zebra 0 grey_wolf 0 Canis_lupus 0 001 @ 00000009 n 0000 | animals  \n"
        "00000002 06 n 04 b-52 0 jack_in_the_box 0 ship's_bell 1 apron 0 000 | made things  \n"
        "00000003 04 n 02 running 0 zebra 1 000 | acts  \n"
        "00000004 08 n 01 bottom 0 000 | vulgar slang for something  \n"
        "00000005 20 n 0b a 0 bb 0 c 0 d 0 e 0 f 0 g 0 h 0 i 0 j 0 oak_tree 0 000 | eleven, in sixteens  \n"
        "00000006 27 n 01 salt_| 0 000 | not a word  \n",
        "utf-8",
    )
    for name in ("one.txt.gz", "two.txt.gz"):
        subprocess.run([sys.executable, TOOL, tmp_path, tmp_path / name], check=True, capture_output=True)
    lines = gzip.decompress((tmp_path / "one.txt.gz").read_bytes()).decode().splitlines()
    assert [n for n in lines if n[0] != "#"] == ["apron", "bb", "grey wolf", "oak tree", "ship's bell", "zebra"]
    assert "noun.animal" in lines[0] and "noun.substance" in lines[0]
    assert (tmp_path / "WORDNET-LICENSE.txt").read_text("utf-8") == "Some licence.\n"
    assert (tmp_path / "one.txt.gz").read_bytes() == (tmp_path / "two.txt.gz").read_bytes()


def test_the_error_of_the_tool_names_a_missing_dictionary(tmp_path):
    done = subprocess.run([sys.executable, TOOL, tmp_path, tmp_path / "x"], capture_output=True, text=True)
    assert done.returncode and "data.noun was not found" in done.stderr


def test_farthest_nouns_by_hand():
    """The median of two classes is their mean: closeness .5, .1, .3, .1 selects 1, then 3, then 2."""
    similarity = torch.tensor([[0.5, 0.5], [0.0, 0.2], [0.6, 0.0], [0.1, 0.1]], dtype=torch.float64)
    assert farthest_nouns(similarity, 3, percentile=0.5).tolist() == [1, 3, 2]
    assert farthest_nouns(similarity, 4, percentile=1.0).tolist() == [3, 1, 0, 2]  # the nearest class alone
    assert farthest_nouns(similarity, 0).tolist() == []


def test_farthest_nouns_agree_with_numpy(monkeypatch):
    monkeypatch.setattr(module, "CHUNK", 300)  # several chunks, the last one shorter
    similarity = torch.rand(101, 20, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 2 - 1
    closeness = np.percentile(similarity.numpy(), 95, axis=1)
    assert farthest_nouns(similarity, 40).tolist() == np.argsort(closeness, kind="stable")[:40].tolist()


def test_a_single_close_class_does_not_exclude_a_noun():
    """A noun close to one of forty classes may be chosen; one close to five of them is not."""
    similarity = torch.full((3, 40), 0.2)
    similarity[0, :1], similarity[1, :5], similarity[2] = 0.9, 0.9, 0.3
    assert farthest_nouns(similarity, 3).tolist() == [0, 2, 1]


def test_ties_are_in_the_order_of_the_list():
    assert farthest_nouns(torch.zeros(50, 3), 50).tolist() == list(range(50))


def test_planted_far_nouns_are_found():
    draw = torch.Generator().manual_seed(3)
    centre = F.normalize(torch.randn(1, 32, generator=draw), dim=-1)
    classes = F.normalize(centre + 0.1 * torch.randn(10, 32, generator=draw), dim=-1)
    names = F.normalize(centre + 0.1 * torch.randn(200, 32, generator=draw), dim=-1)
    planted = torch.randperm(200, generator=draw)[:20]
    names[planted] = F.normalize(torch.randn(20, 32, generator=draw), dim=-1)
    assert set(farthest_nouns(names @ classes.T, 20).tolist()) == set(planted.tolist())
    assert farthest_nouns((names @ classes.T).half(), 20).shape == (20,)


def test_invalid_arguments_are_errors():
    with pytest.raises(FedvlmError, match="5 outsiders were asked for, and there are 4 nouns"):
        farthest_nouns(torch.zeros(4, 2), 5)
    with pytest.raises(FedvlmError, match="not 95"):
        farthest_nouns(torch.zeros(4, 2), 1, percentile=95)
    with pytest.raises(FedvlmError, match="not 0"):
        farthest_nouns(torch.zeros(4, 0), 1)
    with pytest.raises(FedvlmError, match="not a number"):
        farthest_nouns(torch.full((4, 2), torch.nan), 1)
