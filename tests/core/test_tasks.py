"""Beyond classification: masks, characters and whole networks, each against something that knows better."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import example, random_data, random_task, same, small_adapter, state_of
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional as F

from fedvlm.backbones import load
from fedvlm.cli import main
from fedvlm.config.config import resolve
from fedvlm.core.adapter import Task
from fedvlm.core.cohort import Cohort
from fedvlm.core.data import Batch, Data
from fedvlm.core.descent import MOMENTUM, gradient_step, with_proximal_term
from fedvlm.core.state import Message, Reply
from fedvlm.core.tasks import SEGMENTATION, dice, mask_loss
from fedvlm.data.clients import federate
from fedvlm.data.formats.text import ALPHABET, BLOCK, WINDOW, tokens
from fedvlm.data.pool import Pool, Pools
from fedvlm.data.source import open_source
from fedvlm.engines import base
from fedvlm.engines.stacked import Stacked
from fedvlm.errors import FedvlmError
from fedvlm.parts import registry
from fedvlm.parts.adapters.lstm import Lstm
from fedvlm.parts.adapters.network import Norm
from fedvlm.parts.adapters.resnet import ResNet
from fedvlm.parts.local.bgp import Bgp
from fedvlm.parts.local.grace import Grace
from fedvlm.parts.local.perfedavg import PerFedAvg
from fedvlm.parts.local.scaffold import CONTROL
from fedvlm.parts.merge.grace import SMALLEST, consistency
from fedvlm.parts.merge.mean import Mean
from fedvlm.predict import predictor
from fedvlm.predict.export import folder as exported
from fedvlm.rounds.method import Method
from fedvlm.training import train
from fedvlm.training.folder import RunFolder
from fedvlm.training.planned_run import PlannedRun


def pool_of(method: str, **given: object) -> Pool:
    return Pools().load(resolve(method, given))


def run_of(folder: Path, method: str, **given: object) -> RunFolder:
    setup = resolve(method, given)
    return train.train(PlannedRun(setup, Pools().load(setup), folder))


def asked(method: Method, data: Data, *ids: int, **message: object) -> Reply:
    """Replies to the first training request."""
    sent = Message(method.initial, **message)
    return Cohort(Stacked(method, data, 1), np.array(ids), 1).ask("train", sent)


def test_dice_by_hand():
    one = torch.tensor([[[[1, 1], [0, 0]]]])
    other = torch.tensor([[[[1, 0], [1, 0]]]])
    none = torch.zeros_like(one)
    assert dice(one.double(), other) == 0.5 and dice(one.double(), one) == 1
    assert dice(none.double(), none) == 1 and dice(none.double(), one) == 0
    logits = torch.tensor([[[[3.0, 2.0], [-1.0, -9.0]]]])
    assert SEGMENTATION.score(logits, other) == 0.5 and SEGMENTATION.loss(logits, other) > 0


def test_mask_loss_is_torchs_cross_entropy_and_soft_dice(double):
    logits, y = torch.randn(2, 3, 5, 4), torch.randint(0, 2, (2, 3, 5, 4))
    p = logits.sigmoid()
    for i, j in np.ndindex(2, 3):
        soft = (2 * (p[i, j] * y[i, j]).sum() + 1) / (p[i, j].sum() + y[i, j].sum() + 1)
        expected = F.binary_cross_entropy_with_logits(logits[i, j], y[i, j].double()) + 1 - soft
        torch.testing.assert_close(mask_loss(logits, y)[i, j], expected)


def test_norm_is_batch_norm_and_padding_is_nothing(double):
    x = torch.randn(5, 3, 4, 4) * 2 + 1
    ours, theirs = Norm(3), nn.BatchNorm2d(3)
    real = torch.tensor([1 / 3, 1 / 3, 1 / 3, 0, 0])
    leaves = {k: v.detach().clone().requires_grad_() for k, v in ours.state_dict().items()}
    found = torch.func.functional_call(ours, leaves, (x, real))
    torch.testing.assert_close(found[:3], theirs(x[:3]))
    slopes = dict(zip(leaves, torch.autograd.grad(found[:3].square().sum(), list(leaves.values())), strict=True))
    moved = {k: leaves[k] - MOMENTUM * slopes[k] for k in ("running_mean", "running_square")}
    torch.testing.assert_close(moved["running_mean"], theirs.running_mean)
    biased = 0.9 + 0.1 * (x[:3].square().mean((0, 2, 3)))
    torch.testing.assert_close(moved["running_square"], biased)
    settled = {"running_mean": x.mean((0, 2, 3)), "running_square": x.square().mean((0, 2, 3))}
    still = torch.func.functional_call(ours, leaves | settled, (x,))
    torch.testing.assert_close(still, F.batch_norm(x, None, None, training=True))


def test_averaged_moments_are_those_of_all_data_and_averaged_variances_are_not(double):
    """Two clients whose means differ: buffers averaged the usual way would miss the distance between them."""
    a, b = torch.randn(400) - 3, torch.randn(100) + 3
    both = torch.cat([a, b])
    mean = 0.8 * a.mean() + 0.2 * b.mean()
    square = 0.8 * a.square().mean() + 0.2 * b.square().mean()
    torch.testing.assert_close(square - mean**2, both.var(correction=0))
    assert 0.8 * a.var() + 0.2 * b.var() < 0.2 * both.var()


def test_running_statistics_travel_and_are_averaged(double):
    task, data = example("resnet")
    method = Method.build(small_adapter(ResNet), registry.find("local", "sgd")(batch=4), Mean(), task, 5)
    engine, ids = Stacked(method, data, 1), np.array([0, 2])
    reply = asked(method, data, *ids)
    state = method.round(method.init(6), Cohort(engine, ids, 1))
    for name in ("bn1.running_mean", "layer2.0.bn1.running_square"):
        assert not torch.equal(reply.shared[name][0], method.initial[name])
        n = reply.values["n"]
        torch.testing.assert_close(state.shared[name], (n / n.sum()) @ reply.shared[name])


def test_nothing_pulls_at_running_statistics(double):
    """No tie, no step ahead, no control variate: by hand, and in SCAFFOLD's reply."""
    now = {"w": torch.ones(1, 2), "bn.running_mean": torch.ones(1, 2)}
    anchor = {k: torch.zeros(1, 2) for k in now}
    still = lambda params, batch: (torch.zeros(1), [torch.zeros(1, 2)] * 2)  # noqa: E731
    loss, found = with_proximal_term(still, anchor, 2.0)(now, None)
    assert loss == 2 and found[0].tolist() == [[2, 2]] and found[1].tolist() == [[0, 0]]
    moved = gradient_step(now, [torch.ones(1, 2)] * 2, 0.5)
    assert moved["w"].tolist() == [[0.5, 0.5]] and moved["bn.running_mean"] is now["bn.running_mean"]
    task, data = example("resnet")
    kind = registry.find("local", "scaffold")(batch=4, lr=0.01)
    method = Method.build(small_adapter(ResNet), kind, registry.find("merge", "scaffold")(), task, 5)
    reply = asked(method, data, 0, extra={k: torch.zeros_like(v) for k, v in method.initial.items()})
    assert not reply.values[CONTROL + "bn1.running_mean"].any() and reply.values[CONTROL + "bn1.weight"].any()
    assert not torch.equal(reply.shared["bn1.running_mean"][0], method.initial["bn1.running_mean"])


