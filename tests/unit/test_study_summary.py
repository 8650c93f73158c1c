"""A study's table: means, deviations, and who is behind whom."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oktopk.workbench.console.tables import Row, markdown
from oktopk.workbench.study.definition import Study
from oktopk.workbench.study.outcome import Outcome, Point
from oktopk.workbench.study.summary import columns, mean_and_std, rows

STUDY = Study(
    name="made",
    preset="lenet",
    metric="accuracy",
    higher_is_better=True,
    target=0.5,
    seeds=(1, 2, 3),
    settings={},
    variants={"dense": {"reducer": "dense"}, "oktopk": {"density": 0.01}, "topkA": {}},
)
LOWER = replace(STUDY, higher_is_better=False)


def outcome(variant: str, seed: int, *values: float, status: str = "finished", **changes: Any) -> Outcome:
    """A validation every ten steps, a second and a hundred bytes each."""
    curve = [
        Point(10 * at, value, 1.0 * at, 100.0 * at, simulated_s=2.0 * at) for at, value in enumerate(values, start=1)
    ]
    final = values[-1] if values and status == "finished" else None
    whole = Outcome(variant, seed, status, alone=True, final=final, curve=curve, bytes_sent=100.0 * len(values))
    return replace(whole, **changes)


def outcomes(variant: str, finals: Sequence[float]) -> list[Outcome]:
    return [outcome(variant, seed, 0.0, final) for seed, final in enumerate(finals, start=1)]


def row_of(found: Sequence[Row], variant: str) -> Row:
    (row,) = [row for row in found if row["variant"] == variant]
    return row


# --- one run


def test_the_first_validation_that_reaches_the_target() -> None:
    point = outcome("dense", 1, 0.2, 0.6, 0.4, 0.9).first_reached(STUDY)
    assert point is not None
    assert (point.step, point.value) == (20, 0.6)
    point = outcome("dense", 1, 0.9, 0.6, 0.5).first_reached(LOWER)
    assert point is not None
    assert point.step == 30
    assert outcome("dense", 1, 0.2, 0.499).first_reached(STUDY) is None


def test_times_are_those_after_as_many_steps() -> None:
    timed = outcome("dense", 1, 0.2, 0.6).with_times([step / 4 for step in range(21)])
    assert [point.simulated_s for point in timed.curve] == [2.5, 5.0]
    assert [(point.step, point.value) for point in timed.curve] == [(10, 0.2), (20, 0.6)]


# --- rows


def test_mean_and_sample_deviation() -> None:
    assert mean_and_std([]) == (None, None)
    assert mean_and_std([0.5]) == (0.5, None)
    assert mean_and_std([1.0, 2.0, 6.0]) == (3.0, pytest.approx(math.sqrt(7.0)))  # (4 + 1 + 9) / (3 - 1)


def test_a_row() -> None:
    made = [*outcomes("dense", [0.6, 0.7, 0.8]), *outcomes("oktopk", [0.55, 0.66, 0.77])]
    dense, sparse = rows(STUDY, made)  # a variant without a run has no row
    assert (dense["variant"], dense["runs"], dense["diverged"]) == ("dense", 3, 0)
    assert (dense["behind"], dense["within"], dense["of_baseline"]) == (0.0, True, 1.0)
    assert (sparse["variant"], sparse["settings"]) == ("oktopk", {"density": 0.01})
    assert sparse["finals"] == [0.55, 0.66, 0.77]
    assert (sparse["mean"], sparse["std"]) == (pytest.approx(0.66), pytest.approx(0.11))
    assert sparse["behind"] == pytest.approx(0.04)
    assert sparse["within"] is True  # dense deviates by 0.1


@pytest.mark.parametrize(
    ("study", "finals", "behind", "within"),
    [
        (STUDY, [0.75, 0.5], 0.0, True),
        (STUDY, [0.5, 0.5], 0.125, True),
        (STUDY, [0.25, 0.5], 0.25, False),
        (STUDY, [1.0, 1.0], -0.375, True),
        (LOWER, [0.75, 0.75], 0.125, True),
        (LOWER, [1.0, 0.75], 0.25, False),
        (LOWER, [0.0, 0.0], -0.625, True),
    ],
)
def test_behind_is_positive_for_what_is_worse(study: Study, finals: list[float], behind: float, within: bool) -> None:
    """The baseline's mean is 0.625 and its deviation 0.177."""
    row = row_of(rows(study, [*outcomes("dense", [0.5, 0.75]), *outcomes("oktopk", finals)]), "oktopk")
    assert (row["behind"], row["within"]) == (behind, within)


