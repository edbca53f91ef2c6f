"""The ledger: a chain that notices changes, repair after a crash, and both sides compared."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save

from fedvlm.cli import main
from fedvlm.errors import FedvlmError
from fedvlm.federation.ledger import (
    NOTHING,
    RECEIVED,
    SENT,
    Entry,
    Ledger,
    LedgerHead,
    Sent,
    Tensor,
    audit,
    compare,
    content,
    entries,
    verify,
)


def sent(round: int = 1, frame: bytes = b"abc", **more) -> Sent:
    about = content(frame)._asdict()
    return Sent(**{"run": "fedot-s0", "site": "north", "step": "train", "round": round, "exchange": 1, **about, **more})


@pytest.fixture
def ledger(tmp_path) -> Path:
    path = tmp_path / SENT
    for round in range(1, 6):
        Ledger(path).append(sent(round, bytes([round]) * round))
    return path


def lines(path: Path) -> list[bytes]:
    return path.read_bytes().splitlines(keepends=True)


def test_what_an_entry_says(tmp_path):
    frame = save({"shared/w": torch.zeros(2, 3), "values/n": torch.ones(1, dtype=torch.float64)})
    entry = Ledger(tmp_path / SENT).append(sent(7, frame, clipped=0.5, masked=True))
    assert list(entries(tmp_path / SENT)) == [entry]
    assert (entry.number, entry.previous, entry.head.hash) == (1, NOTHING, entry.hash)
    assert entry.bytes == len(frame) and entry.clipped == 0.5 and entry.masked and not entry.noised
    assert sorted(entry.tensors, key=lambda t: t.name) == [
        Tensor("shared/w", [2, 3], "F32"),
        Tensor("values/n", [1], "F64"),
    ]
    assert entry.time.endswith("+00:00")


@pytest.mark.parametrize(
    "frame", [b"", b"\0" * 8, b"\xff" * 30, b"\2\0\0\0\0\0\0\0[]", b'\x0c\0\0\0\0\0\0\0{"a": {"b":1}}']
)
def test_bytes_that_are_no_tensors(frame):
    assert content(frame).tensors == [] and content(frame).bytes == len(frame)


@pytest.mark.skipif(os.name != "posix", reason="rights of POSIX")
def test_nobody_else_reads_it(ledger):
    assert ledger.stat().st_mode & 0o777 == 0o600


def test_every_entry_follows_the_one_before(ledger):
    found = list(entries(ledger))
    assert [e.number for e in found] == [1, 2, 3, 4, 5] and verify(ledger) is None
    assert [e.previous for e in found] == [NOTHING, *(e.hash for e in found[:-1])]


def changed(path: Path, line: int, **values: object) -> None:
    """One line with other values, in a file that is otherwise as it was."""
    all_lines = lines(path)
    all_lines[line - 1] = json.dumps(json.loads(all_lines[line - 1]) | values).encode() + b"\n"
    path.write_bytes(b"".join(all_lines))


def another(value: object) -> object:
    """A value of the same kind in a line's JSON."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, list):
        return [*value, {"name": "shared/w", "shape": [1], "dtype": "F32"}]
    if value is None:
        return {"count": 1, "hash": NOTHING}
    return value + type(value)(1)  # a number and 1, a text and a further character


@pytest.mark.parametrize("field", [f.name for f in fields(Entry)])
def test_a_changed_line_is_noticed(ledger, field):
    changed(ledger, 3, **{field: another(json.loads(lines(ledger)[2])[field])})
    fault = verify(ledger)
    assert fault and fault.line == 3


@pytest.mark.parametrize("values", [{"noised": 0.5}, {"clipped": 0.5}, {"time": "2020"}, {"odd": 1}])
def test_a_line_with_a_value_of_another_kind_is_noticed(ledger, values):
    changed(ledger, 3, **values)
    fault = verify(ledger)
    assert fault and fault.line == 3


