"""`oktopk advise` and `oktopk plan` as people type them: what they answer, what they write, what they refuse."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from oktopk.workbench.cli import main
from oktopk.workbench.plan.calibrate import Calibration
from oktopk.workbench.plan.model import Cost, Link, Machine
from oktopk.workbench.plan.stored import read_calibration, write_calibration
from tests.runs import Recipe, write_run

MACHINE = Machine(
    step=Cost(1.2e-3, 1.2e-9),
    chosen_s=9e-8,
    encode=Cost(1.5e-4, 4e-9),
    decode=Cost(1e-4, 4e-9),
    sum=Cost(2e-5, 2e-9),
)
LINK = Link(latency_s=3e-4, per_message_s=6e-5, seconds_per_byte=8.8e-9, dense_byte_s=8.1e-9)
FIGURES = ("--ranks", "8", "--bandwidth", "1gbit")


def oktopk(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    started = [sys.executable, "-m", "oktopk", *command.split()]
    return subprocess.run(started, cwd=folder, env=environment, capture_output=True, text=True, timeout=150)


def answered(done: subprocess.CompletedProcess[str]) -> list[str]:
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout.splitlines()


def refused(code: int, error: str) -> str:
    """The one line that a user gets to see."""
    assert code == 2, error
    assert "Traceback" not in error
    (line,) = error.splitlines()
    assert line.startswith("oktopk: ")
    return line


@pytest.fixture
def calibration(tmp_path: Path) -> str:
    path = tmp_path / "measured.json"
    write_calibration(path, Calibration(2, LINK, MACHINE))
    return str(path)


@pytest.fixture
def empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where we are, with nothing in it."""
    folder = tmp_path / "empty"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


# --- advise, from figures


def test_a_fast_link_and_a_small_gradient_stay_dense(empty: Path) -> None:
    lines = answered(oktopk("advise --parameters 1M --ranks 8 --bandwidth 100gbit --latency 5us", empty))
    assert lines[0].startswith("1M parameters in 1 bucket")
    assert "8 workers" in lines[0]
    assert "5 us a round" in lines[0]
    assert lines[1].startswith("stay dense: compression would cost you ")
    (marked,) = [line for line in lines if line.endswith("<-")]
    assert marked.startswith("dense")
    assert not list(empty.iterdir())


def test_a_slow_link_and_a_large_gradient_compress(empty: Path) -> None:
    lines = answered(oktopk("advise --parameters 27.6M --ranks 8 --bandwidth 1gbit --latency 100us", empty))
    assert lines[0].startswith("27.6M parameters in 5 buckets, 8 workers, 1000 Mbit/s, 100 us a round")
    assert lines[1].startswith("use oktopk at density 0.0")
    assert "times as fast" in lines[1]
    (marked,) = [line for line in lines if line.endswith("<-")]
    assert marked.startswith("oktopk")
    assert any(line.startswith("from figures: ") for line in lines)
    assert any(line.startswith("nothing is known of forward and backward") for line in lines)
    assert not list(empty.iterdir())


