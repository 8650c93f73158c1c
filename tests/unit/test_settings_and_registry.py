"""A user's mistake is a ValueError that names the key, the value and what would be right."""

from __future__ import annotations

import sys
from dataclasses import FrozenInstanceError, fields
from typing import Any

import pytest
import torch

from oktopk.allreducer import AllReducer
from oktopk.bucket import Bucket, Layout
from oktopk.comm.simulator import SimulatedCommunicator, World
from oktopk.kernels.by_device import KERNELS
from oktopk.kernels.numba_ops import NumbaKernels
from oktopk.kernels.torch_ops import TorchKernels
from oktopk.reduce.base import ReducerSettings
from oktopk.reduce.exchange import Exchange
from oktopk.registry import REDUCERS, describe, make_communicator, make_kernels, reducer_names
from oktopk.select.base import Accumulated
from oktopk.select.bucket_selector import BucketSelector
from oktopk.settings import WIRE_DTYPES, Settings, settings_from
from oktopk.wire import ValueEncoding

NAN, INF = float("nan"), float("inf")
CPU = torch.device("cpu")
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
    "wire_dtype": ["", "FP32", "fp16", "float32", "bfloat16", None, 0, 1, ["bf16"]],
    "dense_dtype": ["", "INT8", "int4", "float32", None, 0, 8, ["int8"]],
    "thresholds": ["", "Exact", "reused", None, True, 0, ["exact"]],
    "kernels": ["", "Torch", "cuda", None, 3, ["torch"]],
    "timeout_s": [0, 0.0, -1, NAN, INF, "300", None, [300]],
}
BAD = [(key, value) for key, values in BAD_VALUES.items() for value in values]


def one_rank() -> SimulatedCommunicator:
    return SimulatedCommunicator(World(1), 0)


def plain_settings(**further: Any) -> ReducerSettings:
    selector = BucketSelector(make_kernels("torch"), CPU, CPU)
    return ReducerSettings(selector=selector, exchange=Exchange(TorchKernels()), **further)


# --- values


def test_every_setting_has_its_bad_values_here() -> None:
    assert {item.name for item in fields(Settings)} == set(BAD_VALUES)


@pytest.mark.parametrize(("key", "value"), BAD, ids=[f"{key}={value!r}" for key, value in BAD])
def test_a_bad_value_is_refused_with_its_key_and_itself(key: str, value: Any) -> None:
    with pytest.raises(ValueError, match=key) as caught:
        settings_from(None, {key: value})
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
        {"wire_dtype": "fp32"},
        {"wire_dtype": "bf16"},
        {"thresholds": "exact"},
        {"thresholds": "reuse"},
    ],
    ids=str,
)
def test_values_at_the_edge_are_taken_as_they_are(good: dict[str, Any]) -> None:
    taken = settings_from(None, good)
    assert {key: getattr(taken, key) for key in good} == good


def test_values_travel_in_fp32_and_thresholds_are_exact_unless_told_otherwise() -> None:
    settings = Settings()
    assert (settings.wire_dtype, settings.thresholds, settings.kernels) == ("fp32", "exact", "auto")
    assert WIRE_DTYPES == {"fp32": ValueEncoding.FP32, "bf16": ValueEncoding.BF16}


@pytest.mark.parametrize(("key", "choices"), [("wire_dtype", ("fp32", "bf16")), ("thresholds", ("exact", "reuse"))])
def test_a_wrong_choice_is_refused_with_the_right_ones(key: str, choices: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match=f"{key}='neither'") as caught:
        AllReducer("oktopk", comm=one_rank(), **{key: "neither"})
    assert all(repr(choice) in str(caught.value) for choice in choices)


def test_settings_reach_the_reducer() -> None:
    """Through AllReducer: how values travel, which thresholds, which kernels, and for how many steps they are kept."""
    seen: list[ReducerSettings] = []

    def watched(settings: ReducerSettings) -> Any:
        seen.append(settings)
        return describe("oktopk").factory(settings)

    given = {"wire_dtype": "bf16", "thresholds": "reuse", "kernels": "torch", "tau": 5, "tau_prime": 7}
    allreducer = AllReducer(watched, comm=one_rank(), warmup_steps=0, min_sparse_numel=0, **given)
    allreducer.reduce(Bucket(torch.tensor([1.0, 2.0, 1.0 + 2.0**-8]), Layout.of([("a", 3)])))
    assert [(s.thresholds, s.tau, s.tau_prime, s.exchange.values) for s in seen] == [
        ("reuse", 5, 7, ValueEncoding.BF16)
    ]
    assert isinstance(seen[0].exchange.kernels, TorchKernels)


