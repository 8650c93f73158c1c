"""`--reducer auto`, and what every run leaves: run.json, ranks.csv, profiles, recorded gradients, the report."""

from __future__ import annotations

import csv
import datetime
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from oktopk import AllReducer, Bucket, Layout
from oktopk.comm import simulate
from oktopk.comm.base import Communicator
from oktopk.comm.sizes import LENGTH_BYTES
from oktopk.metrics.meter import STAGES
from oktopk.workbench.cli import main
from oktopk.workbench.plan.advise import Question
from oktopk.workbench.plan.model import Cost, Link, Machine
from oktopk.workbench.recording.profile import NAMES, NOBODY, profile_files, read_profile
from oktopk.workbench.train.auto import Auto
from oktopk.workbench.train.config import ConfigError, make_config
from oktopk.workbench.train.data.an4_like import generate
from oktopk.workbench.worlds.membership import Member, Place
from tests import gradients

TINY = ["--conv-channels", "2", "--hidden-size", "16", "--num-layers", "2", "--batch-size", "2", "--quiet"]
STEPS_PER_EPOCH = 8
WARMUP = 6


@dataclass(frozen=True)
class Run:
    """A finished run of two workers: what it said, and its folder."""

    said: str
    folder: Path

    def json(self, name: str) -> Any:
        return json.loads((self.folder / name).read_text())

    def steps(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()]

    def rows(self, name: str) -> list[dict[str, str]]:
        with (self.folder / name).open(newline="") as file:
            return list(csv.DictReader(file))

    def profile(self, rank: int) -> np.ndarray[Any, Any]:
        return read_profile(self.folder / "profile" / f"rank_{rank}.bin")[1]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus") / "an4"
    generate(folder, num_train=4 * STEPS_PER_EPOCH, num_test=6, seed=3)
    return folder


def train(corpus: Path, folder: Path, name: str, *further: str) -> Run:
    """Two workers, in processes of their own."""
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "oktopk", "train", "lstman4", *TINY, "--workers", "2", "--data-dir", str(corpus)]
    command += ["--name", name, "--warmup-steps", str(WARMUP), *further]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stdout + done.stderr
    return Run(done.stdout, folder / "runs" / name)


