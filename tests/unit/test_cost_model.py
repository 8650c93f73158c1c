"""The cost model: laws that any such model must keep, what is advised and in which words, and what it is fed with."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable
from dataclasses import asdict, astuple, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from oktopk.comm import simulate
from oktopk.comm.base import Communicator
from oktopk.workbench.console.words import UsageError
from oktopk.workbench.plan import calibrate as calibrating
from oktopk.workbench.plan.advise import Answer, Question, advise, describe, duration, equal_buckets, table_rows
from oktopk.workbench.plan.calibrate import Calibration, calibrate
from oktopk.workbench.plan.check import Check, checked
from oktopk.workbench.plan.model import _SMALL_SHARE, Compute, Cost, Link, Machine, Prediction, predict, step_seconds
from oktopk.workbench.plan.run_facts import read_run
from oktopk.workbench.plan.scaling import Grid, crossover, scale
from oktopk.workbench.plan.stored import read_calibration, write_calibration
from tests.runs import Recipe, write_run

CPU = torch.device("cpu")
MACHINE = Machine(
    step=Cost(1.2e-3, 1.2e-9),
    chosen_s=9e-8,
    encode=Cost(1.5e-4, 4e-9),
    decode=Cost(1e-4, 4e-9),
    sum=Cost(2e-5, 2e-9),
)
LINK = Link(latency_s=3e-4, per_message_s=6e-5, seconds_per_byte=8.8e-9, dense_byte_s=8.1e-9)
SPARSE = ("oktopk", "topkA", "topkDSA", "gtopk", "gaussiank", "gaussiankSA")
ALL = ("dense", *SPARSE)
IN_LIBRARY = 20_000
"""Elements beyond which an all_reduce is always the library's: smaller ones go another way, which costs more bytes."""
BIT = 1.0 + 1e-9
"""Sums in another order."""

reducers = st.sampled_from(ALL)
ranks = st.integers(2, 300)
sizes = st.integers(IN_LIBRARY, 30_000_000)
densities = st.sampled_from([0.001, 0.01, 0.02, 0.1, 1.0])
commons = st.floats(0.0, 1.0)
links = st.builds(
    Link,
    latency_s=st.floats(1e-6, 1e-2),
    per_message_s=st.floats(1e-7, 1e-3),
    seconds_per_byte=st.floats(1e-11, 1e-6),
    dense_byte_s=st.floats(1e-11, 1e-6),
    burst_bytes=st.sampled_from([0.0, 1e4, 1e6]),
)
costs = st.builds(Cost, st.floats(0.0, 1e-2), st.floats(0.0, 1e-7))
machines = st.builds(Machine, step=costs, chosen_s=st.floats(0.0, 1e-6), encode=costs, decode=costs, sum=costs)
stretches = st.floats(1.0, 100.0)


def of_figures(bits_per_s: float, latency_s: float) -> Link:
    return Link.of_figures(bits_per_s, latency_s, 20e-6)


# --- one allreduce


@given(reducers, sizes, densities, ranks, links, machines, commons)
@settings(max_examples=100, deadline=None)
def test_predictions_are_times_and_grow_with_the_gradient(
    reducer: str, n: int, density: float, num_ranks: int, link: Link, machine: Machine, common: float
) -> None:
    """But where the model takes shares to be even by themselves no longer: an exchange to even them falls away."""
    evened = [round(density * each) < _SMALL_SHARE * num_ranks for each in (n, 2 * n)]
    assume(evened[0] == evened[1])
    small, large = (predict(reducer, each, density, num_ranks, link, machine, common) for each in (n, 2 * n))
    for seconds in (small.compute_s, small.exchange_s, large.compute_s, large.exchange_s):
        assert 0.0 <= seconds < math.inf
    assert small.total_s == small.compute_s + small.exchange_s
    assert small.compute_s <= large.compute_s * BIT
    assert small.total_s <= large.total_s * BIT