@pytest.mark.parametrize("relinked", [False, True])
def test_a_line_whose_own_hash_is_made_anew_breaks_the_next(ledger, tmp_path, relinked):
    """Also where the next names the new hash: then its own is another."""
    other = Ledger(tmp_path / "other.jsonl")
    for round in (1, 2):
        other.append(sent(round, b"another"))
    ledger.write_bytes(b"".join([*lines(other.path), *lines(ledger)[2:]]))
    if relinked:
        changed(ledger, 3, previous=other.head.hash)
    fault = verify(ledger)
    assert fault and fault.line == 3


@pytest.mark.parametrize(
    ("order", "wrong"), [((0, 1, 3, 4), 3), ((0, 2, 1, 3, 4), 2), ((0, 0, 1, 2), 2), ((1, 2, 3, 4), 1)]
)
def test_a_removed_moved_or_repeated_line_is_noticed(ledger, order, wrong):
    old = lines(ledger)
    ledger.write_bytes(b"".join(old[i] for i in order))
    fault = verify(ledger)
    assert fault and fault.line == wrong


@pytest.mark.parametrize("text", [b"\n", b"{\n", b"[]\n", b"\xff\n", b"[" * 100_000 + b"\n"])
def test_a_line_that_is_no_entry(ledger, text):
    with ledger.open("ab") as out:
        out.write(text)
    fault = verify(ledger)
    assert fault and fault.line == 6
    with pytest.raises(FedvlmError, match="move the file away"):
        Ledger(ledger).append(sent())


@pytest.mark.parametrize("size", [1, 50, 400])
def test_a_cut_line_is_removed_and_that_is_noted(ledger, size):
    ledger.write_bytes(ledger.read_bytes()[:-size])
    cut = lines(ledger)[-1].decode()
    fault = verify(ledger)
    assert fault and fault.line == 5 and "cut" in fault.reason
    Ledger(ledger).append(sent(6))
    found = list(entries(ledger))
    assert [e.step for e in found[4:]] == ["repair", "train"] and found[4].note.endswith(cut)


def test_a_ledger_that_holds_only_a_cut_line(tmp_path):
    (tmp_path / SENT).write_bytes(b'{"run"')
    Ledger(tmp_path / SENT).append(sent())
    assert [e.step for e in entries(tmp_path / SENT)] == ["repair", "train"]


def test_long_lines(tmp_path):
    """The last line is longer than what is read at a time from the end."""
    many = [Tensor(f"shared/{i}", [i], "F32") for i in range(1500)]
    for round in range(3):
        Ledger(tmp_path / SENT).append(sent(round, tensors=many))
    assert verify(tmp_path / SENT) is None and len(list(entries(tmp_path / SENT))) == 3


def test_several_processes(tmp_path):
    code = (
        "import sys; from pathlib import Path; from fedvlm.federation.ledger import Ledger, Sent\n"
        "for i in range(20): Ledger(Path(sys.argv[1])).append(Sent('r', 's', 'train', i))\n"
        "assert 'torch' not in sys.modules"
    )
    path = tmp_path / SENT
    all_ = [subprocess.Popen([sys.executable, "-c", code, str(path)]) for _ in range(3)]
    assert [p.wait() for p in all_] == [0, 0, 0]
    assert verify(path) is None and len(list(entries(path))) == 60


@pytest.fixture
def both(tmp_path) -> tuple[Path, Path]:
    """A site's ledger with two runs, and what the server of one of them received, also from another site."""
    mine, theirs = tmp_path / SENT, tmp_path / "run" / RECEIVED
    theirs.parent.mkdir()
    Ledger(mine).append(sent(run="earlier"))
    for round in range(1, 4):
        said = [sent(round, b"reply" * round), sent(round, b"", step="score", refused="site.yaml: no score")]
        for one in said:
            head = Ledger(mine).head  # before the line: the message that tells it cannot hold its own hash
            Ledger(mine).append(one)
            refused = "refused" if one.refused else ""
            told = Sent(**vars(one) | {"direction": "received", "site_head": head, "refused": refused})
            Ledger(theirs, sync=False).append(told)
        Ledger(theirs, sync=False).append(sent(round, site="south", direction="received"))
    return mine, theirs