def test_as_far_behind_as_the_baseline_deviates_is_within() -> None:
    base = [0.0, 1.0, 2.0]  # mean and deviation are 1
    found = rows(STUDY, [*outcomes("dense", base), *outcomes("oktopk", [0.0]), *outcomes("topkA", [-0.001])])
    assert [row["within"] for row in found] == [True, True, False]


def test_one_run_that_diverged_is_not_within() -> None:
    made = [
        *outcomes("dense", [0.5, 0.75]),
        outcome("oktopk", 1, 0.9, 0.9),
        outcome("oktopk", 2, 0.9, 0.9, status="diverged"),
        outcome("topkA", 1, status="diverged", bytes_sent=40.0),
        outcome("topkA", 2, 0.6, status="diverged", bytes_sent=20.0),
    ]
    _, some, none = rows(STUDY, made)
    assert (some["runs"], some["diverged"], some["finals"], some["mean"]) == (2, 1, [0.9], 0.9)
    assert some["behind"] == pytest.approx(-0.275)  # of the run that came to an end
    assert some["within"] is False
    assert (none["diverged"], none["mean"], none["std"], none["behind"]) == (2, None, None, None)
    assert none["within"] is False
    # what was sent and reached on the way to nowhere would only flatter
    assert (none["bytes_sent"], none["of_baseline"], none["steps_to_target"], none["reached"]) == (None, None, None, 0)


def test_without_a_deviation_nothing_is_within_or_not() -> None:
    made = [*outcomes("dense", [0.5]), *outcomes("oktopk", [0.9]), outcome("topkA", 1, 0.6, status="diverged")]
    dense, sparse, lost = rows(STUDY, made)
    assert (dense["within"], sparse["within"], lost["within"]) == (None, None, False)
    assert (dense["mean"], dense["std"]) == (0.5, None)


def test_what_was_sent_is_a_mean_and_a_part_of_the_baseline() -> None:
    made = [
        outcome("dense", 1, 0.5, bytes_sent=1000.0),
        outcome("dense", 2, 0.5, bytes_sent=3000.0),
        outcome("oktopk", 1, 0.5, bytes_sent=100.0),
        outcome("oktopk", 2, 0.5, bytes_sent=200.0),
    ]
    dense, sparse = rows(STUDY, made)
    assert (dense["bytes_sent"], sparse["bytes_sent"], sparse["of_baseline"]) == (2000.0, 150.0, 0.075)
    (alone,) = rows(STUDY, made[2:])  # the baseline is not there yet
    assert (alone["bytes_sent"], alone["of_baseline"], alone["behind"]) == (150.0, None, None)


def test_the_way_to_the_target_is_a_mean_over_those_that_reached_it() -> None:
    made = [
        outcome("dense", 1, 0.6, 0.7, 0.8),
        outcome("dense", 2, 0.2, 0.3, 0.5, alone=False),
        outcome("dense", 3, 0.2, 0.3, 0.4),
        outcome("oktopk", 1, 0.2, 0.4),
        outcome("topkA", 1, 0.6, alone=False),
    ]
    dense, sparse, other = rows(STUDY, made)
    assert (dense["reached"], dense["steps_to_target"], dense["simulated_s"]) == (2, 20.0, 4.0)
    assert dense["measured_s"] == 1.0  # only where the machine did nothing else
    assert [sparse[key] for key in ("reached", "steps_to_target", "simulated_s", "measured_s")] == [0, None, None, None]
    assert [other[key] for key in ("reached", "steps_to_target", "simulated_s", "measured_s")] == [1, 10.0, 2.0, None]


# --- laws

FINALS = st.lists(st.floats(-10, 10, allow_subnormal=False), min_size=1, max_size=6)
CURVES = st.lists(st.lists(st.floats(-1, 1), min_size=1, max_size=5), min_size=1, max_size=4)


@given(base=CURVES, other=CURVES, lost=st.booleans(), target=st.floats(-1, 1))
def test_a_mirrored_metric_gives_the_same_rows(
    base: list[list[float]], other: list[list[float]], lost: bool, target: float
) -> None:
    """Higher is better of x says what lower is better says of -x."""

    def made(sign: float) -> list[Outcome]:
        found = [outcome("dense", seed, *(sign * x for x in curve)) for seed, curve in enumerate(base)]
        found += [outcome("oktopk", seed, *(sign * x for x in curve)) for seed, curve in enumerate(other)]
        return [*found[:-1], replace(found[-1], status="diverged")] if lost else found

    up = rows(replace(STUDY, target=target), made(1.0))
    down = rows(replace(LOWER, target=-target), made(-1.0))
    mirrored = {"mean", "finals"}
    for high, low in zip(up, down, strict=True):
        assert {key: high[key] for key in high if key not in mirrored} == {
            key: low[key] for key in low if key not in mirrored
        }
        assert high["finals"] == [-value for value in low["finals"]]