@given(
    reducer=reducers,
    n=st.integers(1, 10_000_000),
    density=densities,
    num_ranks=ranks,
    link=links,
    machine=machines,
    common=commons,
    figure=st.sampled_from(["latency_s", "per_message_s", "seconds_per_byte", "dense_byte_s"]),
    times=stretches,
)
@settings(max_examples=150, deadline=None)
def test_a_faster_link_never_makes_a_prediction_slower(
    reducer: str,
    n: int,
    density: float,
    num_ranks: int,
    link: Link,
    machine: Machine,
    common: float,
    figure: str,
    times: float,
) -> None:
    slower = replace(link, **{figure: times * getattr(link, figure)})
    burst = replace(link, burst_bytes=times * link.burst_bytes)
    now, later, earlier = (
        predict(reducer, n, density, num_ranks, each, machine, common).total_s for each in (link, slower, burst)
    )
    assert now <= later * BIT
    assert earlier <= now * BIT


@given(reducers, sizes, densities, ranks, links, machines, commons, stretches)
@settings(max_examples=80, deadline=None)
def test_slower_kernels_never_help_and_are_nothing_to_dense(
    reducer: str,
    n: int,
    density: float,
    num_ranks: int,
    link: Link,
    machine: Machine,
    common: float,
    times: float,
) -> None:
    def slow(cost: Cost) -> Cost:
        return Cost(times * cost.call_s, times * cost.item_s)

    parts = {name: slow(getattr(machine, name)) for name in ("step", "encode", "decode", "sum")}
    slower = Machine(**parts, chosen_s=times * machine.chosen_s)
    before, after = (predict(reducer, n, density, num_ranks, link, each, common) for each in (machine, slower))
    if reducer == "dense":
        assert before == after
        assert before.compute_s == 0.0
    else:
        assert before.compute_s <= after.compute_s * BIT
        assert before.total_s <= after.total_s * BIT


@given(reducers, st.integers(1, 1_000_000), densities, links, machines, commons)
@settings(max_examples=40, deadline=None)
def test_one_rank_exchanges_nothing(
    reducer: str, n: int, density: float, link: Link, machine: Machine, common: float
) -> None:
    nothing = Link(0.0, 0.0, 0.0, 0.0)
    for each in (link, nothing):  # the latter is what a lone rank measures
        assert predict(reducer, n, density, 1, each, machine, common).exchange_s == 0.0


@given(ranks, sizes)
@settings(max_examples=40, deadline=None)
def test_dense_counts_the_librarys_bytes_and_hops(num_ranks: int, n: int) -> None:
    found = predict("dense", n, 0.01, num_ranks, LINK, MACHINE, 0.7).total_s
    hops = 2 * math.ceil(math.log2(num_ranks))
    ring = 2 * 4 * n * (num_ranks - 1) / num_ranks
    assert found == pytest.approx(hops * LINK.latency_s + ring * LINK.dense_byte_s, rel=1e-4)


def test_figures_of_a_link() -> None:
    link = Link.of_figures(1e9, 5e-6, 2e-5)
    assert astuple(link) == (5e-6, 2e-5, 8e-9, 8e-9, 0.0)
    assert Link.of_figures(1e9, 5e-6, 2e-5, dense_byte_s=1e-8).dense_byte_s == 1e-8
    assert Link.of_figures(1e9, 5e-6, 2e-5, dense_byte_s=1e-12).dense_byte_s == 8e-9
    assert Prediction(0.25, 0.5).times(2.0) == Prediction(0.5, 1.0)


# --- a whole step

predictions = st.lists(st.builds(Prediction, st.floats(0.0, 1.0), st.floats(0.0, 1.0)), max_size=8)
computes = st.builds(Compute, st.floats(0.0, 2.0), st.floats(0.0, 2.0), st.booleans(), st.booleans())


@given(predictions, computes)
@settings(max_examples=200, deadline=None)
def test_overlap_hides_no_more_than_there_is_and_costs_nothing(buckets: list[Prediction], compute: Compute) -> None:
    alone = compute.forward_s + compute.backward_s
    allreduce = sum(bucket.total_s for bucket in buckets)
    step_s = step_seconds(buckets, compute)
    assert alone <= step_s * BIT
    assert step_s <= (alone + allreduce) * BIT
    assert compute.forward_s + allreduce <= step_s * BIT  # the reductions themselves take their time
    hidden, plain = (step_seconds(buckets, replace(compute, hidden=each)) for each in (True, False))
    assert hidden <= plain * BIT
    assert plain == pytest.approx(alone + allreduce)
    own, shared = (step_seconds(buckets, replace(compute, shared=each)) for each in (False, True))
    assert own <= shared * BIT


