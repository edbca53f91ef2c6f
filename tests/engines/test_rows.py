"""Clients' private rows: whole after interruptions, repeated rounds and full disks; damage is an error, never a reset."""

from __future__ import annotations

import contextlib
import errno
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from fedvlm.engines import rows as rows_module
from fedvlm.engines.rows import ENTRY, HEAD, Rows
from fedvlm.errors import FedvlmError

NEWCOMER = {"w": torch.zeros(2, 3), "b": torch.zeros(())}
CLIENTS = 4
EVERYBODY = np.arange(CLIENTS)


def values(x: float, clients: int = CLIENTS) -> dict[str, torch.Tensor]:
    """Rows of numbers that start at `x` for the first client, at x + 0.1 for the next."""
    own = x + torch.arange(clients) / 10
    return {"w": own[:, None, None] + torch.arange(6.0).view(2, 3), "b": own}


@pytest.fixture
def path(tmp_path) -> Path:
    return tmp_path / "rows.bin"


@pytest.fixture
def played(path) -> Path:
    """A file after three rounds of everybody."""
    rows = Rows(NEWCOMER, CLIENTS, path)
    for round in (1, 2, 3):
        rows.write(EVERYBODY, values(round), round)
    return path


def reopened(path: Path) -> Rows:
    return Rows(NEWCOMER, CLIENTS, path)


def test_rows_of_a_round_done_again_are_those_from_before(path):
    rows, ids = Rows(NEWCOMER, CLIENTS, path), np.array([1, 3])
    for x, round in ((1, 1), (2, 2), (3, 3), (30, 3)):  # the last round twice
        rows.write(ids, values(x, 2), round)
    again = reopened(path)
    assert torch.equal(again.read(ids, 2)["b"], values(2, 2)["b"])
    assert torch.equal(again.read(ids, 3)["w"], values(30, 2)["w"])
    assert again.read(np.array([0, 2]), 3)["w"].eq(0).all()
    again.write(ids, values(4, 2), 4)
    assert torch.equal(again.read(ids, 3)["b"], values(30, 2)["b"])
    assert torch.equal(again.read(ids, 4)["b"], values(4, 2)["b"])


@pytest.mark.parametrize("ids", [[0, 1, 2, 3], [3, 2, 1, 0], [2, 0, 3], [1, 2], [3], []])
def test_any_order_of_clients(played, ids):
    rows, ids = reopened(played), np.array(ids, dtype=np.int64)
    assert torch.equal(rows.read(ids, 3)["w"], values(3)["w"][torch.from_numpy(ids)])
    own = {k: v[torch.from_numpy(ids)] for k, v in values(4).items()}
    rows.write(ids, own, 4)
    expected = values(3)["b"]
    expected[ids] = values(4)["b"][ids]
    assert torch.equal(reopened(played).read(EVERYBODY, 4)["b"], expected)


def test_clients_whose_newest_rows_are_in_different_slots(path):
    rows = Rows(NEWCOMER, CLIENTS, path)
    rows.write(EVERYBODY[:3], values(1, 3), 1)
    rows.write(np.array([1]), values(2, 1), 2)
    assert rows.read(EVERYBODY, 2)["b"].tolist() == pytest.approx([1.0, 2.0, 1.2, 0.0])


class Failing:
    """A file whose n-th write stops after `whole` bytes, with an error or for good."""

    def __init__(self, file, n: int, whole: int, error: BaseException):
        self.file, self.left, self.whole, self.error = file, n, whole, error

    def __getattr__(self, name):
        return getattr(self.file, name)

    def write(self, data) -> int:
        self.left -= 1
        if not self.left:
            self.file.write(data[: self.whole])
            raise self.error
        return self.file.write(data)


class Killed(BaseException):
    pass


