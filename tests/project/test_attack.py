"""tools/attack.py: known leaks are found, noise leaks nothing, and the table of a run is right."""

from __future__ import annotations

import csv
from dataclasses import replace

import numpy as np
import pytest
import torch
from attack import Leak, attack, attack_client, embed, main, mean_leak, measure_leak, non_members, table
from helpers import example
from torch.nn import functional as F

from fedvlm.config.config import resolve
from fedvlm.core.data import Data
from fedvlm.core.state import with_client_axis
from fedvlm.data.pool import Pools
from fedvlm.engines.rows import Rows
from fedvlm.errors import FedvlmError
from fedvlm.parts.merge.text_server import TextServer
from fedvlm.training import train
from fedvlm.training.folder import RunFolder
from fedvlm.training.planned_run import PlannedRun

SHORT = {"rounds": 4, "tolerance": 2.0, "patience": 1, "rank": 1, "text_rank": 1, "layers": 1, "text_layers": 1}
SHORT |= {"projections": "q", "updates": 2, "epochs": 1, "batch": 16, "seed": 7, "engine": "serial"}
SHORT |= {"protocol": "base-to-novel", "partition": "iid", "clients": 2}


def run_of(images, folder, **how):
    """A short run of FedDTL."""
    setup = resolve("feddtl", SHORT | {"data": str(images)} | how)
    return train.train(PlannedRun(setup, Pools().load(setup), folder))


def clusters(classes: int = 5, each: int = 40, dim: int = 32):
    """Unit vectors around class vectors: the embeddings of a client's images, of as many others, labels, class vectors."""
    draw = torch.Generator().manual_seed(0)
    text = F.normalize(torch.randn(classes, dim, generator=draw), dim=-1)
    y = torch.arange(classes).repeat_interleave(each)
    noise = 0.5 * torch.randn(2, len(y), dim, generator=draw) / dim**0.5
    ours, theirs = F.normalize(text[y] + noise, dim=-1)
    return ours, theirs, y, text


def leak_of(merge: TextServer, ours, theirs, y, text) -> Leak:
    data = Data(ours, y, np.array([[0, len(y), len(y), len(y)]]), np.array([0]), seed=1, round=2)
    sent, _ = merge.embeddings_to_send(ours, y, data, 0)
    return measure_leak(sent, merge.source_rows(y, data, 0), torch.cat([ours, theirs]), y, text)


def test_unprotected_embeddings_leak_everything():
    found = leak_of(TextServer(), *clusters())
    assert found.matched == 1.0 and found.member == 1.0 and found.classes == found.labels == 1.0
    assert found.chance == 1 / 400 and found.sent == 200


def test_noise_leaks_nothing():
    ours, theirs, y, text = clusters(each=400)
    noise = torch.randn(len(y), 32, generator=torch.Generator().manual_seed(5))
    found = measure_leak(noise, list(torch.arange(len(y))[:, None]), torch.cat([ours, theirs]), y, text)
    assert found.matched <= 6 / len(y) and found.chance == 1 / (2 * len(y))
    assert abs(found.member - 0.5) < 0.03 and abs(found.labels - 0.2) < 0.03


@pytest.mark.parametrize(
    "protection", [{"upload_groups": 8}, {"upload_groups": 4}, {"upload_noise": 0.1}, {"upload_noise": 0.3}], ids=str
)
def test_protections_reduce_the_leak(protection):
    plain, found = (leak_of(TextServer(**p), *clusters()) for p in ({}, protection))
    assert found.matched < 0.96 and found.member < 0.95
    assert found.matched > 1.5 * found.chance and found.member > 0.5  # reduced, not removed
    assert plain.labels >= found.labels


def test_a_stronger_protection_leaks_less():
    for key, values in {
        "upload_noise": (0.05, 0.2, 0.8),
        "upload_groups": (20, 8, 2),
        "upload_share": (0.5, 0.2, 0.1),
    }.items():
        found = [leak_of(TextServer(**{key: v}), *clusters()) for v in values]
        members = [f.member for f in found]
        assert members == sorted(members, reverse=True) and members[0] > members[-1] + 0.05
        if key != "upload_share":  # all of what is still sent is found
            assert found[0].matched > found[-1].matched
        else:
            assert {f.matched for f in found} == {1.0} and [f.sent for f in found] == [100, 40, 20]


def test_a_group_of_one_image_protects_nothing():
    assert leak_of(TextServer(upload_groups=8), *clusters(each=8))._replace(chance=0) == leak_of(
        TextServer(), *clusters(each=8)
    )._replace(chance=0)


