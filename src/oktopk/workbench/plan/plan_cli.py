"""`oktopk plan`: step times past the machines at hand, by the cost model."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from oktopk.comm.simulator import SimulatedCommunicator, World
from oktopk.registry import REDUCERS
from oktopk.workbench.console import words
from oktopk.workbench.console.files import check_folder, write_results
from oktopk.workbench.console.tables import Column, Row, figure, table
from oktopk.workbench.console.words import LineParser
from oktopk.workbench.plan.advise import DEFAULT_REDUCERS, Question, duration
from oktopk.workbench.plan.asked import add_options, read_options
from oktopk.workbench.plan.calibrate import measure_machine
from oktopk.workbench.plan.model import PER_MESSAGE_S, Link, Machine
from oktopk.workbench.plan.scaling import Grid, crossover, scale
from oktopk.workbench.plan.stored import read_calibration
from oktopk.workbench.worlds.membership import check_device

_RANKS = (2, 8, 32, 64, 256, 1024, 4096)
_RATES = ("1gbit", "10gbit", "25gbit", "100gbit")


def main(arguments: Sequence[str]) -> int:
    start = time.monotonic()
    options = _parser().parse_args(list(arguments))
    question, links = _question(options)
    folder = Path(options.out)
    check_folder(folder)
    rows = scale(question, Grid(options.ranks, links))
    for link, _ in links:
        print(f"\n{link}, {duration(options.latency)} a round: milliseconds of a step (x dense)")
        print(_shown([row for row in rows if row["link"] == link], options.ranks))
    print()
    for line in crossover(rows):
        print(line)
    whole = question.compute.forward_s + question.compute.backward_s
    known = duration(whole) if whole else "unknown, so nothing is hidden behind them"
    print(f"forward and backward: {known}")
    print(f"by the cost model, give or take {question.uncertainty:.0%} of an allreduce; <- marks what would be advised")
    write_results(folder / "plan.json", ["plan", *arguments], rows, time.monotonic() - start)
    print(folder / "plan.json")
    _draw(folder / "plan.png", rows)
    return 0


def _question(options: argparse.Namespace) -> tuple[Question, list[tuple[str, Link]]]:
    asked = read_options(options)
    machine, per_message_s, dense_byte_s = _machine(options, max(asked.bucket_sizes))
    links = [
        (rate, Link.of_figures(words.bits_per_s(rate), options.latency, per_message_s, dense_byte_s))
        for rate in options.rates
    ]
    question = Question(
        bucket_sizes=asked.bucket_sizes,
        num_ranks=2,
        link=links[0][1],
        machine=machine,
        compute=replace(asked.compute, shared=options.device == "cpu"),
        reducers=options.reducers,
        densities=(options.density,),
        common=asked.common,
    )
    return question, links


def _machine(options: argparse.Namespace, n: int) -> tuple[Machine, float, float]:
    """Measured before, or now; with what a message and a byte of an all_reduce cost the processor."""
    if options.calibration:
        known = read_calibration(Path(options.calibration))
        return known.machine, known.link.per_message_s, known.link.dense_byte_s
    check_device(options.device)
    torch.set_num_threads(1)
    alone = SimulatedCommunicator(World(1), 0)
    return measure_machine(alone, torch.device(options.device), n), PER_MESSAGE_S, 0.0


def _shown(rows: Sequence[Row], ranks: Sequence[int]) -> str:
    def cell(reducer: str, num_ranks: int) -> str:
        row = next(row for row in rows if row["reducer"] == reducer and row["ranks"] == num_ranks)
        mark = " <-" if row["chosen"] else "   "
        return f"{figure(row['step_ms'], '.4g')} ({figure(row['speedup'], '.2g')}x){mark}"

    reducers = list(dict.fromkeys(row["reducer"] for row in rows))

    def column(num_ranks: int) -> Column:
        return f"P = {num_ranks}", lambda row: cell(row["reducer"], num_ranks)

    names: Column = ("", lambda row: row["reducer"])
    return table([names, *map(column, ranks)], [{"reducer": reducer} for reducer in reducers])


def _draw(path: Path, rows: Sequence[Row]) -> None:
    try:
        from oktopk.workbench.plan.scaling_plot import draw
    except ModuleNotFoundError as error:
        print(f"no picture: {error}; pip install 'oktopk[train]'")
        return
    draw(path, rows)
    print(path)


def _parser() -> argparse.ArgumentParser:
    parser = LineParser(
        prog="oktopk plan",
        description="Weak scaling by the cost model: step times on more workers and other links than one has.",
    )
    add_options(parser)
    add = parser.add_argument
    add("--calibration", help="what `oktopk advise --save` wrote; without it this machine's kernels are measured now")
    add("--density", type=words.density, default=0.01, help="part to send (default %(default)s)")
    names = words.one_of(*(name for name in REDUCERS if name != "dense"))
    add("--reducers", type=names, nargs="+", default=list(DEFAULT_REDUCERS), help="which, beside dense")
    add("--ranks", type=words.count(2), nargs="+", default=list(_RANKS), help=f"workers (default {_list(_RANKS)})")
    add("--rates", type=words.link_rate, nargs="+", default=list(_RATES), help=f"links (default {' '.join(_RATES)})")
    add("--latency", type=words.seconds, default=50e-6, help="of one exchange, such as 100us (default 50us)")
    add("--device", type=words.one_of("cpu", "cuda"), default="cpu", help="whose kernels (default %(default)s)")
    add("--out", default="plan", help="folder of plan.json and plan.png (default %(default)s)")
    return parser


def _list(values: Sequence[int]) -> str:
    return " ".join(str(value) for value in values)
