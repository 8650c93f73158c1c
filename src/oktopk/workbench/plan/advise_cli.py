"""`oktopk advise`: will it help me? Measured between the ranks it is started on, or from figures."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from oktopk.comm.base import CommunicationError
from oktopk.comm.simulator import SimulatedCommunicator, World
from oktopk.workbench.console import words
from oktopk.workbench.console.tables import Column, figure, table
from oktopk.workbench.console.words import LineParser, UsageError
from oktopk.workbench.plan.advise import DENSITIES, Answer, Question, advise, describe, duration, table_rows
from oktopk.workbench.plan.asked import Asked, add_options, read_options
from oktopk.workbench.plan.calibrate import Calibration, calibrate, measure_machine
from oktopk.workbench.plan.check import Check, checked
from oktopk.workbench.plan.model import PER_MESSAGE_S, Link, Machine
from oktopk.workbench.plan.stored import write_calibration
from oktopk.workbench.worlds.local_workers import start_local_workers
from oktopk.workbench.worlds.membership import COMM_NAMES, DEVICE_NAMES, Member, check_device, find_place, join

_COLUMNS: tuple[Column, ...] = (
    ("reducer", lambda row: row["reducer"]),
    ("density", lambda row: "-" if row["reducer"] == "dense" else figure(row["density"], "g")),
    ("a step", lambda row: duration(row["step_s"])),
    ("allreduce alone", lambda row: duration(row["allreduce_s"])),
    ("x dense", lambda row: figure(row["speedup"], ".2f")),
    ("", lambda row: row["mark"]),
)


def main(arguments: Sequence[str]) -> int:
    options = _parser().parse_args(list(arguments))
    asked = read_options(options)
    _check_options(options, asked)
    if options.bandwidth:
        _say(_from_figures(options, asked), [])
        return 0
    place = find_place()
    if place.starter == "nobody" and options.workers > 1:
        return start_local_workers(options.workers, ["-m", "oktopk", "advise", *arguments])
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // place.local_size))
    member = join(place, options.comm, options.device, options.timeout_s)
    if place.size == 1:
        raise UsageError(
            "workers=1: nothing is exchanged by one worker; start several (--workers 2, torchrun, mpirun), or give "
            "the link in figures: --ranks 8 --bandwidth 1gbit --latency 100us"
        )
    try:
        answer, checks, calibration = _measured(options, asked, member)
        if member.is_first:
            if options.save:
                write_calibration(Path(options.save), calibration)
            _say(answer, checks)
        member.comm.barrier()
    except CommunicationError as error:
        raise UsageError(str(error)) from error
    return 0


def _measured(options: argparse.Namespace, asked: Asked, member: Member) -> tuple[Answer, list[Check], Calibration]:
    if member.is_first:
        print("measuring the link and the machine ...", file=sys.stderr)
    calibration = calibrate(member.comm, member.device, max(asked.bucket_sizes))
    question = _question(options, asked, member.place.size, calibration.link, calibration.machine, member.device)
    return (*checked(advise(question), member.comm, member.device), calibration)


def _from_figures(options: argparse.Namespace, asked: Asked) -> Answer:
    check_device(options.device)
    torch.set_num_threads(1)  # as beside other workers
    device = torch.device("cuda" if options.device != "cpu" and torch.cuda.is_available() else "cpu")
    alone = SimulatedCommunicator(World(1), 0)
    link = Link.of_figures(words.bits_per_s(options.bandwidth), options.latency, PER_MESSAGE_S)
    machine = measure_machine(alone, device, max(asked.bucket_sizes))
    num_ranks = options.ranks or (asked.run.num_ranks if asked.run else 0)
    return advise(_question(options, asked, num_ranks, link, machine, device))


def _question(
    options: argparse.Namespace, asked: Asked, num_ranks: int, link: Link, machine: Machine, device: torch.device
) -> Question:
    return Question(
        bucket_sizes=asked.bucket_sizes,
        num_ranks=num_ranks,
        link=link,
        machine=machine,
        compute=replace(asked.compute, shared=device.type == "cpu"),
        densities=options.density,
        common=asked.common,
    )


def _say(answer: Answer, checks: Sequence[Check]) -> None:
    question = answer.question
    print(f"{describe(question)}")
    for line in answer.lines():
        print(line)
    print()
    print(table(_COLUMNS, [dict(row) for row in table_rows(answer)]))
    print()
    for check in checks:
        print(
            f"checked: {check.reducer} of {check.n:,} elements takes {duration(check.measured_s)} here "
            f"(the model said {duration(check.predicted_s)}); all times above are corrected by that"
        )
    if not checks:
        print(
            "from figures: dense is counted at the link's full speed, the rest from this machine's kernels; "
            f"expect {question.uncertainty:.0%} either way"
        )
    if not question.compute.backward_s:
        print("nothing is known of forward and backward (--compute 250ms, or --run): no exchange is hidden behind them")


def _check_options(options: argparse.Namespace, asked: Asked) -> None:
    if options.bandwidth and not (options.ranks or asked.run):
        raise UsageError("--ranks: missing; with --bandwidth no worker is started, so say how many there would be")
    if options.latency is not None and not options.bandwidth:
        raise UsageError("--latency: is measured; it can be given only together with --bandwidth")
    if options.ranks and not options.bandwidth:
        raise UsageError("--ranks: with workers at hand these are counted; give --bandwidth too, or use --workers")
    if options.save and options.bandwidth:
        raise UsageError("--save: nothing is measured between workers with --bandwidth; leave one of them out")
    if options.save and not Path(options.save).absolute().parent.is_dir():
        raise UsageError(f"--save: '{options.save}': its folder does not exist; make it first")
    if options.latency is None:
        options.latency = 100e-6


def _parser() -> argparse.ArgumentParser:
    parser = LineParser(
        prog="oktopk advise",
        description="Whether compression would help: which reducer at which density, or to stay dense. Started on "
        "several workers (--workers, torchrun, mpirun, srun) it measures them; with --bandwidth it takes your word.",
    )
    add_options(parser)
    add = parser.add_argument
    densities = f"densities to consider (default {' '.join(map(str, DENSITIES))})"
    add("--density", type=words.density, nargs="+", default=list(DENSITIES), help=densities)
    add("--workers", type=words.count(1), default=1, help="workers to start on this machine and measure")
    add("--bandwidth", type=words.link_rate, help="of each worker's link, such as 1gbit, instead of measuring")
    add("--latency", type=words.seconds, help="of one exchange on it, such as 100us (default 100us)")
    add("--ranks", type=words.count(2), help="with --bandwidth: how many workers")
    add("--comm", type=words.one_of(*COMM_NAMES), default="auto", help="as for oktopk train")
    add("--device", type=words.one_of(*DEVICE_NAMES), default="auto", help="as for oktopk train")
    add("--timeout-s", type=words.positive, default=300.0, help="how long a worker waits for the others")
    add("--save", help="write what was measured to this file, for oktopk plan")
    return parser