def test_by_hand():
    """By cosine, not length; the nearest candidate may be another image; a group is matched by any of its members."""
    text = torch.eye(3)
    ours = torch.tensor([[2.0, 0, 0], [0, 1, 0], [0.9, 0.1, 0]])
    theirs = torch.tensor([[0.0, 0, 1], [0.6, 0.8, 0]])
    y, made_of = torch.tensor([0, 1, 1]), [torch.tensor([0]), torch.tensor([1, 2])]
    sent = torch.tensor([[5.0, 0, 0], [0.6, 0.7, 0]])
    found = measure_leak(sent, made_of, torch.cat([ours, theirs]), y, text)
    assert (
        found.matched == 0.5 and found.chance == 1.5 / 5
    )  # the second is nearest to [.6, .8], which is not the client's
    cosines = F.normalize(sent, dim=-1) @ F.normalize(torch.cat([ours, theirs]), dim=-1).T
    best = cosines.max(0).values.tolist()
    assert found.member == np.mean([m > o for m in best[:3] for o in best[3:]])
    assert found.labels == 1.0 and found.classes == 1.0
    assert measure_leak(sent[:1], made_of[:1], ours, y, text).classes == pytest.approx(2 * 1 / (1 + 2))
    assert measure_leak(sent, made_of, ours, y, text).member is None  # no other images
    nearer = measure_leak(torch.tensor([[1.0, 0, 0], [1.0, 0.12, 0]]), made_of, ours, y, text)
    assert nearer.matched == 1.0 and nearer.labels == 0.5


def test_comparing_in_blocks_changes_nothing(monkeypatch):
    import attack as module

    at_once = leak_of(TextServer(upload_noise=0.1), *clusters())
    monkeypatch.setattr(module, "BLOCK", 7)
    in_blocks = leak_of(TextServer(upload_noise=0.1), *clusters())
    assert in_blocks == pytest.approx(at_once)


def test_non_members_are_no_training_images():
    _, data = example("head")
    trained = {r for b in data.bounds for r in range(b[0], b[1])}
    for i, (_, mid, _, high) in enumerate(data.bounds):
        rows, size = non_members(data, i).tolist(), int(data.counts("train")[i])
        assert len(rows) == len(set(rows)) == min(size, len(data.x) - len(trained)) and not set(rows) & trained
        first = rows[: high - mid]
        assert set(first) <= set(range(mid, high)) and rows == non_members(data, i).tolist()
    assert non_members(replace(data, seed=9), 0).tolist() != non_members(data, 0).tolist()


def test_means_are_over_clients():
    one, other = Leak(1.0, 0.2, None, 1.0, 1.0, 10), Leak(0.5, 0.4, 0.7, 0.5, 0.0, 30)
    assert mean_leak((one, other)) == pytest.approx(Leak(0.75, 0.3, 0.7, 0.75, 0.5, 20))
    assert mean_leak((one, one)).member is None


@pytest.fixture(scope="module")
def runs(images, tmp_path_factory):
    """Without and with a protection; and one that is not base-to-novel and has private parameters."""
    out = tmp_path_factory.mktemp("attack")
    run_of(images, out / "plain", rounds=2)
    run_of(images, out / "grouped", rounds=2, upload_groups=2, upload_noise=0.05, text_lr=0.5)
    given = {
        "protocol": "one",
        "partition": "domain",
        "unseen": "noto",
        "rounds": 1,
        "private": "image.0.q.B",
        "lr": 0.1,
    }
    run_of(images, out / "domains", **given)
    return out


@pytest.mark.parametrize("name", ["plain", "grouped", "domains"])
def test_the_attack_uses_what_a_client_would_send(runs, name):
    """Embeddings of the last round from the final model with the client's private parameters; candidates without them."""
    run = RunFolder(runs / name)
    setup = run.setup()
    planned = PlannedRun(setup, Pools().load(setup))
    method, federation = planned.method, planned.federation
    state, round = run.load()
    shared = with_client_axis(state.shared)
    server = shared | with_client_axis(state.private)
    method = replace(method, task=method.task._replace(text=state.task["text"]))
    data, leaks = replace(federation.data, round=round), []
    for i in federation.seen:
        one = replace(data, bounds=data.bounds[i : i + 1], ids=data.ids[i : i + 1])
        own = Rows(method.newcomer, len(federation.names), run.folder / "rows.bin").read(np.array([i]), round)
        up, _ = setup.merge.client_values(method.model, shared | own, one)
        y = data.y[slice(*data.bounds[i, :2])]
        assert up["labels"][0].tolist() == [int(y[rows[0]]) for rows in setup.merge.source_rows(y, data, int(i))]
        x = torch.cat([data.x[slice(*data.bounds[i, :2])], data.x[non_members(data, int(i))]])
        made_of = setup.merge.source_rows(y, data, int(i))
        leaks.append(measure_leak(up["embeddings"][0], made_of, embed(method, server, x), y, state.task["text"]))
    wanted = mean_leak(leaks)._asdict()
    (row,) = attack(run)
    assert {k: row[k] for k in wanted} == pytest.approx(wanted)


