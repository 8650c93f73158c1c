"""`oktopk study` as its users run it: one small study, trained once, and what can be done with it afterwards."""

from __future__ import annotations

import csv
import io
import json
import os
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from oktopk.workbench.bench.options import Options
from oktopk.workbench.cli import main
from oktopk.workbench.study import running
from oktopk.workbench.worlds.world import BenchWorld, Seat
from tests.studies import CONTENT, write_study
from tests.worlds import ROOT

TARGET = 0.1
VARIANTS = {
    "dense": {"reducer": "dense"},
    "wild": {"lr": 1e30},
    "oktopk": {},
    "lost": {"data_dir": "/nowhere/at/all"},
}
ONLY = ["--only", "wild", "okto*"]
FOLDERS = [f"{name}-seed-{seed}" for name in ("dense", "wild", "oktopk") for seed in (1, 2)]


@dataclass(frozen=True)
class Trained:
    """A study that was trained whole, `wild` diverging in both runs."""

    folder: Path
    command: list[str]
    code: int
    out: str
    err: str
    num_worlds: int

    @property
    def results(self) -> dict[str, Any]:
        return json.loads((self.folder / "study.json").read_text())

    @property
    def rows(self) -> dict[str, dict[str, Any]]:
        return {row["variant"]: row for row in self.results["rows"]}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    place = tmp_path_factory.mktemp("study")
    path = write_study(place / "tiny.toml", target=TARGET, variants=VARIANTS)
    command = ["study", str(path), *ONLY, "--out", str(place / "out"), "--device", "cpu"]
    worlds: list[BenchWorld] = []

    class Counted(BenchWorld):
        def __init__(self, seats: Sequence[Seat], options: Options) -> None:
            super().__init__(seats, options)
            worlds.append(self)

    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.setattr(running, "BenchWorld", Counted)
        code = main(command)
    return Trained(place / "out" / "tiny", command, code, out.getvalue(), err.getvalue(), len(worlds))


@pytest.fixture
def copied(trained: Trained, tmp_path: Path) -> tuple[Path, list[str]]:
    """The study's folder to do with as one likes, and the command that goes on with it."""
    folder = tmp_path / "out" / "tiny"
    shutil.copytree(trained.folder, folder)
    return folder, [str(tmp_path / "out") if word == str(trained.folder.parent) else word for word in trained.command]


