"""Recorded gradients: each worker's own, before anything was added, of the steps asked for and no others."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from oktopk import AllReducer, Bucket, Layout
from oktopk.comm import simulate
from oktopk.comm.base import Communicator
from oktopk.workbench.recording.gradients import GradientRecorder
from tests import gradients

LAYOUTS = (Layout.of([("a", 100), ("b", 60)]), Layout.of([("c", 90)]))
SETTINGS = {"warmup_steps": 2, "density": 0.05, "min_sparse_numel": 0, "tau": 4, "tau_prime": 2}


def gradient(number: int, rank: int, step: int) -> Tensor:
    return gradients.make("heavy", LAYOUTS[number].numel, rank, step, seed=10 + number)


def record(folder: Path, reducer: str, steps: range, size: int = 2, num_steps: int = 6) -> None:
    """Train `size` ranks for `num_steps`, two buckets a step; each records into a folder of its own."""

    def run(comm: Communicator) -> None:
        allreducer = AllReducer(reducer, comm=comm, **SETTINGS)
        allreducer.watch(GradientRecorder(folder / f"rank_{comm.rank}", steps))
        for step in range(num_steps):
            for number, layout in enumerate(LAYOUTS):
                bucket = Bucket(gradient(number, comm.rank, step), layout)
                allreducer.reduce(bucket)
                assert not torch.equal(bucket.flat, gradient(number, comm.rank, step))  # it was reduced
            allreducer.end_step()

    simulate(size, run)


@pytest.mark.parametrize("reducer", ["oktopk", "topkA", "dense"])
@pytest.mark.parametrize("steps", [range(1, 4), range(2), range(4, 9)])
def test_what_was_passed_in_is_what_is_written(reducer: str, steps: range, tmp_path: Path) -> None:
    """In dense and in sparse steps, where something is owed."""
    record(tmp_path, reducer, steps)
    for rank in range(2):
        folder = tmp_path / f"rank_{rank}"
        taken = [step for step in steps if step < 6]
        expected = {f"step_{step:06d}_bucket_{number:02d}.npy" for step in taken for number in range(2)}
        assert {path.name for path in folder.iterdir()} == expected | {"buckets.json"}
        for step in taken:
            for number in range(2):
                saved = np.load(folder / f"step_{step:06d}_bucket_{number:02d}.npy", allow_pickle=False)
                assert saved.dtype == np.float32
                assert saved.ndim == 1
                assert np.array_equal(saved, gradient(number, rank, step).numpy())


def test_buckets_json_says_which_parameters_lie_where(tmp_path: Path) -> None:
    record(tmp_path, "oktopk", range(3, 5))
    for rank in range(2):
        assert json.loads((tmp_path / f"rank_{rank}" / "buckets.json").read_text()) == [
            [{"name": "a", "numel": 100}, {"name": "b", "numel": 60}],
            [{"name": "c", "numel": 90}],
        ]


def test_steps_that_never_come_leave_nothing_behind(tmp_path: Path) -> None:
    record(tmp_path, "oktopk", range(50, 52), num_steps=3)
    record(tmp_path, "oktopk", range(1, 1), num_steps=3)
    assert list(tmp_path.iterdir()) == []


def test_recording_changes_no_bit(tmp_path: Path) -> None:
    def run(comm: Communicator, recorded: bool) -> list[Tensor]:
        allreducer = AllReducer("oktopk", comm=comm, **SETTINGS)
        if recorded:
            allreducer.watch(GradientRecorder(tmp_path / f"rank_{comm.rank}", range(8)))
        means = []
        for step in range(8):
            bucket = Bucket(gradient(0, comm.rank, step), LAYOUTS[0])
            allreducer.reduce(bucket)
            allreducer.end_step()
            means.append(bucket.flat)
        return means

    plain, watched = (simulate(3, lambda comm, r=recorded: run(comm, r)) for recorded in (False, True))
    for left, right in zip(plain, watched, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def test_other_dtypes_are_written_as_fp32(tmp_path: Path) -> None:
    allreducer = AllReducer("oktopk", **SETTINGS)
    allreducer.watch(GradientRecorder(tmp_path, range(1)))
    narrow = gradient(0, 0, 0).to(torch.bfloat16)
    allreducer.reduce(Bucket(narrow.clone(), LAYOUTS[0]))
    saved = np.load(tmp_path / "step_000000_bucket_00.npy", allow_pickle=False)
    assert saved.dtype == np.float32
    assert np.array_equal(saved, narrow.float().numpy())


def test_parameters_without_a_gradient_contribute_zero_whatever_stands_there(tmp_path: Path) -> None:
    allreducer = AllReducer("oktopk", **SETTINGS)
    allreducer.watch(GradientRecorder(tmp_path, range(1)))
    allreducer.reduce(Bucket(gradient(0, 0, 0), LAYOUTS[0], missing=frozenset({"b"})))
    saved = np.load(tmp_path / "step_000000_bucket_00.npy", allow_pickle=False)
    assert np.array_equal(saved[:100], gradient(0, 0, 0)[:100].numpy())
    assert not saved[100:].any()