def test_a_run_and_what_if(runs):
    rows = attack(RunFolder(runs / "plain"), what_if=True)
    last = RunFolder(runs / "plain").record.finished.last
    plain, *rest = rows
    assert plain["matched"] == 1.0 and plain["member"] > 0.95 and plain["hm"] == last["hm"] is not None
    assert [(r["upload_share"], r["upload_groups"], r["upload_noise"]) for r in rest] == [
        (1, 0, 0.1),
        (1, 4, 0),
        (1, 8, 0),
        (0.2, 0, 0),
    ]
    assert all(r["hm"] is None and r["run"] == "plain, what if" for r in rest)
    assert rest[0]["matched"] < 1 and rest[1]["matched"] < 1 and rest[1]["sent"] < plain["sent"] == 18
    assert rest[3]["sent"] == 4 and rest[3]["matched"] == 1.0
    (grouped,) = attack(RunFolder(runs / "grouped"))
    assert (grouped["upload_groups"], grouped["upload_noise"], grouped["sent"]) == (2, 0.05, 4) and grouped[
        "matched"
    ] < 1
    assert len(attack(RunFolder(runs / "grouped"), what_if=True)) == 6


def test_the_server_embeds_candidates_without_private_parameters(runs):
    (row,) = attack(RunFolder(runs / "domains"))
    assert row["P"] is not None and row["G"] is not None and "hm" not in row
    run = RunFolder(runs / "domains")
    setup = run.setup()
    planned = PlannedRun(setup, Pools().load(setup))
    method, federation = planned.method, planned.federation
    state, _ = run.load()
    method = method.for_message(state.message())
    server = with_client_axis(state.shared) | with_client_axis(state.private)
    other = server | {"image.0.q.B": server["image.0.q.B"] + torch.randn_like(server["image.0.q.B"])}
    ((far,), (near,)) = (attack_client(method, [TextServer()], server, p, federation.data, 1) for p in (other, server))
    assert far.member < near.member and near.matched == 1.0


def test_the_command(runs, tmp_path, capsys):
    words = [str(runs / "plain"), str(runs / "grouped"), str(runs / "domains")]
    assert main([*words, "--csv", str(tmp_path / "t.csv")]) == 0
    text = capsys.readouterr().out
    head = text.splitlines()[0].split()
    assert head[:8] == ["run", "upload_share", "upload_groups", "upload_noise", "local", "base", "novel", "hm"]
    assert head[8:] == ["G", "P", "matched", "chance", "member", "classes", "labels", "sent"]
    rows = {line.split()[0]: line.split() for line in text.splitlines()[1:4]}
    assert rows["plain"][10] == "100.00" and rows["plain"][8:10] == ["–", "–"] and rows["domains"][4:8] == ["–"] * 4
    assert "One round is attacked" in text and "50 is a guess" in text
    with (tmp_path / "t.csv").open() as file:
        read = list(csv.DictReader(file))
    assert [r["run"] for r in read] == ["plain", "grouped", "domains"] and float(read[0]["matched"]) == 1.0
    assert read[2]["hm"] == "" and float(read[1]["upload_noise"]) == 0.05
    assert main([str(runs / "plain"), "--what-if"]) == 0
    assert capsys.readouterr().out.count("plain, what if") == 4


def test_runs_that_cannot_be_attacked_are_errors(images, runs, tmp_path, capsys, monkeypatch):
    setup = resolve("fedavg", {"data": str(images), "unseen": "noto", "rounds": 1})
    train.train(PlannedRun(setup, Pools().load(setup), tmp_path / "fedavg"))
    assert main([str(tmp_path / "fedavg")]) == 1
    assert "no embeddings, so there is nothing to match; try a run of feddtl" in capsys.readouterr().err
    assert main([str(tmp_path / "fedavg"), str(runs / "plain")]) == 0
    assert "fedavg is left out" in capsys.readouterr().out
    with pytest.raises(FedvlmError, match="nothing to match"):
        attack(RunFolder(tmp_path / "fedavg"))

    class Stop(Exception):
        pass

    def stopping(self, result):
        raise Stop

    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "finish", stopping)
        with pytest.raises(Stop):
            run_of(images, tmp_path / "half", rounds=1)
    assert main([str(tmp_path / "half")]) == 1
    assert "is not finished; `fedvlm resume" in capsys.readouterr().err
    run = RunFolder(runs / "plain")
    pool = Pools().load(run.setup())
    with pytest.raises(FedvlmError, match="is not what it was trained on"):
        attack(run, replace(pool, fingerprint="other"))


def test_a_table_without_utility_has_no_columns_for_it():
    row = {"run": "r", "upload_share": 1.0, "upload_groups": 0, "upload_noise": 0.0} | Leak(
        1.0, 0.1, None, 0.5, 0.5, 12
    )._asdict()
    made = table([row])
    assert (
        made.columns[:5] == ["run", "upload_share", "upload_groups", "upload_noise", "matched"]
        and made.rows[0]["member"] == "–"
    )
    assert made.rows[0]["matched"] == "100.00" and made.rows[0]["sent"] == "12"
