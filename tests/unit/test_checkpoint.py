"""Which checkpoints stay, and what is in one."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from oktopk.comm import SimulatedCommunicator, World
from oktopk.workbench.recording.profile import NoProfile
from oktopk.workbench.train import checkpoint
from oktopk.workbench.train.trainer import Position, Trainer


def save(folder: Path, *steps: int) -> None:
    for step in steps:
        comm = SimulatedCommunicator(World(1), 0)
        path = checkpoint.save(folder, step, {"fingerprint": "f"}, {"rng": torch.get_rng_state()}, comm)
        assert checkpoint.latest(folder) == path
        assert checkpoint.load(path, 0, 1, "f").shared["step"] == step


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("step_*"))


def test_the_last_two_are_kept(tmp_path: Path) -> None:
    save(tmp_path, 10, 20, 30)
    assert names(tmp_path) == ["step_00000020", "step_00000030"]


def test_what_was_just_written_stays_beside_later_ones(tmp_path: Path) -> None:
    """Someone went back to step 10 and went on from there."""
    save(tmp_path, 40, 50)
    kept = checkpoint.latest(tmp_path)
    save(tmp_path, 10)
    assert names(tmp_path) == ["step_00000010", kept.name], "the last complete one stays until there are two new ones"
    save(tmp_path, 20)
    assert names(tmp_path) == ["step_00000010", "step_00000020"]


def test_one_that_was_never_finished_takes_no_other_ones_place(tmp_path: Path) -> None:
    save(tmp_path, 10)
    (tmp_path / "step_00000020").mkdir()
    save(tmp_path, 25)
    assert names(tmp_path) == ["step_00000010", "step_00000025"]


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"checkpoint": 3}'])
def test_a_damaged_pointer_is_replaced(content: str, tmp_path: Path) -> None:
    (tmp_path / "latest.json").write_text(content)
    save(tmp_path, 10)
    assert names(tmp_path) == ["step_00000010"]


def trainer_on(device: str, folder: Path, step: int) -> Any:
    """As much of a Trainer as `_save` and `_resume` use."""
    state = {"optimizer": {}, "allreducer": {}}
    return SimpleNamespace(
        optimizer=SimpleNamespace(training_state_dict=lambda: state, load_training_state_dict=lambda _: None),
        fingerprint="f",
        config=SimpleNamespace(as_dict=dict),
        position=Position(step=step),
        num_steps=100,
        elapsed_s=lambda: 0.0,
        _model=torch.nn.Linear(2, 2),
        _workload=SimpleNamespace(state=dict, load_state=lambda _: None),
        _member=SimpleNamespace(
            device=torch.device(device),
            place=SimpleNamespace(rank=0, size=1),
            comm=SimulatedCommunicator(World(1), 0),
        ),
        _profiler=NoProfile(),
        _told=[],
        _checkpoints=folder,
    )


def test_the_gpus_random_state_is_saved_and_restored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dropout on a GPU draws from there."""
    state = {"cuda:1": torch.arange(16, dtype=torch.uint8)}
    saved = state["cuda:1"].clone()
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device: state[str(device)].clone())
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda new, device: state.update({str(device): new}))
    Trainer._save(trainer_on("cuda:1", tmp_path, 4))
    state["cuda:1"] += 1
    Trainer._resume(trainer_on("cuda:1", tmp_path, 0))
    assert torch.equal(state["cuda:1"], saved)

    Trainer._save(trainer_on("cpu", tmp_path, 8))  # as checkpoints were before: without it
    assert "cuda_rng" not in checkpoint.load(checkpoint.latest(tmp_path), 0, 1, "f").own
    resumed = trainer_on("cuda:1", tmp_path, 0)
    Trainer._resume(resumed)
    assert resumed.position.step == 8
    assert torch.equal(state["cuda:1"], saved)
