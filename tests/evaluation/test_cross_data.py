"""Cross-data-set (FLiP 2025): a run is tested on other data, whose classes it knows by their names only."""

from __future__ import annotations

import shutil

import pytest
import torch

import fedvlm
from fedvlm import backbones
from fedvlm.cli import main
from fedvlm.core.state import with_client_axis
from fedvlm.data.pool import image_pool
from fedvlm.data.source import open_source
from fedvlm.errors import FedvlmError
from fedvlm.parts.adapters.attention import Attention


@pytest.fixture(scope="module")
def other(images, tmp_path_factory):
    """Two classes of which nobody trained, one of them in two domains, and one that a client trained."""
    root = tmp_path_factory.mktemp("cross") / "later"
    for domain, label in (("new", "hand"), ("new", "train"), ("new", "bird"), ("noto", "hand"), ("noto", "train")):
        shutil.copytree(images / ("openmoji" if domain == "new" else domain) / label, root / domain / label)
    return root


@pytest.fixture(scope="module")
def trained(images, tmp_path_factory):
    out = tmp_path_factory.mktemp("trained") / "run"
    return fedvlm.run("fedclip", data=images, classes="bird,clock,fruit", rounds=1, lr=0.001, out=out)


def test_other_classes_are_told_apart_by_their_names(trained, other):
    (found,) = trained.evaluate(data=str(other))
    pool = image_pool(open_source(str(other)), backbones.load("mini-clip"), "a photo of a {}", view="raw")
    assert pool.task.classes == ("bird", "hand", "train")
    y = torch.tensor([pool.task.classes.index(i.label) for i in pool.source.items])
    params = {k: torch.as_tensor(v) for k, v in trained.parameters().items()}
    logits = Attention().logits(pool.task, with_client_axis(params), pool.x[None])[0]
    right = (logits.argmax(-1) == y).double()
    new = torch.tensor([i.domain == "new" for i in pool.source.items])
    scores = found.scores["acc@later"]
    assert scores["newcomer"] == pytest.approx(float(right[new].mean()))
    assert scores["shared"] == pytest.approx(float(right[~new].mean()))
    assert found.notes == ["2 of its 3 classes are not the run's; classified among its own, by name"]


def test_the_command_prints_it(trained, other, capsys):
    assert main(["evaluate", str(trained.folder), f"data={other}"]) == 0
    said = capsys.readouterr().out
    assert "acc@later" in said and "classified among its own, by name" in said


def test_a_classifier_of_its_classes_cannot(images, other, tmp_path):
    done = fedvlm.run("fedavg", data=images, classes="bird,clock,fruit", rounds=0, out=tmp_path / "run")
    with pytest.raises(FedvlmError, match=r"knows no class 'hand' \(2 of 3 are unknown\), and adapter=head has param"):
        done.evaluate(data=str(other))
