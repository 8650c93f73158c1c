"""dense (none): every element, by the communicator's own allreduce."""

from __future__ import annotations

from oktopk.comm.base import Communicator
from oktopk.reduce.base import DenseReduction, Stateless
from oktopk.reduce.description import Bound, ReducerDescription
from oktopk.reduce.volume import SteadyStep, Volume, all_reduce
from oktopk.select.base import Accumulated


class Dense(Stateless):
    """Sends 2n(P-1)/P elements."""

    def reduce(self, acc: Accumulated, comm: Communicator, k: int) -> DenseReduction:  # noqa: ARG002 - a dense k is n
        mean = acc.values.clone()
        comm.all_reduce(mean)
        mean /= comm.size
        return DenseReduction(mean)


# --- its description

_FP32_BYTES = 4


def _volume(step: SteadyStep) -> Volume:
    elements = 2.0 * step.n * step.num_peers / step.num_ranks
    return Volume(float(step.n), (all_reduce(_FP32_BYTES * step.n, step.num_ranks, elements),))


DENSE = ReducerDescription(
    name="dense",
    aliases=("none",),
    factory=lambda _: Dense(),
    bound=Bound("2n(P-1)/P", lambda n, _, num_ranks: 2 * n * (num_ranks - 1) / num_ranks),
    volume=_volume,
    work=None,
)
