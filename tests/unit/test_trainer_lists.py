"""The lists that users know, and what is said (once) about them."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

import pytest
import torch

from oktopk.allreducer import AllReducer
from oktopk.bucket import Bucket, Layout
from oktopk.comm.simulator import SimulatedCommunicator, World
from oktopk.metrics.step_stats import StepStats
from oktopk.metrics.trainer_lists import TrainerLists, mean_or_none
from oktopk.reduce.base import Phase


@dataclass
class Trainer:
    sparsities: list[float] = field(default_factory=list)
    compression_ratios: list[float] = field(default_factory=list)
    communication_sizes: list[float] = field(default_factory=list)

    def rows(self) -> list[tuple[float, float, float]]:
        return list(zip(self.sparsities, self.compression_ratios, self.communication_sizes, strict=True))


def told(phase: Phase, count: int, *, step: int = 0, skipped: bool = False, bucket: str = "fc") -> StepStats:
    return StepStats(
        step=step, bucket=bucket, phase=phase, n=100, k=5, local_count=5, global_count=count, skipped=skipped
    )


def test_both_phases_fill_all_three_lists() -> None:
    trainer = Trainer()
    lists = TrainerLists(trainer)
    for stats in (told("dense", 100), told("sparse", 20), told("sparse", 0)):
        lists(stats)
    assert trainer.rows() == [(0.0, 1.0, 400.0), (0.8, 5.0, 160.0), (1.0, 100.0, 0.0)]
    assert all(type(value) is float for row in trainer.rows() for value in row)


def test_every_bucket_of_a_step_has_its_entry() -> None:
    trainer = Trainer()
    lists = TrainerLists(trainer)
    for bucket in ("first", "second", "third"):
        lists(told("sparse", 10, bucket=bucket))
    assert trainer.rows() == [(0.9, 10.0, 80.0)] * 3


def test_skipped_steps_are_left_out() -> None:
    trainer = Trainer()
    lists = TrainerLists(trainer)
    for skipped in (True, False, True):
        lists(told("sparse", 20, skipped=skipped))
    assert trainer.rows() == [(0.8, 5.0, 160.0)]


def test_what_a_trainer_already_had_stays() -> None:
    trainer = Trainer(sparsities=[0.5], compression_ratios=[2.0], communication_sizes=[7.0])
    TrainerLists(trainer)(told("dense", 100))
    assert trainer.rows() == [(0.5, 2.0, 7.0), (0.0, 1.0, 400.0)]


def test_two_trainers_share_nothing() -> None:
    one, other = Trainer(), Trainer()
    TrainerLists(one)(told("dense", 100))
    TrainerLists(other)
    assert (len(one.rows()), len(other.rows())) == (1, 0)


def test_with_a_trainer_one_debug_line_tells_the_first_metric(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, logger="oktopk")
    lists = TrainerLists(Trainer())
    for step in range(4, 7):
        lists(told("sparse", 20, step=step, bucket="fc.weight..fc.bias"))
    assert [(record.levelname, record.name) for record in caplog.records] == [("DEBUG", "oktopk")]
    message = caplog.records[0].getMessage()
    for part in ("step 4", "fc.weight..fc.bias", "sparse", "0.800000"):
        assert part in message


def test_only_the_first_rank_tells_of_it(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, logger="oktopk")
    trainer = Trainer()
    TrainerLists(trainer, rank=1)(told("sparse", 20))
    assert len(trainer.rows()) == 1
    assert caplog.records == []


def test_a_skipped_step_says_nothing_and_the_first_real_one_still_does(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, logger="oktopk")
    lists = TrainerLists(Trainer())
    lists(told("sparse", 0, skipped=True))
    assert caplog.records == []
    lists(told("sparse", 20))
    assert len(caplog.records) == 1


def test_an_allreducer_fills_the_lists_through_both_phases_and_leaves_skipped_steps_out() -> None:
    trainer = Trainer()
    comm = SimulatedCommunicator(World(1), 0)
    reducer = AllReducer(
        "topkA", comm=comm, trainer=trainer, density=0.1, warmup_steps=2, min_sparse_numel=0, nonfinite="skip"
    )
    layout = Layout.of([("a", 60), ("b", 40)])
    generator = torch.Generator().manual_seed(1)
    for step in range(5):
        gradient = torch.randn(100, generator=generator)
        if step == 3:
            gradient[7] = float("nan")
        reducer.reduce(Bucket(gradient, layout))
        reducer.end_step()
    assert reducer.num_skipped_steps == 1
    assert trainer.rows() == [(0.0, 1.0, 400.0)] * 2 + [(0.9, 10.0, 80.0)] * 2


def test_a_trainer_set_later_is_filled_from_then_on(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, logger="oktopk")
    reducer = AllReducer("dense", comm=SimulatedCommunicator(World(1), 0))
    layout = Layout.of([("a", 10)])
    trainer = Trainer()
    reducer.reduce(Bucket(torch.ones(10), layout))
    reducer.set_trainer(trainer)
    for _ in range(2):
        reducer.reduce(Bucket(torch.ones(10), layout))
    assert trainer.rows() == [(0.0, 1.0, 40.0)] * 2
    assert [record.levelname for record in caplog.records] == ["DEBUG"]


def test_a_mean_over_nothing_is_not_available() -> None:
    assert mean_or_none([]) is None


def test_a_mean_is_the_arithmetic_one() -> None:
    assert mean_or_none([1.0, 2.0, 6.0]) == 3.0
    assert mean_or_none([0.0]) == 0.0
