"""The model of volumes: sums, limits, and agreement with what the real reducers send."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oktopk.reduce.volume import Volume
from oktopk.registry import REDUCERS
from oktopk.workbench.simulate.command import DEFAULT_REDUCERS
from oktopk.workbench.simulate.rows import model_row, moved_row, traits_of
from oktopk.workbench.simulate.run import Course, simulate_run
from oktopk.workbench.simulate.sources import SyntheticSource
from oktopk.workbench.simulate.volume import fit_common, union_size, volume

N, K = 200_000, 2000


@given(
    reducer=st.sampled_from(sorted(REDUCERS)),
    n=st.integers(1, 10**9),
    part=st.floats(0.0, 1.0),
    num_ranks=st.integers(1, 4096),
    common=st.floats(0.0, 1.0),
    skew=st.floats(1.0, 10.0),
    evened=st.booleans(),
)
def test_any_case_has_a_volume(
    reducer: str, n: int, part: float, num_ranks: int, common: float, skew: float, evened: bool
) -> None:
    k = max(1, round(part * n))
    found = volume(reducer, n, k, num_ranks, common, skew=skew, evened=evened)
    assert found.bytes_sent == sum(each.bytes for each in found.rounds)
    assert found.messages_sent == sum(each.messages for each in found.rounds)
    assert found.pairs_sent * 2 == found.elements_sent
    assert math.isfinite(found.bytes_sent)
    assert found.mean_bytes_sent <= found.bytes_sent * (1 + 1e-9)
    assert found.mean_elements_sent <= found.elements_sent * (1 + 1e-9)
    assert (found.bytes_sent == 0) == (num_ranks == 1)
    assert 0 < found.applied <= n * (1 + 1e-9)


def test_one_rank_sends_nothing() -> None:
    assert all(volume(name, N, K, 1, 0.5).rounds == () for name in REDUCERS)


def test_oktopk_has_the_rounds_of_a_step() -> None:
    found = volume("oktopk", N, K, 8, 0.5)
    assert [each.operation for each in found.rounds] == [
        "all_reduce",
        "all_to_all_lengths",
        "all_to_all",
        "all_reduce",
        "all_reduce",
        "all_gather",
    ]
    assert found.rounds[0].bytes == 7 * 8 * (8 + 1), (
        "the agreement: to each peer, an integer for each rank and one more"
    )
    assert volume("oktopk", N, K, 256, 0.5).rounds[0].operation == "ring_all_reduce"


def test_oktopk_stays_within_its_bound_for_any_number_of_ranks() -> None:
    for num_ranks in (2, 7, 64, 256, 4096):
        for skew, evened in ((1.0, False), (2.0, False), (9.0, False), (1.0, True)):
            found = volume("oktopk", 10**7, 10**5, num_ranks, 0.5, skew=skew, evened=evened)
            assert found.elements_sent <= 6 * 10**5 * (num_ranks - 1) / num_ranks * (1 + 1e-9)


def test_topk_dsa_sends_whole_regions_where_pairs_would_cost_more() -> None:
    found = volume("topkDSA", 1000, 900, 4, 0.0)
    assert found.rounds[-1].elements == pytest.approx(3 * 250)


def test_the_root_of_the_tree_sends_to_every_level_and_the_average_rank_about_twice() -> None:
    found = volume("gtopk", N, K, 64, 0.0)
    assert found.elements_sent == 2 * K * 6
    assert found.mean_elements_sent == pytest.approx(2 * K * 2 * 63 / 64)


def test_two_byte_values_take_less() -> None:
    assert volume("topkA", N, K, 4, 0.0, value_bytes=2).bytes_sent < 0.7 * volume("topkA", N, K, 4, 0.0).bytes_sent


@given(common=st.floats(0.0, 1.0), num_ranks=st.integers(1, 5000))
def test_unions_lie_between_one_choice_and_everything(common: float, num_ranks: int) -> None:
    union = union_size(N, K, num_ranks, common)
    assert K * (1 - 1e-9) <= union <= min(N, num_ranks * K) * (1 + 1e-9)
    assert union <= union_size(N, K, num_ranks + 1, common) * (1 + 1e-9)


@given(common=st.floats(0.0, 1.0))
def test_what_was_common_is_found_again(common: float) -> None:
    unions = {size: union_size(N, K, size, common) for size in (1, 2, 8, 64)}
    assert fit_common(unions, N, K) == pytest.approx(common, abs=1e-4)


@pytest.mark.parametrize(
    ("given", "key"),
    [
        ({"num_ranks": 0}, "num_ranks"),
        ({"k": 0}, "k"),
        ({"k": N + 1}, "k"),
        ({"common": 1.5}, "common"),
        ({"skew": 0.5}, "skew"),
        ({"reducer": "magic"}, "magic"),
    ],
)
def test_what_cannot_be_is_refused(given: dict[str, float | str], key: str) -> None:
    case = {"reducer": "oktopk", "n": N, "k": K, "num_ranks": 4, "common": 0.5, **given}
    with pytest.raises(ValueError, match=key):
        volume(**case)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def source() -> SyntheticSource:
    return SyntheticSource(N, 2022)


@pytest.mark.parametrize("reducer", DEFAULT_REDUCERS)
def test_the_model_agrees_with_what_is_moved(reducer: str, source: SyntheticSource) -> None:
    course = Course(density=0.01, num_warmup=8, num_steps=1)
    runs = [simulate_run(reducer, size, source, course) for size in (2, 4, 8, 16, 32)]
    traits = traits_of(runs)
    for run in runs:
        real, expected = moved_row(run), model_row(reducer, run.num_ranks, run.n, run.k, traits)
        where = f"{reducer} on {run.num_ranks} ranks"
        assert expected["mean_bytes"] == pytest.approx(real["mean_bytes"], rel=0.15), where
        assert expected["mean_elements"] == pytest.approx(real["mean_elements"], rel=0.15), where
        assert expected["mean_messages"] == pytest.approx(real["mean_messages"], rel=0.05), where
        assert expected["applied"] == pytest.approx(real["applied"], rel=0.15), where


def test_a_volume_is_a_plain_value() -> None:
    assert volume("topkA", N, K, 4, 0.5) == volume("topkA", N, K, 4, 0.5)
    assert isinstance(hash(volume("topkA", N, K, 4, 0.5)), int)
    assert Volume(1.0, ()).bytes_sent == 0