def train_alone(corpus: Path, folder: Path, name: str, *further: str) -> int:
    """One worker, in this process."""
    data = ["--data-dir", str(corpus), "--out-dir", str(folder), "--name", name, "--report", "False"]
    return main(["train", "lstman4", *TINY, "--workers", "1", *data, *further])


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lone worker would take all cores, for all tests after it too."""
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)


@pytest.fixture(scope="module")
def measured(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """An ordinary run, profiled and recorded; two epochs and a piece, dense and sparse."""
    folder = tmp_path_factory.mktemp("measured")
    further = ["--max-steps", "18", "--profile", "--record-gradients", "2", "--validate-every", "2"]
    return train(corpus, folder, "measured", *further, "--report", "False")


@pytest.fixture(scope="module")
def decided(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, dict[str, Any]]:
    """A run with `auto`, and its run.json, which a resumed run writes over."""
    run = train(corpus, tmp_path_factory.mktemp("auto"), "auto", "--reducer", "auto", "--max-steps", "10")
    return run, run.json("run.json")


@pytest.fixture(scope="module")
def resumed(decided: tuple[Run, dict[str, Any]], corpus: Path) -> tuple[Run, list[dict[str, Any]]]:
    """The same run again, for six more steps, and the steps it had before."""
    run, _ = decided
    before = run.steps()
    further = ["--reducer", "auto", "--max-steps", "16", "--resume", "--report", "False"]
    return train(corpus, run.folder.parent.parent, "auto", *further), before


# --- auto, in real runs


def test_the_plan_says_what_auto_decided(decided: tuple[Run, dict[str, Any]]) -> None:
    run, about = decided
    (line,) = about["auto"]["answer"]
    assert line.startswith(("use ", "stay dense: "))
    assert f"  auto: {line}\n" in run.said
    assert ", 2 workers, auto\n" in run.said
    assert about["reducer"] == (about["auto"]["reducer"] if about["dense_steps"] < about["num_steps"] else "dense")
    assert about["density"] == about["auto"]["density"]
    assert about["auto"]["reducer"] in ("oktopk", "topkA", "topkDSA", "gtopk")
    assert 0.0 < about["density"] <= 0.02


def test_after_the_warm_up_auto_looks_again(decided: tuple[Run, dict[str, Any]]) -> None:
    run, about = decided
    (recheck,) = about["auto"]["rechecks"]
    assert recheck["step"] == WARMUP - 1
    assert recheck["answer"].startswith(f"after {WARMUP} dense steps, with ")
    assert f"auto, step {WARMUP - 1}: {recheck['answer']}\n" in run.said
    compresses = ": use " in recheck["answer"]
    assert compresses or ": stay dense: " in recheck["answer"]
    phases = [step["phase"] for step in run.steps()[:10]]
    assert phases == ["dense"] * WARMUP + ["sparse" if compresses else "dense"] * 4


def test_a_resumed_run_goes_on_with_what_was_decided(
    decided: tuple[Run, dict[str, Any]], resumed: tuple[Run, list[dict[str, Any]]]
) -> None:
    _, about = decided
    run, before = resumed
    later = run.json("run.json")
    for key in ("reducer", "density", "auto", "num_parameters", "workers"):
        assert later[key] == about[key], key
    assert later["status"] == "finished"
    assert later["num_steps"] == 16
    assert "resumed at step 10" in run.said
    (recheck,) = about["auto"]["rechecks"]
    assert f"  auto: {about['auto']['answer'][0]}\n" in run.said
    assert f"  auto: step {WARMUP - 1}: {recheck['answer']}\n" in run.said
    steps = run.steps()
    assert steps[:10] == before
    assert [step["step"] for step in steps] == list(range(16))
    assert {step["phase"] for step in steps[10:]} == {steps[9]["phase"]}
    times = [step["time_s"] for step in steps]
    assert all(earlier < later for earlier, later in pairwise(times))  # resumed parts are added up


def test_one_worker_that_asks_auto_stays_dense(corpus: Path, tmp_path: Path) -> None:
    further = ["--reducer", "auto", "--warmup-steps", "2", "--max-steps", "5"]
    assert train_alone(corpus, tmp_path, "alone", *further) == 0
    about = json.loads((tmp_path / "alone" / "run.json").read_text())
    assert about["status"] == "finished"
    assert about["auto"]["answer"][0].startswith("stay dense")
    steps = [json.loads(line) for line in (tmp_path / "alone" / "metrics.jsonl").read_text().splitlines()]
    assert [step["phase"] for step in steps] == ["dense"] * 5


def test_a_run_that_decided_nothing_cannot_be_resumed_with_auto(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train_alone(corpus, tmp_path, "plain", "--max-steps", "2") == 0
    capsys.readouterr()
    assert train_alone(corpus, tmp_path, "plain", "--max-steps", "4", "--resume", "--reducer", "auto") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "reducer='auto': " in line
    assert "resume it with the reducer it was trained with" in line
    assert json.loads((tmp_path / "plain" / "run.json").read_text())["status"] == "finished"


# --- run.json


def test_run_json_says_what_was_planned_and_that_it_finished(measured: Run) -> None:
    about = measured.json("run.json")
    n = sum(bucket["n"] for bucket in measured.steps()[0]["buckets"])
    assert datetime.datetime.fromisoformat(about.pop("started")).tzinfo is not None
    assert about == {
        "format": 1,
        "status": "finished",
        "reason": None,
        "task": "lstman4",
        "num_parameters": n,
        "workers": 2,
        "num_steps": 18,
        "steps_per_epoch": STEPS_PER_EPOCH,
        "dense_steps": WARMUP,
        "reducer": "oktopk",
        "density": 0.02,
        "auto": None,
    }
    phases = [step["phase"] for step in measured.steps()]
    assert phases == ["dense"] * WARMUP + ["sparse"] * (18 - WARMUP)


def test_run_json_of_a_run_that_failed_says_why_in_one_line(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    further = ["--max-steps", "40", "--lr", "1e30", "--norm-clip", "0"]
    assert train_alone(corpus, tmp_path, "bad", *further) == 2
    about = json.loads((tmp_path / "bad" / "run.json").read_text())
    assert about["status"] == "failed"
    assert len(about["reason"].splitlines()) == 1
    assert about["reason"].startswith("training stopped at step ")
    assert about["reason"] in capsys.readouterr().err
    assert about["num_steps"] == 40
    lines = (tmp_path / "bad" / "metrics.jsonl").read_text().splitlines()
    assert f"training stopped at step {len(lines)}," in about["reason"]


# --- ranks.csv, epochs.csv, time


def test_ranks_csv_has_a_row_for_every_epoch_and_worker(measured: Run) -> None:
    rows, epochs, steps = measured.rows("ranks.csv"), measured.rows("epochs.csv"), measured.steps()
    assert [(row["epoch"], row["rank"]) for row in rows] == [(str(e), str(r)) for e in range(3) for r in range(2)]
    assert [row["steps"] for row in rows] == ["8", "8", "8", "8", "2", "2"]
    for epoch, of_epoch in enumerate(epochs):
        first, second = rows[2 * epoch : 2 * epoch + 2]
        mine = [step for step in steps if step["epoch"] == epoch]
        assert int(first["bytes_sent"]) == int(of_epoch["bytes_sent"]) == sum(step["bytes_sent"] for step in mine)
        received = sum(bucket["bytes_received"] for step in mine for bucket in step["buckets"])
        assert int(first["bytes_received"]) == received
        assert int(first["bytes_sent"]) > 0
        for sent, arrived in (("bytes_sent", "bytes_received"), ("messages_sent", "messages_received")):
            assert first[sent] == second[arrived]  # with two workers, what one sends the other gets
            assert second[sent] == first[arrived]
        for stage in ("io", "forward", "backward", "wait"):
            logged = sum(step["seconds"][stage] for step in mine)
            assert float(first[f"{stage}_s"]) == pytest.approx(logged, rel=1e-6)
        for stage in STAGES:
            logged = sum(bucket["seconds"].get(stage, 0.0) for step in mine for bucket in step["buckets"])
            assert float(first[f"{stage}_s"]) == pytest.approx(logged, rel=1e-6, abs=1e-9)


def test_time_goes_forward(measured: Run) -> None:
    steps, epochs = measured.steps(), measured.rows("epochs.csv")
    times = [step["time_s"] for step in steps]
    assert times[0] > 0.0
    assert all(earlier < later for earlier, later in pairwise(times))
    assert [row["step"] for row in epochs] == ["8", "16", "18"]
    for row in epochs:
        done = int(row["step"])
        assert float(row["time_s"]) >= times[done - 1]
        if done < len(times):
            assert float(row["time_s"]) <= times[done]
    assert [row["wer"] == "n/a" for row in epochs] == [True, False, False]  # --validate-every 2, and the last


# --- profile


def names_of(rows: np.ndarray[Any, Any]) -> list[str]:
    return [NAMES[code] for code in rows["name"]]


def of_name(rows: np.ndarray[Any, Any], name: str) -> np.ndarray[Any, Any]:
    return rows[rows["name"] == NAMES.index(name)]


def test_there_is_a_profile_for_every_worker_with_every_stage_of_every_step(measured: Run) -> None:
    files = profile_files(measured.folder)
    assert [path.name for path in files] == ["rank_0.bin", "rank_1.bin"]
    for rank, path in enumerate(files):
        header, rows = read_profile(path)
        assert (header.rank, header.size) == (rank, 2)
        for stage in ("io", "forward", "backward", "wait"):
            assert of_name(rows, stage)["step"].tolist() == list(range(18))
        assert len(of_name(rows, "validate")) == 2
        assert len(of_name(rows, "checkpoint")) == 3
        assert set(rows["peer"].tolist()) <= {NOBODY, 1 - rank}


def test_the_profile_has_the_bytes_that_the_metrics_have(measured: Run) -> None:
    """Lengths are not counted by peer: 8 bytes in each all_to_all_v, and in all_gather_v unless all know them."""
    rows = measured.profile(0)
    reductions = [NAMES.index(name) for name in ("all_reduce", "all_to_all_v", "all_gather_v")]
    for step in measured.steps():
        if step["step"] % STEPS_PER_EPOCH == 0:
            continue  # beginnings and ends of epochs communicate too
        mine = rows[(rows["step"] == step["step"]) & np.isin(rows["name"], reductions)]
        lengths = step["bytes_sent"] - int(mine["bytes_sent"].sum())
        if step["phase"] == "dense":
            assert lengths == 0
            assert set(names_of(mine)) == {"all_reduce"}
        else:
            swaps, gathers = len(of_name(mine, "all_to_all_v")), len(of_name(mine, "all_gather_v"))
            assert swaps > 0
            assert gathers > 0
            assert lengths % LENGTH_BYTES == 0
            assert swaps <= lengths // LENGTH_BYTES <= swaps + gathers


def test_what_one_worker_sent_the_other_got(measured: Run) -> None:
    first, second = measured.profile(0), measured.profile(1)
    for name in ("all_reduce", "all_to_all_v", "all_gather_v"):
        there, back = of_name(first, name), of_name(second, name)
        assert there["bytes_sent"].tolist() == back["bytes_received"].tolist()
        assert back["bytes_sent"].tolist() == there["bytes_received"].tolist()
        assert there["step"].tolist() == back["step"].tolist()
        assert len(there) > 0


# --- gradients


def test_the_gradients_of_the_first_sparse_steps_are_recorded(measured: Run) -> None:
    buckets = measured.steps()[WARMUP]["buckets"]
    expected = {
        f"step_{step:06d}_bucket_{number:02d}.npy" for step in (WARMUP, WARMUP + 1) for number in range(len(buckets))
    }
    seen = []
    for rank in range(2):
        folder = measured.folder / "gradients" / f"rank_{rank}"
        assert {path.name for path in folder.iterdir()} == expected | {"buckets.json"}
        layout = json.loads((folder / "buckets.json").read_text())
        assert [sum(slot["numel"] for slot in bucket) for bucket in layout] == [bucket["n"] for bucket in buckets]
        for name in sorted(expected):
            values = np.load(folder / name, allow_pickle=False)
            assert values.dtype == np.float32
            assert values.shape == (buckets[int(name[-6:-4])]["n"],)
            assert np.isfinite(values).all()
            assert values.any()
            seen.append(values)
    for number, values in enumerate(seen):
        assert not any(np.array_equal(values, other) for other in seen[:number])


# --- the report


def test_a_report_is_made_unless_it_is_not_wanted(measured: Run, decided: tuple[Run, dict[str, Any]]) -> None:
    run, about = decided
    page = (run.folder / "report.html").read_text()
    assert about["auto"]["answer"][0].partition(":")[0] in page
    assert list((run.folder / "report").glob("*.png"))
    assert "report.html" in run.said
    assert not (measured.folder / "report.html").exists()
    assert not (measured.folder / "report").exists()
    assert "report.html" not in measured.said


def test_nothing_is_written_but_what_is_asked_for(measured: Run, decided: tuple[Run, dict[str, Any]]) -> None:
    always = {"config.json", "run.json", "metrics.jsonl", "epochs.csv", "ranks.csv"}
    always |= {"tensorboard", "logs", "checkpoints"}
    run, _ = decided
    assert {path.name for path in run.folder.iterdir()} == always | {"report.html", "report"}
    assert {path.name for path in measured.folder.iterdir()} == always | {"profile", "gradients"}
    assert {path.name for path in measured.folder.parent.parent.iterdir()} == {"runs"}


# --- Auto by itself, on simulated workers with made-up clocks

MACHINE = Machine(
    step=Cost(1.2e-3, 1.2e-9),
    chosen_s=9e-8,
    encode=Cost(1.5e-4, 4e-9),
    decode=Cost(1e-4, 4e-9),
    sum=Cost(2e-5, 2e-9),
)
LINK = Link(latency_s=3e-4, per_message_s=6e-5, seconds_per_byte=8.8e-9, dense_byte_s=8.1e-9)
QUESTION = Question(bucket_sizes=(1_000_000,), num_ranks=2, link=LINK, machine=MACHINE)
N = 200
LAYOUT = Layout.of([("w", N)])
SLOW_S, FAST_S = 10.0, 1e-6
Clock = Callable[[int, str], float]
"""(rank, phase) -> seconds of a step"""


def make_auto(compresses: bool = True, question: Question | None = QUESTION) -> Auto:
    return Auto("oktopk", 0.02, compresses, ["what was said first"], question)


def drive(
    comm: Communicator,
    auto: Auto,
    num_steps: int,
    allreduce_s: float,
    clock: Clock = lambda _, phase: 1.0 if phase == "dense" else 0.5,
    skipped: frozenset[int] = frozenset(),
) -> tuple[str, list[dict[str, Any]]]:
    """Real reductions in made-up time: the phases of all steps, and what was noted."""
    settings = {"warmup_steps": WARMUP, "min_sparse_numel": 0, "density": 0.02, "nonfinite": "skip"}
    allreducer = AllReducer(auto.reducer, comm=comm, **settings)
    if not auto.compresses:
        allreducer.compress_from(None)
    phases = ""
    for step in range(num_steps):
        gradient = gradients.make("heavy", N, comm.rank, step, seed=1)
        if step in skipped:
            gradient[0] = float("nan")
        stats = allreducer.reduce(Bucket(gradient, LAYOUT))
        allreducer.end_step()
        phases += stats.phase[0]
        whole = 1e6 if step in skipped else clock(comm.rank, stats.phase)
        record = {
            "step": step,
            "phase": stats.phase,
            "skipped": stats.skipped,
            "seconds": {"io": whole / 4, "forward": whole / 4, "backward": whole / 4, "wait": whole / 4},
            "buckets": [{"seconds": {"exchange": 1e6 if step in skipped else allreduce_s}}],
        }
        noted = len(auto.rechecks)
        answer = auto.after_step(record, allreducer, comm)
        assert auto.rechecks[noted:] == ([{"step": step, "answer": answer}] if answer else [])
    return phases, auto.rechecks


def everyone(num_ranks: int, run: Callable[[Communicator], tuple[str, list[dict[str, Any]]]]) -> tuple[str, list[Any]]:
    """What all ranks agree on."""
    found = simulate(num_ranks, run)
    assert all(each == found[0] for each in found)
    return found[0]


def test_a_slow_dense_allreduce_is_reason_to_compress() -> None:
    phases, rechecks = everyone(2, lambda comm: drive(comm, make_auto(), 12, SLOW_S))
    assert phases == "d" * WARMUP + "s" * 6
    (recheck,) = rechecks
    assert recheck["step"] == WARMUP - 1
    assert recheck["answer"].startswith(f"after {WARMUP} dense steps, with 10 s measured for an allreduce: use oktopk")
    phases, rechecks = everyone(2, lambda comm: drive(comm, make_auto(compresses=False), 12, SLOW_S))
    assert phases == "d" * WARMUP + "s" * 6
    assert "measured for an allreduce (changed): use oktopk at density 0.02" in rechecks[0]["answer"]


def test_a_fast_dense_allreduce_is_reason_to_stay_dense() -> None:
    phases, rechecks = everyone(2, lambda comm: drive(comm, make_auto(), 40, FAST_S))
    assert phases == "d" * 40
    (recheck,) = rechecks
    assert recheck["step"] == WARMUP - 1
    assert "measured for an allreduce (changed): stay dense" in recheck["answer"]
    phases, (recheck,) = everyone(2, lambda comm: drive(comm, make_auto(compresses=False), 40, FAST_S))
    assert phases == "d" * 40
    assert "(changed)" not in recheck["answer"]


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_sparse_steps_that_are_slower_end_it(num_ranks: int) -> None:
    def clock(rank: int, phase: str) -> float:
        return 1.0 + rank if phase == "dense" else 2.0 + rank

    phases, rechecks = everyone(num_ranks, lambda comm: drive(comm, make_auto(), 60, SLOW_S, clock))
    assert phases == "d" * WARMUP + "s" * 20 + "d" * (60 - WARMUP - 20)
    assert [recheck["step"] for recheck in rechecks] == [WARMUP - 1, WARMUP + 19]
    dense, sparse = 1.0 + (num_ranks - 1) / 2, 2.0 + (num_ranks - 1) / 2
    assert rechecks[1]["answer"].startswith(f"measured: a dense step {dense:g} s, a sparse one {sparse:g} s")
    assert "staying dense from here on" in rechecks[1]["answer"]


def test_sparse_steps_that_are_faster_go_on_and_auto_asks_only_once() -> None:
    phases, rechecks = everyone(2, lambda comm: drive(comm, make_auto(), 80, SLOW_S))
    assert phases == "d" * WARMUP + "s" * (80 - WARMUP)
    assert [recheck["step"] for recheck in rechecks] == [WARMUP - 1, WARMUP + 19]
    assert rechecks[1]["answer"].endswith("going on with oktopk")


@pytest.mark.parametrize(("slow_s", "ends"), [(9.0, True), (1.2, False)])
def test_workers_that_see_it_differently_decide_alike(slow_s: float, ends: bool) -> None:
    """The first is faster sparse than dense; whether the second's loss outweighs it is for the average to say."""

    def clock(rank: int, phase: str) -> float:
        return 1.0 if phase == "dense" else (0.5, slow_s)[rank]

    phases, _ = everyone(2, lambda comm: drive(comm, make_auto(), 30, SLOW_S, clock))
    assert phases == "d" * WARMUP + "s" * 20 + ("d" if ends else "s") * 4


