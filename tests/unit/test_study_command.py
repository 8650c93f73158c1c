"""`oktopk study` from its command line to its files, on runs that are there already."""

from __future__ import annotations

import csv
import json
import os
import shlex
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from oktopk.workbench.cli import main
from oktopk.workbench.console.words import UsageError
from oktopk.workbench.plan.model import Cost, Machine
from oktopk.workbench.study import times
from oktopk.workbench.study.definition import Run, Study
from oktopk.workbench.study.outcome import load
from oktopk.workbench.study.running import Done
from tests.studies import CONTENT, fabricate, make_study, write_study

MACHINE = Machine(Cost(1e-3, 1e-9), 1e-8, Cost(1e-5, 1e-9), Cost(1e-5, 1e-9), Cost(1e-5, 1e-9))
FINALS = {"dense": (0.8, 0.7), "oktopk 0.05": (0.76, 0.66), "oktopk 0.02, 20 dense steps": (0.9, 0.4)}
Refused = Callable[..., str]


@pytest.fixture(autouse=True)
def _no_measuring(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(times, "measure_machine", lambda *_: MACHINE)


@pytest.fixture
def image() -> Any:
    """A reader of pictures: they are drawn only where somebody looks at them."""
    pytest.importorskip("matplotlib")
    return pytest.importorskip("PIL.Image")


@pytest.fixture(autouse=True)
def _no_pictures(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where matplotlib is not installed."""
    if "image" not in request.fixturenames:
        monkeypatch.setitem(sys.modules, "oktopk.workbench.study.plot", None)


@pytest.fixture
def study(tmp_path: Path) -> Study:
    """Trained, and nothing looked at yet."""
    study = make_study(tmp_path)
    for run in study.runs(tmp_path / "made"):
        fabricate(run, FINALS[run.variant][run.seed - 1])
    return study


@pytest.fixture
def refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Refused:
    """What a command says that is refused; on tmp_path/made.toml, unless another study is given."""

    def ask(*arguments: str, study: str | None = None) -> str:
        mine = [study or str(tmp_path / "made.toml"), "--out", str(tmp_path), "--device", "cpu"]
        capsys.readouterr()
        assert main(["study", *mine, *arguments]) == 2
        said = capsys.readouterr()
        assert said.out == ""
        assert said.err.startswith("oktopk: ")
        assert said.err.count("\n") == 1
        return said.err

    return ask


def look(folder: Path, *arguments: str) -> dict[str, Any]:
    """The results of `--table-only` on the study of folder/made.toml."""
    command = ["study", str(folder / "made.toml"), "--out", str(folder), "--device", "cpu", "--table-only", *arguments]
    assert main(command) == 0
    found = json.loads((folder / "made" / "study.json").read_text())
    assert shlex.split(found["command"]) == ["oktopk", *command]
    return found


def by_variant(found: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {row["variant"]: row for row in found["rows"]}


def mean_bytes(folder: Path) -> float:
    """What the workers' rows of ranks.csv add up to, of the average worker."""
    with (folder / "ranks.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    return sum(float(row["bytes_sent"]) for row in rows) / len({row["rank"] for row in rows})


# --- results


def test_results(study: Study, tmp_path: Path, capsys: pytest.CaptureFixture[str], image: Any) -> None:
    found = look(tmp_path)
    folder = tmp_path / "made"
    printed = capsys.readouterr()
    assert printed.err == ""
    assert printed.out.splitlines()[-1] == str(folder / "study.json")
    assert {"cpu", "cores", "memory_gib", "kernel", "python", "torch", "gpu", "date"} <= set(found["machine"])
    assert found["study"]["seeds"] == [1, 2]
    assert found["study"]["metric"] == "accuracy"
    assert [row["variant"] for row in found["rows"]] == list(study.variants)
    assert [(run["variant"], run["seed"]) for run in found["runs"]] == [
        (name, seed) for seed in (1, 2) for name in study.variants
    ]
    first = found["runs"][0]
    assert (first["status"], first["alone"]) == ("finished", True)
    assert [(point["step"], point["value"]) for point in first["curve"]] == [(30, 0.4), (60, 0.8)]
    assert [point["time_s"] for point in first["curve"]] == pytest.approx([0.031 * 30 + 0.2, 0.031 * 60 + 0.2])
    assert first["curve"][-1]["bytes_sent"] == pytest.approx(first["bytes_sent"])
    assert 0 < first["curve"][0]["simulated_s"] < first["curve"][1]["simulated_s"]
    about, _, *table = (folder / "study.md").read_text().split("\n- ")[0].strip().splitlines()
    assert about == found["about"]
    assert all(word in about for word in ("made", "lenet", "2 workers", "cpu", "seeds 1 2"))
    assert [line.count("|") for line in table] == [10] * (2 + len(study.variants))
    assert [line.split("|")[1].strip() for line in table[2:]] == list(study.variants)
    for row in found["rows"]:
        assert row["variant"] in printed.out
        assert f"{row['mean']:.4f} ± {row['std']:.4f}" in printed.out
    for name in ("finals.png", "curves.png"):
        with image.open(folder / name) as picture:
            picture.load()
            assert picture.format == "PNG"
    assert not [path.name for path in folder.iterdir() if path.name.startswith(".")]  # nothing half written


def test_rows_are_what_the_folders_add_up_to(study: Study, tmp_path: Path) -> None:
    found = by_variant(look(tmp_path))
    dense, sparse, other = found.values()
    for name, row in found.items():
        assert row["finals"] == list(FINALS[name])
        folders = [run.folder for run in study.runs(tmp_path / "made") if run.variant == name]
        assert row["bytes_sent"] == pytest.approx(sum(map(mean_bytes, folders)) / 2)
        assert row["of_baseline"] == pytest.approx(row["bytes_sent"] / dense["bytes_sent"])
        assert row["settings"] == study.variants[name]
    assert (dense["mean"], dense["std"]) == (pytest.approx(0.75), pytest.approx(0.05 * 2**0.5))
    assert (sparse["behind"], sparse["within"]) == (pytest.approx(0.04), True)
    assert (other["behind"], other["within"]) == (pytest.approx(0.1), False)
    # dense reaches 0.5 at the end only; 0.9 has not half of it at 30, and 0.4 never has
    assert [row["steps_to_target"] for row in found.values()] == [60, 60, 60]
    assert [row["reached"] for row in found.values()] == [2, 2, 1]
    assert sparse["measured_s"] == pytest.approx(0.031 * 60 + 0.2)
    assert sparse["of_baseline"] < 0.3


def test_a_diverged_run_is_a_result(study: Study, tmp_path: Path) -> None:
    lost = study.runs(tmp_path / "made")[1]
    shutil.rmtree(lost.folder)
    fabricate(lost, 0.9, num_steps=40, status="diverged")
    found = look(tmp_path)
    row = by_variant(found)[lost.variant]
    assert (row["runs"], row["diverged"], row["finals"], row["within"]) == (2, 1, [0.66], False)
    assert found["runs"][1]["status"] == "diverged"
    assert f"| {lost.variant} | 0.6600 (1 of 2), 1 diverged |" in (tmp_path / "made" / "study.md").read_text()


def test_times_are_measured_only_of_runs_that_were_alone(study: Study, tmp_path: Path) -> None:
    for run in study.runs(tmp_path / "made"):
        if run.variant != "dense" and (run.variant == "oktopk 0.05" or run.seed == 1):
            shutil.rmtree(run.folder)
            fabricate(run, 0.9, num_jobs=2, num_steps=30)
    found = by_variant(look(tmp_path))
    assert [row["measured_s"] is None for row in found.values()] == [False, True, True]
    assert [row["simulated_s"] is None for row in found.values()] == [False, False, False]


def test_runs_that_are_not_there_are_left_out(study: Study, tmp_path: Path) -> None:
    runs = study.runs(tmp_path / "made")
    for run in runs[3:]:
        shutil.rmtree(run.folder)
    (runs[2].folder / "conditions.json").unlink()  # stopped half way
    found = look(tmp_path)
    assert [row["runs"] for row in found["rows"]] == [1, 1]
    assert [row["within"] for row in found["rows"]] == [None, None]
    assert (runs[2].folder / "metrics.jsonl").is_file()  # looking removes nothing


def test_without_matplotlib_there_are_no_pictures(
    study: Study, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert len(look(tmp_path)["rows"]) == len(study.variants)
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert all(word in said for word in ("no pictures", "matplotlib", "pip install"))
    assert not list(tmp_path.rglob("*.png"))


# --- options


def test_seeds_only_and_target(study: Study, tmp_path: Path) -> None:
    first, second, third = study.variants
    found = look(tmp_path, "--seeds", "2")
    assert {run["seed"] for run in found["runs"]} == {2}
    assert [row["finals"] for row in found["rows"]] == [[0.7], [0.66], [0.4]]
    assert found["study"]["seeds"] == [2]
    found = look(tmp_path, "--only", "*dense steps")
    assert [row["variant"] for row in found["rows"]] == [first, third]
    found = look(tmp_path, "--target", "0.39")
    assert [(row["reached"], row["steps_to_target"]) for row in found["rows"]] == [(2, 45), (2, 60), (2, 45)]
    assert "steps to 0.39" in (tmp_path / "made" / "study.md").read_text()
    assert second in by_variant(found)


def test_a_simulated_link_changes_simulated_times_alone(study: Study, tmp_path: Path) -> None:
    assert study.target == 0.5
    usual, slow, far = (
        look(tmp_path, *words) for words in ([], ["--simulate", "10mbit"], ["--latency", "50ms", "--simulate", "1gbit"])
    )
    assert "simulated, 1gbit" in (tmp_path / "made" / "study.md").read_text()
    for one, other, third in zip(usual["rows"], slow["rows"], far["rows"], strict=True):
        assert one["simulated_s"] < other["simulated_s"]
        assert one["simulated_s"] + 60 * 50e-3 < third["simulated_s"]
        for key in set(one) - {"simulated_s"}:
            assert one[key] == other[key] == third[key]
    # bytes are what matters on a slow link
    dense, sparse, _ = (row["simulated_s"] for row in slow["rows"])
    assert dense > 3 * sparse


def test_settings_for_all_runs(study: Study, tmp_path: Path, refused: Refused) -> None:
    changed = replace(study, settings={**study.settings, "epochs": 3, "data_dir": "/data"})
    shutil.rmtree(tmp_path / "made")
    for run in changed.runs(tmp_path / "made"):
        fabricate(run)
    found = look(tmp_path, "--data-dir", "/data", "--set", "epochs=3")
    assert found["study"]["settings"] == changed.settings
    assert len(found["runs"]) == 6
    assert "epochs=3 there, 2 here" in refused("--table-only", "--data-dir", "/data")
    assert "data_dir='/data' there, '' here" in refused("--table-only", "--set", "epochs=3")


def test_everything_there_trains_nothing(
    study: Study, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> None:
        raise AssertionError("a world was made")

    monkeypatch.setattr("oktopk.workbench.study.running.BenchWorld", fail)
    command = ["study", str(tmp_path / "made.toml"), "--out", str(tmp_path), "--device", "cpu"]
    assert main(command) == 0
    assert list(study.variants)[2] in capsys.readouterr().out
    assert len(json.loads((tmp_path / "made" / "study.json").read_text())["runs"]) == 6


# --- what cannot be


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--seeds", "1", "1"], ["--seeds=[1, 1]", "different"]),
        (["--seeds", "-1"], ["--seeds"]),
        (["--seeds", "one"], ["--seeds", "'one'", "whole number"]),
        (["--only", "sketch*"], ["--only", "'sketch*'", "oktopk 0.05"]),
        (["--set", "epochs"], ["--set", "'epochs'", "epochs=3"]),
        (["--set", "epoch=3"], ["epoch=3", "--help"]),
        (["--set", "epochs=three"], ["epochs='three'", "int"]),
        (["--set", "seed=3"], ["--set", "'seed'", "leave it out"]),
        (["--set", "workers=1"], ["workers=1", "--set workers=2"]),
        (["--target", "high"], ["--target", "'high'"]),
        (["--jobs", "0"], ["--jobs", "'0'", "at least 1"]),
        (["--jobs", "2", "--link", "1gbit"], ["--jobs=2", "--jobs 1"]),
        (["--link", "fast"], ["--link", "'fast'", "1gbit"]),
        (["--simulate", "loopback"], ["--simulate", "'loopback'", "1gbit"]),
        (["--latency", "100"], ["--latency", "'100'", "100us"]),
        (["--device", "tpu"], ["--device", "'tpu'", "cuda"]),
        (["--out", "/dev/null/x"], ["--out", "/dev/null/x", "choose another"]),
        (["--colour", "red"], ["--colour", "--help"]),
        (["--table-only"], ["made", "no finished run", "--table-only"]),
    ],
)
def test_bad_input_is_one_line(tmp_path: Path, refused: Refused, arguments: list[str], words: list[str]) -> None:
    write_study(tmp_path / "made.toml")
    said = refused(*arguments)
    assert all(word in said for word in words), said
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and path.name != "made.toml"]


def test_a_bad_study_is_one_line(tmp_path: Path, refused: Refused) -> None:
    write_study(tmp_path / "made.toml", better="bigger")
    assert f"{tmp_path / 'made.toml'}: better='bigger'" in refused()
    assert "no such study" in refused(study="chess")
    assert not (tmp_path / "made").exists()


def test_an_unknown_metric_names_those_there_are(tmp_path: Path, refused: Refused, study: Study) -> None:
    write_study(tmp_path / "made.toml", metric="speed")
    said = refused("--table-only")
    assert all(word in said for word in ("metric='speed'", "lenet", "it has accuracy"))
    with pytest.raises(UsageError, match="metric='loss'"):  # that of training is none to compare by
        load(study.runs(tmp_path / "made")[0], replace(study, metric="loss"), Done("finished", alone=True))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"settings": {**CONTENT["settings"], "batch_size": 8}}, "batch_size=16 there, 8 here"),
        ({"preset": "lenet", "variants": {"dense": {}}}, "reducer='dense' there, 'oktopk' here"),
    ],
)
def test_other_settings_in_the_same_folder(
    study: Study, tmp_path: Path, refused: Refused, changes: dict[str, Any], words: str
) -> None:
    write_study(tmp_path / "made.toml", **changes)
    for arguments in ([], ["--table-only"]):
        said = refused(*arguments)
        assert all(word in said for word in (words, "dense-seed-1", "use another --out"))
    assert len(list((tmp_path / "made").glob("*-seed-*"))) == len(study.runs(tmp_path / "made"))


