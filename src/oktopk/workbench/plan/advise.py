"""Which reducer at which density, or none: what the cost model says of one world and one gradient."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from oktopk.workbench.console.tables import elements, figure
from oktopk.workbench.plan.model import Compute, Link, Machine, predict, step_seconds

DEFAULT_REDUCERS = ("oktopk", "topkA", "topkDSA", "gtopk")
"""One of each kind; the others cost what their kind costs."""
DENSITIES = (0.02, 0.01)
"""Those that are known to train as well as dense more often than not; lower ones are for who asks for them."""
UNCERTAINTY = 0.4
"""Of an allreduce predicted from figures: most of those in docs/performance.md are less far off."""
COMMON = 0.44
"""How much ranks' choices coincide where nobody has looked, as in `oktopk simulate`: see `union_size` there."""
_AS_GOOD = 1.25
_WORTH_IT = 1.05
"""Training another way should bring at least this."""


@dataclass(frozen=True, kw_only=True)
class Question:
    """A gradient in buckets, the world that exchanges it, and what else a step takes."""

    bucket_sizes: Sequence[int]
    num_ranks: int
    link: Link
    machine: Machine
    compute: Compute = field(default_factory=Compute)
    reducers: Sequence[str] = DEFAULT_REDUCERS
    densities: Sequence[float] = DENSITIES
    common: float = COMMON
    uncertainty: float = UNCERTAINTY
    dense_factor: float = 1.0
    """Measured / predicted, where somebody has measured."""
    sparse_factor: float = 1.0

    @property
    def num_elements(self) -> int:
        return sum(self.bucket_sizes)


@dataclass(frozen=True)
class Choice:
    """One way to exchange, and how long a step would take, at best and at worst.

    `allreduce_s`: all buckets, nothing hidden.
    """

    reducer: str
    density: float
    step_s: float
    fast_s: float
    slow_s: float
    allreduce_s: float

    def __str__(self) -> str:
        return "dense" if self.reducer == "dense" else f"{self.reducer} at density {self.density:g}"


@dataclass(frozen=True)
class Answer:
    """`choice` is dense where compression would not surely help; `best` is the best that is not dense."""

    question: Question
    choice: Choice
    best: Choice
    dense: Choice
    considered: tuple[Choice, ...]

    @property
    def compresses(self) -> bool:
        return self.choice is self.best

    @property
    def speedup(self) -> float:
        """Of the best against dense, whether it was chosen or not."""
        return self.dense.step_s / self.best.step_s if self.best.step_s else 1.0

    def lines(self) -> list[str]:
        """For people."""
        if not self.dense.step_s:
            return ["stay dense: one worker exchanges nothing"]
        times = self.speedup
        span = f"{_times(self.dense.step_s / self.best.slow_s)} to {_times(self.dense.step_s / self.best.fast_s)}"
        if self.compresses:
            return [
                f"use {self.best}: a step of about {duration(self.best.step_s)} instead of "
                f"{duration(self.dense.step_s)} dense, {_times(times)} times as fast ({span})"
            ]
        if times < 1.0:
            loss = 100 * (self.best.step_s / self.dense.step_s - 1)
            return [
                f"stay dense: compression would cost you {loss:.0f} % (a step of {duration(self.best.step_s)} with "
                f"{self.best} instead of {duration(self.dense.step_s)})"
            ]
        return [
            f"stay dense: {self.best} might be {_times(times)} times as fast (a step of "
            f"{duration(self.best.step_s)} instead of {duration(self.dense.step_s)}; {span} is possible), too little "
            "to be sure of; only training both ways will tell"
        ]


def advise(question: Question) -> Answer:
    """Compress only where even the low end of the expected speed-up is a gain that is worth it.

    Of densities that are almost as fast as the fastest, the highest: it sends more of the gradient for nothing.
    """
    dense = _choice("dense", 1.0, question)
    considered = tuple(
        _choice(reducer, density, question) for reducer in question.reducers for density in question.densities
    )
    fastest = min(choice.step_s for choice in considered)
    as_good = [choice for choice in considered if choice.step_s <= _AS_GOOD * fastest]
    highest = max(choice.density for choice in as_good)
    best = min((choice for choice in as_good if choice.density == highest), key=lambda choice: choice.step_s)
    gains = question.num_ranks > 1 and dense.step_s > _WORTH_IT * best.slow_s
    return Answer(question, best if gains else dense, best, dense, considered)


def _choice(reducer: str, density: float, question: Question) -> Choice:
    """Only buckets of one size need to be looked at once."""
    made = {
        n: predict(reducer, n, density, question.num_ranks, question.link, question.machine, question.common)
        for n in set(question.bucket_sizes)
    }
    factor = question.dense_factor if reducer == "dense" else question.sparse_factor
    buckets = [made[n].times(factor) for n in question.bucket_sizes]
    unsure = 1.0 + question.uncertainty
    step_s, fast_s, slow_s = (
        step_seconds([bucket.times(by) for bucket in buckets], question.compute) for by in (1.0, 1.0 / unsure, unsure)
    )
    return Choice(reducer, density, step_s, fast_s, slow_s, sum(bucket.total_s for bucket in buckets))


def equal_buckets(num_elements: int, bucket_cap_mb: float) -> list[int]:
    """As DDP or DistributedOptimizer would cut it, more or less: full ones and a rest."""
    most = max(1, int(bucket_cap_mb * 2**20 / 4))
    full, rest = divmod(num_elements, most)
    return [most] * full + ([rest] if rest else [])


def table_rows(answer: Answer) -> Iterable[dict[str, str | float]]:
    """Dense first, then what was considered, by time."""
    for choice in (answer.dense, *sorted(answer.considered, key=lambda choice: choice.step_s)):
        mark = "<-" if choice is answer.choice else ""
        yield {
            "reducer": choice.reducer,
            "density": choice.density,
            "step_s": choice.step_s,
            "allreduce_s": choice.allreduce_s,
            "speedup": answer.dense.step_s / choice.step_s if choice.step_s else 1.0,
            "mark": mark,
        }


def describe(question: Question) -> str:
    link = question.link
    mbit = 8e-6 / link.seconds_per_byte if link.seconds_per_byte else 0.0
    speed = f"{mbit / 1e3:.4g} Gbit/s" if mbit >= 1e3 else f"{mbit:.4g} Mbit/s"
    number = len(question.bucket_sizes)
    return (
        f"{elements(question.num_elements)} parameters in {number} bucket{'s' if number > 1 else ''}, "
        f"{question.num_ranks} workers, {speed}, {duration(link.latency_s)} a round"
    )


def duration(seconds: float) -> str:
    """Three digits and the unit that fits them."""
    for unit, name in ((1e-6, "us"), (1e-3, "ms")):
        if seconds < 999.5 * unit:
            return f"{figure(seconds / unit)} {name}"
    return f"{figure(seconds)} s"


def _times(value: float) -> str:
    return f"{value:.2f}" if value < 2 else f"{value:.1f}" if value < 10 else f"{value:.0f}"
