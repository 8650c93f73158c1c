"""Which runs of a study are done, in which worlds, and what stays when one fails; with worlds that train nothing."""

from __future__ import annotations

import io
import json
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import pytest

from oktopk.workbench.console.progress import Progress
from oktopk.workbench.console.words import UsageError
from oktopk.workbench.study import running
from oktopk.workbench.study.definition import Run
from oktopk.workbench.study.running import Conditions, Done, alone_in, do_runs, done_before
from oktopk.workbench.train.config import TrainConfig, make_config
from oktopk.workbench.worlds.world import Seat, WorkerFailed
from tests.studies import CONDITIONS, CONTENT, fabricate, make_study

VARIANTS: dict[str, dict[str, Any]] = {"dense": {"reducer": "dense"}, "oktopk": {}, "gtopk": {"reducer": "gtopk"}}


class Worlds:
    """Stands in for BenchWorld: remembers what it was asked, and leaves a config.json for each run."""

    def __init__(self) -> None:
        self.made: list[tuple[int, str]] = []
        self.trained: list[str] = []
        self.warmed: list[TrainConfig] = []
        self.open = 0
        self.fails: str | None = None
        self.diverges: str | None = None
        self.meet: threading.Barrier | None = None
        self.outlives_a_failure: str | None = None

    def __call__(self, seats: Sequence[Seat], options: Any) -> Self:
        self.made.append((len(seats), options.device))
        return self

    def __enter__(self) -> Self:
        self.open += 1
        return self

    def __exit__(self, *how: object) -> None:
        self.open -= 1

    def run(self, job: dict[str, Any], progress: Any) -> list[str]:
        config = make_config(job["config"])
        folder = config.run_folder
        assert job["metric"] == "accuracy"
        if folder.name.endswith("-warming-up"):
            self.warmed.append(config)
            folder.mkdir(parents=True)
            return ["finished"] * 2
        self.trained.append(folder.name)
        if self.meet is not None:
            self.meet.wait(30)
        assert job["what"] == "train_run"
        assert not (folder / "config.json").exists()  # else a run of another name would be made
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps(config.as_dict()))
        progress.detail("epoch 1 of 2")
        patience = time.monotonic() + 30
        while folder.name == self.outlives_a_failure and progress.failure is None and time.monotonic() < patience:
            time.sleep(0.001)
        if folder.name == self.fails:
            raise WorkerFailed("worker 0 of 2: no data")
        return ["diverged" if folder.name == self.diverges else "finished"] * 2


@pytest.fixture
def worlds(monkeypatch: pytest.MonkeyPatch) -> Worlds:
    made = Worlds()
    monkeypatch.setattr(running, "BenchWorld", made)
    return made


@pytest.fixture
def runs(tmp_path: Path) -> list[Run]:
    return make_study(tmp_path, variants=VARIANTS).runs(tmp_path / "out")


def do(runs: Sequence[Run], conditions: Conditions = CONDITIONS) -> str:
    said = io.StringIO()
    do_runs(runs, "accuracy", conditions, Progress(said))
    return said.getvalue()


def how(run: Run) -> dict[str, Any]:
    return json.loads((run.folder / "conditions.json").read_text())


ALL = [f"{name}-seed-{seed}" for seed in (1, 2) for name in VARIANTS]


def test_all_runs_in_one_world(worlds: Worlds, runs: list[Run]) -> None:
    said = do(runs)
    assert worlds.trained == ALL
    assert worlds.made == [(2, "cpu")]
    assert worlds.open == 0
    assert [done_before(run, CONDITIONS) for run in runs] == [Done("finished", alone=True)] * 6
    assert "0 of 6 runs done; now dense, seed 1" in said
    assert "5 of 6 runs done; now gtopk, seed 2" in said
    kept = {"status": "finished", "link": "loopback", "device": "cpu", "num_jobs": 1, "num_workers": 2}
    assert kept.items() <= how(runs[0]).items()


def test_finished_runs_are_not_done_again(worlds: Worlds, runs: list[Run]) -> None:
    for run in (runs[0], runs[3]):
        fabricate(run)
    fabricate(runs[4], status="diverged")  # as much of a result as any
    before = {path: path.read_bytes() for path in runs[0].folder.rglob("*") if path.is_file()}
    assert "3 of 6 runs done; now oktopk, seed 1" in do(runs)
    assert worlds.trained == [ALL[1], ALL[2], ALL[5]]
    assert {path: path.read_bytes() for path in before} == before
    worlds.made.clear()
    assert do(runs) == ""
    assert worlds.made == []


def test_a_run_stopped_half_way_is_removed_and_done_again(worlds: Worlds, runs: list[Run]) -> None:
    fabricate(runs[0])
    fabricate(runs[1], status=None)
    assert (runs[1].folder / "metrics.jsonl").is_file()
    assert done_before(runs[1], CONDITIONS) is None
    do(runs[:2])
    assert worlds.trained == [ALL[1]]
    assert {path.name for path in runs[1].folder.iterdir()} == {"config.json", "conditions.json"}
    assert (runs[0].folder / "metrics.jsonl").is_file()


@pytest.mark.parametrize("content", ["", "{", "[]"])
def test_files_that_were_cut_off_are_those_of_a_run_stopped_half_way(
    worlds: Worlds, runs: list[Run], content: str
) -> None:
    for run, name in zip(runs, ("config.json", "conditions.json"), strict=False):
        fabricate(run)
        (run.folder / name).write_text(content)
    do(runs[:2])
    assert worlds.trained == ALL[:2]
    assert done_before(runs[0], CONDITIONS) == Done("finished", alone=True)


