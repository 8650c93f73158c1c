"""One contract, every communicator: simulated, Gloo, MPI."""

from __future__ import annotations

import pytest

from oktopk.comm import simulate
from tests.contract.communicator_checks import CHECKS, run_all, run_all_over
from tests.worlds import GlooWorld, run_mpi

SIMULATED_SIZES = [*range(1, 10), 16, 64]


def assert_all_passed(by_rank: list[dict[str, str | None]]) -> None:
    for rank, verdicts in enumerate(by_rank):
        failed = {name: why for name, why in verdicts.items() if why}
        assert not failed, f"rank {rank}: {failed}"
        assert verdicts.keys() == CHECKS.keys()


@pytest.mark.parametrize("size", SIMULATED_SIZES)
def test_simulated(size: int) -> None:
    assert_all_passed(simulate(size, run_all))


def test_gloo(gloo: GlooWorld) -> None:
    assert_all_passed(gloo.run(run_all_over, "torch"))


@pytest.mark.parametrize("size", [1, 2, 3])
def test_mpi(size: int) -> None:
    assert_all_passed(run_mpi(size, run_all_over, "mpi"))