def test_both_sides_agree(both):
    assert compare(*both, "north") == []


def test_what_was_not_received(both):
    Ledger(both[0]).append(sent(4, b"lost"))
    assert compare(*both, "north") == ["fedot-s0: train of round 4, exchange 1 (4 bytes) was not received"]
    assert len(compare(both[0], both[1], "south")) == 3


def test_a_site_that_the_server_never_heard_of(both, tmp_path):
    Ledger(tmp_path / "third.jsonl").append(sent(site="third"))
    assert len(compare(tmp_path / "third.jsonl", both[1], "third")) == 1


@pytest.mark.parametrize("flag", [{"clipped": 2.0}, {"noised": 0.5}, {"masked": True}])
def test_both_sides_say_what_was_done_to_an_update(both, flag):
    Ledger(both[0]).append(sent(4, b"update", **flag))
    Ledger(both[1], sync=False).append(sent(4, b"update", direction="received", **flag))
    assert compare(*both, "north") == []
    Ledger(both[0]).append(sent(5, b"update", **flag))
    Ledger(both[1], sync=False).append(sent(5, b"update", direction="received"))
    assert len(compare(*both, "north")) == 2  # each has one that the other does not


@pytest.mark.parametrize("values", [{}, {"frame": b"other"}, {"masked": True}, {"round": 5}])
def test_what_is_not_in_the_ledger(both, values):
    Ledger(both[1]).append(sent(**values, direction="received"))
    assert [d for d in compare(*both, "north") if "not in the site's ledger" in d]


def test_a_ledger_whose_end_was_removed(both):
    both[0].write_bytes(b"".join(lines(both[0])[:-1]))
    assert verify(both[0]) is None  # the chain alone cannot notice
    assert len(compare(*both, "north")) == 1
    both[0].write_bytes(b"".join(lines(both[0])[:-1]))
    assert "line 6 of the site's ledger is not the one that the server was told of" in compare(*both, "north")


def test_a_ledger_that_was_written_anew(both):
    old = list(entries(both[0]))
    both[0].unlink()
    for entry in old:
        Ledger(both[0]).append(Sent(**{k: v for k, v in vars(entry).items() if k in Sent.__dataclass_fields__}))
    assert compare(*both, "north") == ["line 1 of the site's ledger is not the one that the server was told of"]


def test_heads():
    head = LedgerHead(7, "a" * 64)
    assert LedgerHead.parse(str(head)) == head
    assert not any(
        map(LedgerHead.parse, ["", "7", "7 abc", f"-1 {'a' * 64}", f"{'9' * 30} {'a' * 64}", f"x {'a' * 64}"])
    )


def test_the_first_message_of_a_site(tmp_path):
    ledger, received = Ledger(tmp_path / SENT), Ledger(tmp_path / RECEIVED)
    told = ledger.head
    ledger.append(sent())
    received.append(sent(direction="received", site_head=told))
    assert told == LedgerHead(0, NOTHING) and compare(ledger.path, received.path, "north") == []


def test_the_command_prints_it(both, capsys, tmp_path):
    assert main(["ledger", str(tmp_path), "--csv", str(tmp_path / "out.csv")]) == 0
    out = capsys.readouterr().out
    assert "fedot-s0: 6 messages sent, 30 bytes, steps score, train" in out and "refused: site.yaml: no score" in out
    assert len((tmp_path / "out.csv").read_text(encoding="utf-8").splitlines()) == 8


