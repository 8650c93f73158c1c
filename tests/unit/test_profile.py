"""Profiles: every row as it was told, whatever happens to the run; and where the rows come from, a counting
communicator."""

from __future__ import annotations

import contextlib
import json
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from oktopk.comm import CommRecord, CountingCommunicator, Traffic, simulate
from oktopk.comm.base import Communicator
from oktopk.comm.sizes import LENGTH_BYTES
from oktopk.workbench.recording import profile as profile_module
from oktopk.workbench.recording.profile import (
    NAMES,
    NOBODY,
    OPERATIONS,
    RECORD,
    STAGES,
    FileProfile,
    NoProfile,
    ProfileError,
    profile_files,
    read_profile,
)

CPU = torch.device("cpu")
VALID = {"format": 1, "rank": 0, "size": 2, "host": "here", "wall_minus_monotonic_s": 1.5}


def barrier(start_s: float = 0.0) -> CommRecord:
    return CommRecord("barrier", None, 0, 0, 1, 1, start_s, 0.5)


def swap(rank: int, to: Sequence[int], back: Sequence[int], operation: str = "all_to_all_v") -> CommRecord:
    """A call that moved so much to and from each rank."""
    assert to[rank] == back[rank] == 0
    peers = len(to) - 1
    sent, received = sum(to) + LENGTH_BYTES * peers, sum(back) + LENGTH_BYTES * peers
    return CommRecord(operation, None, sent, received, 2 * peers, 2 * peers, 10.25, 0.125, tuple(to), tuple(back))


def telling(records: Sequence[CommRecord]) -> Callable[[FileProfile], None]:
    def tell(profile: FileProfile) -> None:
        for record in records:
            profile.communication(record)

    return tell


def barriers(count: int) -> Callable[[FileProfile], None]:
    """One after the other, numbered by their start."""
    return telling([barrier(float(number)) for number in range(count)])


def rows_of(path: Path, tell: Callable[[FileProfile], None], rank: int = 0, size: int = 4) -> np.ndarray[Any, Any]:
    profile = FileProfile(path, rank, size)
    tell(profile)
    profile.close()
    return read_profile(path)[1]


def names_of(rows: np.ndarray[Any, Any]) -> list[str]:
    return [NAMES[code] for code in rows["name"]]


# --- rows


def test_a_call_with_known_peers_has_a_row_for_each_of_them(tmp_path: Path) -> None:
    def tell(profile: FileProfile) -> None:
        profile.communication(swap(1, [10, 0, 20, 30], [1, 0, 2, 3]))
        profile.communication(swap(1, [7, 0, 8, 9], [7, 0, 8, 9], "all_gather_v"))

    rows = rows_of(tmp_path / "p.bin", tell, rank=1)
    assert names_of(rows) == ["all_to_all_v"] * 3 + ["all_gather_v"] * 3
    assert rows["peer"].tolist() == [0, 2, 3] * 2
    assert rows["bytes_sent"].tolist() == [10, 20, 30, 7, 8, 9]
    assert rows["bytes_received"].tolist() == [1, 2, 3, 7, 8, 9]
    assert rows["messages_sent"].tolist() == rows["messages_received"].tolist() == [1] * 6
    first, second = rows["call"][:3], rows["call"][3:]
    assert len(set(first.tolist())) == len(set(second.tolist())) == 1
    assert first[0] != second[0]
    assert set(rows["start_s"].tolist()) == {10.25}
    assert set(rows["seconds"].tolist()) == {0.125}


