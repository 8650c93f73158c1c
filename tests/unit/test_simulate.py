"""`oktopk simulate`: the table, the files, recorded gradients, and what is said where something cannot be."""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from oktopk import wire
from oktopk.comm import simulate
from oktopk.comm.base import Communicator
from oktopk.registry import REDUCERS
from oktopk.sparse_vector import SparseVector
from oktopk.workbench.cli import main as oktopk
from oktopk.workbench.simulate.command import DEFAULT_RANKS, DEFAULT_REDUCERS, DEFAULT_SIZE, main
from oktopk.workbench.simulate.elements import ElementCounter, elements_in
from oktopk.workbench.simulate.gradients import Synthetic, draw_base
from oktopk.workbench.simulate.rows import moved_row, verdict
from oktopk.workbench.simulate.run import Course, simulate_run
from oktopk.workbench.simulate.sources import RecordedSource, SyntheticSource

SMALL = ["--size", "20k", "--steps", "1", "--warmup-steps", "1", "--jobs", "1"]


def run(out: Path, *arguments: str) -> dict[str, Any]:
    assert main([*arguments, "--out", str(out)]) == 0
    return json.loads((out / "simulate.json").read_text())


def record(folder: Path, num_ranks: int, num_steps: int, sizes: tuple[int, ...] = (3000, 5000)) -> Path:
    """As a run leaves them behind."""
    for rank in range(num_ranks):
        place = folder / "gradients" / f"rank_{rank}"
        place.mkdir(parents=True)
        (place / "buckets.json").write_text("{}")
        for step in range(num_steps):
            for bucket, size in enumerate(sizes):
                values = np.random.default_rng([rank, step, bucket]).standard_t(3, size).astype(np.float32)
                np.save(place / f"step_{10 * step:06d}_bucket_{bucket:02d}.npy", values)
    return folder


# --- what is counted


def test_pairs_are_read_from_the_header() -> None:
    spread = SparseVector(torch.tensor([1, 500, 900, 70_000]), torch.ones(4), 100_000)
    indices, values = wire.split_index_and_value(wire.encode(spread))
    assert (elements_in(wire.encode(spread)), elements_in(indices), elements_in(values)) == (8, 8, 0)
    assert elements_in(wire.encode(SparseVector(torch.arange(10, 60), torch.ones(50), 100))) == 50  # no indices
    assert elements_in(torch.zeros(0, dtype=torch.uint8)) == 0
    assert elements_in(torch.zeros(64, dtype=torch.uint8)) == 0


def test_what_stays_on_a_rank_or_is_no_gradient_does_not_count() -> None:
    def exchange(comm: Communicator) -> list[float]:
        counter = ElementCounter(comm)
        buffer = wire.encode(SparseVector(torch.tensor([3, 40, 77]), torch.ones(3), 100))
        found = []
        for call in (
            lambda: counter.all_to_all_v([buffer] * 4),
            lambda: list(counter.all_to_all_each([buffer] * 4)),
            lambda: counter.all_gather_v(buffer),
            lambda: counter.all_reduce(torch.ones(100)),
            lambda: counter.all_reduce(torch.ones(100, dtype=torch.int64)),
            lambda: counter.broadcast(torch.ones(100), 0),
            lambda: counter.send(buffer, (counter.rank + 1) % 4),
            lambda: counter.recv((counter.rank - 1) % 4, torch.device("cpu")),
            counter.barrier,
        ):
            call()
            found.append(counter.take())
        return found

    assert simulate(4, exchange) == [[18.0, 18.0, 18.0, 150.0, 0.0, 0.0, 6.0, 0.0, 0.0]] * 4


@pytest.mark.parametrize("reducer", sorted(REDUCERS))
def test_every_reducer_sends_about_what_its_paper_says(reducer: str) -> None:
    course = Course(density=0.01, num_warmup=2, num_steps=2)
    found = simulate_run(reducer, 4, SyntheticSource(20_000, 3), course)
    row = moved_row(found)
    assert len(found.steps) == 4
    assert len(found.steady) == 8
    assert row["mean_elements"] <= row["formula_elements"] * (3.2 if reducer.startswith("gaussiank") else 1.0 + 1e-9)
    assert row["mean_elements"] >= row["lower_bound_elements"]
    if reducer in ("dense", "topkA", "topkA2"):
        assert row["mean_elements"] == row["max_elements"] == row["formula_elements"]


def test_oktopk_keeps_its_bound_on_the_default_gradients() -> None:
    source = SyntheticSource(DEFAULT_SIZE, 2022)
    course = Course(density=0.01, num_warmup=3, num_steps=1)
    rows = [moved_row(simulate_run("oktopk", size, source, course)) for size in DEFAULT_RANKS if size <= 32]
    assert all(row["within"] for row in rows)
    assert all(row["lower_bound_elements"] < row["mean_elements"] for row in rows)
    said = verdict(rows)
    assert said is not None
    assert "no rank sent more than 6k(P-1)/P" in said


