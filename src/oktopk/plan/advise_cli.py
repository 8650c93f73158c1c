"""`oktopk advise`: will it help me? Measured between the ranks it is started on, or from figures."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from oktopk.comm.local_workers import start_local_workers
from oktopk.comm.simulator import SimulatedCommunicator, World
from oktopk.console import words
from oktopk.console.tables import Column, figure, table
from oktopk.console.words import LineParser, UsageError
from oktopk.launch import COMM_NAMES, DEVICE_NAMES, Member, find_place, join
from oktopk.plan.advise import DENSITIES, Answer, Question, advise, describe, duration, equal_buckets, table_rows
from oktopk.plan.calibrate import Calibration, calibrate, measure_machine
from oktopk.plan.check import Check, checked
from oktopk.plan.model import Compute, Link
from oktopk.plan.run_facts import RunFacts, read_run
from oktopk.plan.stored import write_calibration

PER_MESSAGE_S = 20e-6
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
    facts = read_run(Path(options.run)) if options.run else None
    _check_options(options, facts)
    if options.bandwidth:
        _say(*_from_figures(options, facts))
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
    answer, checks, calibration = _measured(options, facts, member)
    if member.is_first:
        if options.save:
            write_calibration(Path(options.save), calibration)
        _say(answer, checks)
    member.comm.barrier()
    return 0


def _measured(
    options: argparse.Namespace, facts: RunFacts | None, member: Member
) -> tuple[Answer, list[Check], Calibration]:
    sizes = _bucket_sizes(options, facts)
    if member.is_first:
        print("measuring the link and the machine ...", file=sys.stderr)
    calibration = calibrate(member.comm, member.device, max(sizes))
    question = Question(
        bucket_sizes=sizes, num_ranks=member.place.size, link=calibration.link, machine=calibration.machine
    )
    question = _with_facts(question, options, facts, member.device)
    return (*checked(advise(question), member.comm, member.device), calibration)


def _from_figures(options: argparse.Namespace, facts: RunFacts | None) -> tuple[Answer, list[Check]]:
    sizes = _bucket_sizes(options, facts)
    torch.set_num_threads(1)  # as beside other workers
    device = torch.device("cuda" if options.device != "cpu" and torch.cuda.is_available() else "cpu")
    alone = SimulatedCommunicator(World(1), 0)
    link = Link.of_figures(words.bits_per_s(options.bandwidth), options.latency, PER_MESSAGE_S)
    num_ranks = options.ranks or (facts.num_ranks if facts else 0)
    machine = measure_machine(alone, device, max(sizes))
    question = Question(bucket_sizes=sizes, num_ranks=num_ranks, link=link, machine=machine)
    return advise(_with_facts(question, options, facts, device)), []


def _bucket_sizes(options: argparse.Namespace, facts: RunFacts | None) -> Sequence[int]:
    if options.parameters or not facts:
        return equal_buckets(options.parameters, options.bucket_cap_mb)
    return facts.bucket_sizes


def _with_facts(
    question: Question, options: argparse.Namespace, facts: RunFacts | None, device: torch.device
) -> Question:
    compute = facts.compute if facts else Compute()
    if options.compute is not None:
        compute = Compute(options.compute / 3, options.compute * 2 / 3)
    question = replace(question, compute=replace(compute, shared=device.type == "cpu"))
    if options.density:
        question = replace(question, densities=tuple(options.density))
    if facts and facts.common is not None:
        question = replace(question, common=facts.common)
    return question


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


def _check_options(options: argparse.Namespace, facts: RunFacts | None) -> None:
    if not (options.parameters or facts):
        raise UsageError("--parameters: missing; say how large the gradient is (--parameters 27.6M) or give a --run")
    if options.bandwidth and not (options.ranks or facts):
        raise UsageError("--ranks: missing; with --bandwidth no worker is started, so say how many there would be")
    if options.latency is not None and not options.bandwidth:
        raise UsageError("--latency: is measured; it can be given only together with --bandwidth")
    if options.ranks and not options.bandwidth:
        raise UsageError("--ranks: with workers at hand these are counted; give --bandwidth too, or use --workers")
    if options.latency is None:
        options.latency = 100e-6


def _parser() -> argparse.ArgumentParser:
    parser = LineParser(
        prog="oktopk advise",
        description="Whether compression would help: which reducer at which density, or to stay dense. Started on "
        "several workers (--workers, torchrun, mpirun, srun) it measures them; with --bandwidth it takes your word.",
    )
    add = parser.add_argument
    add("--parameters", type=words.size, help="elements of the gradient, such as 27.6M")
    add("--run", help="a run's folder: sizes, forward and backward, and, where recorded, its gradients")
    add("--compute", type=words.seconds, help="forward and backward of one step, such as 250ms")
    add("--density", type=words.density, nargs="+", help=f"densities to consider (default {_list(DENSITIES)})")
    add("--bucket-cap-mb", type=words.positive, default=25.0, help="largest bucket in MiB (default %(default)s)")
    add("--workers", type=words.count(1), default=1, help="workers to start on this machine and measure")
    add("--bandwidth", type=_link_rate, help="of each worker's link, such as 1gbit, instead of measuring")
    add("--latency", type=words.seconds, help="of one exchange on it, such as 100us (default 100us)")
    add("--ranks", type=words.count(2), help="with --bandwidth: how many workers")
    add("--comm", type=words.one_of(*COMM_NAMES), default="auto", help="as for oktopk train")
    add("--device", type=words.one_of(*DEVICE_NAMES), default="auto", help="as for oktopk train")
    add("--timeout-s", type=words.positive, default=300.0, help="how long a worker waits for the others")
    add("--save", help="write what was measured to this file, for oktopk plan")
    return parser


def _list(values: Sequence[float]) -> str:
    return " ".join(f"{value:g}" for value in values)


def _link_rate(text: str) -> str:
    words.bits_per_s(text)
    return text