@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_rows_add_up_to_what_went_to_and_came_from_each_peer(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    size = data.draw(st.integers(1, 6))
    rank = data.draw(st.integers(0, size - 1))
    counts = st.lists(st.integers(0, 2**40), min_size=size, max_size=size)
    told: list[CommRecord] = []
    for _ in range(data.draw(st.integers(0, 4))):
        to, back = data.draw(counts), data.draw(counts)
        to[rank] = back[rank] = 0
        told.append(swap(rank, to, back))
    path = tmp_path_factory.mktemp("profile") / "p.bin"
    rows = rows_of(path, telling(told), rank, size)
    for peer in range(size):
        mine = rows[rows["peer"] == peer]
        assert int(mine["bytes_sent"].sum()) == sum(record.sent_to[peer] for record in told)
        assert int(mine["bytes_received"].sum()) == sum(record.received_from[peer] for record in told)
        assert mine["messages_sent"].tolist() == [int(sent > 0) for sent in mine["bytes_sent"]]
    assert rank not in rows["peer"]
    assert len(set(zip(rows["call"].tolist(), rows["peer"].tolist(), strict=True))) == len(rows)


def test_what_only_the_library_knows_is_one_row_of_nobodys(tmp_path: Path) -> None:
    def tell(profile: FileProfile) -> None:
        profile.communication(CommRecord("all_reduce", None, 4000, 4000, 6, 6, 1.0, 0.5))
        profile.communication(CommRecord("broadcast", None, 24, 0, 2, 0, 2.0, 0.25))
        profile.communication(barrier(3.0))

    rows = rows_of(tmp_path / "p.bin", tell)
    assert names_of(rows) == ["all_reduce", "broadcast", "barrier"]
    assert rows["peer"].tolist() == [NOBODY] * 3
    assert rows["bytes_sent"].tolist() == [4000, 24, 0]
    assert rows["bytes_received"].tolist() == [4000, 0, 0]
    assert rows["messages_sent"].tolist() == [6, 2, 1]
    assert rows["messages_received"].tolist() == [6, 0, 1]
    assert rows["start_s"].tolist() == [1.0, 2.0, 3.0]
    assert len(set(rows["call"].tolist())) == 3


def test_send_and_recv_name_their_peer(tmp_path: Path) -> None:
    def tell(profile: FileProfile) -> None:
        profile.communication(CommRecord("send", 0, 108, 0, 2, 0, 1.0, 0.5))
        profile.communication(CommRecord("recv", 3, 0, 8, 0, 1, 2.0, 0.5))

    rows = rows_of(tmp_path / "p.bin", tell, rank=2)
    assert names_of(rows) == ["send", "recv"]
    assert rows["peer"].tolist() == [0, 3]
    assert rows["bytes_sent"].tolist() == [108, 0]
    assert rows["bytes_received"].tolist() == [0, 8]
    assert rows["messages_sent"].tolist() == [2, 0]
    assert rows["messages_received"].tolist() == [0, 1]


def test_stages_move_nothing_and_are_written_even_where_they_fail(tmp_path: Path) -> None:
    def tell(profile: FileProfile) -> None:
        for name in STAGES:
            with profile.stage(name):
                pass
        with pytest.raises(KeyError), profile.stage("forward"):
            raise KeyError
        with profile.stage("wait"):
            profile.communication(barrier())

    before = time.monotonic()
    rows = rows_of(tmp_path / "p.bin", tell)
    assert names_of(rows) == [*STAGES, "forward", "barrier", "wait"]
    stages = rows[rows["name"] != NAMES.index("barrier")]
    assert set(stages["peer"].tolist()) == {NOBODY}
    for key in ("bytes_sent", "bytes_received", "messages_sent", "messages_received"):
        assert not stages[key].any()
    assert (stages["seconds"] >= 0).all()
    assert all(before <= start <= time.monotonic() for start in stages["start_s"])


def test_rows_have_the_step_that_training_is_at(tmp_path: Path) -> None:
    def tell(profile: FileProfile) -> None:
        profile.communication(barrier())  # nobody has said yet
        at = [5]
        profile.step = lambda: at[0]
        profile.communication(swap(0, [0, 1, 1, 1], [0, 1, 1, 1]))
        at[0] = 6
        with profile.stage("io"):
            pass

    assert rows_of(tmp_path / "p.bin", tell)["step"].tolist() == [0, 5, 5, 5, 6]


def test_the_header_says_whose_it_is_and_what_time_it_was(tmp_path: Path) -> None:
    path = tmp_path / "not" / "yet" / "there" / "p.bin"
    profile = FileProfile(path, 3, 7)
    with profile.stage("io"):
        now = time.time()
    profile.close()
    header, rows = read_profile(path)
    assert (header.format, header.rank, header.size, header.host) == (1, 3, 7, socket.gethostname())
    assert abs(rows["start_s"][0] + header.wall_minus_monotonic_s - now) < 60  # of the same clock, not how fast
    assert set(OPERATIONS).isdisjoint(STAGES)


# --- many rows, several threads, the end


@pytest.mark.parametrize("count", [0, 1, 4095, 4096, 4097, 10_000])
def test_no_row_is_lost_however_many_there_are(count: int, tmp_path: Path) -> None:
    rows = rows_of(tmp_path / "p.bin", barriers(count))
    assert rows["start_s"].tolist() == [float(i) for i in range(count)]
    assert len(set(rows["call"].tolist())) == count


def test_most_of_a_long_run_is_on_the_disk_before_its_end(tmp_path: Path) -> None:
    profile = FileProfile(tmp_path / "p.bin", 0, 2)
    barriers(10_000)(profile)
    _, rows = read_profile(tmp_path / "p.bin")  # as if it had been killed here
    assert 5_000 <= len(rows) <= 10_000
    assert rows["start_s"].tolist() == [float(i) for i in range(len(rows))]
    profile.close()
    assert len(read_profile(tmp_path / "p.bin")[1]) == 10_000


def test_closing_twice_changes_nothing(tmp_path: Path) -> None:
    profile = FileProfile(tmp_path / "p.bin", 0, 2)
    profile.communication(barrier())
    profile.close()
    before = (tmp_path / "p.bin").read_bytes()
    profile.close()
    profile.communication(barrier())  # the worker's last words, after all profiles were made whole
    profile.close()
    assert (tmp_path / "p.bin").read_bytes() == before


@pytest.mark.parametrize("rows_at_once", [2, 4096])
def test_threads_that_tell_at_once_lose_nothing(
    rows_at_once: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profile_module, "_ROWS_AT_ONCE", rows_at_once)
    num_threads, each = 4, 3000
    profile = FileProfile(tmp_path / "p.bin", 0, 3)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)

    def tell(number: int) -> None:
        for i in range(each):
            record = replace(swap(0, [0, 1 + number, 1 + number], [0, 1, 1]), start_s=float(i))
            profile.communication(record)

    threads = [threading.Thread(target=tell, args=(number,)) for number in range(num_threads)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    profile.close()
    _, rows = read_profile(tmp_path / "p.bin")
    assert len(rows) == 2 * num_threads * each
    assert len(set(rows["call"].tolist())) == num_threads * each
    for number in range(num_threads):
        mine = rows[rows["bytes_sent"] == 1 + number]
        assert mine["start_s"].tolist() == [float(i) for i in range(each) for _ in range(2)]
        assert mine["call"][0::2].tolist() == mine["call"][1::2].tolist()


def test_no_profile_takes_everything_and_keeps_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    profile = NoProfile()
    profile.step = lambda: 3
    profile.communication(barrier())
    with pytest.raises(KeyError), profile.stage("forward"):
        raise KeyError
    profile.close()
    profile.close()
    assert list(tmp_path.iterdir()) == []


# --- files


def test_half_a_record_at_the_end_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "p.bin"
    whole = rows_of(path, barriers(3))
    raw = path.read_bytes()
    for cut in range(1, RECORD.itemsize + 1):
        path.write_bytes(raw[:-cut])
        _, rows = read_profile(path)
        assert rows.tolist() == whole[:2].tolist()
    path.write_bytes(raw[: raw.index(b"\n") + 1])
    assert len(read_profile(path)[1]) == 0


FOREIGN = {
    "empty": b"",
    "an empty line": b"\n",
    "one line without an end": b"no profile",
    "bytes that are no text": b"\xff\xfe\x00\n" + bytes(200),
    "a picture": b"\x89PNG\r\n\x1a\n" + bytes(100),
    "a list": b"[1, 2]\n",
    "a number": b"3\n",
    "null": b"null\n",
    "an empty header": b"{}\n",
    "half a header": json.dumps(VALID).encode(),
    "another format": json.dumps(VALID | {"format": 2}).encode() + b"\n",
    "a key too many": json.dumps(VALID | {"more": 1}).encode() + b"\n",
    "a key of two lines": json.dumps(VALID | {"two\nlines": 1}).encode() + b"\n",
    "a key too few": json.dumps({key: value for key, value in VALID.items() if key != "host"}).encode() + b"\n",
    "a rank that is a word": json.dumps(VALID | {"rank": "first"}).encode() + b"\n",
    "a clock that is null": json.dumps(VALID | {"wall_minus_monotonic_s": None}).encode() + b"\n",
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_what_is_no_profile_is_named_in_one_line(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "p.bin"
    path.write_bytes(FOREIGN[kind])
    with pytest.raises(ProfileError) as caught:
        read_profile(path)
    assert str(path) in str(caught.value)
    assert "is no profile" in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


@given(content=st.binary(max_size=200), keep=st.integers(0, 300))
@settings(max_examples=60, deadline=None)
def test_any_bytes_are_a_profile_or_a_profile_error(
    content: bytes, keep: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("profile") / "p.bin"
    for raw in (content, (json.dumps(VALID).encode() + b"\n")[:keep] + content):
        path.write_bytes(raw)
        with contextlib.suppress(ProfileError):
            header, rows = read_profile(path)
            assert header.format == 1
            assert rows.dtype == RECORD


def test_profile_files_come_by_rank(tmp_path: Path) -> None:
    assert profile_files(tmp_path) == []
    for rank in (10, 0, 2):
        FileProfile(tmp_path / "profile" / f"rank_{rank}.bin", rank, 11).close()
    (tmp_path / "profile" / "notes.txt").write_text("")
    assert [path.name for path in profile_files(tmp_path)] == ["rank_0.bin", "rank_2.bin", "rank_10.bin"]


def test_profile_files_leaves_out_what_is_no_workers(tmp_path: Path) -> None:
    FileProfile(tmp_path / "profile" / "rank_0.bin", 0, 1).close()
    (tmp_path / "profile" / "rank_0 copy.bin").write_bytes(b"")
    assert [path.name for path in profile_files(tmp_path)] == ["rank_0.bin"]


# --- the counting communicator, which tells


def buffer(size: int) -> Tensor:
    return torch.zeros(size, dtype=torch.uint8)


def every_operation(comm: Communicator) -> None:
    """One of each, small and large, even and uneven."""
    comm.all_reduce(torch.ones(3))
    comm.all_reduce(torch.ones(10_000))
    comm.all_gather_v(buffer(5 * comm.rank))
    comm.all_gather_v(buffer(40 + comm.rank), [40 + rank for rank in range(comm.size)])
    uneven = [buffer(10 * comm.rank + target) for target in range(comm.size)]
    comm.all_to_all_v(uneven)
    list(comm.all_to_all_each(uneven))
    comm.broadcast(torch.ones(6), comm.size - 1)
    comm.barrier()
    if comm.rank == 0:
        comm.send(buffer(17), comm.size - 1)
    if comm.rank == comm.size - 1:
        assert comm.recv(0, CPU).numel() == 17


def timeless(records: Sequence[CommRecord]) -> list[CommRecord]:
    return [replace(record, start_s=0.0, seconds=0.0) for record in records]


@pytest.mark.parametrize("size", [2, 3, 5])
def test_what_is_told_is_what_would_have_been_kept(size: int) -> None:
    def kept(comm: Communicator) -> list[CommRecord]:
        counting = CountingCommunicator(comm)
        every_operation(counting)
        records = counting.take()
        assert counting.take() == []
        return records

    def told(comm: Communicator) -> list[CommRecord]:
        records: list[CommRecord] = []
        counting = CountingCommunicator(comm, tell=records.append)
        every_operation(counting)
        assert counting.take() == []
        return records

    before = time.monotonic()
    for left, right in zip(simulate(size, kept), simulate(size, told), strict=True):
        assert timeless(left) == timeless(right)
        for record in right:
            assert before <= record.start_s <= time.monotonic()
            assert record.seconds >= 0


def test_the_way_is_known_where_messages_go_to_each_peer_and_nowhere_else() -> None:
    def run(comm: Communicator) -> list[CommRecord]:
        counting = CountingCommunicator(comm)
        every_operation(counting)
        return counting.take()

    first, second, *_ = simulate(3, run)
    assert [bool(record.sent_to) for record in second] == [True, False, True, True, True, True, False, False]
    assert [record.operation for record in second[:2]] == ["all_reduce", "all_reduce"]
    assert second[0].sent_to == second[0].received_from == (12, 0, 12)
    assert first[-1] == replace(first[-1], operation="send", peer=2, bytes_sent=17 + LENGTH_BYTES, messages_sent=2)


@given(
    size=st.integers(1, 4),
    seed=st.integers(0, 2**31),
    kind=st.sampled_from(["all_to_all_v", "all_to_all_each", "all_gather_v", "known sizes", "all_reduce"]),
)
@settings(max_examples=40, deadline=None)
def test_bytes_by_peer_add_up_and_agree_between_the_two_ends(size: int, seed: int, kind: str) -> None:
    sizes = np.random.default_rng(seed).integers(0, 50, (size, size))

    def run(comm: Communicator) -> CommRecord:
        counting = CountingCommunicator(comm)
        if kind == "all_reduce":
            counting.all_reduce(torch.ones(int(sizes[0, 0])))
        elif kind == "all_gather_v":
            counting.all_gather_v(buffer(int(sizes[comm.rank, 0])))
        elif kind == "known sizes":
            counting.all_gather_v(buffer(int(sizes[comm.rank, 0])), [int(each) for each in sizes[:, 0]])
        else:
            outgoing = [buffer(int(each)) for each in sizes[comm.rank]]
            list(getattr(counting, kind)(outgoing))
        (record,) = counting.take()
        return record

    records = simulate(size, run)
    with_lengths = kind not in ("known sizes", "all_reduce")
    lengths = LENGTH_BYTES * (size - 1) if with_lengths else 0
    for rank, record in enumerate(records):
        assert len(record.sent_to) == len(record.received_from) == size
        assert record.sent_to[rank] == record.received_from[rank] == 0
        assert sum(record.sent_to) + lengths == record.bytes_sent
        assert sum(record.received_from) + lengths == record.bytes_received
        for peer, other in enumerate(records):
            assert record.sent_to[peer] == other.received_from[rank]
            if kind.startswith("all_to_all") and peer != rank:
                assert record.sent_to[peer] == sizes[rank, peer]


def test_a_profile_told_by_a_communicator_holds_its_traffic(tmp_path: Path) -> None:
    def run(comm: Communicator) -> Traffic:
        profile = FileProfile(tmp_path / f"rank_{comm.rank}.bin", comm.rank, comm.size)
        records: list[CommRecord] = []

        def tell(record: CommRecord) -> None:
            records.append(record)
            profile.communication(record)

        every_operation(CountingCommunicator(comm, tell=tell))
        profile.close()
        return Traffic.of(records)

    size, calls_with_lengths = 3, 3
    for rank, traffic in enumerate(simulate(size, run)):
        _, rows = read_profile(tmp_path / f"rank_{rank}.bin")
        lengths = LENGTH_BYTES * (size - 1) * calls_with_lengths  # not counted by peer
        assert int(rows["bytes_sent"].sum()) + lengths == traffic.bytes_sent
        assert int(rows["bytes_received"].sum()) + lengths == traffic.bytes_received