def test_a_run_that_diverges_is_a_result_and_the_world_goes_on(worlds: Worlds, runs: list[Run]) -> None:
    worlds.diverges = ALL[1]
    assert "oktopk, seed 1: diverged" in do(runs)
    assert len(worlds.made) == 1
    assert worlds.trained == ALL
    assert [done_before(run, CONDITIONS) for run in runs[:3]] == [
        Done("finished", alone=True),
        Done("diverged", alone=True),
        Done("finished", alone=True),
    ]


def test_a_failure_ends_it_and_keeps_what_is_done(worlds: Worlds, runs: list[Run]) -> None:
    worlds.fails = ALL[2]
    with pytest.raises(WorkerFailed, match="no data"):
        do(runs)
    assert worlds.trained == ALL[:3]
    assert worlds.open == 0
    assert [done_before(run, CONDITIONS) is not None for run in runs] == [True, True, False, False, False, False]
    worlds.fails = None
    do(runs)  # goes on from there
    assert worlds.trained == [*ALL[:3], *ALL[2:]]


def test_several_runs_at_a_time(worlds: Worlds, runs: list[Run]) -> None:
    worlds.meet = threading.Barrier(3)  # nobody goes on before three are at it
    conditions = replace(CONDITIONS, num_jobs=3)
    do(runs, conditions)
    assert worlds.made == [(2, "cpu")] * 3
    assert worlds.open == 0
    assert sorted(worlds.trained) == sorted(ALL)
    assert [done_before(run, conditions) for run in runs] == [Done("finished", alone=False)] * 6
    assert done_before(runs[0], CONDITIONS) == Done("finished", alone=False)  # whatever is asked for now


def test_there_are_no_more_worlds_than_runs(worlds: Worlds, runs: list[Run]) -> None:
    do(runs[:2], replace(CONDITIONS, num_jobs=5))
    assert len(worlds.made) == 2


def test_after_a_failure_what_runs_beside_it_ends_and_nothing_begins(worlds: Worlds, runs: list[Run]) -> None:
    worlds.meet = threading.Barrier(2)
    worlds.fails, worlds.outlives_a_failure = ALL[0], ALL[1]
    with pytest.raises(WorkerFailed):
        do(runs, replace(CONDITIONS, num_jobs=2))
    assert sorted(worlds.trained) == sorted(ALL[:2])
    assert worlds.open == 0
    assert [done_before(run, CONDITIONS) is not None for run in runs[:3]] == [False, True, False]


@pytest.mark.parametrize(
    ("settings", "conditions", "words"),
    [
        ({"epochs": 3}, {}, "epochs=3 there, 2 here"),
        ({"density": 0.5}, {}, "density=0.5 there, 0.05 here"),
        ({}, {"link": "1gbit"}, "link='1gbit' there, 'loopback' here"),
        ({}, {"device": "cuda"}, "device='cuda' there, 'cpu' here"),
    ],
)
def test_a_run_of_another_kind_is_in_the_way(
    tmp_path: Path, worlds: Worlds, runs: list[Run], settings: dict[str, Any], conditions: dict[str, str], words: str
) -> None:
    others = make_study(tmp_path, variants=VARIANTS, settings={**CONTENT["settings"], **settings})
    fabricate(others.runs(tmp_path / "out")[1], **conditions)
    with pytest.raises(UsageError) as caught:
        do(runs)
    assert all(word in str(caught.value) for word in [str(runs[1].folder), words, "--out"])
    assert "\n" not in str(caught.value)
    assert worlds.trained == []  # seen before anything is trained
    assert (runs[1].folder / "metrics.jsonl").is_file()


def test_where_a_run_lies_and_how_long_it_may_take_make_no_difference(tmp_path: Path, runs: list[Run]) -> None:
    others = make_study(tmp_path, variants=VARIANTS, settings={**CONTENT["settings"], "timeout_s": 20.0})
    fabricate(others.runs(tmp_path / "out")[1])
    assert done_before(runs[1], CONDITIONS) == Done("finished", alone=True)


def test_a_world_warms_up_once_and_leaves_nothing_of_it(worlds: Worlds, runs: list[Run]) -> None:
    """What a first run loads and compiles, of both phases, must not count as its time."""
    do(runs)
    (short,) = worlds.warmed
    assert (short.reducer, short.warmup_steps, short.max_steps) == ("oktopk", 1, 3)
    assert not short.run_folder.exists()


def test_only_one_study_works_in_a_folder(tmp_path: Path) -> None:
    with alone_in(tmp_path), pytest.raises(UsageError, match="another study is at work there"), alone_in(tmp_path):
        pass
    with alone_in(tmp_path):
        pass


def test_what_a_run_left_before_its_config_was_written_is_removed(worlds: Worlds, runs: list[Run]) -> None:
    assert worlds.open == 0
    (runs[0].folder / "data").mkdir(parents=True)
    do(runs[:1])
    assert not (runs[0].folder / "data").exists()


def test_a_run_of_somebody_else_is_never_removed(worlds: Worlds, runs: list[Run]) -> None:
    """It has no conditions, like one that was stopped half way; but its settings are others."""
    runs[0].folder.mkdir(parents=True)
    (runs[0].folder / "config.json").write_text(json.dumps({**runs[0].config.as_dict(), "lr": 7.0}))
    with pytest.raises(UsageError, match=r"lr=7\.0 there"):
        do(runs)
    assert (runs[0].folder / "config.json").is_file()
    assert worlds.trained == []
