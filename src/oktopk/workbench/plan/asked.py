"""What `advise` and `plan` are asked about: a gradient and the step around it, from options or from a run."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from oktopk.workbench.console import words
from oktopk.workbench.console.words import UsageError
from oktopk.workbench.plan.advise import COMMON, equal_buckets
from oktopk.workbench.plan.model import Compute
from oktopk.workbench.plan.run_facts import RunFacts, read_run


@dataclass(frozen=True)
class Asked:
    bucket_sizes: Sequence[int]
    compute: Compute
    common: float
    run: RunFacts | None


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--parameters", type=words.size, help="elements of the gradient, such as 27.6M")
    add("--run", help="a run's folder: sizes, forward and backward, and, where recorded, its gradients")
    add("--compute", type=words.seconds, help="forward and backward of one step, such as 250ms")
    add("--bucket-cap-mb", type=words.positive, default=25.0, help="largest bucket in MiB (default %(default)s)")


def read_options(options: argparse.Namespace) -> Asked:
    """What is given counts more than what the run says; UsageError where neither says how large the gradient is."""
    run = read_run(Path(options.run)) if options.run else None
    if not (run or options.parameters):
        raise UsageError("--parameters: missing; say how large the gradient is (--parameters 27.6M) or give a --run")
    compute = run.compute if run else Compute()
    if options.compute is not None:  # backward takes twice as long, more or less
        compute = replace(compute, forward_s=options.compute / 3, backward_s=options.compute * 2 / 3)
    return Asked(
        bucket_sizes=run.bucket_sizes
        if run and not options.parameters
        else equal_buckets(options.parameters, options.bucket_cap_mb),
        compute=compute,
        common=COMMON if run is None or run.common is None else run.common,
        run=run,
    )
