"""What a person sees: the plan, a bar for each epoch, its figures, the table at the end. Worker 0 alone speaks."""

from __future__ import annotations

import contextlib
import csv
import json
from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from oktopk.metrics.trainer_lists import mean_or_none
from oktopk.workbench.console.tables import byte_count
from oktopk.workbench.train.budget import percent

if TYPE_CHECKING:
    from oktopk.workbench.train.trainer import Trainer

StepSink = Callable[[Mapping[str, Any]], None]


_ENOUGH_DENSE_STEPS = 70
"""docs/results/updates.md: with fewer, updates have the wrong size for a long time."""


class Display(Protocol):
    def plan(self, trainer: Trainer) -> None: ...
    def note(self, text: str) -> None: ...
    def epoch(self, epoch: int, num_steps: int) -> contextlib.AbstractContextManager[StepSink]: ...
    def epoch_done(self, record: Mapping[str, Any], metrics: Mapping[str, str]) -> None: ...
    def summary(self, trainer: Trainer, record: Mapping[str, Any]) -> None: ...


class Silent:
    """For all workers but the first."""

    def plan(self, trainer: Trainer) -> None:
        trainer.outline()

    def note(self, text: str) -> None:
        del text

    @contextlib.contextmanager
    def epoch(self, epoch: int, num_steps: int) -> Generator[StepSink]:
        del epoch, num_steps
        yield lambda _: None

    def epoch_done(self, record: Mapping[str, Any], metrics: Mapping[str, str]) -> None:
        del record, metrics

    def summary(self, trainer: Trainer, record: Mapping[str, Any]) -> None:
        del trainer, record


class Terminal:
    def __init__(self, quiet: bool) -> None:
        self._console = Console(highlight=False, soft_wrap=True)
        self._bars = self._console.is_terminal and not quiet

    def plan(self, trainer: Trainer) -> None:
        config, outline = trainer.config, trainer.outline()
        n, size = trainer.num_parameters, trainer.optimizer.allreducer.comm.size
        dense, sparse = len(outline.dense_steps), len(outline.sparse_steps)
        k = max(1, round(trainer.density * n))
        say = self._console.print
        say(f"plan: {config.task}, {n:,} parameters, {size} worker{'s' if size > 1 else ''}, {config.reducer}")
        for line in trainer.auto.history() if trainer.auto else ():
            say(f"  auto: {line}")
        every = config.local_steps
        further = f"then an exchange every {every}" if every else f"{sparse} sparse"
        say(
            f"  {trainer.steps_per_epoch} steps an epoch, {trainer.num_steps} in all: {dense} dense, {further}"
            + (f" from step {outline.sparse_steps.start}" if sparse and not every else "")
        )
        say(
            f"  gradient to apply in a step: dense {byte_count(4 * n)}, sparse about {byte_count(8 * k)}"
            f" (density {trainer.density:g})"
        )
        budget = trainer.budget()
        if budget is not None:
            say(f"  {budget}")
        if trainer.position.step:
            say(f"  resumed at step {trainer.position.step}")
        if outline.warning:
            say(f"  WARNING: {outline.warning}")
        elif config.compress == "update" and config.optimizer == "adamw" and dense < _ENOUGH_DENSE_STEPS:
            say(
                f"  WARNING: {dense} dense steps are few to measure AdamW's second moment, and training may get stuck; "
                f"set warmup_steps to a tenth of the steps, and {_ENOUGH_DENSE_STEPS} or more"
            )

    def note(self, text: str) -> None:
        self._console.print(text)

    @contextlib.contextmanager
    def epoch(self, epoch: int, num_steps: int) -> Generator[StepSink]:
        if not self._bars:
            yield lambda _: None
            return
        columns = (
            TextColumn(f"epoch {epoch}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[figures]}"),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=self._console, transient=True) as progress:
            bar = progress.add_task("", total=num_steps, figures="")

            def advance(record: Mapping[str, Any]) -> None:
                rate = record["samples"] / max(sum(record["seconds"].values()), 1e-9)
                figures = f"loss {_figure(record['loss'])}  {record['phase']}  sparsity {_figure(record['sparsity'])}"
                progress.update(bar, advance=1, figures=f"{figures}  {rate:.0f} samples/s")

            yield advance

    def epoch_done(self, record: Mapping[str, Any], metrics: Mapping[str, str]) -> None:
        judged = "".join(f"{name} {_figure(record.get(key))}, " for key, name in metrics.items())
        against = record["sent_of_dense"]
        so_far = "" if against is None else f" ({percent(against)} of dense so far)"
        self._console.print(
            f"epoch {record['epoch']}: loss {_figure(record['loss'])}, held-out {_figure(record.get('val_loss'))}, "
            f"{judged}sparsity {_figure(record['sparsity'])}, ratio {_figure(record['compression_ratio'], '.1f')}, "
            f"sent {byte_count(record['bytes_sent'])}{so_far}, {record['samples_per_s']:.0f} samples/s"
        )

    def summary(self, trainer: Trainer, record: Mapping[str, Any]) -> None:
        folder = trainer.config.run_folder
        table = Table(title=f"{trainer.config.name}: {trainer.position.step} steps", show_header=False)
        for row in summary_rows(folder, trainer.optimizer.allreducer.comm.size, record, trainer.metrics):
            table.add_row(*row)
        self._console.print(table)
        for what in (
            "report.html",
            "metrics.jsonl",
            "epochs.csv",
            "ranks.csv",
            "profile",
            "tensorboard",
            "checkpoints",
        ):
            if (folder / what).exists():
                self._console.print(f"  {folder / what}")