@pytest.mark.parametrize("ids", [[0, 1, 2, 3], [2, 0]])
@pytest.mark.parametrize("repeated", [False, True])
@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), Killed()])
def test_stopped_at_any_write_the_rows_from_before_stand(played, ids, repeated, error):
    """Also where the round was played once before, and its rows are replaced."""
    ids = np.array(ids)
    own = {k: v[torch.from_numpy(ids)] for k, v in values(4).items()}
    if repeated:
        reopened(played).write(ids, own, 4)
    before = played.read_bytes()
    for at in range(1, 20):
        for whole in (0, ENTRY.itemsize, 20 * ENTRY.itemsize):
            played.write_bytes(before)
            rows = reopened(played)
            rows.file = Failing(rows.file, at, whole, error)
            try:
                rows.write(ids, own, 4)
            except FedvlmError as told:
                assert "No space left" in str(told) and "fedvlm resume" in str(told)
            except Killed:
                pass
            else:
                assert at > 2
                return
            after = reopened(played)
            assert torch.equal(after.read(EVERYBODY, 3)["w"], values(3)["w"])  # the round done again starts from here
            half = after.read(EVERYBODY, 4)["b"]
            assert all(b in (values(3)["b"][i], values(4)["b"][i]) for i, b in enumerate(half))
            after.write(ids, own, 4)
            assert torch.equal(after.read(ids, 4)["w"], own["w"])
    raise AssertionError("it was never written to the end")


