"""`oktopk study`: train every variant on every seed, then say what came of it."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from oktopk.workbench.console import words
from oktopk.workbench.console.files import check_folder, write_results, write_text
from oktopk.workbench.console.progress import Progress
from oktopk.workbench.console.stopping import terminable
from oktopk.workbench.console.tables import markdown, table
from oktopk.workbench.console.words import LOOPBACK, LineParser, UsageError
from oktopk.workbench.plan.advise import duration
from oktopk.workbench.plan.model import PER_MESSAGE_S, Link
from oktopk.workbench.report.run import Run as LoadedRun
from oktopk.workbench.study.definition import (
    Study,
    checked_seeds,
    checked_target,
    chosen_variants,
    parse_settings,
    read_study,
    study_names,
)
from oktopk.workbench.study.outcome import Outcome, load
from oktopk.workbench.study.running import Conditions, alone_in, do_runs, done_before
from oktopk.workbench.study.summary import columns, rows
from oktopk.workbench.study.times import Clock
from oktopk.workbench.worlds.links import LinksUnavailable
from oktopk.workbench.worlds.membership import DEVICE_NAMES, check_device
from oktopk.workbench.worlds.world import WorkerFailed


def main(arguments: Sequence[str]) -> int:
    """The exit code: 2 where the user asked for something that cannot be, 1 where a worker or the disk failed."""
    progress = Progress()
    try:
        with terminable():
            return _study(arguments, progress)
    except LinksUnavailable as error:
        raise UsageError(f"--link: {error}") from error
    except (WorkerFailed, OSError) as error:
        progress.end()
        print(f"oktopk: {error}; finished runs are kept, and not done again", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        progress.end()
        print("oktopk: stopped; finished runs are kept, the same command goes on from there", file=sys.stderr)
        return 130


def _study(arguments: Sequence[str], progress: Progress) -> int:
    options = _parser().parse_args(list(arguments))
    check_device(options.device)
    study = _asked(options)
    folder = Path(options.out) / study.name
    runs = study.runs(folder)
    conditions = Conditions(
        num_workers=runs[0].config.workers,
        link=options.link,
        device="cuda" if options.device != "cpu" and torch.cuda.is_available() else "cpu",
        num_jobs=options.jobs,
        timeout_s=runs[0].config.timeout_s,
    )
    if conditions.num_workers < 2:
        raise UsageError("workers=1: one worker exchanges nothing; add --set workers=2 or more")
    if conditions.link != LOOPBACK and conditions.num_jobs > 1:
        raise UsageError(f"--jobs={conditions.num_jobs}: runs beside each other share the link; use --jobs 1")
    start = time.monotonic()
    if not options.table_only:
        check_folder(folder)
        with alone_in(folder):
            do_runs(runs, study.metric, conditions, progress)
        progress.end()
    done = [(run, how) for run in runs if (how := done_before(run, conditions)) is not None]
    if not done:
        raise UsageError(f"{folder}: holds no finished run of this study; leave --table-only out")
    loaded = [load(run, study, how) for run, how in done]
    _write(study, loaded, folder, arguments, conditions, options, time.monotonic() - start)
    return 0


def _asked(options: Any) -> Study:
    study = read_study(options.study)
    settings = parse_settings(options.set)
    if options.data_dir:
        settings["data_dir"] = options.data_dir
    study = study.with_settings(settings)
    if options.seeds:
        study = replace(study, seeds=checked_seeds(options.seeds, "--seeds"))
    if options.only:
        study = replace(study, variants=chosen_variants(study, options.only))
    if options.target is not None:
        study = replace(study, target=checked_target(options.target, "--target"))
    return study


def _write(
    study: Study,
    loaded: Sequence[tuple[Outcome, LoadedRun]],
    folder: Path,
    arguments: Sequence[str],
    conditions: Conditions,
    options: Any,
    seconds: float,
) -> None:
    """study.json, study.md and two pictures, of the runs that are there."""
    link = Link.of_figures(words.bits_per_s(options.simulate), options.latency, PER_MESSAGE_S)
    timed = _best_timed(study, loaded)
    clock = Clock.of([run for _, run in timed], link, conditions.num_workers, conditions.device)
    outcomes = [outcome.with_times(clock.seconds_after(run)) for outcome, run in loaded]
    found = rows(study, outcomes)
    shown = columns(study, options.simulate, conditions.link)
    beside = "" if all(outcome.alone for outcome, _ in timed) else " (beside other runs)"
    about = (
        f"{study.name}: {study.preset}, {conditions.num_workers} workers on {conditions.device}, one thread each, over "
        f"Gloo, seeds {' '.join(map(str, study.seeds))}; computing a step takes {duration(clock.compute_s)}{beside}"
    )
    notes = (
        f"behind: how much worse than {study.baseline}; bytes and times are means over seeds",
        "simulated: computing as measured, bytes as counted by the first worker, rounds of "
        f"{duration(options.latency)} and kernels by the cost model; validations not counted",
        "measured: validations included; only of runs that had the machine to themselves",
    )
    write_results(
        folder / "study.json",
        ["study", *arguments],
        found,
        seconds,
        about=about,
        notes=notes,
        study={key: value for key, value in asdict(study).items() if key != "variants"},
        link=conditions.link,
        simulated_link=options.simulate,
        clock=asdict(clock),
        runs=[asdict(outcome) for outcome in outcomes],
    )
    listed = "".join(f"- {note}\n" for note in notes)
    write_text(folder / "study.md", f"{about}\n\n{markdown(shown, found)}\n{listed}")
    print("\n".join(["", about, "", table(shown, found), "", *notes]))
    try:
        from oktopk.workbench.study.plot import draw_curves, draw_finals
    except ImportError:
        print("no pictures: matplotlib is not installed (pip install 'oktopk[train]')", file=sys.stderr)
    else:
        draw_finals(study, found, folder / "finals.png")
        draw_curves(study, outcomes, options.simulate, folder / "curves.png")
    print(folder / "study.json")


def _best_timed(study: Study, loaded: Sequence[tuple[Outcome, LoadedRun]]) -> Sequence[tuple[Outcome, LoadedRun]]:
    """The runs to take the time of computing from: the first variant's, undisturbed ones where there are any."""
    base = [(outcome, run) for outcome, run in loaded if outcome.variant == study.baseline and run.steps]
    return [(outcome, run) for outcome, run in base if outcome.alone] or base or loaded