def test_what_shares_the_cores_is_not_hidden() -> None:
    bucket = [Prediction(0.5, 0.25)] * 2
    assert step_seconds(bucket, Compute(1.0, 10.0, shared=False)) == 11.0 + 0.75
    assert step_seconds(bucket, Compute(1.0, 10.0, shared=True)) == 11.0 + 0.25 + 1.0
    assert step_seconds([], Compute(1.0, 2.0)) == 3.0


# --- advice


def question(n: int, link: Link, num_ranks: int = 8, **more: Any) -> Question:
    buckets = equal_buckets(n, 25.0)
    return Question(bucket_sizes=buckets, num_ranks=num_ranks, link=link, machine=MACHINE, **more)


def test_fast_links_and_small_gradients_stay_dense() -> None:
    answer = advise(question(1_000_000, of_figures(100e9, 5e-6)))
    assert not answer.compresses
    assert answer.choice is answer.dense
    assert answer.speedup < 1.0
    (line,) = answer.lines()
    cost = 100 * (answer.best.step_s / answer.dense.step_s - 1)
    assert line.startswith(f"stay dense: compression would cost you {cost:.0f} %")
    assert str(answer.best) in line


def test_slow_links_and_large_gradients_compress() -> None:
    answer = advise(question(27_600_000, of_figures(1e9, 1e-4)))
    assert answer.compresses
    assert answer.choice.reducer == "oktopk"
    assert answer.speedup > 5.0
    (line,) = answer.lines()
    assert line.startswith(f"use oktopk at density {answer.choice.density:g}: a step of about ")
    assert duration(answer.choice.step_s) in line
    assert f"instead of {duration(answer.dense.step_s)} dense" in line


def test_what_might_help_is_too_little_to_be_sure_of() -> None:
    first = advise(question(5_000_000, LINK))
    close = replace(first.question, dense_factor=1.2 * first.best.step_s / first.dense.step_s)
    answer = advise(close)
    assert answer.speedup == pytest.approx(1.2)
    assert not answer.compresses
    (line,) = answer.lines()
    assert line.startswith(f"stay dense: {answer.best} might be 1.20 times as fast")
    assert "too little to be sure of; only training both ways will tell" in line
    sure = advise(replace(close, uncertainty=0.05))
    assert sure.compresses
    assert sure.lines()[0].startswith(f"use {answer.best}: ")


@given(
    n=st.integers(1, 30_000_000),
    num_ranks=st.integers(1, 300),
    link=links,
    machine=machines,
    compute=computes,
    uncertainty=st.floats(0.0, 2.0),
    dense_factor=st.floats(0.01, 100.0),
    sparse_factor=st.floats(0.01, 100.0),
)
@settings(max_examples=150, deadline=None)
def test_no_advice_is_given_that_could_make_it_slower(
    n: int,
    num_ranks: int,
    link: Link,
    machine: Machine,
    compute: Compute,
    uncertainty: float,
    dense_factor: float,
    sparse_factor: float,
) -> None:
    asked = Question(
        bucket_sizes=equal_buckets(n, 25.0),
        num_ranks=num_ranks,
        link=link,
        machine=machine,
        compute=compute,
        uncertainty=uncertainty,
        dense_factor=dense_factor,
        sparse_factor=sparse_factor,
    )
    answer = advise(asked)
    assert len(answer.considered) == len(asked.reducers) * len(asked.densities)
    assert answer.best in answer.considered
    for choice in (answer.dense, *answer.considered):
        assert choice.fast_s <= choice.step_s * BIT
        assert choice.step_s <= choice.slow_s * BIT
    if answer.compresses:
        assert answer.choice is answer.best
        assert answer.best.slow_s < answer.dense.step_s
        assert num_ranks > 1
    else:
        assert answer.choice is answer.dense
        less_sure = advise(replace(asked, uncertainty=2 * uncertainty))
        assert not less_sure.compresses
    assert all(
        answer.best.density >= choice.density for choice in answer.considered if choice.step_s <= answer.best.step_s
    )
    if answer.dense.step_s:
        (line,) = answer.lines()
        assert line.startswith("use " if answer.compresses else "stay dense: ")
        assert "nan" not in line
        assert "inf" not in line