def test_a_resumed_auto_says_nothing_more() -> None:
    phases, rechecks = everyone(2, lambda comm: drive(comm, make_auto(question=None), 40, FAST_S))
    assert phases == "d" * WARMUP + "s" * (40 - WARMUP)
    assert rechecks == []


def test_skipped_steps_are_not_measured() -> None:
    bad = frozenset({1, 2, WARMUP + 4, WARMUP + 5})
    phases, rechecks = everyone(2, lambda comm: drive(comm, make_auto(), 60, SLOW_S, skipped=bad))
    assert phases == "d" * WARMUP + "s" * (60 - WARMUP)
    assert rechecks[0]["answer"].startswith(f"after {WARMUP - 2} dense steps, with 10 s measured")


def test_a_skipped_last_step_of_the_warm_up_does_not_keep_auto_from_looking_again() -> None:
    bad = frozenset({WARMUP - 1})
    phases, rechecks = everyone(2, lambda comm: drive(comm, make_auto(compresses=False), 20, SLOW_S, skipped=bad))
    assert len(rechecks) == 1
    assert phases.endswith("s" * 10)


def test_auto_decides_the_same_on_all_workers_and_sends_no_more_than_it_may() -> None:
    def run(comm: Communicator, density: float, norm_clip: float) -> Auto:
        member = Member(Place("nobody", comm.rank, comm.size, comm.rank, comm.size), comm, torch.device("cpu"))
        config = make_config({"reducer": "auto", "density": density, "norm_clip": norm_clip})
        return Auto.decide(config, member, [20_000, 5_000])

    for density, norm_clip, expected in ((0.05, 0.0, {0.05, 0.02, 0.01}), (0.005, 400.0, {0.005})):
        first, second = simulate(2, lambda comm, d=density, c=norm_clip: run(comm, d, c))
        assert first == second
        assert first.question is not None
        assert set(first.question.densities) == expected
        assert first.question.compute.hidden is (norm_clip == 0.0)
        assert first.question.num_ranks == 2
        assert first.density <= density
        assert first.rechecks == []
        assert first.compresses == first.answer[0].startswith("use ")


def test_what_was_decided_comes_back_from_run_json(tmp_path: Path) -> None:
    auto = Auto("gtopk", 0.01, False, ["a", "b"], QUESTION, [{"step": 3, "answer": "c"}])
    (tmp_path / "run.json").write_text(json.dumps({"auto": auto.as_dict()}))
    again = Auto.of_run(tmp_path)
    assert again.as_dict() == auto.as_dict()
    assert again.history() == ["a", "b", "step 3: c"]
    assert again.question is None


@pytest.mark.parametrize("content", [None, "{", "[]", "{}", '{"auto": null}', '{"auto": {"reducer": "oktopk"}}'])
def test_a_run_json_that_does_not_say_it_is_named_in_one_line(content: str | None, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "run.json").write_text(content)
    with pytest.raises(ConfigError, match=r"^reducer='auto': .*run\.json does not say") as caught:
        Auto.of_run(tmp_path)
    assert len(str(caught.value).splitlines()) == 1