@pytest.mark.parametrize("adapter", ["rotation", "unet"])
def test_another_device_changes_nothing(adapter, double):
    """The way that leads to a GPU, with the processor's other name for a device: same replies, same views."""
    task, data = example(adapter)
    method = Method.build(small_adapter(adapter), registry.find("local", "ditto")(batch=4), Mean(), task, 5)
    found = []
    for device in ("cpu", "cpu:0"):
        engine = Stacked(method, data, 2, device=device)
        state = method.round(method.init(6), Cohort(engine, np.arange(5), 1))
        found.append((state.shared, Cohort(engine, np.arange(6), 1).ask("score", state.message()).values))
    for a, b in zip(*found, strict=True):
        same(a, b)
    assert "shared.score" in found[1][1] and "personal.score" in found[1][1]


def test_a_gpu_that_is_not_there(monkeypatch):
    """Asked for, it is missed in words; left to us, small steps never go there and networks only where there is one."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(FedvlmError, match="finds no GPU"):
        base.device_of(resolve("fedclip", {"device": "cuda"}))
    small, network = resolve("fedclip", {}), resolve("fedavg", {"on": "unet"})
    assert base.device_of(network) == "cpu"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert base.device_of(small) == base.device_of(network.with_(device="cpu")) == "cpu"
    assert base.device_of(network) == base.device_of(small.with_(device="cuda")) == "cuda"


def test_residual_networks_have_everybodys_sizes():
    for depth, expected in ((18, 11_689_512), (34, 21_797_672), (50, 25_557_032)):
        with torch.device("meta"):
            found = ResNet(depth=depth).init(Task(tuple(map(str, range(1000))), None, 0, 1.0), 1)
        assert sum(v.numel() for k, v in found.items() if "running" not in k) == expected


def test_pretrained_weights_as_everybody_names_them(tmp_path):
    task, kind = random_task(classes=7), small_adapter(ResNet)
    saved = {k: torch.rand_like(v) for k, v in kind.init(random_task(classes=3), 9).items()}
    variance = {k.replace("square", "var"): saved.pop(k) for k in list(saved) if "square" in k}
    save_file(saved | variance | {"bn1.num_batches_tracked": torch.tensor(3)}, tmp_path / "r.safetensors")
    found = replace(kind, start=str(tmp_path / "r.safetensors")).init(task, 1)
    assert torch.equal(found["layer1.0.conv1.weight"], saved["layer1.0.conv1.weight"])
    square = variance["bn1.running_var"] + saved["bn1.running_mean"] ** 2
    assert torch.equal(found["bn1.running_square"], square) and found["fc.weight"].shape[0] == 7
    with pytest.raises(FedvlmError, match="another shape"):
        replace(kind, width=4, start=str(tmp_path / "r.safetensors")).init(task, 1)
    (tmp_path / "bad.safetensors").write_bytes(b"no")
    with pytest.raises(FedvlmError, match="cannot be read"):
        replace(kind, start=str(tmp_path / "bad.safetensors")).init(task, 1)


def test_lstm_is_torchs(double):
    kind, task = Lstm(hidden=6, embed=4), random_task(classes=9)
    one = kind.init(task, 3)
    other = nn.LSTM(4, 6, num_layers=2, batch_first=True)
    for k in range(2):
        for name, ours in (("weight_ih", "input"), ("weight_hh", "state"), ("bias_ih", "bias")):
            getattr(other, f"{name}_l{k}").data = one[f"{ours}{k}"].clone()
        getattr(other, f"bias_hh_l{k}").data.zero_()
    x = torch.randint(0, 9, (2, 5, 11), dtype=torch.uint8)
    many = {k: torch.stack([v, v]) for k, v in one.items()}
    for client in range(2):
        expected = other(one["characters"][x[client].long()])[0][:, -1] @ one["head"].T + one["bias"]
        torch.testing.assert_close(kind.logits(task, many, x)[client], expected)
    torch.testing.assert_close(kind.logits(task, {k: v[None] for k, v in one.items()}, x), kind.logits(task, many, x))
    leaves = {k: v.requires_grad_() for k, v in many.items()}
    kind.logits(task, leaves, x)[0].square().sum().backward()
    table = one["characters"].clone().requires_grad_()
    (other(table[x[0].long()])[0][:, -1] @ one["head"].T + one["bias"]).square().sum().backward()
    torch.testing.assert_close(leaves["characters"].grad[0], table.grad)
    for k in range(2):
        for name, ours in (("weight_ih", "input"), ("weight_hh", "state"), ("bias_ih", "bias")):
            torch.testing.assert_close(leaves[f"{ours}{k}"].grad[0], getattr(other, f"{name}_l{k}").grad)
            assert not leaves[f"{ours}{k}"].grad[1].any()


def test_the_tower_starts_as_the_backbone(images):
    """Round 0 of full fine-tuning is zero-shot: the same embeddings as those the store holds."""
    tower, plain = pool_of("fedavg", on="tower", data=str(images)), pool_of("zero-shot", data=str(images))
    adapter = registry.find("adapter", "tower")()
    params = {k: v[None] for k, v in adapter.init(tower.task, 1).items()}
    with torch.no_grad():
        found = adapter.features(tower.task, params, tower.x[None, ::15])[0]
    torch.testing.assert_close(found, plain.x[::15], rtol=1e-4, atol=1e-5)


def test_full_fine_tuning_is_counted_not_asserted():
    """ViT-B/32: the image tower alone sends 167 times FedCLIP's adapter; all of CLIP is 288 times it. (FedCLIP's paper
    says 283, from rounded numbers: 1.5e8 / 5.3e5.)"""
    from transformers import CLIPConfig, CLIPModel

    from fedvlm.backbones.hf import ImageTower

    class Normalisation:
        image_mean = image_std = (0.5, 0.5, 0.5)

    with torch.device("meta"):
        clip = CLIPModel(CLIPConfig(projection_dim=512))
        tower = ImageTower(clip.vision_model, clip.visual_projection, Normalisation())
        task = Task(("a", "b"), torch.zeros(2, 512), 512, 100.0, tower)
    build = {n: registry.find("adapter", n)() for n in ("tower", "attention")}
    with torch.device("meta"):
        whole = sum(v.numel() for v in build["tower"].init(task, 1).values())
    small = sum(v.numel() for v in build["attention"].init(task._replace(text=torch.zeros(2, 512)), 1).values())
    assert small == 525_312 and whole == 87_849_216
    assert round(whole / small) == 167
    assert round(sum(p.numel() for p in clip.parameters()) / small) == 288


def write_roles(path, roles=4, length=2500):
    draw = np.random.default_rng(3)
    with gzip.open(path, "wt") as out:
        for k in range(roles):
            text = "".join(draw.choice(list("abcde ,.\n"), length))
            out.write(json.dumps({"play": "p", "role": f"R. {k}/../x", "text": text}) + "\n")
    return path


def test_no_character_is_read_in_training_and_tested_on(tmp_path):
    source = open_source(str(write_roles(tmp_path / "r.jsonl.gz")), stride=7)
    assert len(source.domains) == 4 and not any("/" in d or "." in d for d in source.domains)
    setup = resolve("fedavg", {"on": "lstm", "data": str(tmp_path / "r.jsonl.gz"), "stride": 7, "domains": 0})
    pool = Pools().load(setup)
    held, items = federate(pool, setup.config, 5), pool.source.items
    for i in range(len(held.names)):
        touched = []
        for a, b in zip(held.data.bounds[i], held.data.bounds[i][1:], strict=False):
            places = set()
            for r in range(a, b):
                first = int(items[held.items[r]].path.rpartition("#")[2])
                places |= set(range(first, first + WINDOW + 1))
            touched.append(places)
        assert all(touched) and not touched[0] & touched[2] and not touched[0] & touched[1]


def test_text_becomes_the_alphabet():
    assert "".join(ALPHABET[t] for t in tokens("Café—“no”…\t§")) == 'Cafe-"no".  '
    assert len(set(ALPHABET)) == len(ALPHABET) == 79 and BLOCK > WINDOW


def test_an_example_is_eighty_characters_and_the_next(tmp_path):
    path = write_roles(tmp_path / "r.jsonl.gz", roles=1)
    text = json.loads(gzip.decompress(path.read_bytes()))["text"]
    source = open_source(str(path), stride=5)
    for item, row in list(zip(source.items, source.tokens, strict=True))[::17]:
        first = int(item.path.rpartition("#")[2])
        assert "".join(ALPHABET[t] for t in row) == text[first : first + WINDOW]
        assert item.label == text[first + WINDOW]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "is empty"),
        ("{no", "line 1"),
        ('{"role": "A"}\n', "line 1"),
        ('{"role": "A", "text": "short"}\n', "no speaker"),
    ],
)
def test_bad_text_is_named(tmp_path, content, words):
    (tmp_path / "t.jsonl").write_text(content)
    with pytest.raises(FedvlmError, match=words):
        open_source(str(tmp_path / "t.jsonl"))


def write_masks(root, sites=("a", "b"), count=6, size=24):
    draw = np.random.default_rng(1)
    for site in sites:
        for part in ("image", "mask"):
            (root / site / part).mkdir(parents=True)
        for k in range(count):
            inside = np.zeros((size, size), bool)
            r, c = draw.integers(0, size // 2, 2)
            inside[r : r + size // 3, c : c + size // 3] = True
            shown = np.where(inside[..., None], (220, 60, 60), (40, 90, 40)) + draw.integers(-30, 30, (size, size, 3))
            Image.fromarray(shown.clip(0, 255).astype(np.uint8)).save(root / site / "image" / f"{k}.png")
            Image.fromarray(inside.astype(np.uint8) * 255).save(root / site / "mask" / f"{k}.png")
    return root


def test_masks_go_the_images_way(tmp_path):
    """What is bright in the image is inside in the mask, at the size the network sees."""
    setup = resolve("fedavg", {"on": "unet", "data": str(write_masks(tmp_path / "m")), "backbone": "pixels:16"})
    pool = Pools().load(setup)
    assert pool.x.shape == (12, 3, 16, 16) and pool.y.shape == (12, 16, 16)
    assert ((pool.x[:, 0] > 130) == (pool.y == 1)).float().mean() > 0.97
    held = federate(pool, setup.config, 5)
    assert held.names == ("a-0", "a-1", "a-2", "b-0", "b-1", "b-2")


def test_an_image_without_its_mask_is_named(tmp_path):
    root = write_masks(tmp_path / "m")
    (root / "a" / "mask" / "3.png").unlink()
    with pytest.raises(FedvlmError, match=r"a/image/3\.png"):
        open_source(str(root))


def test_a_broken_mask_takes_its_image_along(tmp_path):
    root = write_masks(tmp_path / "m")
    (root / "a" / "mask" / "3.png").write_bytes(b"no")
    pool = pool_of("fedavg", on="unet", data=str(root), backbone="pixels:16")
    assert len(pool.x) == len(pool.y) == 11 and list(pool.skipped) == ["a/image/3.png"]


def test_data_and_adapter_must_fit(tmp_path, images):
    masks = str(write_masks(tmp_path / "m"))
    with pytest.raises(FedvlmError, match="adapters for this data: unet"):
        pool_of("fedclip", data=masks)
    with pytest.raises(FedvlmError, match="learns text"):
        pool_of("fedavg", on="lstm", data=str(images))
    with pytest.raises(FedvlmError, match="domains=9: there are 3"):
        pool_of("fedclip", data=str(images), domains=9)
    assert len(pool_of("fedclip", data=str(images), domains=2).source.domains) == 2
    with pytest.raises(FedvlmError, match="reads embedding"):
        pool_of("fedclip", data=str(images), backbone="pixels:16")
    with pytest.raises(FedvlmError, match="objective=contrastive"):
        task, _ = example("unet")
        Method.build(
            registry.find("adapter", "unet")(), registry.find("local", "sgd")(objective="contrastive"), Mean(), task
        )
    with pytest.raises(FedvlmError, match="pixels:SIZE"):
        load("pixels:big")


@pytest.mark.parametrize(
    ("method", "on", "more"),
    [
        ("fft-gp", "unet", {"backbone": "pixels:16", "width": 2, "levels": 2, "unseen": "b", "clients": 2}),
        ("grace", "lstm", {"stride": 40, "hidden": 8, "domains": 3}),
        ("fft-gp", "resnet", {"backbone": "pixels:16", "depth": 10, "width": 4, "epochs": 1}),
        ("fedavg", "tower", {"batch": 8}),
    ],
)
def test_a_run_through_bytes_is_the_run_in_one(method, on, more, tmp_path, images, bytes_only):
    """Whole networks: the same state, to the bit."""
    data = images
    if on == "unet":
        data = write_masks(tmp_path / "m")
    if on == "lstm":
        data = write_roles(tmp_path / "r.jsonl.gz")
    if on == "tower":
        more = more | {"shots": 1, "unseen": "noto", "rounds": 1, "split": "20,1,1"}  # and nobody has a test image
    states = []
    for engine in ("serial", "loopback"):
        run = run_of(tmp_path / engine, method, **({"rounds": 2} | more), on=on, data=str(data), engine=engine)
        states.append(state_of(run.folder))
        assert (run.record.finished.last["P"] is None) == (on == "tower")
    assert states[0] == states[1]
    assert run.record.data.metric == ("Dice" if on == "unet" else "accuracy")


@pytest.mark.parametrize(("method", "on"), [("fft-gp", "prompt"), ("fedavg", "tower")])
def test_towers_predict_from_a_run_and_from_an_export(method, on, tmp_path, images):
    given = {"on": on, "data": str(images), "rounds": 1, "shots": 1, "batch": 8, "unseen": "noto"}
    run = run_of(tmp_path / "run", method, **given)
    paths = sorted((images / "noto").rglob("*.png"))[::12]
    found = predictor.from_run(run).predict(paths)
    assert [c for c, _ in found] and all(0 < p <= 1 for _, p in found)
    exported.export(run, tmp_path / "out")
    again = exported.load_export(tmp_path / "out").predict(paths)
    assert [c for c, _ in again] == [c for c, _ in found]
    outputs = load_file(run.folder / "outputs.safetensors")
    assert outputs["shared.logits"].shape[1] == 5


def test_masks_are_drawn_at_the_images_size(tmp_path):
    """A U-Net that has learned something draws what the test split says; text runs say why they cannot predict."""
    data = write_masks(tmp_path / "m", count=12)
    given = {"data": str(data), "backbone": "pixels:16", "width": 4, "levels": 1, "rounds": 8, "epochs": 5, "lr": 0.01}
    run = run_of(tmp_path / "run", "fedavg", on="unet", **given)
    assert run.record.finished.last["shared"]["test"] > 0.7
    model = predictor.from_run(run)
    paths = sorted((data / "a" / "image").iterdir())[:3]
    for path, drawn, (word, share) in zip(paths, model.masks(paths), model.predict(paths), strict=True):
        with Image.open(data / "a" / "mask" / path.name) as found:
            truth = np.asarray(found) > 127
        inside = np.asarray(drawn) > 127
        assert drawn.size == (24, 24) and word == "inside" and abs(share - truth.mean()) < 0.1
        assert 2 * (truth & inside).sum() / (truth.sum() + inside.sum()) > 0.6
    assert main(["predict", str(run.folder), *map(str, paths), "--masks", str(tmp_path / "drawn")]) == 0
    assert len(list((tmp_path / "drawn").glob("*.png"))) == 3
    text = {"data": str(write_roles(tmp_path / "r.jsonl.gz")), "domains": 2, "stride": 90, "rounds": 1}
    done = run_of(tmp_path / "text", "fedavg", on="lstm", **text)
    with pytest.raises(FedvlmError, match="continue text"):
        predictor.from_run(done)


def test_a_prompt_of_the_usual_words_is_zero_shot(images):
    """PromptFL started from "a photo of a" gives the class embeddings that zero-shot has, but for the full stop."""
    given = {"data": str(images), "template": "a photo of a {}."}
    pools = [pool_of(m, **given) for m in ("promptfl", "zero-shot")]
    adapter = registry.find("adapter", "prompt")(phrase="a photo of a")
    params = {k: v[None] for k, v in adapter.init(pools[0].task, 1).items()}
    found = adapter.logits(pools[0].task, params, pools[0].x[None, :9])[0]
    expected = pools[1].task.scale * pools[1].x[:9] @ pools[1].task.names().T
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    with pytest.raises(FedvlmError, match="reads embedding"):
        pool_of("promptfl", data=str(images), backbone="pixels:8")


def test_consistency_by_brute_force(double):
    draw = torch.Generator().manual_seed(4)
    shared = {"a": torch.randn(3, generator=draw), "running_mean": torch.randn(2, generator=draw)}
    up = {k: v + torch.rand(4, *v.shape, generator=draw) for k, v in shared.items()}
    updates = up["a"] - shared["a"]
    each = [
        np.mean([float(F.cosine_similarity(updates[i], updates[j], dim=0)) for j in range(4) if j != i])
        for i in range(4)
    ]
    torch.testing.assert_close(consistency(up, shared, 4), torch.tensor(each))
    up["a"][2] = shared["a"] - 5 * updates[0]  # one against the others
    found = consistency(up, shared, 4)
    assert found.min() == SMALLEST == found[2] and found.isfinite().all()
    alone = {k: v[:1] for k, v in up.items()}
    assert consistency(alone, shared, 1).tolist() == [1]
    still = {k: v.expand(3, *v.shape) for k, v in shared.items()}
    assert consistency(still, shared, 3).isfinite().all() and consistency(still, shared, 3).min() > 0


def test_grace_without_alignment_is_perfedavg(double):
    task = random_task()
    data = random_data(task)
    replies = []
    for rule in (Grace(align=0.0, inner=0.02, keep=False, lr=0.05, batch=4), PerFedAvg(inner=0.02, lr=0.05, batch=4)):
        method = Method.build(registry.find("adapter", "attention")(), rule, Mean(), task, 5)
        replies.append(Cohort(Stacked(method, data, 6), np.arange(5), 1).ask("train", Message(method.initial)))
    one, other = (reply.shared | reply.values for reply in replies)
    assert one.keys() == other.keys() and one
    for k in one:
        torch.testing.assert_close(one[k], other[k])


def test_grace_looks_back_at_what_was_sent_and_bgp_goes_on(double):
    """One batch, by hand: GRACE steps from w with the slope taken ahead; BGP's second step starts where the first ended."""
    task = random_task()
    model = Method.build(registry.find("adapter", "attention")(), Grace(), Mean(), task, 5).model
    data = random_data(task)
    batch = Batch(data.x[None, :6], data.y[None, :6], torch.full((1, 6), 1 / 6))
    now = {k: v[None].clone() for k, v in model.adapter.init(task, 5).items()}
    anchor = {k: v + 0.01 for k, v in now.items()}
    rule = Grace(align=2.0, inner=0.3)
    sent = Message({k: v[0] for k, v in anchor.items()})
    _, found = rule.meta_gradients(model, sent, data, {})(now, batch)
    leaves = {k: v.clone().requires_grad_() for k, v in now.items()}
    first = batch._replace(weight=torch.tensor([[1 / 3, 0] * 3]))
    slopes = torch.autograd.grad(model.loss("cross-entropy", leaves, first).sum(), list(leaves.values()))
    there = {k: (v - 0.3 * g).detach().requires_grad_() for (k, v), g in zip(now.items(), slopes, strict=True)}
    second = batch._replace(weight=torch.tensor([[0, 1 / 3] * 3]))
    features = [model.adapter.logits_and_aligned(task, p, batch)[1][0, 1::2] for p in (there, anchor)]
    apart = (features[0].mean(0) - features[1].mean(0)).square().mean()
    apart = apart + (features[0].T.cov() - features[1].T.cov()).square().mean()
    total = model.loss("cross-entropy", there, second).sum() + 2.0 * apart
    for a, b in zip(found, torch.autograd.grad(total, list(there.values())), strict=True):
        torch.testing.assert_close(a, b)
    assert Bgp().keep and rule.keep