def test_one_worker_stays_dense_in_words() -> None:
    """Nothing is known of forward and backward, and nothing is exchanged: dense costs nothing at all."""
    answer = advise(question(11_000, Link(0.0, 0.0, 0.0, 0.0), num_ranks=1))
    assert answer.choice is answer.dense
    (line,) = answer.lines()
    assert line.startswith("stay dense")
    assert next(iter(table_rows(answer)))["mark"] == "<-"
    assert describe(answer.question)


@pytest.mark.parametrize("link", [of_figures(100e9, 5e-6), of_figures(1e9, 1e-4)])
def test_the_table_has_dense_first_then_the_fastest_and_marks_the_choice(link: Link) -> None:
    answer = advise(question(10_000_000, link))
    rows = list(table_rows(answer))
    assert rows[0]["reducer"] == "dense"
    assert rows[0]["speedup"] == 1.0
    times = [row["step_s"] for row in rows[1:]]
    assert times == sorted(times)
    assert len(rows) == 1 + len(answer.considered)
    (marked,) = [row for row in rows if row["mark"]]
    assert (marked["reducer"], marked["density"]) == (answer.choice.reducer, answer.choice.density)


@given(st.integers(1, 100_000_000), st.floats(0.1, 100.0))
@settings(max_examples=60, deadline=None)
def test_buckets_hold_the_whole_gradient_and_none_is_too_large(n: int, cap_mb: float) -> None:
    buckets = equal_buckets(n, cap_mb)
    assert sum(buckets) == n
    assert min(buckets) > 0
    assert max(buckets) * 4 <= max(4, cap_mb * 2**20)
    assert len(set(buckets[:-1])) <= 1


UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}


@given(st.floats(1e-7, 900.0))
@settings(max_examples=100, deadline=None)
def test_durations_are_within_a_per_cent_of_what_they_say(seconds: float) -> None:
    value, unit = duration(seconds).split()
    assert float(value) * UNITS[unit] == pytest.approx(seconds, rel=0.01)


@pytest.mark.parametrize("seconds", [0.0, 9.9951e-4, 1e-3, 0.99951, 1.0])
def test_durations_are_plain_figures(seconds: float) -> None:
    assert "e" not in duration(seconds)


@pytest.mark.parametrize("bits_per_s", [1e8, 1e9, 2.5e10, 1e11])
def test_a_question_is_described_in_plain_figures(bits_per_s: float) -> None:
    text = describe(question(27_600_000, of_figures(bits_per_s, 1e-4)))
    assert "27.6M parameters in 5 buckets, 8 workers" in text
    assert "100 us a round" in text
    assert "e+" not in text


# --- more workers than one has


def test_scaling_has_a_row_for_every_link_number_and_way_and_one_choice_each() -> None:
    grid = Grid((2, 8, 64), (("1gbit", of_figures(1e9, 1e-4)), ("100gbit", of_figures(1e11, 5e-6))))
    asked = question(5_000_000, LINK, densities=(0.01,), compute=Compute(0.1, 0.2))
    rows = scale(asked, grid)
    assert len(rows) == 2 * 3 * 5
    for link, of_link in grid.rates:
        for num_ranks in grid.num_ranks:
            mine = [row for row in rows if row["link"] == link and row["ranks"] == num_ranks]
            answer = advise(replace(asked, link=of_link, num_ranks=num_ranks))
            assert mine[0]["reducer"] == "dense"
            assert mine[0]["speedup"] == 1.0
            assert mine[0]["density"] is None
            assert [row["reducer"] for row in mine if row["chosen"]] == [answer.choice.reducer]
            assert mine[0]["step_ms"] == pytest.approx(1e3 * answer.dense.step_s)
            for row in mine:
                assert 0.0 < row["of_no_communication"] <= 1.0
                assert row["of_no_communication"] == pytest.approx(300.0 / row["step_ms"])
    assert json.loads(json.dumps(rows)) == rows
    assert {row["of_no_communication"] for row in scale(replace(asked, compute=Compute()), grid)} == {None}