def test_a_broken_bound_is_said() -> None:
    row = {"reducer": "oktopk", "how": "moved", "ranks": 8, "formula_elements": 1.0, "max_elements_of_all_steps": 2.0}
    said = verdict([row])
    assert said is not None
    assert "MORE" in said
    assert "P = 8" in said


def test_ranks_share_the_base_without_changing_a_number() -> None:
    alone, sharing = Synthetic(1000, 3, 5), Synthetic(1000, 3, 5, draw_base(1000, 5))
    assert torch.equal(alone.at(2), sharing.at(2))
    out = torch.empty(1000)
    SyntheticSource(1000, 5).write(3, 2, out)
    assert torch.equal(out, alone.at(2))


# --- the command


def test_the_table_and_the_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content = run(tmp_path, *SMALL, "--ranks", "4", "2", "4")
    shown = capsys.readouterr().out
    keys = [(row["reducer"], row["ranks"], row["how"]) for row in content["rows"]]
    assert keys == [(name, size, "moved") for name in DEFAULT_REDUCERS for size in (2, 4)]
    assert all(f"\n{name} " in shown for name in (*DEFAULT_REDUCERS, "lower bound"))
    assert "6k(P-1)/P" in shown
    assert "within: max does not exceed the formula" in shown
    assert "oktopk: no rank sent more than" in shown
    assert content["command"].startswith("oktopk simulate --size 20k")
    assert (tmp_path / "volume.png").read_bytes().startswith(b"\x89PNG")
    rows = list(csv.DictReader((tmp_path / "ranks.csv").read_text().splitlines()))
    assert len(rows) == 6 * (2 + 4) * 2
    assert {row["warmup"] for row in rows} == {"0", "1"}