def summary_rows(
    folder: Path, size: int, record: Mapping[str, Any], metrics: Mapping[str, str]
) -> list[tuple[str, str]]:
    """From what was logged: final figures, bytes against dense, seconds by stage in each phase."""
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    with (folder / "epochs.csv").open(newline="") as file:
        first = next(csv.DictReader(file))["loss"]
    started = first if first == "n/a" else _figure(float(first))
    rows = [
        ("training loss, first and last epoch", f"{started} → {_figure(record.get('loss'))}"),
        ("held-out loss", _figure(record.get("val_loss"))),
        *((name, _figure(record.get(key))) for key, name in metrics.items()),
    ]
    for phase in ("dense", "sparse", "local"):
        mine = [step for step in steps if step["phase"] == phase and not step["skipped"]]
        if phase == "local":  # nothing was exchanged
            rows += [("local steps", str(len(mine)))] if mine else []
            continue
        rows.append((f"{phase} steps", str(len(mine))))
        if not mine:
            continue
        buckets = [bucket for step in mine for bucket in step["buckets"]]
        would_be = sum(8 * bucket["n"] * (size - 1) // size for bucket in buckets)
        sent = sum(step["bytes_sent"] for step in mine)
        against = f", {sent / would_be:.1%} of dense" if would_be else ""
        seconds = {
            stage: sum(step["seconds"][stage] for step in mine) / len(mine)
            for stage in ("io", "forward", "backward", "wait")
        }
        exchange = sum(bucket["seconds"].get("exchange", 0.0) for bucket in buckets) / len(mine)
        rows += [
            (f"  sparsity, {phase}", _figure(mean_or_none([step["sparsity"] for step in mine]))),
            (f"  compression ratio, {phase}", _figure(mean_or_none([b["compression_ratio"] for b in buckets]), ".1f")),
            (f"  sent by a worker in a step, {phase}", f"{byte_count(sent / len(mine))}{against}"),
            (
                f"  a step, {phase}",
                ", ".join(f"{stage} {value * 1e3:.0f} ms" for stage, value in seconds.items())
                + f" (of which exchanging {exchange * 1e3:.0f} ms, partly during backward)",
            ),
        ]
    return rows


def _figure(value: float | None, spec: str = ".4f") -> str:
    return "n/a" if value is None else format(value, spec)
