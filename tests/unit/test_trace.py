"""Chrome traces of profiles: every call once, on its thread, all workers on one clock."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from oktopk.workbench.cli import main
from oktopk.workbench.recording.profile import NAMES, OPERATIONS, profile_files, read_profile
from tests.runs import Recipe, write_run


def trace_of(folder: Path) -> dict[str, Any]:
    assert main(["trace", str(folder)]) == 0
    return json.loads((folder / "trace.json").read_text())


def calls_of(trace: dict[str, Any], rank: int) -> list[dict[str, Any]]:
    return [event for event in trace["traceEvents"] if event["ph"] == "X" and event["pid"] == rank]


def shift_clock(path: Path, seconds: float) -> None:
    """As of a worker whose monotonic clock started that much earlier."""
    line, _, records = path.read_bytes().partition(b"\n")
    header = json.loads(line)
    header["wall_minus_monotonic_s"] += seconds
    path.write_bytes(json.dumps(header).encode() + b"\n" + records)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_run(tmp_path / "made", Recipe(workers=3))
    return tmp_path / "made"


def test_a_trace_is_valid_by_the_formats_definition(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = trace_of(folder)
    assert trace["displayTimeUnit"] in ("ms", "ns")
    for event in trace["traceEvents"]:
        assert event["ph"] in ("X", "M")
        assert isinstance(event["name"], str)
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        assert event["ts"] >= 0
        if event["ph"] == "X":
            assert event["dur"] >= 0
    names = [event for event in trace["traceEvents"] if event["ph"] == "M"]
    processes = {event["pid"]: event["args"]["name"] for event in names if event["name"] == "process_name"}
    assert [processes[rank].split()[:2] for rank in range(3)] == [["rank", str(rank)] for rank in range(3)]
    threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in names if e["name"] == "thread_name"}
    assert threads == {
        (rank, tid): name for rank in range(3) for tid, name in enumerate(("training loop", "communication"))
    }
    assert str(folder / "trace.json") in capsys.readouterr().out


def test_every_call_is_in_it_once_with_what_it_moved(folder: Path) -> None:
    trace = trace_of(folder)
    for rank, path in enumerate(profile_files(folder)):
        _, records = read_profile(path)
        calls = calls_of(trace, rank)
        assert len(calls) == len(set(records["call"].tolist()))
        for event in calls:
            assert event["tid"] == (1 if event["name"] in OPERATIONS else 0)
            assert "step" in event["args"]
        for key in ("bytes_sent", "bytes_received", "messages_sent", "messages_received"):
            assert sum(event["args"].get(key, 0) for event in calls) == int(records[key].sum())
        swap = next(event for event in calls if event["name"] == "all_to_all_v")
        others = [peer for peer in range(3) if peer != rank]
        assert swap["args"]["sent_to"] == {str(peer): 900 + 100 * peer for peer in others}
        assert swap["args"]["received_from"] == {str(peer): 900 + 100 * rank for peer in others}
        assert swap["dur"] == pytest.approx(2000, rel=1e-3)
        assert [event["args"]["step"] for event in calls if event["name"] == "forward"] == [0, 1, 2]


def test_workers_are_laid_on_one_clock_that_starts_at_zero(folder: Path) -> None:
    offset_s = 0.25
    first, second, third = profile_files(folder)
    for path in (second, third):  # the same offset as the first, whenever the three were written
        shift_clock(path, read_profile(first)[0].wall_minus_monotonic_s - read_profile(path)[0].wall_minus_monotonic_s)
    shift_clock(second, offset_s)
    trace = trace_of(folder)
    starts = [[e["ts"] for e in calls_of(trace, rank) if e["name"] == "all_reduce"] for rank in range(3)]
    assert starts[1] == pytest.approx([start + 1e6 * offset_s for start in starts[0]], abs=2.0)
    assert starts[2] == pytest.approx(starts[0], abs=2.0)
    assert min(e["ts"] for rank in range(3) for e in calls_of(trace, rank)) == 0.0


def test_what_a_killed_run_left_can_be_traced(folder: Path) -> None:
    before = len(calls_of(trace_of(folder), 2))
    path = profile_files(folder)[2]
    path.write_bytes(path.read_bytes()[:-5])
    assert len(calls_of(trace_of(folder), 2)) == before - 1


def test_a_code_that_no_version_writes_is_left_out(folder: Path) -> None:
    path = profile_files(folder)[0]
    line, _, rest = path.read_bytes().partition(b"\n")
    _, records = read_profile(path)
    records = records.copy()
    records["name"][0] = len(NAMES)
    path.write_bytes(line + b"\n" + records.tobytes())
    assert len(rest) == len(records.tobytes())
    assert len(calls_of(trace_of(folder), 0)) == len(set(records["call"].tolist())) - 1


def test_out_chooses_the_file(folder: Path, tmp_path: Path) -> None:
    assert main(["trace", str(folder), "--out", str(tmp_path / "t.json")]) == 0
    assert json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    assert not (folder / "trace.json").exists()


def test_without_a_profile_one_line_says_how_to_get_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "made", Recipe(steps=2, profile=False))
    assert main(["trace", str(tmp_path / "made")]) == 2
    assert (
        capsys.readouterr().err == f"oktopk: {tmp_path / 'made'}: holds no profile; train with --profile to get one\n"
    )
    (tmp_path / "made" / "profile").mkdir()
    (tmp_path / "made" / "profile" / "rank_0.bin").write_bytes(b"something else")
    assert main(["trace", str(tmp_path / "made")]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "rank_0.bin: is no profile" in said
    assert main(["trace", str(tmp_path / "nowhere")]) == 2
    assert "does not exist" in capsys.readouterr().err
