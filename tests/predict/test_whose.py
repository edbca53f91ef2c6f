"""Whose model answers, on whose images: of runs whose clients are not in the order of their data."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from helpers import same
from safetensors.torch import load_file

import fedvlm
from fedvlm.data.corruptions import corrupt
from fedvlm.data.images import decode
from fedvlm.data.pool import Pools
from fedvlm.data.source import digest, open_source
from fedvlm.predict.finished import Finished, as_clients


def test_predictions_are_with_the_class_embeddings_that_the_server_trained(images, tmp_path):
    run = fedvlm.run("feddtl", data=images, rounds=1, layers=1, shots=2, text_lr=0.01, out=tmp_path / "run")
    trained = run.files.load()[0].task["text"]
    model = run.predictor().model
    assert torch.equal(model.task.text, trained)
    assert not torch.allclose(trained, Pools().load(run.files.setup()).task.text, atol=1e-3)
    exported = tmp_path / "model"
    run.export(exported)
    assert torch.equal(fedvlm.load(exported).model.task.text, trained)


def test_other_data_meet_the_own_model_of_the_client_of_that_name(images, tmp_path):
    """noto, the first client, is held out, so that places among all clients and among those that train differ."""
    run = fedvlm.run("fedot", data=images, unseen="noto", rounds=1, lr=0.01, out=tmp_path / "run")
    setup = run.files.setup()
    pool = Pools().load(setup)
    model = Finished.of(run.files, setup, pool)
    federation, rows = as_clients(model, pool)
    assert federation.names == model.federation.names == ("noto", "openmoji", "twemoji")
    same({k: v[1:] for k, v in rows.items()}, {k: v[1:] for k, v in model.rows.items()})
    same({k: v[0] for k, v in rows.items()}, model.method.newcomer)
    assert any(not torch.equal(v[1], v[2]) for v in rows.values())


def test_corrupted_images_are_scored_by_their_own_labels(images, tmp_path):
    """Against single predictions, with images dealt at random."""
    run = fedvlm.run("fedavg", data=images, partition="iid", clients=3, rounds=1, out=tmp_path / "run")
    outputs, source = load_file(run.folder / "outputs.safetensors"), open_source(str(images))
    model, right = run.predictor(), [list[float]() for _ in range(3)]
    for client, number in zip(outputs["client"].tolist(), outputs["item"].tolist(), strict=True):
        data = (images / source.items[number].path).read_bytes()
        versions = []
        for severity in range(1, 6):
            seed = int.from_bytes(digest(digest(data) + f"brightness-{severity}".encode())[:7], "little")
            versions.append(corrupt(decode(data), "brightness", severity, seed))
        right[client] += [name == source.items[number].label for name, _ in model.predict(versions)]
    (found,) = run.evaluate(corrupt="brightness")
    expected = np.mean([np.mean(one) for one in right])
    assert found.scores["cacc@brightness"]["shared"] == pytest.approx(expected, abs=1e-6)