def test_crossover_says_for_each_link_where_dense_stops_winning() -> None:
    def row(link: str, num_ranks: int, reducer: str, chosen: bool = True) -> dict[str, Any]:
        return {"link": link, "ranks": num_ranks, "reducer": reducer, "chosen": chosen}

    rows = [
        row("slow", 2, "oktopk"),
        row("slow", 2, "dense", chosen=False),
        row("slow", 8, "gtopk"),
        row("fast", 2, "dense"),
        row("fast", 2, "oktopk", chosen=False),
        row("fast", 8, "dense"),
        row("between", 2, "dense"),
        row("between", 8, "dense"),
        row("between", 32, "oktopk"),
        row("between", 64, "topkA"),
    ]
    assert crossover(rows) == [
        "slow: compress at every number of workers looked at",
        "fast: stay dense at every number of workers looked at",
        "between: stay dense on 2, 8 workers, compress on 32, 64",
    ]


def test_crossover_of_real_links() -> None:
    grid = Grid((2, 8), (("1gbit", of_figures(1e9, 1e-4)), ("100gbit", of_figures(1e11, 5e-6))))
    assert crossover(scale(question(27_600_000, LINK, densities=(0.01,)), grid)) == [
        "1gbit: compress at every number of workers looked at",
        "100gbit: stay dense at every number of workers looked at",
    ]


# --- calibrations as files

CALIBRATION = Calibration(2, LINK, MACHINE)


def one_line(action: Callable[[], object], *said: str) -> None:
    with pytest.raises(UsageError) as caught:
        action()
    text = str(caught.value)
    assert len(text.splitlines()) == 1
    for each in said:
        assert each in text