def test_what_is_sent_is_what_the_wire_carries_and_the_rest_stays_owed() -> None:
    for wire_dtype, applied, owed in (("fp32", 1.0 + 2.0**-9, 0.0), ("bf16", 1.0, 2.0**-9)):
        allreducer = AllReducer("topkA", comm=one_rank(), warmup_steps=0, min_sparse_numel=0, wire_dtype=wire_dtype)
        bucket = Bucket(torch.tensor([1.0 + 2.0**-9]), Layout.of([("a", 1)]))
        allreducer.reduce(bucket)
        allreducer.end_step()
        assert bucket.flat.tolist() == [applied]
        assert allreducer.state_dict()["feedback"]["residual"]["a"].tolist() == [owed]


@pytest.mark.parametrize("thresholds", ["exact", "reuse"])
def test_oktopk_remembers_when_it_last_found_a_threshold_only_where_it_is_reused(thresholds: Any) -> None:
    reducer = describe("oktopk").factory(plain_settings(thresholds=thresholds))
    for _ in range(3):
        reducer.reduce(Accumulated(torch.tensor([4.0, 0.0, -3.0, 0.5])), one_rank(), 2)
    state = reducer.state_dict()
    for part in ("choice", "cut"):
        assert state[part].get("steps") == (3 if thresholds == "reuse" else None)


def test_unknown_settings_are_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"unknown setting densty=0\.1") as caught:
        settings_from(None, {"tau": 3, "densty": 0.1})
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
        plain_settings(**{key: bad})
    assert repr(bad) in str(caught.value)


# --- names


def test_the_known_reducers_are_those_of_the_design() -> None:
    assert sorted(REDUCERS) == sorted(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_every_reducer_is_made_by_its_name_and_reduces_on_one_rank(name: str) -> None:
    assert describe(name).name == name
    reducer = describe(name).factory(plain_settings())
    acc = torch.tensor([4.0, 0.0, -3.0, 0.5])
    reduction = reducer.reduce(Accumulated(acc.clone()), one_rank(), 4)
    mean = reduction.mean if isinstance(reduction.mean, torch.Tensor) else reduction.mean.to_dense()
    assert mean.tolist() == acc.tolist()


@pytest.mark.parametrize(("alias", "name"), [("none", "dense"), ("topkSA", "topkDSA")])
def test_aliases_are_other_names_for_the_same(alias: str, name: str) -> None:
    assert alias in reducer_names()
    assert describe(alias) is describe(name) is REDUCERS[name]
    assert AllReducer(alias, comm=one_rank()).reducer == name


@pytest.mark.parametrize("unknown", ["", "topk", "OKTOPK", "oktopk "])
def test_an_unknown_reducer_is_refused_with_the_known_ones(unknown: str) -> None:
    for ask in (describe, lambda name: AllReducer(name, comm=one_rank())):
        with pytest.raises(ValueError, match="unknown reducer") as caught:
            ask(unknown)
        assert repr(unknown) in str(caught.value)
        listed = str(caught.value).split("known: ")[-1].split(", ")
        assert set(listed) == {*NAMES, "none", "topkSA"}


def test_the_known_kernels_are_those_of_the_settings() -> None:
    assert list(KERNELS) == ["auto", "torch", "numba", "triton"]


def test_kernels_are_made_by_their_name_for_each_device() -> None:
    for name, kind in (
        ("auto", NumbaKernels),
        ("numba", NumbaKernels),
        ("torch", TorchKernels),
        ("triton", TorchKernels),
    ):
        kernels = make_kernels(name)
        assert type(kernels.on(CPU)) is kind
        assert kernels.on(CPU) is kernels.on(CPU)


@pytest.mark.parametrize("name", list(KERNELS))
def test_every_name_selects_on_a_cpu(name: str) -> None:
    """Kernels for another device leave it to plain torch."""
    best = BucketSelector(make_kernels(name), CPU, CPU).top_k(Accumulated(torch.tensor([1.0, -3.0, 0.0, 2.0])), 2)
    assert best.indices.tolist() == [1, 3]


def test_only_those_who_ask_for_numba_by_name_must_have_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "oktopk.kernels.numba_ops", None)
    acc = torch.tensor([1.0, -3.0])
    for name in ("auto", "torch", "triton"):
        assert make_kernels(name).on(CPU).kth_magnitude(acc, 1) == 3.0
    with pytest.raises(ImportError):
        make_kernels("numba").on(CPU)


def test_unknown_kernels_are_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="unknown kernels 'cuda'; known: auto, torch, numba, triton"):
        make_kernels("cuda")


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
