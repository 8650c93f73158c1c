"""One description is all that a reducer needs: settings, simulation, models and commands follow it."""

from __future__ import annotations

import json
from dataclasses import FrozenInstanceError, replace
from pathlib import Path

import pytest

from oktopk import registry
from oktopk.allreducer import AllReducer
from oktopk.comm.simulator import SimulatedCommunicator, World
from oktopk.reduce.description import Bound, ReducerDescription, lower_bound
from oktopk.reduce.topk_allgather import topk_a
from oktopk.reduce.volume import SteadyStep, Volume, gather
from oktopk.reduce.work import Amount, Work
from oktopk.registry import by_name, describe, find, reducer_names
from oktopk.workbench.plan.model import Cost, Link, Machine, predict
from oktopk.workbench.simulate.command import main as simulate_command
from oktopk.workbench.simulate.rows import model_row, moved_row, traits_of
from oktopk.workbench.simulate.run import Course, simulate_run
from oktopk.workbench.simulate.sources import SyntheticSource
from oktopk.workbench.simulate.volume import volume
from oktopk.workbench.train.config import TrainConfig

N, K = 20_000, 200


def _volume(step: SteadyStep) -> Volume:
    return Volume(step.union, tuple(gather(step, step.chosen, step.n)))


def _work(step: SteadyStep) -> Work:
    return Work(encoded=Amount(1.0, step.k), decoded=Amount(step.num_peers, step.k * step.num_peers))


MINE = ReducerDescription(
    name="mine",
    aliases=("my-own",),
    factory=topk_a,
    bound=Bound("2k(P-1)", lambda _, k, num_ranks: 2 * k * (num_ranks - 1)),
    volume=_volume,
    work=_work,
    applies_union=True,
)


@pytest.fixture
def _listed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if MINE stood in the registry's list."""
    monkeypatch.setattr(registry, "REDUCERS", by_name((*registry.REDUCERS.values(), MINE)))


@pytest.mark.usefixtures("_listed")
@pytest.mark.parametrize("name", ["mine", "my-own"])
def test_it_is_found_by_its_name_and_its_alias(name: str) -> None:
    assert describe(name) is find(name) is MINE
    assert name in reducer_names()
    assert AllReducer(name, comm=SimulatedCommunicator(World(1), 0)).reducer == "mine"
    assert TrainConfig(reducer=name).reducer == name


@pytest.mark.usefixtures("_listed")
def test_it_is_simulated_and_its_model_agrees() -> None:
    source, course = SyntheticSource(N, 3), Course(density=K / N, num_warmup=2, num_steps=1)
    runs = [simulate_run("mine", size, source, course) for size in (2, 4)]
    traits = traits_of(runs)
    assert traits.common > 0
    for run in runs:
        moved, model = moved_row(run), model_row("mine", run.num_ranks, run.n, run.k, traits)
        assert moved["formula_elements"] == model["formula_elements"] == 2 * K * (run.num_ranks - 1)
        assert moved["within"]
        assert model["mean_bytes"] == pytest.approx(moved["mean_bytes"], rel=0.15)
        assert model["mean_messages"] == pytest.approx(moved["mean_messages"], rel=0.05)


@pytest.mark.usefixtures("_listed")
def test_the_models_ask_its_description() -> None:
    assert volume("my-own", N, K, 8, 0.5) == volume("topkA", N, K, 8, 0.5)
    link = Link.of_figures(1e9, 1e-4, 1e-5)
    machine = Machine(Cost(0.0, 0.0), 0.0, Cost(1.0, 0.0), Cost(10.0, 0.0), Cost(100.0, 0.0))
    assert predict("mine", N, K / N, 8, link, machine, 0.5).compute_s == 1.0 + 7 * 10.0
    assert predict("mine", N, K / N, 1, link, machine, 0.5).compute_s == 0.0


@pytest.mark.usefixtures("_listed")
def test_the_simulate_command_takes_it(tmp_path: Path) -> None:
    small = ["--size", "20k", "--steps", "1", "--warmup-steps", "1", "--jobs", "1", "--ranks", "2", "4"]
    assert simulate_command([*small, "--reducers", "my-own", "--out", str(tmp_path)]) == 0
    rows = json.loads((tmp_path / "simulate.json").read_text())["rows"]
    assert [(row["reducer"], row["formula"]) for row in rows] == [("mine", "2k(P-1)")] * 2
    assert (tmp_path / "volume.png").exists()


def test_without_its_line_it_is_unknown() -> None:
    assert find("mine") is None
    for ask in (describe, lambda name: volume(name, N, K, 4, 0.5)):
        with pytest.raises(ValueError, match="unknown reducer 'mine'; known: dense, topkA, "):
            ask("mine")


@pytest.mark.parametrize(
    ("second", "twice"),
    [
        (MINE, "mine"),
        (replace(MINE, name="other"), "my-own"),
        (replace(MINE, name="my-own", aliases=()), "my-own"),
        (replace(MINE, name="other", aliases=("mine",)), "mine"),
        (replace(MINE, name="other", aliases=("other",)), "other"),
    ],
)
def test_no_name_is_given_twice(second: ReducerDescription, twice: str) -> None:
    with pytest.raises(ValueError, match=f"reducer '{twice}' is described twice"):
        by_name((MINE, second))


def test_a_description_cannot_be_changed() -> None:
    with pytest.raises(FrozenInstanceError):
        MINE.name = "other"  # type: ignore[misc]


@pytest.mark.parametrize("description", registry.REDUCERS.values(), ids=lambda each: each.name)
def test_bounds_lie_between_the_lower_bound_and_each_other(description: ReducerDescription) -> None:
    for num_ranks in (2, 3, 64):
        most = description.bound.elements(N, K, num_ranks)
        least = description.bound.least(N, K, num_ranks) if description.bound.least else most
        assert lower_bound(K, num_ranks) <= least <= most
