"""The model of what a reducer sends in a steady step, and the exchanges that such models are built from.

Bytes and messages are counted as `CountingCommunicator` counts them, with headers, lengths and histograms. A step is
steady once thresholds have settled and regions are agreed upon: the first steps of oktopk send a little more.
"""

from __future__ import annotations

from dataclasses import dataclass

from oktopk import wire
from oktopk.comm.sizes import LENGTH_BYTES, is_direct, ring_bytes

INT64_BYTES = 8


@dataclass(frozen=True, kw_only=True)
class SteadyStep:
    """One reduction of one bucket, as the models see it."""

    n: int
    """Elements of the bucket."""
    k: int
    """Elements that are wanted."""
    num_ranks: int
    chosen: float
    """Elements that a rank chooses: k, or about k where the threshold is estimated."""
    union: float
    """Different elements that all ranks choose together."""
    skew: float = 1.0
    """The largest region's share, as a multiple of the average share."""
    evened: bool = False
    """Whether oktopk evens the shares out before it gathers them."""
    value_bytes: int = 4
    """Bytes of a value on the wire: 4, or 2 for bf16."""

    @property
    def num_peers(self) -> int:
        return self.num_ranks - 1


@dataclass(frozen=True)
class Round:
    """One exchange of one step, as the busiest rank sees it: what it sends, to all its peers together.

    Operations: `all_reduce` (straight to every peer), `ring_all_reduce`, `all_to_all_lengths`, `all_to_all`,
    `all_gather_lengths`, `all_gather`, and `tree`: one level of a binomial tree, which is passed on the way up and on
    the way down. The root sends on the way down only, so twice as many transfers lie one behind the other.
    """

    operation: str
    messages: int
    bytes: int
    elements: float = 0.0
    """Words as the paper counts them: two for a pair of index and value, one for a value without index."""
    mean_share: float = 1.0
    """What the average rank sends, as a part of that."""

    @property
    def mean_messages(self) -> float:
        """In a tree some ranks do not send; elsewhere all do, some more and some less."""
        return self.messages * (self.mean_share if self.operation == "tree" else 1.0)


@dataclass(frozen=True)
class Volume:
    """What the busiest rank sends in one steady step, and how many elements are applied. Sums over `rounds`."""

    applied: float
    rounds: tuple[Round, ...]

    @property
    def bytes_sent(self) -> int:
        return sum(each.bytes for each in self.rounds)

    @property
    def messages_sent(self) -> int:
        return sum(each.messages for each in self.rounds)

    @property
    def elements_sent(self) -> float:
        return sum(each.elements for each in self.rounds)

    @property
    def pairs_sent(self) -> float:
        """Of two words each; where values go without index, half their number."""
        return self.elements_sent / 2

    @property
    def mean_bytes_sent(self) -> float:
        return sum(each.bytes * each.mean_share for each in self.rounds)

    @property
    def mean_messages_sent(self) -> float:
        return sum(each.mean_messages for each in self.rounds)

    @property
    def mean_elements_sent(self) -> float:
        return sum(each.elements * each.mean_share for each in self.rounds)


# --- the exchanges


def all_reduce(num_bytes: int, num_ranks: int, elements: float = 0.0) -> Round:
    """Small ones go straight to every peer, larger ones around a ring."""
    peers = num_ranks - 1
    if is_direct(num_bytes, num_ranks):
        return Round("all_reduce", peers, num_bytes * peers, elements)
    return Round("ring_all_reduce", 2 * peers, ring_bytes(num_bytes, num_ranks), elements)


def gather(step: SteadyStep, count: float, span: float, skew: float = 1.0) -> list[Round]:
    """Every rank sends its pairs to everyone, lengths first.

    The average rank holds `count` pairs, the busiest `skew` times as many, spread over `span` indices.
    """
    size = encoded_bytes(step, skew * count, span)
    return [
        lengths("all_gather", step),
        to_peers("all_gather", step, size, 2 * skew * count, mean_share=1.0 / skew),
    ]


def scatter(step: SteadyStep) -> list[Round]:
    """Every rank sends to each owner the chosen pairs of its region, lengths first."""
    count = step.chosen / step.num_ranks
    size = encoded_bytes(step, count, step.n / step.num_ranks)
    return [lengths("all_to_all", step), to_peers("all_to_all", step, size, 2 * count)]


def lengths(operation: str, step: SteadyStep) -> Round:
    """The round before an exchange of buffers whose lengths the peers do not know."""
    return Round(f"{operation}_lengths", step.num_peers, LENGTH_BYTES * step.num_peers)


def to_peers(operation: str, step: SteadyStep, size: float, elements: float, mean_share: float = 1.0) -> Round:
    """One message of `size` bytes to each peer."""
    peers = step.num_peers
    return Round(operation, peers, round(size * peers), elements * peers, mean_share)


def encoded_bytes(step: SteadyStep, count: float, span: float) -> float:
    """The expected size on the wire of `count` pairs spread evenly over `span` indices."""
    return wire.expected_bytes(count, span, length=step.n, value_bytes=step.value_bytes)
