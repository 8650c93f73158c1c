"""How long an allreduce takes: rounds over a link, work on a machine, and what of both hides behind backward.

All times are those of the slowest rank. A link is described by what a round costs however little it carries, what each
further message adds, and what each byte adds; a machine by what its kernels cost while all ranks are at work.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from oktopk.reduce.volume import Round, Volume
from oktopk.reduce.work import Work
from oktopk.registry import describe
from oktopk.workbench.simulate.volume import steady_step, volume

_SKEW = 2.5
"""The largest of equal regions holds so many times the average: layers differ in scale. Balanced ones are alike."""
_SMALL_SHARE = 40
"""Of so few elements, some rank holds twice as many by chance: then oktopk evens shares out."""
PER_MESSAGE_S = 20e-6
"""Of a message on a link that is given in figures."""


@dataclass(frozen=True)
class Link:
    """`burst_bytes` pass at once after a pause, as through a token bucket; a plain network has none."""

    latency_s: float
    """Of one exchange of one small message with each other."""
    per_message_s: float
    """Of each message beyond the first in the same exchange."""
    seconds_per_byte: float
    dense_byte_s: float
    """The same in the library's own all_reduce, with the sums that it forms."""
    burst_bytes: float = 0.0

    @staticmethod
    def of_figures(bits_per_s: float, latency_s: float, per_message_s: float, dense_byte_s: float = 0.0) -> Link:
        """`dense_byte_s`: what a machine needs for a byte of an all_reduce, however fast the link."""
        byte_s = 8.0 / bits_per_s
        return Link(latency_s, per_message_s, byte_s, max(byte_s, dense_byte_s))

    def slower(self, factor: float) -> Link:
        """Of rounds and messages; bytes take as long as before."""
        return replace(self, latency_s=factor * self.latency_s, per_message_s=factor * self.per_message_s)


@dataclass(frozen=True)
class Cost:
    """Seconds of a call, and of each item that it handles."""

    call_s: float
    item_s: float

    def of(self, num_calls: float, num_items: float) -> float:
        return self.call_s * num_calls + self.item_s * num_items

    def slower(self, factor: float) -> Cost:
        return Cost(factor * self.call_s, factor * self.item_s)


@dataclass(frozen=True)
class Machine:
    """What the parts of a reduction cost on one rank, the others being as busy."""

    step: Cost
    """A sparse reduction without any exchange, by element of the bucket: add, select, write the mean, keep the rest."""
    chosen_s: float
    """What each chosen element adds to that."""
    encode: Cost
    decode: Cost
    sum: Cost
    """By vector and pair."""

    def seconds(self, work: Work) -> float:
        """How long it takes to encode, decode and add up so much."""
        coding = self.encode.of(*work.encoded) + self.decode.of(*work.decoded)
        return coding + self.sum.of(*work.summed) + self.chosen_s * work.chosen

    def slower(self, factor: float) -> Machine:
        costs = (cost.slower(factor) for cost in (self.encode, self.decode, self.sum))
        return Machine(self.step.slower(factor), factor * self.chosen_s, *costs)


@dataclass(frozen=True)
class Prediction:
    """Of one allreduce of one bucket."""

    compute_s: float
    exchange_s: float

    @property
    def total_s(self) -> float:
        return self.compute_s + self.exchange_s

    def times(self, factor: float) -> Prediction:
        return Prediction(factor * self.compute_s, factor * self.exchange_s)


def expected_volume(reducer: str, n: int, k: int, num_ranks: int, common: float, value_bytes: int = 4) -> Volume:
    """What a steady step of one bucket sends, where layers differ in scale as they do in training."""
    skew = _SKEW if describe(reducer).regions == "equal" else 1.0
    evened = k < _SMALL_SHARE * num_ranks
    return volume(reducer, n, k, num_ranks, common, skew=skew, evened=evened, value_bytes=value_bytes)


def predict(
    reducer: str, n: int, density: float, num_ranks: int, link: Link, machine: Machine, common: float
) -> Prediction:
    """A steady step of one bucket of n elements; `common`: see `simulate.volume.union_size`."""
    description = describe(reducer)
    k = max(1, round(density * n))
    moved = expected_volume(reducer, n, k, num_ranks, common)
    if description.work is None:
        return Prediction(0.0, _dense_seconds(moved.rounds[1:], num_ranks, link))
    work = description.work(steady_step(n, k, num_ranks, common)) if num_ranks > 1 else Work()
    compute_s = machine.step.of(1, n) + machine.chosen_s * k + machine.seconds(work)
    return Prediction(compute_s, _exchange_seconds(moved, compute_s, link))


def _dense_seconds(rounds: Sequence[Round], num_ranks: int, link: Link) -> float:
    """Hops wait for each other, as few as a good library needs."""
    num_bytes = max(0.0, sum(each.bytes for each in rounds) - link.burst_bytes)
    return dense_hops(num_ranks) * link.latency_s + num_bytes * link.dense_byte_s


def dense_hops(num_ranks: int) -> int:
    return 2 * (num_ranks - 1).bit_length()


def _exchange_seconds(moved: Volume, compute_s: float, link: Link) -> float:
    """Round after round. Tokens that a burst used up come back while the machine works between two rounds."""
    pause = compute_s / max(1, len(moved.rounds))
    tokens, total = link.burst_bytes, 0.0
    for each in moved.rounds:
        num_bytes = float(each.bytes)
        if each.operation == "ring_all_reduce":
            seconds = dense_hops(each.messages // 2 + 1) * link.latency_s
        elif each.operation == "tree":  # up and down again, a length and a buffer each
            seconds, num_bytes = 2 * each.messages * link.latency_s, 2.0 * each.bytes
        else:
            seconds = link.latency_s + (each.messages - 1) * link.per_message_s
        seconds += max(0.0, num_bytes - tokens) * link.seconds_per_byte
        total += seconds
        refill = (seconds + pause) / link.seconds_per_byte
        tokens = min(link.burst_bytes, max(0.0, tokens - num_bytes) + refill)
    return total


# --- a whole training step


@dataclass(frozen=True)
class Compute:
    """What a step takes without any exchange."""

    forward_s: float = 0.0
    backward_s: float = 0.0
    shared: bool = True
    """Reducing takes the same cores as backward, as on a CPU."""
    hidden: bool = True
    """Buckets are exchanged while backward goes on; not so where the gradient is clipped first."""


def step_seconds(buckets: Sequence[Prediction], compute: Compute) -> float:
    """Buckets are reduced in turn, each when its part of backward is done; what shares the cores is not hidden."""
    busy = sum(bucket.compute_s for bucket in buckets) if compute.shared else 0.0
    end = 0.0
    for number, bucket in enumerate(buckets):
        ready = compute.backward_s * ((number + 1) / len(buckets) if compute.hidden else 1.0)
        end = max(end, ready) + (bucket.exchange_s if compute.shared else bucket.total_s)
    return compute.forward_s + max(end, compute.backward_s) + busy