@given(num_ranks=st.integers(2, 4096), link=links, machine=machines)
@settings(max_examples=40, deadline=None)
def test_a_calibration_comes_back_as_it_was(
    num_ranks: int, link: Link, machine: Machine, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("calibration") / "c.json"
    write_calibration(path, Calibration(num_ranks, link, machine))
    assert read_calibration(path) == Calibration(num_ranks, link, machine)
    assert set(json.loads(path.read_text())) == {"measured_on", "calibration"}
    assert [each.name for each in path.parent.iterdir()] == ["c.json"]


def without(key: str) -> dict[str, Any]:
    return {name: value for name, value in asdict(CALIBRATION).items() if name != key}


DAMAGED: dict[str, Any] = {
    "no JSON": None,
    "a list": [1, 2],
    "a number": 3,
    "null": {"calibration": None},
    "another file": {"rows": []},
    "empty": {"calibration": {}},
    "no link": {"calibration": without("link")},
    "no machine": {"calibration": without("machine")},
    "no ranks": {"calibration": without("num_ranks")},
    "half a link": {"calibration": without("link") | {"link": {"latency_s": 1e-3}}},
    "a strange figure": {"calibration": asdict(CALIBRATION) | {"link": asdict(LINK) | {"speed": 3.0}}},
    "half a machine": {"calibration": without("machine") | {"machine": {"chosen_s": 0.0}}},
    "a machine that is a list": {"calibration": without("machine") | {"machine": []}},
    "a figure that is a word": {"calibration": asdict(CALIBRATION) | {"link": asdict(LINK) | {"latency_s": "fast"}}},
    "a figure that is null": {"calibration": asdict(CALIBRATION) | {"machine": asdict(MACHINE) | {"chosen_s": None}}},
    "a cost that is null": {
        "calibration": asdict(CALIBRATION) | {"machine": asdict(MACHINE) | {"sum": {"call_s": None, "item_s": 1.0}}}
    },
}


@pytest.mark.parametrize("kind", DAMAGED)
def test_what_is_no_calibration_is_one_clear_line(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    path.write_text("{" if DAMAGED[kind] is None else json.dumps(DAMAGED[kind]))
    one_line(lambda: read_calibration(path), f"--calibration: '{path}': is no calibration", "oktopk advise --save")


def test_calibrations_that_cannot_be_read_or_written_are_one_clear_line(tmp_path: Path) -> None:
    path = tmp_path / "nowhere" / "c.json"
    one_line(lambda: read_calibration(path), f"--calibration: '{path}': cannot be read")
    one_line(lambda: read_calibration(tmp_path), f"--calibration: '{tmp_path}': cannot be read")
    one_line(lambda: write_calibration(path, CALIBRATION), f"--save: '{path}': cannot be written")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    one_line(lambda: read_calibration(tmp_path / "binary"), "is no calibration")


# --- what a run says


def test_a_run_says_its_sizes_workers_density_and_seconds(tmp_path: Path) -> None:
    steps = write_run(tmp_path / "made", Recipe(steps=31, workers=3, density=0.05, profile=False))
    facts = read_run(tmp_path / "made")
    assert (facts.bucket_sizes, facts.num_ranks, facts.density) == ((60_000, 40_000), 3, 0.05)
    assert facts.common is None
    for stage, seconds in (("forward", facts.compute.forward_s), ("backward", facts.compute.backward_s)):
        later = [step["seconds"][stage] for step in steps[15:]]
        assert min(later) <= seconds <= max(later)
        assert seconds == pytest.approx(statistics.median(later), rel=0.05)


@pytest.mark.parametrize(("norm_clip", "hidden"), [(400.0, False), (0.0, True), (None, True)])
def test_a_run_that_clips_hides_nothing_behind_backward(norm_clip: float | None, hidden: bool, tmp_path: Path) -> None:
    config = {} if norm_clip is None else {"norm_clip": norm_clip}
    write_run(tmp_path / "made", Recipe(steps=4, profile=False, config=config))
    assert read_run(tmp_path / "made").compute.hidden is hidden


def record_gradients(folder: Path, chosen: list[range], n: int = 1000) -> None:
    """Rank r's largest elements are those in chosen[r]."""
    for rank, large in enumerate(chosen):
        gradient = np.full(n, 1e-3, np.float32)
        gradient[list(large)] = -1.0 - rank
        path = folder / "gradients" / f"rank_{rank}" / "step_000020_bucket_00.npy"
        path.parent.mkdir(parents=True)
        np.save(path, gradient)


def test_recorded_gradients_say_how_much_the_choices_coincide(tmp_path: Path) -> None:
    for name, chosen in (("same", range(20)), ("half", range(10, 30)), ("other", range(500, 520))):
        write_run(tmp_path / name, Recipe(steps=4, density=0.02, profile=False))
        record_gradients(tmp_path / name, [range(20), chosen])
    same, half, other = (read_run(tmp_path / name).common for name in ("same", "half", "other"))
    assert same is not None
    assert half is not None
    assert other is not None
    assert same > 0.95
    assert other < half < same
    assert other < 0.1


def test_gradients_of_one_worker_or_of_other_sizes_say_nothing(tmp_path: Path) -> None:
    write_run(tmp_path / "one", Recipe(steps=4, profile=False))
    record_gradients(tmp_path / "one", [range(20)])
    assert read_run(tmp_path / "one").common is None
    write_run(tmp_path / "uneven", Recipe(steps=4, profile=False))
    record_gradients(tmp_path / "uneven", [range(20), range(20)])
    np.save(tmp_path / "uneven" / "gradients" / "rank_1" / "step_000020_bucket_00.npy", np.ones(7, np.float32))
    assert read_run(tmp_path / "uneven").common is None


def test_half_a_gradient_of_a_killed_run_says_nothing(tmp_path: Path) -> None:
    write_run(tmp_path / "made", Recipe(steps=4, profile=False, status="running"))
    record_gradients(tmp_path / "made", [range(20), range(20)])
    path = tmp_path / "made" / "gradients" / "rank_1" / "step_000020_bucket_00.npy"
    path.write_bytes(path.read_bytes()[:500])
    assert read_run(tmp_path / "made").common is None


@pytest.mark.parametrize("line", ['{"step": 7, "pha', "", "[1, 2]", "3"])
def test_a_damaged_line_of_metrics_is_left_out(line: str, tmp_path: Path) -> None:
    write_run(tmp_path / "made", Recipe(steps=10, profile=False))
    path = tmp_path / "made" / "metrics.jsonl"
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:-1], line]))
    assert read_run(tmp_path / "made").bucket_sizes == (60_000, 40_000)


