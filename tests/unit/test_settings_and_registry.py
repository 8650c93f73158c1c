"""A user's mistake is a ValueError that names the key, the value and what would be right."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, fields
from typing import Any

import pytest
import torch

from oktopk.allreducer import AllReducer
from oktopk.comm.simulator import SimulatedCommunicator, World
from oktopk.reduce.base import ReducerSettings
from oktopk.registry import (
    ALIASES,
    REDUCERS,
    SELECTORS,
    canonical_name,
    make_communicator,
    make_selector,
    reducer_factory,
)
from oktopk.select.torch_ops import TorchSelector
from oktopk.settings import Settings

NAN, INF = float("nan"), float("inf")
NAMES = (
    *("dense", "topkA", "topkA2", "topkAopt", "topkDSA", "gtopk", "gaussiank", "gaussiankconcat", "gaussiankSA"),
    "oktopk",
)

BAD_VALUES: dict[str, list[Any]] = {
    "density": [0, 0.0, -0.1, 1.0000001, 2, NAN, INF, -INF, "0.1", None, [0.1], 0.1j],
    "warmup_steps": [-1, 1.0, 128.5, NAN, INF, "128", None, True, [1]],
    "min_sparse_numel": [-1, 1024.0, NAN, "1024", None, True],
    "guard_every": [-1, 1.5, "1", None, False],
    "tau": [0, -64, 64.0, NAN, "64", None, True],
    "tau_prime": [0, -32, 32.0, NAN, "32", None, True],
    "nonfinite": ["", "Raise", "ignore", None, True, 0, ["skip"]],
    "momentum_correction": [-0.1, 1.0, 1, 2.5, NAN, INF, "0.9", None, [0.9]],
    "timeout_s": [0, 0.0, -1, NAN, INF, "300", None, [300]],
}
BAD = [(key, value) for key, values in BAD_VALUES.items() for value in values]


def one_rank() -> SimulatedCommunicator:
    return SimulatedCommunicator(World(1), 0)


# --- values


def test_every_setting_has_its_bad_values_here() -> None:
    assert {item.name for item in fields(Settings)} - {"selector"} == set(BAD_VALUES)


@pytest.mark.parametrize(("key", "value"), BAD, ids=[f"{key}={value!r}" for key, value in BAD])
def test_a_bad_value_is_refused_with_its_key_and_itself(key: str, value: Any) -> None:
    with pytest.raises(ValueError, match=key) as caught:
        Settings.of({key: value})
    assert repr(value) in str(caught.value)


@pytest.mark.parametrize(
    "good",
    [
        {"density": 1},
        {"density": 1.0},
        {"density": 1e-9},
        {"warmup_steps": 0},
        {"min_sparse_numel": 0},
        {"guard_every": 1},
        {"tau": 1, "tau_prime": 1},
        {"nonfinite": "raise"},
        {"nonfinite": "skip"},
        {"momentum_correction": 0},
        {"momentum_correction": 0.999},
        {"timeout_s": 1},
        {"timeout_s": 0.5},
    ],
    ids=str,
)
def test_values_at_the_edge_are_taken_as_they_are(good: dict[str, Any]) -> None:
    taken = Settings.of(good)
    assert {key: getattr(taken, key) for key in good} == good


def test_unknown_settings_are_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"unknown setting densty=0\.1") as caught:
        Settings.of({"tau": 3, "densty": 0.1})
    for item in fields(Settings):
        assert item.name in str(caught.value)


def test_an_allreducer_refuses_what_its_settings_refuse() -> None:
    with pytest.raises(ValueError, match="tau=0"):
        AllReducer("oktopk", comm=one_rank(), tau=0)
    with pytest.raises(ValueError, match="unknown setting foo='bar'; known: density"):
        AllReducer("oktopk", comm=one_rank(), foo="bar")


def test_settings_cannot_be_changed_afterwards() -> None:
    settings = Settings()
    with pytest.raises(FrozenInstanceError):
        settings.tau = 0  # type: ignore[misc]


@pytest.mark.parametrize("bad", [0.0, -0.5, 1.5, NAN, "0.1", None], ids=repr)
def test_a_schedule_that_gives_a_bad_density_is_named_with_its_step(bad: Any) -> None:
    settings = Settings(density=lambda step: bad if step == 7 else 0.5)
    assert settings.density_at(6) == 0.5
    for ask in (lambda: settings.density_at(7), lambda: settings.k_at(7, 100)):
        with pytest.raises(ValueError, match=r"density=.* at step 7") as caught:
            ask()
        assert repr(bad) in str(caught.value)


def test_a_schedule_is_asked_for_every_step() -> None:
    settings = Settings(density=lambda step: 1.0 / (step + 1))
    assert [settings.density_at(step) for step in (0, 1, 3)] == [1.0, 0.5, 0.25]
    assert [settings.k_at(step, 100) for step in (0, 1, 3)] == [100, 50, 25]


@pytest.mark.parametrize(
    ("density", "n", "k"), [(0.01, 1000, 10), (0.01, 10, 1), (0.02, 130, 3), (1.0, 7, 7), (1, 7, 7), (1e-9, 5, 1)]
)
def test_k_is_the_rounded_part_of_n_and_at_least_one(density: float, n: int, k: int) -> None:
    assert Settings(density=density).k_at(0, n) == k


@pytest.mark.parametrize("key", ["tau", "tau_prime"])
@pytest.mark.parametrize("bad", [0, -1, 1.5, "64", None], ids=repr)
def test_reducer_settings_refuse_bad_periods(key: str, bad: Any) -> None:
    with pytest.raises(ValueError, match=f"{key}=") as caught:
        ReducerSettings(selector=TorchSelector(), **{key: bad})
    assert repr(bad) in str(caught.value)


# --- names


def test_the_known_compressors_are_those_of_the_design() -> None:
    assert sorted(REDUCERS) == sorted(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_every_compressor_is_made_by_its_name_and_reduces_on_one_rank(name: str) -> None:
    assert canonical_name(name) == name
    reducer = reducer_factory(name)(ReducerSettings(selector=TorchSelector()))
    acc = torch.tensor([4.0, 0.0, -3.0, 0.5])
    reduction = reducer.reduce(acc.clone(), one_rank(), 4)
    mean = reduction.mean if isinstance(reduction.mean, torch.Tensor) else reduction.mean.to_dense()
    assert mean.tolist() == acc.tolist()


@pytest.mark.parametrize(("alias", "name"), [("none", "dense"), ("topkSA", "topkDSA")])
def test_aliases_are_other_names_for_the_same(alias: str, name: str) -> None:
    assert ALIASES[alias] == name
    assert canonical_name(alias) == name
    assert reducer_factory(alias) is reducer_factory(name)
    assert AllReducer(alias, comm=one_rank()).compressor == name


@pytest.mark.parametrize("unknown", ["", "topk", "OKTOPK", "oktopk "])
def test_an_unknown_compressor_is_refused_with_the_known_ones(unknown: str) -> None:
    for ask in (canonical_name, reducer_factory, lambda name: AllReducer(name, comm=one_rank())):
        with pytest.raises(ValueError, match="unknown compressor") as caught:
            ask(unknown)
        assert repr(unknown) in str(caught.value)
        listed = str(caught.value).split("known: ")[-1].split(", ")
        assert set(listed) == {*NAMES, "none", "topkSA"}


def test_a_selector_is_made_by_its_name() -> None:
    assert isinstance(make_selector("torch"), TorchSelector)


@pytest.mark.parametrize("unknown", ["", "Torch", "cuda", None, 3], ids=repr)
def test_an_unknown_selector_is_refused_with_the_known_ones(unknown: Any) -> None:
    for ask in (make_selector, lambda name: AllReducer("oktopk", comm=one_rank(), selector=name)):
        with pytest.raises(ValueError, match="unknown selector") as caught:
            ask(unknown)
        assert repr(unknown) in str(caught.value)
        assert set(str(caught.value).split("known: ")[-1].split(", ")) == set(SELECTORS)


@pytest.mark.parametrize("unknown", ["", "MPI", "nccl", "gloo"])
def test_an_unknown_comm_is_refused_with_the_known_ones(unknown: str) -> None:
    for ask in (lambda name: make_communicator(name, 1.0), lambda name: AllReducer("oktopk", comm=name)):
        with pytest.raises(ValueError, match="unknown comm") as caught:
            ask(unknown)
        assert repr(unknown) in str(caught.value)
        assert set(str(caught.value).split("known: ")[-1].split(", ")) == {"auto", "torch", "mpi"}


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """No launcher left its marks in the environment."""
    for key in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "WORLD_SIZE"):
        monkeypatch.delenv(key, raising=False)
    return monkeypatch


@pytest.mark.usefixtures("alone")
def test_auto_is_one_rank_where_nothing_was_launched() -> None:
    comm = make_communicator("auto", 1.0)
    assert (comm.rank, comm.size) == (0, 1)


def test_auto_says_what_to_do_where_a_launcher_was_used_but_not_torch_distributed(alone: pytest.MonkeyPatch) -> None:
    alone.setenv("WORLD_SIZE", "4")
    with pytest.raises(ValueError, match=r"WORLD_SIZE=4.*init_process_group"):
        make_communicator("auto", 1.0)