def table(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def losses(run: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]


def contents(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Every file of the runs, and when it was written."""
    files = [path for name in FOLDERS for path in (folder / name).rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): (path.stat().st_mtime_ns, path.read_bytes()) for path in files}


def workers_of(mark: str) -> list[int]:
    """Workers whose parent or command line has that mark."""
    found: list[int] = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            command, status = (process / "cmdline").read_text(), (process / "status").read_text()
        except OSError:  # it has just ended
            continue
        if "oktopk.workbench.bench.worker" in command and (mark in command or f"\nPPid:\t{mark}\n" in status):
            found.append(int(process.name))
    return found


# --- what came of it


def test_the_results_are_there(trained: Trained) -> None:
    assert trained.code == 0, trained.err
    assert {path.name for path in trained.folder.iterdir()} == {
        ".lock", *FOLDERS, "study.json", "study.md", "finals.png", "curves.png",
    }  # fmt: skip
    results = trained.results
    assert shlex.split(results["command"]) == ["oktopk", *trained.command]
    assert {"cpu", "cores", "memory_gib", "python", "torch", "date"} <= set(results["machine"])
    assert results["clock"]["compute"]["backward_s"] > 0
    assert (results["link"], results["simulated_link"]) == ("loopback", "1gbit")
    assert [row["variant"] for row in results["rows"]] == ["dense", "wild", "oktopk"]
    assert [(run["variant"], run["seed"]) for run in results["runs"]] == [
        (variant, seed) for seed in (1, 2) for variant in ("dense", "wild", "oktopk")
    ]
    for name in ("finals.png", "curves.png"):
        assert (trained.folder / name).read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    lines = (trained.folder / "study.md").read_text().splitlines()
    assert [line.split("|")[1].strip() for line in lines[4:7]] == ["dense", "wild", "oktopk"]
    assert "2 workers on cpu" in lines[0]
    assert trained.out.endswith(f"{trained.folder / 'study.json'}\n")
    assert "| - (0 of 2), 2 diverged |" in lines[5]
    assert "5 of 6 runs done; now oktopk, seed 2" in trained.err


def test_rows_are_what_the_runs_files_add_up_to(trained: Trained) -> None:
    for variant in ("dense", "oktopk"):
        row = trained.rows[variant]
        folders = [trained.folder / f"{variant}-seed-{seed}" for seed in (1, 2)]
        epochs = [table(folder / "epochs.csv") for folder in folders]
        finals = [float(each[-1]["accuracy"]) for each in epochs]
        assert row["finals"] == finals
        assert (row["mean"], row["std"]) == (statistics.fmean(finals), statistics.stdev(finals))
        first = [[int(each["step"]) for each in mine if float(each["accuracy"]) >= TARGET][:1] for mine in epochs]
        reached = [step for steps in first for step in steps]
        assert row["reached"] == len(reached)
        assert row["steps_to_target"] == (statistics.fmean(reached) if reached else None)
        sent = [sum(int(each["bytes_sent"]) for each in table(folder / "ranks.csv")) / 2 for folder in folders]
        assert row["bytes_sent"] == pytest.approx(statistics.fmean(sent))
        for run in (each for each in trained.results["runs"] if each["variant"] == variant):
            assert (run["status"], run["alone"]) == ("finished", True)
            assert [point["step"] for point in run["curve"]] == [2, 4]  # 64 samples, 2 workers, 16 each
            assert run["bytes_sent"] == pytest.approx(sent[run["seed"] - 1])
            assert run["curve"][-1]["bytes_sent"] == pytest.approx(run["bytes_sent"])
            times = [point["simulated_s"] for point in run["curve"]]
            assert 0 < times[0] < times[1]
    dense, sparse = trained.rows["dense"], trained.rows["oktopk"]
    assert (dense["behind"], dense["within"], dense["of_baseline"]) == (0.0, True, 1.0)
    assert sparse["behind"] == pytest.approx(dense["mean"] - sparse["mean"])
    assert sparse["within"] == (sparse["behind"] <= dense["std"])
    assert 0.02 < sparse["of_baseline"] < 0.3


def test_diverging_is_a_result_and_the_same_workers_go_on(trained: Trained) -> None:
    row = trained.rows["wild"]
    assert (row["runs"], row["diverged"], row["finals"], row["mean"], row["within"]) == (2, 2, [], None, False)
    assert [run["status"] for run in trained.results["runs"]] == ["finished", "diverged", "finished"] * 2
    assert trained.num_worlds == 1
    assert "wild, seed 1: diverged" in trained.err
    assert json.loads((trained.folder / "wild-seed-1" / "conditions.json").read_text())["status"] == "diverged"
    assert "loss of nan" in json.loads((trained.folder / "wild-seed-1" / "run.json").read_text())["reason"]


def test_a_variant_starts_from_what_the_baseline_starts_from(trained: Trained) -> None:
    first = {name: losses(trained.folder / name)[0] for name in FOLDERS}
    for seed in (1, 2):
        assert len({first[f"{variant}-seed-{seed}"] for variant in ("dense", "wild", "oktopk")}) == 1
    assert first["dense-seed-1"] != first["dense-seed-2"]


def test_runs_write_no_checkpoint_and_no_report(trained: Trained) -> None:
    for name in FOLDERS:
        assert {path.name for path in (trained.folder / name).iterdir()} == {
            "config.json", "conditions.json", "run.json", "metrics.jsonl", "epochs.csv", "ranks.csv", "tensorboard",
            "logs", "data",
        }  # fmt: skip


def test_nobody_is_left_running(trained: Trained) -> None:
    assert trained.code == 0
    assert workers_of(str(os.getpid())) == []


# --- going on


def test_finished_runs_are_not_done_again(
    trained: Trained, copied: tuple[Path, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise AssertionError("a world was made")

    monkeypatch.setattr(running, "BenchWorld", fail)
    folder, command = copied
    before = contents(folder)
    (folder / "study.json").unlink()
    assert main(command) == 0
    assert contents(folder) == before
    again = json.loads((folder / "study.json").read_text())
    for row in again["rows"]:
        assert {**row, "simulated_s": None} == {**trained.rows[row["variant"]], "simulated_s": None}


@pytest.mark.slow
def test_runs_stopped_half_way_are_done_again_two_at_a_time(trained: Trained, copied: tuple[Path, list[str]]) -> None:
    folder, command = copied
    again = [folder / f"oktopk-seed-{seed}" for seed in (1, 2)]
    for run in again:
        (run / "conditions.json").unlink()
        (run / "metrics.jsonl").write_text('{"step": 0')
        (run / "left over").touch()
    before = contents(folder)
    assert main([*command, "--jobs", "2"]) == 0
    after = contents(folder)
    for name in FOLDERS:
        mine = {path for path in before if path.startswith(f"{name}/")}
        assert all(after.get(path) == before[path] for path in mine) == (not name.startswith("oktopk"))
    for run in again:
        assert not (run / "left over").exists()
        assert json.loads((run / "conditions.json").read_text())["num_jobs"] == 2
        # workers that had trained others before came to the same
        assert losses(run) == losses(trained.folder / run.name)
    rows = {row["variant"]: row for row in json.loads((folder / "study.json").read_text())["rows"]}
    assert rows["oktopk"]["finals"] == trained.rows["oktopk"]["finals"]
    assert rows["oktopk"]["measured_s"] is None  # they shared the machine
    assert rows["dense"]["measured_s"] == trained.rows["dense"]["measured_s"]


def test_other_settings_in_the_same_folder(copied: tuple[Path, list[str]], capsys: pytest.CaptureFixture[str]) -> None:
    folder, command = copied
    before = contents(folder)
    assert main([*command, "--set", "density=0.1"]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "dense-seed-1: holds a run with other settings (density=0.05 there, 0.1 here); use another --out" in said
    assert contents(folder) == before


def test_a_failing_worker_is_one_line_and_finished_runs_stay(
    copied: tuple[Path, list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    folder, command = copied
    before = contents(folder)
    assert main([*command, "--only", "lost"]) == 1
    said = capsys.readouterr()
    *progress, last = said.err.splitlines()
    assert len(progress) == 1
    assert progress[0].endswith("2 of 4 runs done; now lost, seed 1")
    assert last.startswith("oktopk: worker ")
    assert "/nowhere/at/all" in last
    assert last.endswith("finished runs are kept, and not done again")
    assert said.out == ""
    assert contents(folder) == before
    assert workers_of(str(os.getpid())) == []
    assert main([*command, "--only", "lost", "--table-only"]) == 0
    assert [row["variant"] for row in json.loads((folder / "study.json").read_text())["rows"]] == ["dense"]


@pytest.mark.slow
def test_being_told_to_end_leaves_nobody_running(tmp_path: Path) -> None:
    path = write_study(tmp_path / "long.toml", settings={**CONTENT["settings"], "epochs": 100_000}, seeds=[1])
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    child = subprocess.Popen(
        [sys.executable, "-m", "oktopk", "study", str(path), "--out", str(tmp_path / "out"), "--device", "cpu"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(scratch)},  # workers carry it in their command lines
    )
    run = tmp_path / "out" / "long" / "dense-seed-1"
    patience = time.monotonic() + 100
    while not (run / "config.json").is_file() and child.poll() is None and time.monotonic() < patience:
        time.sleep(0.05)
    assert len(workers_of(str(scratch))) == 2
    child.send_signal(signal.SIGTERM)
    out, said = child.communicate(timeout=60)
    assert (child.returncode, out) == (130, "")
    assert said.splitlines()[-1] == "oktopk: stopped; finished runs are kept, the same command goes on from there"
    assert "Traceback" not in said
    while workers_of(str(scratch)) and time.monotonic() < patience:  # they see that their standard input is closed
        time.sleep(0.05)
    assert workers_of(str(scratch)) == []
    assert not list(scratch.glob("oktopk-bench-*"))
    assert not (run / "conditions.json").exists()


# --- training without checkpoints


@pytest.mark.parametrize(("every", "kept"), [(-1, False), (0, True)])
def test_checkpoints_of_a_training(tmp_path: Path, every: int, kept: bool) -> None:
    small = ["--corpus-train", "32", "--corpus-test", "16", "--batch-size", "16", "--epochs", "2", "--workers", "1"]
    how = ["--checkpoint-every", str(every), "--quiet", "--report", "False", "--device", "cpu"]
    assert main(["train", "lenet", *small, *how, "--out-dir", str(tmp_path)]) == 0
    assert len(table(tmp_path / "lenet" / "epochs.csv")) == 2
    assert (tmp_path / "lenet" / "checkpoints").exists() == kept
    assert bool(list(tmp_path.rglob("*.pt"))) == kept