@pytest.mark.parametrize("content", ["{", "[]", "3", "{}", '{"workers": 2, "density": null}', '{"workers": "two"}'])
def test_a_damaged_run_json_is_one_clear_line(content: str, tmp_path: Path) -> None:
    folder = tmp_path / "made"
    write_run(folder, Recipe(steps=3, profile=False))
    (folder / "run.json").write_text(content)
    one_line(lambda: read_run(folder), f"--run: '{folder}': its run.json cannot be read", "train it again")


def test_folders_that_are_no_run_are_one_clear_line(tmp_path: Path) -> None:
    one_line(lambda: read_run(tmp_path / "nowhere"), "--run: ", "nowhere': holds no run with a logged step")
    one_line(lambda: read_run(tmp_path), "holds no run with a logged step")
    write_run(tmp_path / "empty", Recipe(steps=0))
    one_line(lambda: read_run(tmp_path / "empty"), "holds no run with a logged step")
    write_run(tmp_path / "old", Recipe(steps=3, old=True))
    one_line(lambda: read_run(tmp_path / "old"), "its run.json cannot be read")


# --- measured: values are timings, so only sanity


def figures(calibration: Calibration) -> dict[str, float]:
    machine = calibration.machine
    link = {f"link.{key}": value for key, value in asdict(calibration.link).items()}
    costs = {
        f"{name}.{key}": value
        for name in ("step", "encode", "decode", "sum")
        for key, value in asdict(getattr(machine, name)).items()
    }
    return {**link, **costs, "chosen_s": machine.chosen_s}


@pytest.mark.parametrize("size", [2, 3])
def test_calibration_gives_all_ranks_the_same_sane_figures(size: int) -> None:
    found = simulate(size, lambda comm: calibrate(comm, CPU, 20_000))
    assert all(each == found[0] for each in found)
    assert found[0].num_ranks == size
    for name, value in figures(found[0]).items():
        assert 0.0 <= value < 10.0, name  # also no NaN
    for name in ("latency_s", "per_message_s", "seconds_per_byte", "dense_byte_s"):
        assert getattr(found[0].link, name) > 0.0, name
    assert found[0].machine.encode.of(1, 1000) > 0.0
    assert found[0].machine.step.of(1, 20_000) + found[0].machine.chosen_s > 0.0


def test_a_lone_rank_has_no_link() -> None:
    (found,) = simulate(1, lambda comm: calibrate(comm, CPU, 5_000))
    assert astuple(found.link) == (0.0, 0.0, 0.0, 0.0, 0.0)
    assert found.num_ranks == 1


def test_a_link_so_slow_that_one_exchange_is_enough_is_measured_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the smallest exchange already took longer than one wants to wait."""
    monkeypatch.setattr(calibrating, "_LONG_S", 1e-12)
    for link in simulate(2, lambda comm: calibrating.measure_link(comm, CPU, 5_000)):
        assert 0.0 < link.seconds_per_byte < math.inf
        assert 0.0 < link.dense_byte_s < math.inf


@pytest.mark.parametrize("size", [2, 3])
def test_checking_gives_all_ranks_the_same_corrected_answer(size: int) -> None:
    asked = question(20_000, LINK, num_ranks=size)

    def run(comm: Communicator) -> tuple[Answer, list[Check]]:
        return checked(advise(asked), comm, CPU)

    found = simulate(size, run)
    answer, checks = found[0]
    for other, other_checks in found:
        assert (other.choice, other.best, other.dense) == (answer.choice, answer.best, answer.dense)
        assert other.considered == answer.considered
        assert other_checks == checks
        assert other.lines() == answer.lines()
    before = advise(asked)
    assert [check.reducer for check in checks] == ["dense", before.best.reducer]
    assert [check.predicted_s for check in checks] == pytest.approx([before.dense.step_s, before.best.step_s])
    for check in checks:
        assert check.n == 20_000
        assert 0.0 < check.measured_s < 60.0
        assert check.spread >= 0.0
        assert check.factor == check.measured_s / check.predicted_s
    assert answer.question.dense_factor == checks[0].factor
    assert answer.question.sparse_factor == checks[1].factor
    assert answer.question.uncertainty >= max(check.spread for check in checks)
    assert answer.dense.allreduce_s == pytest.approx(checks[0].measured_s)