def test_another_link_in_the_same_folder(study: Study, tmp_path: Path, refused: Refused) -> None:
    assert "link='loopback' there, '1gbit' here" in refused("--link", "1gbit")
    run = study.runs(tmp_path / "made")[0]
    shutil.rmtree(run.folder)
    fabricate(run, device="cuda")
    assert "device='cuda' there, 'cpu' here" in refused()


def test_links_without_root(tmp_path: Path, refused: Refused, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    write_study(tmp_path / "made.toml")
    said = refused("--link", "1gbit")
    assert said.startswith("oktopk: --link: ")
    assert "need root" in said


# --- bytes on the way


def outcome_of(run: Run, study: Study, status: str = "finished") -> Any:
    return load(run, study, Done(status, alone=True))[0]


def test_bytes_of_a_run_are_those_of_its_average_worker(study: Study, tmp_path: Path) -> None:
    """Steps are logged by the first worker alone; the others may send more."""
    run = study.runs(tmp_path / "made")[1]
    lines = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    whole = sum(line["bytes_sent"] for line in lines)
    outcome = outcome_of(run, study)
    assert outcome.bytes_sent == mean_bytes(run.folder) > whole
    half = sum(line["bytes_sent"] for line in lines[:30])
    assert [point.bytes_sent for point in outcome.curve] == pytest.approx(
        [half * outcome.bytes_sent / whole, outcome.bytes_sent]
    )
    (run.folder / "ranks.csv").unlink()
    assert outcome_of(run, study).bytes_sent == whole


def test_bytes_until_a_validation_do_not_depend_on_what_came_later(study: Study, tmp_path: Path) -> None:
    """A run that diverges in its third epoch logs that epoch's steps, and no row for it in ranks.csv."""
    run, longer = study.runs(tmp_path / "one")[1], study.runs(tmp_path / "other")[1]
    fabricate(run, num_steps=30, status="diverged")
    fabricate(longer, num_steps=40)
    before = outcome_of(run, study, "diverged").curve
    shutil.copy(longer.folder / "metrics.jsonl", run.folder)
    after = outcome_of(run, study, "diverged").curve
    assert [point.step for point in after] == [30]
    assert [point.bytes_sent for point in after] == pytest.approx([point.bytes_sent for point in before])
