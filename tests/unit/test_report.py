"""Reports of all kinds of runs, without a browser: what they say, and that their numbers are those of the files."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from oktopk.workbench.cli import main
from oktopk.workbench.console.words import UsageError
from oktopk.workbench.report.write import write_report
from tests.pages import read
from tests.runs import Recipe, write_config, write_facts, write_run

FIGURES = {
    "loss-over-steps", "loss-over-time", "metrics-over-steps", "metrics-over-time", "sparsity", "chosen-and-applied",
    "thresholds", "bytes-per-step", "message-sizes", "stages", "bytes-by-worker", "waiting-by-worker", "who-to-whom",
}  # fmt: skip
PROFILED = {"message-sizes", "who-to-whom"}
SPARSE = {"chosen-and-applied", "thresholds"}
BY_WORKER = {"bytes-by-worker", "waiting-by-worker"}
METRICS = {"metrics-over-steps", "metrics-over-time"}


@pytest.fixture
def no_png(monkeypatch: pytest.MonkeyPatch) -> None:
    """They take half of the time, and show what is on the page."""
    monkeypatch.setattr("oktopk.workbench.report.render.png", lambda _: b"")


# --- kinds of runs


def half_line(folder: Path) -> None:
    path = folder / "metrics.jsonl"
    path.write_text(path.read_text()[:-40])


def broken_lines(folder: Path) -> None:
    path = folder / "metrics.jsonl"
    lines = path.read_text().splitlines()
    lines[7], lines[9], lines[11] = '{"step": 7, "pha', "[1, 2]", '{"step": -3, "phase": "dense"}'
    path.write_text("\n".join(lines) + "\n")


def no_facts(folder: Path) -> None:
    (folder / "run.json").unlink()
    (folder / "epochs.csv").unlink()


def damaged_files(folder: Path) -> None:
    (folder / "config.json").write_text("{")
    (folder / "epochs.csv").write_text((folder / "epochs.csv").read_text()[:-3])
    (folder / "profile" / "rank_1.bin").write_bytes(b"no profile")


def config_only(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.mkdir()
    write_config(folder, Recipe())


def started_only(folder: Path) -> None:
    config_only(folder)
    write_facts(folder, Recipe(steps=0, planned=420, status="running"))
    (folder / "metrics.jsonl").write_text("")


KINDS: dict[str, tuple[Recipe, Callable[[Path], None] | None, list[str], set[str]]] = {
    "whole": (Recipe(), None, [], set()),
    "unprofiled": (Recipe(profile=False), None, ["Run with --profile to see this."], PROFILED),
    "half a line": (
        Recipe(steps=38, planned=420, status="running"),
        half_line,
        ["the last step logged is 36 of 420", "did not finish", "metrics.jsonl ends in half a line"],
        set(),
    ),
    "failed": (
        Recipe(steps=38, planned=420, status="failed", reason="worker 1: training stopped at step 38; overflow in <w>"),
        None,
        ["This run did not finish: the last step logged is 37 of 420", "Reason: worker 1: training stopped at step 38"],
        set(),
    ),
    "no run.json, no epochs": (
        Recipe(),
        no_facts,
        ["no run.json", "the last step logged is 59", "No epoch was finished"],
        METRICS,
    ),
    "broken in the middle": (
        Recipe(),
        broken_lines,
        ["3 damaged lines of metrics.jsonl are left out", "3 of the steps up to 59 are not in metrics.jsonl"],
        set(),
    ),
    "damaged files": (
        Recipe(),
        damaged_files,
        ["config.json is damaged", "epochs.csv ends in half a row", "A profile cannot be read"],
        set(),
    ),
    "config.json only": (Recipe(), config_only, ["no run.json", "no step was logged", "nothing to draw"], FIGURES),
    "zero lines": (Recipe(), started_only, ["did not finish, or is still running: no step was logged"], FIGURES),
    "one step": (Recipe(steps=1, dense_steps=0), None, ["Only one step was logged"], set()),
    "one worker": (
        Recipe(workers=1, profile=False),
        None,
        ["One worker: it has nobody to send to", "One worker sends nothing."],
        PROFILED | {"bytes-per-step", "bytes-by-worker"},
    ),
    "dense": (
        Recipe(dense_steps=60, reducer="dense", config={"reducer": "dense"}),
        None,
        ["No step was sparse: nothing was chosen"],
        SPARSE,
    ),
    "skipped": (Recipe(skipped=frozenset({0, 3, 40, 59})), None, ["4 of 60 steps were skipped"], set()),
    "all skipped": (
        Recipe(steps=4, skipped=frozenset(range(4))),
        None,
        ["4 of 4 steps were skipped"],
        SPARSE | {"loss-over-steps", "loss-over-time", "sparsity", "stages"},
    ),
    "resumed": (Recipe(config={"resume": True}), None, ["continued from a checkpoint"], set()),
    "old": (
        Recipe(old=True),
        None,
        ["no run.json", "before steps had a time", "before encoding was timed", "no ranks.csv"],
        PROFILED | BY_WORKER,
    ),
    "auto": (
        Recipe(
            auto={"answer": ["oktopk: 2.1 times as fast", "dense: <1>"], "rechecks": [{"step": 30, "answer": "no"}]}
        ),
        None,
        ["oktopk: 2.1 times as fast", "dense: <1>", "step 30: no"],
        set(),
    ),
    "local steps": (
        Recipe(local_steps=4),
        None,
        [
            "30 of 60 steps were local: nothing was exchanged after them",
            "30 of 60 steps are local and send nothing",
            "In 10 sparse steps",
            "A local step takes",
        ],
        set(),
    ),
    "local steps, dense exchanges": (
        Recipe(local_steps=4, reducer="dense", config={"reducer": "dense"}),
        None,
        ["30 of 60 steps were local", "All exchanges were dense: every element was applied."],
        SPARSE,
    ),
    "only local steps": (
        Recipe(local_steps=100, dense_steps=0),
        None,
        ["60 of 60 steps were local", "All steps were local: nothing was exchanged."],
        SPARSE | {"sparsity", "bytes-per-step"},
    ),
    "no metrics": (Recipe(metrics={}), None, [], METRICS),
    "many buckets": (Recipe(buckets=[(f"layer.{i}", 3000) for i in range(9)], workers=5), None, [], set()),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("no_png")
def test_every_kind_of_run_gives_a_page_that_says_what_it_is(kind: str, tmp_path: Path) -> None:
    recipe, spoil, sentences, absent = KINDS[kind]
    folder = tmp_path / "made"
    write_run(folder, recipe)
    if spoil:
        spoil(folder)
    path = write_report([folder])
    assert path == folder / "report.html"
    found = read(path)
    for sentence in sentences:
        assert sentence in found.words
    if kind == "whole":
        assert "did not finish" not in found.words
    assert found.absent == absent
    assert sorted(found.figures) == sorted(FIGURES - absent)
    pictures = sorted((folder / "report").glob("*.png"))
    assert [picture.stem for picture in pictures] == sorted(FIGURES - absent)


# --- hostile and unusual names


@pytest.mark.usefixtures("no_png")
def test_whatever_names_hold_they_are_only_text(tmp_path: Path) -> None:
    bad = '<script>alert(1)</script> & "x" $\\frac{1}$ _y \u4e2d\x01\ud800'
    folder = tmp_path / "_run $x^2$ <b>"
    write_run(
        folder,
        Recipe(
            buckets=[(bad, 4000), ("_hidden", 4000)],
            metrics={"a/<i>b": lambda part: part},
            status="failed",
            reason=bad,
            config={"task": bad},
            auto={"answer": [bad], "rechecks": [{"step": 1, "answer": bad}]},
        ),
    )
    write_run(tmp_path / "other", Recipe(profile=False))
    found = read(write_report([folder]))
    assert found.tags.isdisjoint({"b", "i", "script"})
    assert "<script>alert(1)</script>" in found.words
    together = write_report([folder, tmp_path / "other"])
    assert sorted(read(together).figures).count("sparsity") == 2
    assert not [path for path in (together.parent / "report").iterdir() if not path.is_file()]


# --- several runs


@pytest.mark.usefixtures("no_png")
def test_several_runs_are_compared_side_by_side(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "a", Recipe(seed=1, profile=False))
    write_run(tmp_path / "b", Recipe(seed=2, profile=False, dense_steps=60, reducer="dense"))
    assert main(["report", str(tmp_path / "a"), str(tmp_path / "b"), str(tmp_path / "a")]) == 0
    path = tmp_path / "report-a-b" / "report.html"
    said = capsys.readouterr().out
    assert str(path) in said
    found = read(path)
    for over in ("steps", "time", "bytes sent"):
        assert f"All runs: training loss over {over}" in found.labels
        assert f"All runs: WER over {over}" in found.labels
    assert {"a: Sparsity over steps", "b: Sparsity over steps"} <= set(found.labels)
    assert (path.parent / "report" / "compare-loss-over-bytes-sent.png").is_file()
    table = re.search(r'aria-label="Final figures of all runs".*?</table>', path.read_text(), re.DOTALL)
    assert table
    shown = re.findall(r'data-key="loss" data-value="([^"]*)"', table[0])
    ends = [json.loads((tmp_path / name / "metrics.jsonl").read_text().splitlines()[-1])["loss"] for name in "ab"]
    assert [float(each) for each in shown] == ends
    again = ["report", *(str(each) for each in sorted(tmp_path.iterdir())), "--out", str(tmp_path / "c")]
    assert main(again) == 0  # as `runs/*` names them
    assert "left out, it is an earlier report" in capsys.readouterr().out
    assert len(read(tmp_path / "c" / "report.html").figures) == len(found.figures)


@pytest.mark.usefixtures("no_png")
def test_runs_of_one_name_are_told_apart(tmp_path: Path) -> None:
    for parent in ("x", "y"):
        write_run(tmp_path / parent / "same", Recipe(steps=3, profile=False))
    path = write_report([tmp_path / "x" / "same", tmp_path / "y" / "same"])
    assert path == tmp_path / "report-same-same" / "report.html"
    assert {"x/same: Sparsity over steps", "y/same: Sparsity over steps"} <= set(read(path).labels)


# --- what cannot be


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nowhere", "nowhere: does not exist; give the folder of a run"),
        ("file", "file: is a file; give the folder of a run"),
        ("empty", "empty: is no run (none of config.json, run.json, metrics.jsonl is in it); give a folder that"),
        ("runs", "runs: is no run (none of config.json, run.json, metrics.jsonl is in it); did you mean"),
    ],
)
def test_what_is_no_run_is_one_clear_line(
    name: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    write_run(tmp_path / "runs" / "demo", Recipe(steps=1))
    assert main(["report", str(tmp_path / name)]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert message in said
    assert not (tmp_path / name / "report").exists()


def test_an_out_that_cannot_be_written_is_one_clear_line(tmp_path: Path) -> None:
    write_run(tmp_path / "made", Recipe(steps=1, profile=False))
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=r"--out: '.*file': cannot be written to"):
        write_report([tmp_path / "made"], tmp_path / "file")


def test_without_matplotlib_runs_can_be_loaded_and_a_report_says_what_to_install(tmp_path: Path) -> None:
    write_run(tmp_path / "made", Recipe(steps=1, profile=False))
    program = (
        "import sys; sys.modules['matplotlib'] = None\n"
        "import oktopk.workbench.report.load; from oktopk.workbench.cli import main\n"
        "sys.exit(main(['report', sys.argv[1]]))"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "made")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 2
    assert done.stderr == "oktopk: a report needs matplotlib, which is not installed: pip install 'oktopk[train]'\n"