def test_the_command_checks_it(both, capsys):
    assert main(["ledger", str(both[0]), "--verify"]) == 0
    assert "7 lines" in capsys.readouterr().out
    changed(both[0], 2, bytes=0)
    assert main(["ledger", str(both[0]), "--verify"]) == 1
    assert "line 2: it was changed" in capsys.readouterr().err


def test_the_command_compares(both, capsys):
    assert main(["ledger", str(both[0]), "--compare", str(both[1].parent)]) == 0
    assert "agree" in capsys.readouterr().out
    for round in range(4, 34):
        Ledger(both[0], sync=False).append(sent(round))
    assert main(["ledger", str(both[0]), "--compare", str(both[1].parent)]) == 1
    assert "and 12 more" in capsys.readouterr().err


def test_a_site_of_two_federations_compares_the_one_of_the_run(both, tmp_path, capsys, monkeypatch):
    """A hospital gets a second kit of the same name after a stolen one: both homes lie below the data home."""
    homes = tmp_path / "homes"
    for federation in ("heart", "new-heart"):
        (homes / federation / "north").mkdir(parents=True)
    (homes / "heart" / "north" / SENT).write_bytes(both[0].read_bytes())
    Ledger(homes / "new-heart" / "north" / SENT).append(sent(run="fedavg-s1"))
    monkeypatch.setenv("FEDVLM_DATA_HOME", str(homes))
    assert main(["ledger", "--compare", str(both[1].parent)]) == 0
    assert "agree" in capsys.readouterr().out
    (homes / "heart" / "north" / SENT).unlink()
    assert main(["ledger", "--compare", str(both[1].parent)]) == 1
    assert "no ledger here has a message of" in capsys.readouterr().err


def test_where_there_is_none(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("FEDVLM_DATA_HOME", str(tmp_path))
    for words in (["ledger"], ["ledger", str(tmp_path / "nosuch")], ["ledger", str(tmp_path), "--verify"]):
        assert main(words) == 1 and "give the home of a site" in capsys.readouterr().err
    (tmp_path / "north").mkdir()
    Ledger(tmp_path / "north" / SENT).append(sent())
    assert main(["ledger"]) == 0
    assert main(["ledger", "--compare", str(tmp_path / "nosuch")]) == 1 and "cannot be read" in capsys.readouterr().err


# What a server asked


@pytest.fixture
def told(tmp_path):
    """A ledger with these lines."""

    def write(*lines: Sent) -> Path:
        made = Ledger(tmp_path / SENT)
        for line in lines:
            made.append(line)
        return made.path

    return write


HONEST = [Sent("run", "noto", "look", request="a"), Sent("run", "noto", "begin", request="b")]
HONEST += [Sent("run", "noto", "train", round, request=f"t{round}") for round in (1, 2)]
HONEST += [HONEST[-1], Sent("run", "noto", "score", 2, request="s2"), Sent("run", "noto", "finish", 2, request="f")]
SECURE_AGAIN = [Sent("run", "noto", "secure.keys", 3, request=r) for r in ("x", "y")]  # an attempt that was not opened


def test_an_honest_server_leaves_nothing_to_say(told, capsys):
    path = told(*HONEST, *SECURE_AGAIN)
    assert audit(path) == []
    assert main(["ledger", str(path), "--audit"]) == 0 and "every request was one" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (
            [replace(HONEST[3], refused="was asked for round 3 of a plan with 2")] * 2,
            "train was refused 2 times: was asked",
        ),
        ([replace(HONEST[3], request="another")], "train of round 2 was answered for 2 requests"),
        ([replace(HONEST[3], refused="\x1b[2J")], "train was refused 1 times: ?[2J"),
        ([HONEST[3]] * 30, "train of round 2 was asked for 32 times"),
    ],
)
def test_an_audit_says_what_no_honest_server_asks(told, capsys, lines, said):
    path = told(*HONEST, *lines)
    assert [said in sentence for sentence in audit(path)] == [True]
    assert main(["ledger", str(path), "--audit"]) == 1 and said in capsys.readouterr().err
