"""`oktopk simulate`: the real reducers on many simulated ranks, and the volume table that comes of it."""

from __future__ import annotations

import argparse
import csv
import io
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from oktopk.registry import REDUCERS, describe, reducer_names
from oktopk.workbench.console import words as read
from oktopk.workbench.console.files import check_folder, write_results, write_text
from oktopk.workbench.console.progress import Progress
from oktopk.workbench.console.tables import Row, elements
from oktopk.workbench.console.words import LineParser, UsageError
from oktopk.workbench.simulate.campaign import Key, SourceSpec, jobs_for, move_all
from oktopk.workbench.simulate.gradients import DEFAULT_SEED
from oktopk.workbench.simulate.rows import FOOTNOTE, Traits, model_row, moved_row, shown, traits_of, verdict
from oktopk.workbench.simulate.run import Course, MovedRun
from oktopk.workbench.simulate.sources import GradientSource

DEFAULT_REDUCERS = ("dense", "topkA", "topkDSA", "gtopk", "gaussiank", "oktopk")
DEFAULT_RANKS = (2, 4, 8, 16, 32, 64)
DEFAULT_SIZE = 500_000
MOST_MOVED, MOST_RANKS = 256, 4096
_FIT_RANKS = (8, 32)
_FEW = 16  # pairs in a message, which has 40 bytes of header and length