def _parser() -> LineParser:
    parser = LineParser(
        prog="oktopk study",
        description="Train dense and every reducer on the same task over several seeds, and compare: what they reach, "
        "what they send, how long they take. Runs that are finished are not done again.",
    )
    add = parser.add_argument
    add("study", help=f"one of {', '.join(study_names())}, or the path of a TOML file")
    add("--data-dir", help="the task's data; default: what the study says, or embedded data")
    add("--out", default="runs/studies", help="where the study's folder is made (default %(default)s)")
    add("--seeds", type=words.count(0), nargs="+", help="instead of the study's own")
    add("--only", nargs="+", help="variants to train beside the first: names or patterns such as 'oktopk*'")
    add("--set", nargs="+", default=[], metavar="KEY=VALUE", help="settings of `oktopk train` for all runs")
    add("--target", type=float, help="value of the metric that times are taken to, instead of the study's own")
    add("--jobs", type=words.count(1), default=1, help="runs at a time; with several, no times are measured")
    add("--device", type=words.one_of(*DEVICE_NAMES), default="auto", help="as for oktopk train")
    add("--link", type=words.rate, default=LOOPBACK, help="train over links of this speed (needs root, ip and tc)")
    add("--simulate", type=words.link_rate, default="1gbit", help="link of the simulated times (default %(default)s)")
    add("--latency", type=words.seconds, default=100e-6, help="of one exchange on it (default 100us)")
    add("--table-only", action="store_true", help="train nothing: the table of the runs that are there")
    return parser