def test_the_same_seed_gives_the_same_table_in_one_process_or_in_two(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    what = [*SMALL[:-2], "--reducers", "oktopk", "gtopk", "--ranks", "2", "3"]
    first, second = (run(tmp_path / jobs, *what, "--jobs", jobs) for jobs in ("1", "2"))
    shown = capsys.readouterr().out.replace(str(tmp_path / "2"), str(tmp_path / "1"))
    assert first["rows"] == second["rows"]
    assert (tmp_path / "1" / "ranks.csv").read_text() == (tmp_path / "2" / "ranks.csv").read_text()
    assert shown[: len(shown) // 2] == shown[len(shown) // 2 :]
    assert run(tmp_path / "3", *SMALL, *what[4:], "--seed", "1")["rows"] != first["rows"]


def test_beyond_256_ranks_it_says_that_it_is_a_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content = run(tmp_path, *SMALL, "--reducers", "topkSA", "oktopk", "--ranks", "2", "4", "512", "4096")
    how = {(row["reducer"], row["ranks"]): row["how"] for row in content["rows"]}
    assert how["topkDSA", 4] == how["oktopk", 2] == "moved"
    assert how["topkDSA", 512] == how["oktopk", 4096] == "model"
    shown = capsys.readouterr().out
    assert "by model, P > 256: no data moved; fitted to P = 2 to 4" in shown
    assert "messages are mostly headers" in shown
    assert content["model"]["topkDSA"]["common"] > 0


def test_a_model_alone_is_fitted_to_something(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content = run(tmp_path, *SMALL, "--reducers", "topkA", "--ranks", "1024")
    assert [row["ranks"] for row in content["rows"]] == [8, 32, 1024]
    assert "(8, 32 moved for it)" in capsys.readouterr().out


def test_one_rank_sends_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content = run(tmp_path, *SMALL, "--ranks", "1", "--reducers", "oktopk", "none")
    assert [row["max_bytes"] for row in content["rows"]] == [0, 0]
    assert not (tmp_path / "volume.png").exists()
    assert "one rank sends nothing" in capsys.readouterr().out


def test_without_matplotlib_there_is_still_a_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.delitem(sys.modules, "oktopk.workbench.simulate.plot", raising=False)
    run(tmp_path, *SMALL, "--ranks", "2", "--reducers", "topkA")
    shown = capsys.readouterr().out
    assert "2k(P-1)" in shown
    assert "volume.png: left out, matplotlib is missing" in shown


# --- recorded gradients


def test_recorded_gradients(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = record(tmp_path / "run", num_ranks=2, num_steps=3)
    what = ["--steps", "1", "--warmup-steps", "1", "--jobs", "1", "--reducers", "oktopk", "--gradients", str(folder)]
    content = run(tmp_path / "out", *what, "--ranks", "2", "4")
    assert {row["n"] for row in content["rows"]} == {8000}
    shown = capsys.readouterr().out
    assert "2 ranks were recorded: rank r of more stands for rank r % 2, r // 2 recorded steps ahead" in shown
    assert "behind the last" not in shown
    again = run(tmp_path / "out", *what, "--ranks", "6", "--bucket", "1")
    assert again["rows"][0]["n"] == 5000
    assert "3 steps were recorded, 2 are simulated: behind the last comes the first" in capsys.readouterr().out


def test_each_rank_and_step_gets_its_own_file(tmp_path: Path) -> None:
    source = RecordedSource(record(tmp_path, num_ranks=2, num_steps=3, sizes=(4, 3)))
    out = torch.empty(7)
    source.write(3, 2, out)  # rank 1, one step ahead: behind the last comes the first
    parts = [np.random.default_rng([1, 0, bucket]).standard_t(3, size) for bucket, size in enumerate((4, 3))]
    assert np.array_equal(out.numpy(), np.concatenate(parts).astype(np.float32))


def test_without_ranks_as_many_as_were_recorded(tmp_path: Path) -> None:
    folder = record(tmp_path / "run", num_ranks=2, num_steps=3)
    content = run(tmp_path / "out", "--gradients", str(folder), "--reducers", "gaussiank", "--jobs", "1")
    assert [row["ranks"] for row in content["rows"]] == [2, 4]


def test_a_recording_with_nan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = record(tmp_path, num_ranks=2, num_steps=1, sizes=(4,))
    np.save(folder / "gradients/rank_1/step_000000_bucket_00.npy", np.full(4, np.nan, np.float32))
    assert main(["--gradients", str(folder), "--reducers", "topkA", "--out", str(tmp_path / "out")]) == 2
    assert "rank_1/step_000000_bucket_00.npy': holds NaN or Inf" in capsys.readouterr().err


def test_steps_with_other_buckets_are_left_out(tmp_path: Path) -> None:
    record(tmp_path, num_ranks=1, num_steps=3, sizes=(4, 3))
    np.save(tmp_path / "gradients/rank_0/step_000000_bucket_00.npy", np.zeros(3, np.float32))
    source = RecordedSource(tmp_path)
    assert source.n == 7
    assert source.notes(1, 2) == ["recorded steps 0 have other buckets than the rest: left out"]


def damage(folder: Path, what: str) -> None:
    path = folder / "gradients/rank_1/step_000010_bucket_01.npy"
    if what == "missing":
        path.unlink()
    elif what == "cut":
        path.write_bytes(path.read_bytes()[:-4])
    elif what == "pickled":
        np.save(path, np.array([{}], dtype=object), allow_pickle=True)
    elif what == "doubles":
        np.save(path, np.zeros(3))
    elif what == "short":
        np.save(path, np.zeros(2, np.float32))
    else:
        path.write_bytes(b"")


@pytest.mark.parametrize(
    ("what", "reason"),
    [
        ("missing", "is missing"),
        ("cut", "cannot be read"),
        ("pickled", "cannot be read"),
        ("empty", "cannot be read"),
        ("doubles", "must be flat fp32 and not empty, is float64"),
        ("short", "2 elements, those of rank 0 are 3"),
    ],
)
def test_damaged_recordings(tmp_path: Path, what: str, reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    damage(record(tmp_path, num_ranks=2, num_steps=2, sizes=(4, 3)), what)
    assert main(["--gradients", str(tmp_path), "--out", str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "step_000010_bucket_01.npy" in said
    assert reason in said


# --- what cannot be


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--ranks", "0"], "--ranks: '0': must be a whole number, at least 1"),
        (["--ranks", "5000"], "--ranks: 5000: the model is good for at most 4096"),
        (["--ranks", "256", "--size", "400M"], "they need about 2458 GB"),
        (["--reducers", "magic"], "--reducers: 'magic': unknown; choose from dense, topkA"),
        (["--size", "big"], "--size: 'big': must be a number of elements"),
        (["--density", "2"], "--density: '2': must be in (0, 1]"),
        (["--steps", "0"], "--steps: '0'"),
        (["--bucket", "1"], "--bucket: 1: synthetic gradients have no buckets"),
        (["--colour", "red"], "unrecognized arguments: --colour red; `oktopk simulate --help` lists"),
        (["--gradients", "RUN", "--ranks", "8"], "--ranks: 8: RUN holds 4 different gradients (2 ranks, 2 steps)"),
        (["--gradients", "RUN", "--size", "5"], "recorded gradients have a size of their own"),
        (["--gradients", "RUN", "--bucket", "7"], "--bucket: 7: was not recorded; choose from 0, 1"),
        (["--gradients", "nowhere"], "'nowhere': holds no recorded gradients"),
    ],
)
def test_one_clear_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    said: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    record(tmp_path / "RUN", num_ranks=2, num_steps=2)
    assert oktopk(["simulate", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("oktopk: ")
    assert error.count("\n") == 1
    assert said in error


def test_a_folder_that_cannot_be_written_to(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert main([*SMALL, "--out", str(tmp_path / "file")]) == 2
    assert "cannot be written to" in capsys.readouterr().err