def test_a_run_says_how_large_the_gradient_is_and_what_a_step_takes(
    tmp_path: Path, empty: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path / "made", Recipe(steps=8, workers=3, profile=False))
    assert main(["advise", "--run", str(tmp_path / "made"), "--bandwidth", "1gbit", "--density", "0.05"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("100k parameters in 2 buckets, 3 workers, 1000 Mbit/s, 100 us a round")
    assert lines[1].startswith(("use ", "stay dense: "))
    assert not any("nothing is known" in line for line in lines)
    densities = {line.split()[1] for line in lines if line.startswith(("oktopk ", "topkA ", "gtopk ", "topkDSA "))}
    assert densities == {"0.05"}
    assert main(["advise", "--run", str(tmp_path / "made"), *FIGURES, "--parameters", "20k"]) == 0
    assert capsys.readouterr().out.startswith("20k parameters in 1 bucket")  # what is typed comes first
    assert not list(empty.iterdir())


# --- advise, measured; what it saves is what plan takes


@pytest.mark.slow
def test_two_workers_are_measured_checked_and_saved_for_plan(empty: Path) -> None:
    lines = answered(oktopk("advise --parameters 20k --workers 2 --save m.json", empty))
    assert lines[0].startswith("20k parameters in 1 bucket")
    assert "2 workers" in lines[0]
    assert lines[1].startswith(("use ", "stay dense: "))
    checks = [line for line in lines if line.startswith("checked: ")]
    assert checks[0].startswith("checked: dense of 20,000 elements takes ")
    assert len(checks) == 2
    assert all("(the model said " in check for check in checks)
    assert not any(line.startswith("from figures") for line in lines)
    assert len([line for line in lines if line.endswith("<-")]) == 1
    found = read_calibration(empty / "m.json")
    assert found.num_ranks == 2
    assert found.link.seconds_per_byte > 0
    lines = answered(oktopk("plan --parameters 20k --calibration m.json --rates 1gbit --ranks 2 8 --out there", empty))
    assert {path.name for path in empty.iterdir()} == {"m.json", "there"}
    assert {path.name for path in (empty / "there").iterdir()} == {"plan.json", "plan.png"}
    assert lines[-2:] == ["there/plan.json", "there/plan.png"]


def test_a_calibration_that_cannot_be_saved_is_one_line_of_one_worker(empty: Path) -> None:
    done = oktopk("advise --parameters 5k --workers 2 --save nowhere/m.json", empty)
    assert "--save: 'nowhere/m.json': " in refused(done.returncode, done.stderr)
    assert not list(empty.iterdir())


@pytest.mark.usefixtures("empty")
def test_save_without_measuring_is_not_passed_over_in_silence(capsys: pytest.CaptureFixture[str]) -> None:
    """Figures are no measurement: either it is written, or it is said that it cannot be."""
    code = main(["advise", "--parameters", "5k", *FIGURES, "--save", "m.json"])
    error = capsys.readouterr().err
    assert Path("m.json").exists() or "--save" in refused(code, error)


# --- plan


def test_plan_writes_its_rows_and_a_picture(calibration: str, empty: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", "--parameters", "27.6M", "--calibration", calibration, "--compute", "300ms"]
    assert main([*arguments, "--rates", "100mbit", "100gbit", "--ranks", "2", "16", "--latency", "20us"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert {path.name for path in empty.iterdir()} == {"plan"}
    content = json.loads((empty / "plan" / "plan.json").read_text())
    assert content["command"].startswith("oktopk plan --parameters 27.6M ")
    assert content["machine"]["cores"] >= 1
    rows: list[dict[str, Any]] = content["rows"]
    assert len(rows) == 2 * 2 * 5
    assert {(row["link"], row["ranks"]) for row in rows} == {
        (rate, num_ranks) for rate in ("100mbit", "100gbit") for num_ranks in (2, 16)
    }
    for row in rows:
        assert row["step_ms"] >= 300.0
        assert row["of_no_communication"] == pytest.approx(300.0 / row["step_ms"])
    assert (empty / "plan" / "plan.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert "100mbit: compress at every number of workers looked at" in lines
    assert any(line.startswith("100gbit: ") for line in lines)
    assert "forward and backward: 300 ms" in lines
    shown = "\n".join(lines)
    assert shown.count("<-") >= 4  # one for each link and number
    for said in ("P = 2", "P = 16", "100mbit, 20 us a round", "100gbit, 20 us a round"):
        assert said in shown


def test_plan_measures_this_machine_and_takes_sizes_from_a_run(
    tmp_path: Path, empty: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path / "made", Recipe(steps=4, profile=False))
    arguments = ["plan", "--run", str(tmp_path / "made"), "--rates", "1gbit", "--ranks", "4", "--reducers", "gtopk"]
    assert main(arguments) == 0
    rows = json.loads((empty / "plan" / "plan.json").read_text())["rows"]
    assert [(row["reducer"], row["ranks"], row["link"]) for row in rows] == [
        ("dense", 4, "1gbit"),
        ("gtopk", 4, "1gbit"),
    ]
    assert rows[1]["density"] == 0.01
    assert all(row["of_no_communication"] is not None for row in rows)
    assert "unknown" not in capsys.readouterr().out


# --- what cannot be: one line, exit code 2, nothing written


@pytest.mark.parametrize(
    ("arguments", "key"),
    [
        ("advise", "--parameters: missing"),
        ("advise --ranks 8 --bandwidth 1gbit", "--parameters: missing"),
        ("plan", "--parameters: missing"),
        ("advise --parameters many --ranks 8 --bandwidth 1gbit", "--parameters: 'many'"),
        ("advise --parameters 0 --ranks 8 --bandwidth 1gbit", "--parameters: '0'"),
        ("advise --parameters -5 --ranks 8 --bandwidth 1gbit", "--parameters"),
        ("plan --parameters 1e6", "--parameters: '1e6'"),
        ("advise --parameters 1M --ranks 8 --bandwidth fast", "--bandwidth: 'fast'"),
        ("advise --parameters 1M --ranks 8 --bandwidth 1000", "--bandwidth: '1000'"),
        ("advise --parameters 1M --ranks 8 --bandwidth 1kbit", "--bandwidth: '1kbit'"),
        ("plan --parameters 1M --rates 1gbit 10", "--rates: '10'"),
        ("advise --parameters 1M --ranks 8 --bandwidth 1gbit --latency 5", "--latency: '5'"),
        ("plan --parameters 1M --latency soon", "--latency: 'soon'"),
        ("plan --parameters 1M --compute 250", "--compute: '250'"),
        ("advise --parameters 1M --latency 5us", "--latency: is measured"),
        ("advise --parameters 1M --bandwidth 1gbit", "--ranks: missing"),
        ("advise --parameters 1M --ranks 8", "--ranks: with workers at hand"),
        ("advise --parameters 1M --ranks 1 --bandwidth 1gbit", "--ranks: '1'"),
        ("advise --parameters 1M --workers 0", "--workers: '0'"),
        ("advise --parameters 1M --workers 1", "workers=1: nothing is exchanged by one worker"),
        ("advise --parameters 1M", "workers=1: nothing is exchanged by one worker"),
        ("advise --parameters 1M --density 2 --ranks 8 --bandwidth 1gbit", "--density: '2'"),
        ("plan --parameters 1M --reducers dense", "--reducers: 'dense'"),
        ("advise --parameters 1M --comm pigeon", "--comm: 'pigeon'"),
        ("advise --run nowhere --ranks 8 --bandwidth 1gbit", "--run: 'nowhere': holds no run"),
        ("advise --run nowhere --workers 2", "--run: 'nowhere': holds no run"),
        ("plan --run nowhere", "--run: 'nowhere': holds no run"),
        ("plan --parameters 1M --calibration nowhere.json", "--calibration: 'nowhere.json': cannot be read"),
        ("plan --parameters 1M --speed 3", "unrecognized arguments: --speed 3"),
        ("advise --parameters", "--parameters: expected one argument"),
    ],
)
def test_bad_input_is_one_line_that_names_the_key(
    arguments: str, key: str, empty: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = main(arguments.split())
    said = capsys.readouterr()
    assert key in refused(code, said.err)
    assert not said.out
    assert not list(empty.iterdir())


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", '{"calibration": {}}', '{"calibration": {"machine": [], "link": {}, "num_ranks": 2}}'],
)
def test_a_damaged_calibration_is_one_line(
    content: str, tmp_path: Path, empty: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "damaged.json"
    path.write_text(content)
    code = main(["plan", "--parameters", "1M", "--calibration", str(path)])
    assert f"--calibration: '{path}': is no calibration" in refused(code, capsys.readouterr().err)
    assert not list(empty.iterdir())


def test_a_calibration_with_a_word_for_a_figure_is_one_line(
    calibration: str, empty: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = Path(calibration)
    content = json.loads(path.read_text())
    content["calibration"]["link"]["dense_byte_s"] = "slow"
    path.write_text(json.dumps(content))
    code = main(["plan", "--parameters", "1M", "--calibration", calibration])
    assert "--calibration" in refused(code, capsys.readouterr().err)
    assert not list(empty.iterdir())


@pytest.mark.usefixtures("empty")
def test_a_place_that_cannot_be_written_to_is_one_line(calibration: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("file").write_text("")
    arguments = ["plan", "--parameters", "20k", "--calibration", calibration, "--rates", "1gbit", "--ranks", "2"]
    code = main([*arguments, "--out", "file"])
    assert "--out" in refused(code, capsys.readouterr().err)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
@pytest.mark.parametrize("command", ["plan --parameters 20k", "advise --parameters 20k --ranks 4 --bandwidth 1gbit"])
def test_a_device_that_is_not_there_is_one_line(command: str, empty: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = main([*command.split(), "--device", "cuda"])
    assert "cuda" in refused(code, capsys.readouterr().err)
    assert not list(empty.iterdir())


def test_the_command_itself_exits_with_2_and_one_line(empty: Path) -> None:
    done = oktopk("advise --parameters 1M --workers 1", empty)
    assert "workers=1: " in refused(done.returncode, done.stderr)
    assert not done.stdout
    assert not list(empty.iterdir())
