"""Learning rates, densities that fall, and settings that belong to one task."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oktopk import AllReducer
from oktopk.bucket import Bucket, Layout
from oktopk.comm import simulate
from oktopk.workbench.train.config import ConfigError, TrainConfig, load_config, make_config, preset_names
from oktopk.workbench.train.schedule import density_ramp, learning_rate
from oktopk.workbench.train.task_settings import TASKS


def rate(epoch: int, progress: float = 0.0, num_epochs: float = 200.0, **values: object) -> float:
    return learning_rate(make_config({"lr": 0.1, **values}), epoch, progress, num_epochs)


def test_steps_make_it_a_tenth_at_each_milestone() -> None:
    how = {"lr_schedule": "steps", "lr_milestones": "81,122,155"}
    found = [rate(epoch, **how) for epoch in (0, 80, 81, 121, 122, 154, 155, 199)]
    assert found == pytest.approx([0.1, 0.1, 0.01, 0.01, 1e-3, 1e-3, 1e-4, 1e-4])


def test_divide_is_what_it_was() -> None:
    assert [rate(epoch, lr_decay=1.01) for epoch in (0, 1, 7)] == pytest.approx([0.1, 0.1 / 1.01, 0.1 / 1.01**7])


def test_linear_ends_at_zero() -> None:
    how = {"lr_schedule": "linear", "num_epochs": 10.0}
    assert rate(0, 0.0, **how) == pytest.approx(0.1)
    assert rate(5, 0.0, **how) == pytest.approx(0.05)
    assert 0.0 < rate(9, 0.9, **how) < 0.0011


def test_cosine_ends_at_a_tenth() -> None:
    how = {"lr_schedule": "cosine", "num_epochs": 10.0}
    assert rate(0, 0.0, **how) == pytest.approx(0.1)
    assert rate(2, 0.5, **how) == pytest.approx(0.01 + 0.09 * (1 + math.cos(math.pi / 4)) / 2)
    assert rate(5, 0.0, **how) == pytest.approx(0.055)
    assert 0.01 < rate(9, 0.9, **how) < 0.0101
    assert rate(10, 0.0, **how) == rate(12, 0.0, **how) == pytest.approx(0.01)


def test_cosine_begins_where_the_warm_up_ends() -> None:
    how = {"lr_schedule": "cosine", "num_epochs": 10.0, "lr_warmup_epochs": 2.0}
    assert rate(1, 0.0, **how) == pytest.approx(0.05)
    assert rate(2, 0.0, **how) == pytest.approx(0.1)
    assert rate(6, 0.0, **how) == pytest.approx(0.055)


@given(st.sampled_from(["divide", "steps", "linear", "cosine"]), st.floats(0.5, 20.0))
@settings(max_examples=40, deadline=None)
def test_a_warm_up_grows_to_the_full_rate_and_never_beyond(schedule: str, epochs: float) -> None:
    config = make_config({"lr": 0.3, "lr_schedule": schedule, "lr_warmup_epochs": epochs, "lr_milestones": "25"})
    places = [part * epochs / 10 for part in range(10)]
    rates = [learning_rate(config, int(place), place % 1, 40.0) for place in places]
    assert rates == sorted(rates)
    assert 0.0 < rates[0] < rates[-1] < 0.3


@given(st.floats(1e-4, 1.0), st.integers(0, 300), st.integers(1, 500))
@settings(max_examples=100, deadline=None)
def test_a_ramp_falls_from_a_quarter_to_the_density(density: float, first: int, num_steps: int) -> None:
    at = density_ramp(density, first, num_steps)
    values = [at(step) for step in range(first, first + num_steps + 3)]
    assert values == sorted(values, reverse=True)
    assert max(values) <= max(density, 0.25)
    assert values[num_steps - 1] == pytest.approx(density)
    assert values[-1] == pytest.approx(density)
    assert all(density <= value <= 1.0 for value in values)


# --- buckets that stay dense


def test_a_dense_bucket_is_averaged_whole_in_the_sparse_phase() -> None:
    n = 5000

    def rank(comm: object) -> tuple[str, torch.Tensor, int]:
        allreducer = AllReducer("oktopk", comm=comm, density=0.01, warmup_steps=0)  # pyright: ignore
        mine = torch.randn(n, generator=torch.Generator().manual_seed(comm.rank))  # pyright: ignore
        bucket = Bucket(mine.clone(), Layout.of([("bias", n)]), dense=True)
        stats = allreducer.reduce(bucket)
        allreducer.end_step()
        return stats.phase, bucket.flat, stats.communication_size

    found = simulate(3, rank)
    expected = sum(torch.randn(n, generator=torch.Generator().manual_seed(r)) for r in range(3)) / 3
    for phase, gradient, size in found:
        assert phase == "dense"
        torch.testing.assert_close(gradient, expected)
        assert size == 4 * n


# --- settings of tasks


@pytest.mark.parametrize("name", sorted(TASKS))
def test_every_task_has_a_preset_that_is_valid(name: str) -> None:
    config = load_config(name, {})
    assert config.task == name
    assert isinstance(config.task_settings, TASKS[name].settings)


def test_every_preset_is_valid_and_flat_again() -> None:
    for name in preset_names():
        config = load_config(name, {})
        flat = config.as_dict()
        assert "task_settings" not in flat
        assert make_config(flat) == config


def test_a_setting_of_another_task_is_refused_and_its_owners_named() -> None:
    with pytest.raises(ConfigError, match=r"unknown setting conv_channels=8; it belongs to lstman4, not to vgg16"):
        make_config({"task": "vgg16", "conv_channels": 8})
    with pytest.raises(ConfigError, match="unknown setting nothing=8"):
        make_config({"nothing": 8})


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"task": "chess"}, "task='chess': unknown; known: lstman4"),
        ({"hidden_size": 0}, "hidden_size=0: must be at least 1"),
        ({"lr_schedule": "sine"}, "lr_schedule='sine': must be one of divide, steps, linear, cosine"),
        ({"lr_milestones": "81;122"}, "lr_milestones='81;122': must be epochs with commas"),
        ({"optimizer": "lion"}, "optimizer='lion': must be one of sgd, adamw"),
        ({"momentum": 1.0}, "momentum=1.0: must be below 1"),
        ({"density_ramp_steps": -1}, "density_ramp_steps=-1: must be at least 0"),
        ({"lr_warmup_epochs": math.inf}, "lr_warmup_epochs=inf: must be at least 0"),
    ],
)
def test_what_cannot_be_is_said_in_one_line(values: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make_config(values)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_default_config_is_the_speech_task() -> None:
    assert TrainConfig().task_settings == TASKS["lstman4"].settings()
