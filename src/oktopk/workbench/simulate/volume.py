"""What a reducer sends in a steady step, by model: for more ranks than can be simulated, and for cost models.

Everything is counted as `CountingCommunicator` counts it, headers, lengths, agreements and histograms included. Steady
means that thresholds have settled and regions are agreed upon: the first steps of oktopk send a little more.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from oktopk.comm.counting import ring_bytes
from oktopk.comm.pairwise import LENGTH_BYTES, is_direct
from oktopk.kernels.torch_ops import digits
from oktopk.registry import canonical_name
from oktopk.wire import HEADER_BYTES

_WORD_BYTES = _INT32_BYTES = 4
_INT64_BYTES = _FIRST_BYTES = 8
_HISTOGRAM_BYTES = 256 * _INT64_BYTES  # oktopk's, around the last threshold
_FIT_STEPS = 60


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


@dataclass(frozen=True)
class _Case:
    n: int
    k: int
    num_ranks: int
    union: float
    chosen: float
    skew: float
    evened: bool
    value_bytes: int

    @property
    def peers(self) -> int:
        return self.num_ranks - 1


def volume(
    reducer: str,
    n: int,
    k: int,
    num_ranks: int,
    common: float,
    *,
    chosen: float | None = None,
    skew: float = 1.0,
    evened: bool = False,
    value_bytes: int = 4,
    num_parameters: int = 1,
) -> Volume:
    """Of one bucket of n elements of which k are wanted, on any number of ranks from 1; ValueError for what cannot be.

    `common` in [0, 1] says how much the ranks' choices coincide, see `union_size`; it matters where the union is sent
    (topkDSA, gaussiankSA). `chosen` is how many elements a rank chooses where it is not k (the gaussiank family).
    `skew` is how many times the average the largest region's share is; `evened`: oktopk evens shares out before it
    gathers them, as it does where one exceeds 2k/P (small shares do, by chance).
    `value_bytes` is 4, or 2 for bf16; `num_parameters` is how many parameters lie in the bucket.
    """
    name = canonical_name(reducer)
    for key, value, least, most in (
        ("num_ranks", num_ranks, 1, math.inf),
        ("n", n, 1, math.inf),
        ("k", k, 1, n),
        ("common", common, 0.0, 1.0),
        ("skew", skew, 1.0, math.inf),
    ):
        if not least <= value <= most:
            raise ValueError(f"{key}={value!r}: must lie between {least} and {most}")
    picked = float(k) if chosen is None else min(max(chosen, 1.0), float(n))
    case = _Case(n, k, num_ranks, union_size(n, picked, num_ranks, common), picked, skew, evened, value_bytes)
    agreement = _all_reduce(_INT64_BYTES * (num_ranks + num_parameters), num_ranks)
    applied, rounds = _MODELS[name](case)
    return Volume(applied, (agreement, *rounds) if num_ranks > 1 else ())


def union_size(n: int, k: float, num_ranks: int, common: float) -> float:
    """How many different elements P ranks choose that choose k each: kP / (1 + (P - 1) / M).

    That is what comes of elements that differ in how likely a rank chooses them, a few very, most hardly: unions grow
    ever more slowly, towards kM. M = (n / k) ** (1 - common) goes from n / k (any element may be chosen) down to 1
    (everyone chooses the same).
    """
    return k * num_ranks / (1.0 + (num_ranks - 1) / (n / k) ** (1.0 - common))


def fit_common(unions: Mapping[int, float], n: int, k: float) -> float:
    """The `common` that explains best how many different elements so many ranks were seen to choose.

    `unions` holds them by number of ranks; k is what each chose. Best: the least squares of relative errors. Without
    any world of two ranks or more: 0.
    """
    seen = {size: union for size, union in unions.items() if size > 1 and union > 0}

    def error(common: float) -> float:
        return sum(math.log(union_size(n, k, size, common) / union) ** 2 for size, union in seen.items())

    low, high = 0.0, 1.0
    for _ in range(_FIT_STEPS):  # by thirds: unions shrink as `common` grows, so there is one valley
        left, right = low + (high - low) / 3, high - (high - low) / 3
        low, high = (low, right) if error(left) <= error(right) else (left, high)
    return low


# --- the reducers: how many are applied, and the rounds after the agreement

_Model = Callable[[_Case], tuple[float, list[Round]]]


def _dense(case: _Case) -> tuple[float, list[Round]]:
    elements = 2.0 * case.n * case.peers / case.num_ranks
    return float(case.n), [_all_reduce(_WORD_BYTES * case.n, case.num_ranks, elements)]


def _gathering(case: _Case) -> tuple[float, list[Round]]:
    return case.union, _gather(case, case.chosen, case.n)


def _gathering_in_two(case: _Case) -> tuple[float, list[Round]]:
    values = case.value_bytes * case.chosen
    halves = (_packed_bytes(case, case.chosen, case.n) - values, values)
    rounds = [
        each
        for size, elements in zip(halves, (2 * case.chosen, 0.0), strict=True)
        for each in (_lengths("all_gather", case), _to_peers("all_gather", case, size, elements))
    ]
    return case.union, rounds


def _gathering_then_cutting(case: _Case) -> tuple[float, list[Round]]:
    return float(case.k), _gather(case, case.chosen, case.n)


def _splitting(case: _Case) -> tuple[float, list[Round]]:
    """Over equal regions; a region that is almost full travels whole, without indices."""
    share, region = case.union / case.num_ranks, case.n / case.num_ranks
    if (case.value_bytes + 1) * share <= case.value_bytes * region:
        sums = _gather(case, share, region, min(case.skew, region / share))
    else:
        size = HEADER_BYTES + _FIRST_BYTES + case.value_bytes * region
        sums = [_lengths("all_gather", case), _to_peers("all_gather", case, size, region)]
    return case.union, [*_scatter(case), *sums]


def _merging(case: _Case) -> tuple[float, list[Round]]:
    """Over all edges of the tree, k pairs go up and k come down; the root sends to every level."""
    levels = (case.num_ranks - 1).bit_length()
    size = LENGTH_BYTES + _packed_bytes(case, case.k, case.n)
    share = 2 * case.peers / (case.num_ranks * max(1, levels))
    return float(case.k), [Round("tree", 2, round(size), 2.0 * case.k, share)] * levels


def _oktopk(case: _Case) -> tuple[float, list[Round]]:
    """Over regions that follow the data."""
    share, region = case.k / case.num_ranks, case.n / case.num_ranks
    if case.evened:
        moved = HEADER_BYTES + _packed_bytes(case, share, region)  # in two messages, to neighbours
        last = [
            _lengths("all_to_all", case),
            Round("all_to_all", 2, round(moved), 2 * share),
            *_gather(case, share, region),
        ]
    else:
        last = _gather(case, share, region, min(case.skew, 2.0))[1:]  # the lengths are known
    return float(case.k), [
        *_scatter(case),
        _all_reduce(_HISTOGRAM_BYTES, case.num_ranks),
        _all_reduce(2 * _INT64_BYTES * case.num_ranks, case.num_ranks),
        *last,
    ]


_MODELS: Mapping[str, _Model] = {
    "dense": _dense,
    "topkA": _gathering,
    "topkA2": _gathering_then_cutting,
    "topkAopt": _gathering,
    "topkDSA": _splitting,
    "gtopk": _merging,
    "gaussiank": _gathering_in_two,
    "gaussiankconcat": _gathering,
    "gaussiankSA": _splitting,
    "oktopk": _oktopk,
}

# --- the exchanges


def _all_reduce(num_bytes: int, num_ranks: int, elements: float = 0.0) -> Round:
    peers = num_ranks - 1
    if is_direct(num_bytes, num_ranks):
        return Round("all_reduce", peers, num_bytes * peers, elements)
    return Round("ring_all_reduce", 2 * peers, ring_bytes(num_bytes, num_ranks), elements)


def _gather(case: _Case, count: float, span: float, skew: float = 1.0) -> list[Round]:
    """`count` pairs of the average rank, `skew` times as many of the busiest, to everyone."""
    size = _packed_bytes(case, skew * count, span)
    return [
        _lengths("all_gather", case),
        _to_peers("all_gather", case, size, 2 * skew * count, mean_share=1.0 / skew),
    ]


def _scatter(case: _Case) -> list[Round]:
    """To everyone the pairs of its region."""
    count = case.chosen / case.num_ranks
    size = _packed_bytes(case, count, case.n / case.num_ranks)
    return [_lengths("all_to_all", case), _to_peers("all_to_all", case, size, 2 * count)]


def _lengths(operation: str, case: _Case) -> Round:
    return Round(f"{operation}_lengths", case.peers, LENGTH_BYTES * case.peers)


def _to_peers(operation: str, case: _Case, size: float, elements: float, mean_share: float = 1.0) -> Round:
    return Round(operation, case.peers, round(size * case.peers), elements * case.peers, mean_share)


def _packed_bytes(case: _Case, count: float, span: float) -> float:
    """What the wire needs for `count` pairs spread evenly over `span` indices."""
    plain = (_INT32_BYTES if case.n <= 2**31 else _INT64_BYTES) * count
    gaps = [_gap_bytes(count, span, width) for width in (1, 2)] if count > 2 else []
    values = _whole_words(case.value_bytes * count)
    return HEADER_BYTES + _whole_words(min([plain, *gaps])) + values


def _gap_bytes(count: float, span: float, width: int) -> float:
    """Of indices as gaps, where each element is taken with the same probability, one after the other."""
    largest = digits(width)[1]
    reaching = (1.0 - min(1.0, count / span)) ** largest  # the part of the gaps that do not fit into one digit
    return _FIRST_BYTES + width * count / (1.0 - reaching) if reaching < 1.0 else math.inf


def _whole_words(size: float) -> float:
    """On average half the padding that there can be."""
    return size + (_WORD_BYTES - 1) / 2 if size % _WORD_BYTES else size