@given(base=FINALS, other=FINALS, better=st.booleans())
def test_rows_say_what_their_runs_add_up_to(base: list[float], other: list[float], better: bool) -> None:
    def mean(values: Sequence[float]) -> float:
        return sum(values) / len(values)

    def deviation(values: Sequence[float]) -> float:
        return math.sqrt(sum((value - mean(values)) ** 2 for value in values) / (len(values) - 1))

    study = STUDY if better else LOWER
    dense, sparse = rows(study, [*outcomes("dense", base), *outcomes("oktopk", other)])
    for row, values in ((dense, base), (sparse, other)):
        assert row["mean"] == pytest.approx(mean(values), abs=1e-9)
        assert row["std"] == (pytest.approx(deviation(values), abs=1e-9) if len(values) > 1 else None)
    if len(base) == 1:
        assert sparse["within"] is None
        return
    behind = mean(base) - mean(other) if better else mean(other) - mean(base)
    assert sparse["behind"] == pytest.approx(behind, abs=1e-9)
    if abs(behind - deviation(base)) > 1e-6:
        assert sparse["within"] == (behind < deviation(base))
    assert dense["behind"] == 0.0
    assert dense["within"] is True


@given(finals=FINALS, shift=st.integers(-8, 8))
def test_behind_is_the_distance_to_the_baseline(finals: list[float], shift: int) -> None:
    worse, better = ([value - sign * shift for value in finals] for sign in (1, -1))
    found = rows(
        STUDY, [*outcomes("dense", [*finals, *finals]), *outcomes("oktopk", worse), *outcomes("topkA", better)]
    )
    assert [row["behind"] for row in found] == pytest.approx([0.0, shift, -shift], abs=1e-9)


# --- as people read it


def test_the_table() -> None:
    first, second = outcomes("dense", [0.5, 0.75])
    made = [
        first,
        replace(second, alone=False),
        outcome("oktopk", 1, 0.4, 0.55, bytes_sent=50.0),
        outcome("oktopk", 2, 0.6, status="diverged", bytes_sent=10.0),
        outcome("topkA", 1, status="diverged"),
    ]
    two = replace(STUDY, seeds=(1, 2))
    lines = markdown(columns(two, "100mbit", "1gbit"), rows(two, made)).splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert cells == [
        ["variant", "final accuracy", "behind", "within 1 std", "sent by a worker", "of dense", "steps to 0.5",
         "simulated, 100mbit", "measured, 1gbit"],
        ["---"] * 9,
        ["dense", "0.6250 ± 0.1768", "+0.0000", "yes", "200 B", "100.0%", "20", "4.0 s", "2.0 s (1 of 2)"],
        ["oktopk", "0.5500 (1 of 2), 1 diverged", "+0.0750", "NO", "50 B", "25.0%", "20 (1 of 2)", "4.0 s (1 of 2)",
         "2.0 s (1 of 2)"],
        ["topkA", "- (0 of 2), 1 diverged", "-", "NO", "-", "-", "-", "-", "-"],
    ]  # fmt: skip


# --- pictures


@pytest.mark.parametrize(
    "made",
    [
        pytest.param([*outcomes("dense", [0.5, 0.75]), *outcomes("oktopk", [0.1, 0.2])], id="two variants"),
        pytest.param([outcome("oktopk", 1, 0.4)], id="one run, and not the baseline's"),
        pytest.param([*outcomes("dense", [0.5]), outcome("oktopk", 1, status="diverged")], id="one has diverged"),
        pytest.param(
            [outcome("dense", 1, 0.2, 0.4), outcome("dense", 2, 0.2, status="diverged")], id="curves of other lengths"
        ),
        pytest.param([outcome(f"{at}", 1, 0.1 * at) for at in range(9)], id="more than there are colours"),
        pytest.param(
            [outcome("dense", 1, status="diverged"), outcome("oktopk", 1, status="diverged")],
            id="all have diverged",
        ),
    ],
)
def test_pictures_of_whatever_came_of_it(tmp_path: Path, made: list[Outcome]) -> None:
    image = pytest.importorskip("PIL.Image")
    plot = pytest.importorskip("oktopk.workbench.study.plot")
    study = replace(STUDY, variants={"dense": {}, **{each.variant: {} for each in made}})
    plot.draw_finals(study, rows(study, made), tmp_path / "finals.png")
    plot.draw_curves(study, made, "1gbit", tmp_path / "curves.png")
    for name in ("finals.png", "curves.png"):
        with image.open(tmp_path / name) as picture:
            picture.load()
            assert picture.format == "PNG"
            assert min(picture.size) > 200