def main(arguments: Sequence[str]) -> int:
    """The exit code: 2 where the user asked for something that cannot be."""
    progress = Progress()
    try:
        return _simulate(list(arguments), progress)
    except UsageError as error:
        progress.end()
        print(f"oktopk: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        progress.end()
        print("oktopk: stopped; nothing was written", file=sys.stderr)
        return 130


@dataclass(frozen=True)
class _Wanted:
    """What was asked for, checked."""

    reducers: tuple[str, ...]
    ranks: tuple[int, ...]
    course: Course
    spec: SourceSpec
    source: GradientSource
    out: Path
    num_jobs: int | None

    @staticmethod
    def of(given: argparse.Namespace) -> _Wanted:
        for size in given.ranks or ():
            if size > MOST_RANKS:
                raise UsageError(f"--ranks: {size}: the model is good for at most {MOST_RANKS}; choose fewer")
        if given.gradients is not None and given.size is not None:
            raise UsageError(f"--size: {given.size}: recorded gradients have a size of their own; leave --size out")
        if given.gradients is None and given.bucket is not None:
            raise UsageError(f"--bucket: {given.bucket}: synthetic gradients have no buckets; leave --bucket out")
        spec = SourceSpec(size=given.size or DEFAULT_SIZE, seed=given.seed, run=given.gradients, bucket=given.bucket)
        source = spec.open()
        served = [size for size in DEFAULT_RANKS if size <= source.most_ranks]
        ranks = tuple(sorted(set(given.ranks or served or DEFAULT_RANKS[:1])))
        course = Course(density=given.density, num_warmup=given.warmup_steps, num_steps=given.steps)
        reducers = tuple(dict.fromkeys(describe(name).name for name in given.reducers))
        wanted = _Wanted(reducers, ranks, course, spec, source, given.out, given.jobs)
        source.check(wanted.moved[-1])
        return wanted

    @property
    def moved(self) -> list[int]:
        """Numbers of ranks between which data really moves; where the model has nothing to go by, some more."""
        moved = [size for size in self.ranks if size <= MOST_MOVED]
        return moved if (moved and moved[-1] > 1) or not self.modelled else [*moved, *_FIT_RANKS]

    @property
    def modelled(self) -> list[int]:
        return [size for size in self.ranks if size > MOST_MOVED]


def _simulate(arguments: list[str], progress: Progress) -> int:
    wanted = _Wanted.of(_parser().parse_args(arguments))
    check_folder(wanted.out)
    start = time.monotonic()
    source = wanted.source
    keys: list[Key] = [(reducer, size) for reducer in wanted.reducers for size in wanted.moved]
    possible = jobs_for(len(keys), source.n, wanted.moved[-1])
    runs = move_all(
        keys, wanted.spec, source, wanted.course, wanted.num_jobs or possible, progress.part, progress.detail
    )
    progress.end()
    rows, traits = _rows(wanted, runs)
    notes = _notes(wanted, traits, rows)
    print(f"{source.about}: n = {elements(source.n)}, density {wanted.course.density:g}, k = {rows[0]['k']:,}")
    print(f"\n{shown(rows)}\n\n{FOOTNOTE}")
    for line in (*notes, verdict(rows)):
        if line:
            print(line)
    more = {
        "source": source.about,
        "notes": notes,
        "density": wanted.course.density,
        "warmup_steps": wanted.course.num_warmup,
        "steps": wanted.course.num_steps,
        "model": {name: asdict(found) for name, found in traits.items()},
    }
    write_results(wanted.out / "simulate.json", ["simulate", *arguments], rows, time.monotonic() - start, **more)
    write_text(wanted.out / "ranks.csv", _as_csv([runs[key] for key in keys]))
    print(f"\n{wanted.out / 'simulate.json'}\n{wanted.out / 'ranks.csv'}")
    _draw(rows, wanted.out / "volume.png", source.about)
    return 0


def _rows(wanted: _Wanted, runs: Mapping[Key, MovedRun]) -> tuple[list[Row], dict[str, Traits]]:
    """Reducer by reducer, P ascending; and what the model was fitted to, where it was asked."""
    rows: list[Row] = []
    traits: dict[str, Traits] = {}
    for reducer in wanted.reducers:
        mine = [runs[reducer, size] for size in wanted.moved]
        rows += [moved_row(run) for run in mine]
        if wanted.modelled:
            traits[reducer] = traits_of([run for run in mine if run.num_ranks > 1])
            n, k = mine[0].n, mine[0].k
            rows += [model_row(reducer, size, n, k, traits[reducer]) for size in wanted.modelled]
    return rows, traits


def _notes(wanted: _Wanted, traits: Mapping[str, Traits], rows: Sequence[Row]) -> list[str]:
    course, moved, k = wanted.course, wanted.moved, int(rows[0]["k"])
    notes = wanted.source.notes(moved[-1], course.num_warmup + course.num_steps)
    notes.append(
        f"steps: {course.num_warmup} until thresholds have settled (in ranks.csv, not in the table), "
        f"then {course.num_steps} to count"
    )
    if traits:
        added = set(moved) - set(wanted.ranks)
        extra = f" ({', '.join(str(size) for size in sorted(added))} moved for it)" if added else ""
        notes.append(f"by model, P > {MOST_MOVED}: no data moved; fitted to P = {moved[0]} to {moved[-1]}{extra}")
    largest = max(*wanted.ranks, moved[-1])
    if k < _FEW * largest:
        notes.append(
            f"k = {k:,} is less than {_FEW} for each of {largest} ranks: messages are mostly headers; "
            "raise --size or --density for a fair picture of bytes"
        )
    return notes


def _as_csv(runs: Sequence[MovedRun]) -> str:
    """Every rank and step, those of the warm-up too."""
    rows = [
        {
            "reducer": run.reducer,
            "ranks": run.num_ranks,
            "step": number,
            "warmup": int(number < run.num_warmup),
            "rank": each.rank,
            "chosen": each.stats.local_count,
            "applied": each.stats.global_count,
            "elements_sent": f"{each.elements_sent:.0f}",
            "bytes_sent": each.stats.bytes_sent,
            "bytes_received": each.stats.bytes_received,
            "messages_sent": each.stats.messages_sent,
            "messages_received": each.stats.messages_received,
        }
        for run in runs
        for number, step in enumerate(run.steps)
        for each in step
    ]
    out = io.StringIO()
    writer = csv.DictWriter(out, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


def _draw(rows: Sequence[Row], path: Path, source: str) -> None:
    if not any(row["ranks"] > 1 for row in rows):
        print(f"{path.name}: left out, one rank sends nothing")
        return
    try:
        from oktopk.workbench.simulate.plot import draw
    except ImportError as error:
        print(f"{path.name}: left out, matplotlib is missing ({error}): pip install 'oktopk[train]'")
        return
    draw(rows, path, source)
    print(path)


def _parser() -> argparse.ArgumentParser:
    parser = LineParser(
        prog="oktopk simulate",
        description="What every reducer sends: the real ones, on simulated ranks, beside their papers' formulas.",
    )
    names = read.one_of(*reducer_names())
    parser.add_argument(
        "--reducers", type=names, nargs="+", default=list(DEFAULT_REDUCERS), metavar="NAME",
        help=f"which ones, of {', '.join(REDUCERS)} (default {' '.join(DEFAULT_REDUCERS)})",
    )  # fmt: skip
    parser.add_argument(
        "--ranks", type=read.count(1), nargs="+", metavar="P",
        help=f"numbers of ranks: up to {MOST_MOVED} move real data, up to {MOST_RANKS} go by model "
        f"(default {' '.join(str(size) for size in DEFAULT_RANKS)}, as far as recorded gradients go)",
    )  # fmt: skip
    parser.add_argument(
        "--size", type=read.size, metavar="N", help=f"elements, n, of a synthetic gradient (default {DEFAULT_SIZE})"
    )
    parser.add_argument("--density", type=read.density, default=0.01, metavar="X", help="k / n (default %(default)s)")
    parser.add_argument("--seed", type=read.count(0), default=DEFAULT_SEED, metavar="X", help="default %(default)s")
    parser.add_argument(
        "--gradients", type=Path, metavar="RUN", help="take those that a run recorded, such as runs/demo, instead"
    )
    parser.add_argument(
        "--bucket", type=read.count(0), metavar="B", help="only that bucket of them (default: all, as one)"
    )
    parser.add_argument(
        "--steps", type=read.count(1), default=2, metavar="X", help="steps that are counted (default %(default)s)"
    )
    parser.add_argument(
        "--warmup-steps", type=read.count(0), default=8, metavar="X",
        help="steps before them, until thresholds have settled (default %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--jobs", type=read.count(1), metavar="X", help="processes (default: as many as there are cores)"
    )
    parser.add_argument("--out", type=Path, default=Path("simulation"), help="folder to write to (default %(default)s)")
    return parser