def test_short_reads_and_writes_are_continued(path):
    class Short:
        def __init__(self, file):
            self.file, self.seek = file, file.seek

        def write(self, data):
            return self.file.write(data[: max(1, len(data) // 3)])

        def readinto(self, view):
            return self.file.readinto(view[: max(1, len(view) // 3)])

    rows = Rows(NEWCOMER, CLIENTS, path)
    rows.file = Short(rows.file)
    rows.write(EVERYBODY, values(1), 1)
    assert torch.equal(rows.read(EVERYBODY, 1)["w"], values(1)["w"])
    assert torch.equal(reopened(path).read(EVERYBODY, 1)["w"], values(1)["w"])


def test_every_flipped_bit_is_an_error_or_does_not_matter(played):
    """Wherever it is, nobody gets another row than the right one."""
    whole = played.read_bytes()
    refused = 0
    for at in range(len(whole)):
        damaged = bytearray(whole)
        damaged[at] ^= 1 << at % 8
        played.write_bytes(damaged)
        try:
            found = reopened(played).read(EVERYBODY, 3)
        except FedvlmError as told:
            assert "rows.bin" in str(told)
            refused += 1
        else:
            assert torch.equal(found["w"], values(3)["w"]) and torch.equal(found["b"], values(3)["b"])
    rows = CLIENTS * 7 * 4  # of one slot; a damaged row of the other slot, and its checksum, are not read
    assert refused == len(whole) - rows - 8 * CLIENTS


def test_a_damaged_row_is_named_by_the_clients_position(played):
    whole = bytearray(played.read_bytes())
    newest = np.frombuffer(whole, ENTRY, CLIENTS, HEAD)["stamp"][0] == 3  # whether in the first slot
    start = HEAD + 2 * CLIENTS * ENTRY.itemsize + (0 if newest else CLIENTS * 28)
    whole[start + 2 * 28 + 5] ^= 1
    played.write_bytes(whole)
    rows = reopened(played)
    assert torch.equal(rows.read(np.array([0, 1, 3]), 3)["b"], values(3)["b"][[0, 1, 3]])
    with pytest.raises(FedvlmError, match=r"rows.bin is damaged for client 2 \(checksum\); restore it"):
        rows.read(EVERYBODY, 3)


@pytest.mark.parametrize("block", [512, 4096])
def test_a_lost_block_is_not_a_new_client(tmp_path, block):
    """A disk that gives zeros where the table was."""
    path, clients = tmp_path / "rows.bin", 2000
    rows = Rows({"w": torch.zeros(1)}, clients, path)
    rows.write(np.arange(clients), {"w": torch.ones(clients, 1)}, 1)
    whole = bytearray(path.read_bytes())
    whole[block : 2 * block] = bytes(block)
    path.write_bytes(whole)
    with pytest.raises(FedvlmError, match="is damaged for client"):
        Rows({"w": torch.zeros(1)}, clients, path)


def test_a_file_that_was_cut_is_damaged(played):
    whole = played.read_bytes()
    for length in (1, HEAD - 1, HEAD, len(whole) // 2, len(whole) - 1):
        played.write_bytes(whole[:length])
        with pytest.raises(FedvlmError, match="damaged"):
            reopened(played)
    played.write_bytes(whole + b"x")
    with pytest.raises(FedvlmError, match="damaged"):
        reopened(played)


def test_rows_of_another_shape_or_version_are_refused(played):
    with pytest.raises(FedvlmError, match="another shape"):
        Rows({"w": torch.zeros(5)}, CLIENTS, played)
    with pytest.raises(FedvlmError, match="another shape"):
        Rows(NEWCOMER, CLIENTS + 1, played)
    played.write_bytes(bytes(len(played.read_bytes())))  # version 0.2: no head, and a file of zeros was a new one
    with pytest.raises(FedvlmError, match="another version"):
        reopened(played)


def test_rows_that_are_all_newer_than_the_state_are_refused(played):
    """As after a state from a copy: its rows are gone, and a new client's would be a silent reset."""
    assert torch.equal(reopened(played).read(EVERYBODY, 2)["b"], values(2)["b"])
    with pytest.raises(FedvlmError, match="newer than round 1"):
        reopened(played).read(EVERYBODY, 1)


def test_an_empty_file_is_a_new_one(path):
    """A power cut before anything was on the disk."""
    path.write_bytes(b"")
    assert Rows(NEWCOMER, CLIENTS, path).read(EVERYBODY, 0)["b"].eq(0).all()


def test_nothing_is_mapped(played, monkeypatch):
    """A page of a map that the disk cannot give ends the process."""
    import mmap

    def refused(*args, **kwargs):
        raise AssertionError("mapped")

    monkeypatch.setattr(mmap, "mmap", refused)
    assert torch.equal(reopened(played).read(EVERYBODY, 3)["b"], values(3)["b"])
    assert "mmap" not in vars(rows_module)


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such modes")
def test_others_may_not_read_them(path):
    Rows(NEWCOMER, CLIENTS, path)
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_place_for_reading_only_is_enough_to_predict(played, monkeypatch):
    inner = Path.open

    def read_only(self, mode="r", *args, **kwargs):
        if mode != "rb" and self == played:
            raise OSError(errno.EROFS, "Read-only file system")
        return inner(self, mode, *args, **kwargs)

    monkeypatch.setattr(Path, "open", read_only)
    rows = reopened(played)
    assert torch.equal(rows.read(EVERYBODY, 3)["b"], values(3)["b"])
    with pytest.raises(FedvlmError, match="cannot be written"):
        rows.write(EVERYBODY, values(4), 4)


def test_a_guard_is_around_every_write(path):
    inside = []

    class Watched:
        def __init__(self, file):
            self.file = file

        def __getattr__(self, name):
            return getattr(self.file, name)

        def write(self, data):
            assert inside == ["in"]
            return self.file.write(data)

    @contextlib.contextmanager
    def guard() -> Iterator[None]:
        inside.append("in")
        yield
        inside.clear()

    @contextlib.contextmanager
    def refusing() -> Iterator[None]:
        raise FedvlmError("another process")
        yield

    rows = Rows(NEWCOMER, CLIENTS, path, guard)
    rows.file = Watched(rows.file)
    rows.write(EVERYBODY, values(1), 1)
    assert not inside
    before = path.read_bytes()
    with pytest.raises(FedvlmError, match="another process"):
        Rows(NEWCOMER, CLIENTS, path, guard=refusing).write(EVERYBODY, values(2), 2)
    assert path.read_bytes() == before


def test_threads_may_share_a_file(tmp_path):
    clients = 40
    rows = Rows({"w": torch.zeros(500)}, clients, tmp_path / "rows.bin")
    wrong: list[int] = []

    def play(i: int) -> None:
        me = np.array([i])
        for round in range(1, 20):
            rows.write(me, {"w": torch.full((1, 500), float(100 * i + round))}, round)
            if not rows.read(me, round)["w"].eq(100 * i + round).all():
                wrong.append(i)

    threads = [threading.Thread(target=play, args=(i,)) for i in range(clients)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong
