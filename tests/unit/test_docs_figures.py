"""Figures in README.md, docs/ and benchmarks/README.md are those of the result files, to the digit that is printed.

A table is known by its header cells, wherever it stands. Each kind of table gives, for each cell, the values that a
result file holds; sentences are checked by `CLAIMS`. Text that names files, modules and options is checked at the end.
"""

from __future__ import annotations

import ast
import contextlib
import csv
import io
import json
import math
import re
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest

from tests.worlds import ROOT

BENCHMARKS = ROOT / "benchmarks" / "results"
STUDIES = ROOT / "docs" / "results"
DOCUMENTS = {
    str(path.relative_to(ROOT)): path.read_text()
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), ROOT / "benchmarks" / "README.md")
}
Row = dict[str, Any]

# --- printed figures

NUMBER = r"[-+]?\d[\d,]*(?:\.\d+)?(?:e-?\d+)?"
FIGURE = re.compile(rf"(?<![\w.])({NUMBER})(?: ?(%|kB|MB|GB))?")
UNITS = {"": 1.0, "%": 0.01, "kB": 1e3, "MB": 1e6, "GB": 1e9}

Values = Sequence[float] | str
"""What a cell must show: these numbers in this order, in bytes or as fractions where a unit follows; or this text."""


def same_figure(printed: str, unit: str, value: float) -> str | None:
    """None where `value` rounds to what is printed; else the value with as many decimals."""
    mantissa = printed.replace(",", "").split("e")[0]
    decimals = len(mantissa.partition(".")[2])
    shown = f"{value / UNITS[unit]:.{decimals}{'e' if 'e' in printed else 'f'}}"
    return None if float(shown) == float(printed.replace(",", "")) else f"{shown} {unit}".strip()


def mismatch(printed: str, values: Values) -> str | None:
    """None where the text shows exactly these values; else what it should show."""
    if isinstance(values, str):
        return None if printed == values else values
    figures = FIGURE.findall(printed)
    if len(figures) != len(values):
        return f"{len(values)} figures: {', '.join(f'{value:.6g}' for value in values)}"
    true = [same_figure(*figure, value) for figure, value in zip(figures, values, strict=True)]
    if all(each is None for each in true):
        return None
    return ", ".join(each or " ".join(figure).strip() for each, figure in zip(true, figures, strict=True))


# --- tables of a document


@dataclass(frozen=True)
class Line:
    """A row of a table: the number of its line in the document, and its cells by column."""

    number: int
    cells: Sequence[str]

    @property
    def label(self) -> str:
        return self.cells[0]


@dataclass(frozen=True)
class Table:
    header: Sequence[str]
    lines: Sequence[Line]


def tables(text: str) -> list[Table]:
    found: list[Table] = []
    block: list[Line] = []
    for number, line in enumerate([*text.splitlines(), ""], start=1):
        if line.startswith("|"):
            cells = re.split(r"(?<!\\)\|", line.strip().replace("**", "").replace("−", "-"))[1:-1]
            block.append(Line(number, [cell.strip().strip("`") for cell in cells]))
        elif block:
            found.append(Table(block[0].cells, block[2:]))
            block = []
    return found


@dataclass(frozen=True)
class Figure:
    """Something printed, and what it must show."""

    line: int
    printed: str
    values: Values


class Unreadable(Exception):
    """A cell, row or column that no look-up is known for."""


Reading = Callable[[Line, int], Values | Figure | None]
"""The values of one cell; a Figure where part of the cell is words; None where no file holds it."""


# --- benchmarks

CONTENDERS = {
    "Gloo dense fp32": "dense-fp32",
    "Gloo dense bf16": "dense-bf16",
    "DDP fp16 hook": "ddp-fp16",
    "DDP fp16": "ddp-fp16",
    "DDP PowerSGD, rank 4": "powersgd",
    "oktopk": "oktopk-fp32",
    "oktopk, fp32": "oktopk-fp32",
    "oktopk, bf16": "oktopk-bf16",
    "no communication": "no-communication",
    "dense DDP": "ddp-dense",
}
LINKS = {"100 Mbit/s": "100mbit", "1 Gbit/s": "1gbit", "10 Gbit/s": "10gbit", "loopback": "loopback"}
MILLION = 1_000_000


@cache
def rows_of(*names: str) -> list[Row]:
    return [row for name in names for row in json.loads((BENCHMARKS / f"{name}.json").read_text())["rows"]]


def pick(rows: Sequence[Row], **wanted: Any) -> Row:
    found = [row for row in rows if all(row.get(key) == value for key, value in wanted.items())]
    if len(found) != 1:
        raise Unreadable(f"{len(found)} rows with {wanted}")
    return found[0]


def known(names: dict[str, str], label: str) -> str:
    if label not in names:
        raise Unreadable(f"{label!r} is none of {', '.join(names)}")
    return names[label]


def allreduce(link: str, ranks: int, contender: str, n: int = 10 * MILLION, density: float = 0.01) -> Row:
    ours = density if contender.startswith("oktopk") else None
    rows = rows_of("allreduce" if link == "loopback" else "links")
    return pick(rows, link=link, ranks=ranks, contender=contender, n=n, density=ours)


def speedup(link: str, ranks: int, contender: str, over: str = "dense-fp32", n: int = 10 * MILLION) -> float:
    return allreduce(link, ranks, over, n)["median_ms"] / allreduce(link, ranks, contender, n)["median_ms"]


def rounded_down(value: float) -> float:
    """To one decimal: for what is said to be "at least" so much."""
    return math.floor(10 * value) / 10


def least_over_powersgd(ranks: int) -> float:
    return rounded_down(min(speedup(link, ranks, "oktopk-fp32", over="powersgd") for link in LINKS.values()))


def link_times(table: Table) -> Reading:
    """`100 Mbit/s, P = 2`, or `P = 4` for the link of the column before."""
    places: list[tuple[str, int]] = []
    for title in table.header[1:]:
        link, _, ranks = title.rpartition("P = ")
        link = link.rstrip(", ")
        places.append((known(LINKS, link) if link else places[-1][0], int(ranks)))

    def read(line: Line, column: int) -> Values:
        link, ranks = places[column - 1]
        contender = known(CONTENDERS, line.label)
        median_ms = allreduce(link, ranks, contender)["median_ms"]
        return [median_ms] if contender == "dense-fp32" else [median_ms, speedup(link, ranks, contender)]

    return read


def targets(table: Table) -> Reading:
    """`2x: missed, 1.4x (bf16 1.1x)`: the first is what was asked for and is in no file."""

    def read(line: Line, column: int) -> Values:
        ranks = int(table.header[column].removeprefix("P = "))
        asked = line.cells[column].partition("x:")[0]
        link = line.label.removesuffix(", against dense fp32")
        if link == "any link, against PowerSGD":
            reached = least_over_powersgd(ranks)
            shown = f"at least {reached:.1f}x"
        else:
            reached, bf16 = (speedup(known(LINKS, link), ranks, name) for name in ("oktopk-fp32", "oktopk-bf16"))
            shown = f"{reached:.1f}x (bf16 {bf16:.1f}x)"
        return f"{asked}x: {'reached' if reached >= float(asked) else 'missed'}, {shown}"

    return read


def kernels(table: Table) -> Reading:
    operations = {"plain torch": "select, plain torch", "of copy bandwidth": "select"}

    def read(line: Line, column: int) -> Values:
        title = table.header[column]
        found = re.match(r"(CPU|H200), ([\d.]+)M", line.label)
        if found is None:
            raise Unreadable(f"{line.label!r}: neither 'CPU, <n>M' nor 'H200, <n>M'")
        rows = rows_of("kernels" if found[1] == "CPU" else "kernels-h200")
        operation = operations.get(title, title)
        row = pick(rows, n=round(float(found[2]) * MILLION), density=0.01, operation=operation)
        if title == "of copy bandwidth":
            return [row["of_copy_bandwidth"]]
        ratio = {"select": "against_copy", "recompute": "against_select"}.get(title)
        return [row["median_ms"], row[ratio]] if ratio and "(" in line.cells[column] else [row["median_ms"]]

    return read


def training(task: str, contender: str) -> Row:
    return pick(rows_of(f"training-{task}-h200"), contender=contender)


def training_steps(table: Table) -> Reading:
    def read(line: Line, column: int) -> Values:
        task = next(title for title in reversed(table.header[: column + 1]) if ":" in title).partition(":")[0]
        contender = known(CONTENDERS, line.label)
        if not line.cells[column]:  # it did not take part
            return "" if all(row["contender"] != contender for row in rows_of(f"training-{task}-h200")) else "a figure"
        row = training(task, contender)
        mean_ms = 1e3 / row["steps_per_s"]
        return [{"x dense DDP": row["against_dense"], "of no communication": row["of_no_communication"]}.get(
            table.header[column], mean_ms
        )]  # fmt: skip

    return read


def simulated_volumes(table: Table) -> Reading:
    columns: dict[str, Callable[[Row], Values]] = {
        "P": lambda row: [row["ranks"]],
        "": lambda row: row["how"],
        "formula": lambda row: row["formula"],
        "elements by formula": lambda row: [row["formula_elements"]],
        "sent: mean": lambda row: [row["mean_elements"]],
        "most": lambda row: [row["max_elements"]],
        "most / formula": lambda row: [row["elements_ratio"]],
        "bytes, mean": lambda row: [row["mean_bytes"]],
        "messages": lambda row: [row["mean_messages"]],
        "applied / k": lambda row: [row["applied"] / row["k"]],
    }

    def read(line: Line, column: int) -> Values:
        row = pick(rows_of("simulate"), reducer=line.label, ranks=int(line.cells[table.header.index("P")]))
        return columns[table.header[column]](row)

    return read


def model_errors(table: Table) -> Reading:
    """Rows are all predictions, those of a link, or `dense / oktopk / ...`: those of each reducer."""

    def errors(label: str) -> list[float]:
        name = label.strip("` ")
        contender = {"dense": "dense-fp32", "oktopk": "oktopk-fp32"}.get(name, name)
        wanted = LINKS.get(name, contender)
        whole = re.match(r"all (\d+) ", label)
        found = [abs(row["error"]) for row in rows_of("model") if whole or wanted in (row["link"], row["contender"])]
        if not found or (whole and len(found) != int(whole[1])):
            raise Unreadable(f"{label!r}: model.json holds {len(found)} such rows")
        return sorted(found)

    def read(line: Line, column: int) -> Values:
        groups = [line.label] if line.label.startswith("all") else line.label.split(" / ")
        some = [errors(group) for group in groups]
        if table.header[column] == "median error, %":
            return [100 * statistics.median(each) for each in some]
        return [100 * each[math.ceil(0.9 * len(each)) - 1] for each in some]

    return read


# --- studies


@dataclass(frozen=True)
class Outcome:
    """One variant of a study over its seeds."""

    runs: Sequence[Row]
    higher_is_better: bool

    @property
    def finals(self) -> list[float]:
        return [run["curve"][-1]["value"] for run in self.runs]

    @property
    def mean(self) -> float:
        return statistics.fmean(self.finals)

    @property
    def std(self) -> float:
        return statistics.stdev(self.finals)

    @property
    def bytes_sent(self) -> float:
        return statistics.fmean(run["bytes_sent"] for run in self.runs)

    def reached(self, target: float, seconds: Callable[[Row], float]) -> Values:
        """The mean over the runs that reached the target, and how many they are where they are not all."""
        sign = 1 if self.higher_is_better else -1
        curves = [[point for point in run["curve"] if sign * (point["value"] - target) >= 0] for run in self.runs]
        first = [seconds(curve[0]) for curve in curves if curve]
        if not first:
            return "-"
        return [statistics.fmean(first), *([len(first), len(curves)] if len(first) < len(curves) else [])]


@dataclass(frozen=True)
class Study:
    outcomes: dict[str, Outcome]

    def __getitem__(self, variant: str) -> Outcome:
        both = re.fullmatch(r"(oktopk [\d.]+), both", variant)
        names = [name for name in self.outcomes if not both or re.fullmatch(rf"{both[1]}, momentum .*steps", name)]
        variant = names[0] if both and names else variant
        if variant not in self.outcomes:
            raise Unreadable(f"no variant {variant!r}; there are {', '.join(map(repr, self.outcomes))}")
        return self.outcomes[variant]

    @property
    def dense(self) -> Outcome:
        return self.outcomes["dense"]

    @property
    def steps(self) -> int:
        return self.dense.runs[0]["curve"][-1]["step"]

    def behind(self, variant: str) -> float:
        return (self[variant].mean - self.dense.mean) * (-1 if self.dense.higher_is_better else 1)

    def is_within(self, variant: str) -> str:
        return "yes" if self.behind(variant) <= self.dense.std else "no"


@cache
def study(name: str) -> Study:
    """With the runs of study.json, and of study-2.json where there is one."""
    files = [json.loads(path.read_text()) for path in sorted((STUDIES / f"{name}-study").glob("study*.json"))]
    runs: list[Row] = [run for file in files for run in file["runs"]]
    assert {run["status"] for run in runs} == {"finished"}, "a run that diverged needs words, not a mean"
    variants = dict.fromkeys(run["variant"] for run in runs)
    higher = files[0]["study"]["higher_is_better"]
    return Study({name: Outcome([run for run in runs if run["variant"] == name], higher) for name in variants})


STUDY_TABLES = {
    ("final wer", "steps to 0.5"): "an4",
    ("final accuracy", "steps to 0.5"): "resnet20",
    ("final accuracy", "steps to 0.4"): "vgg16",
    ("final perplexity", "steps to 650"): "bert",
    ("final perplexity", "steps to 40"): "adamw",
    ("final wer", "steps to 0.1"): "an4-like",
}
TASKS = {"AN4-like": "an4-like", "AN4": "an4", "ResNet-20": "resnet20", "VGG16": "vgg16", "BERT": "bert"}
TASKS["AdamW"] = "adamw"  # last: the BERT of Wikipedia is trained with AdamW, too


def study_of(label: str) -> Study:
    """Of a row that begins with or names a task."""
    for words, name in TASKS.items():
        if words in label:
            return study(name)
    raise Unreadable(f"{label!r} names none of {', '.join(TASKS)}")


def gbit_seconds(point: Row) -> float:
    """As trained, and the bytes at 1 Gbit/s on top."""
    return point["time_s"] + 8 * point["bytes_sent"] / 1e9


def study_rows(name: str) -> Callable[[Table], Reading]:
    def of(table: Table) -> Reading:
        mine = study(name)
        target = float(next(title for title in table.header if title.startswith("steps to")).split()[-1])

        def read(line: Line, column: int) -> Values:
            outcome, title = mine[line.label], table.header[column]
            if title.startswith("final"):
                return [outcome.mean, outcome.std]
            if title.startswith("steps to"):
                return outcome.reached(target, lambda point: point["step"])
            if title == "1 Gbit/s, at most":
                return outcome.reached(target, gbit_seconds)
            if title.startswith("simulated"):
                return outcome.reached(target, lambda point: point["simulated_s"])
            if title.startswith("measured") and all(run["alone"] for run in outcome.runs):
                return outcome.reached(target, lambda point: point["time_s"])
            return {
                "behind": [mine.behind(line.label)],
                "within": mine.is_within(line.label),
                "sent by a worker": [outcome.bytes_sent],
                "of dense": [outcome.bytes_sent / mine.dense.bytes_sent],
            }[title]

        return read

    return of


def mean_and_std(printed: str, outcome: Outcome) -> Values:
    """With the deviation where one is printed."""
    return [outcome.mean, outcome.std] if "±" in printed else [outcome.mean]


def best_settings(table: Table) -> Reading:
    """Dense, `<final> at <density>`, `<final>: <density>, <setting>`, and what this last one sent."""

    def chosen(line: Line) -> tuple[str, Outcome]:
        cell = line.cells[table.header.index("oktopk with the right setting")]
        printed, _, setting = cell.partition(": ")
        dense_steps = re.fullmatch(r"([\d.]+), a tenth of the steps dense", setting)
        if dense_steps is None:
            return printed, study_of(line.label)[f"oktopk {setting}"]
        of_study = study_of(line.label)
        for name, outcome in of_study.outcomes.items():
            found = re.fullmatch(rf"oktopk {dense_steps[1]}, (\d+) dense steps", name)
            if found and round(int(found[1]) / of_study.steps, 2) == 0.1:
                return printed, outcome
        raise Unreadable(f"no variant with density {dense_steps[1]} and a tenth of {of_study.steps} steps dense")

    def read(line: Line, column: int) -> Values | Figure:
        of_study, cell = study_of(line.label), line.cells[column]
        title = table.header[column]
        if title == "dense":
            return mean_and_std(cell, of_study.dense)
        if title == "oktopk as it is":
            found = re.match(r"(.*) at ([\d.]+)", cell)
            if found is None:
                raise Unreadable(f"{cell!r}: not '<final> at <density>'")
            return Figure(line.number, found[1], mean_and_std(found[1], of_study[f"oktopk {found[2]}"]))
        printed, outcome = chosen(line)
        if title == "sent":
            return [outcome.bytes_sent / of_study.dense.bytes_sent]
        return Figure(line.number, printed, mean_and_std(printed, outcome))

    return read


def overview(table: Table) -> Reading:
    """`0.359, no; with 36 dense steps 0.045, yes`: a verdict is on all figures since the one before it."""
    part = re.compile(r"(?:([\d.]+) )?(?:with (\d+ dense steps|momentum correction) )?([\d.]+)(?=[,:])|(yes|no)\b")

    def read(line: Line, column: int) -> Values | Figure | None:
        of_study, cell, title = study_of(line.label), line.cells[column], table.header[column]
        if title == "dense":
            return mean_and_std(cell, of_study.dense)
        if not re.search(r"\d", cell):
            return cell
        true, waiting = cell, list[str]()
        for found in part.finditer(cell):
            own_density, setting, figure, verdict = found.groups()
            if verdict:
                right = {of_study.is_within(variant) for variant in waiting}
                if right != {verdict}:
                    raise Unreadable(f"{cell!r}: {verdict!r} does not hold for {' and '.join(waiting) or 'anything'}")
                waiting = []
                continue
            name = f"oktopk {own_density}" if own_density else title
            variant = f"{name}, {setting}" if setting else name
            waiting.append(variant)
            shown = same_figure(figure, "", of_study[variant].mean)
            true = true if shown is None else true.replace(figure, shown)
        if waiting:
            raise Unreadable(f"{cell!r}: no verdict on {' and '.join(waiting)}")
        return true

    return read


# --- full-size AN4

FIRST_SPARSE_EPOCH = 3
"""45 of 15 steps each are dense."""


@cache
def an4(name: str) -> dict[str, list[float]]:
    with (STUDIES / "an4" / f"{name}.csv").open() as file:
        rows = list(csv.DictReader(file))
    return {key: [float(row[key]) for row in rows] for key in rows[0]}


def an4_rows(table: Table) -> Reading:
    columns: dict[str, Callable[[dict[str, list[float]]], float] | None] = {
        "training loss": lambda run: run["loss"][-1],
        "held-out loss": lambda run: run["val_loss"][-1],
        "held-out WER, last epoch": lambda run: run["wer"][-1],
        "held-out WER, best epoch": lambda run: min(run["wer"]),
        "held-out CER, last epoch": lambda run: run["cer"][-1],
        "samples a second, sparse phase": lambda run: statistics.fmean(run["samples_per_s"][FIRST_SPARSE_EPOCH:]),
        "sent by a worker in a sparse step": None,  # the run that wrote it is gone
    }

    def read(line: Line, column: int) -> Values | None:
        value = columns[line.label]
        run = an4(table.header[column].partition(",")[0])
        assert table.header[0] == f"after {len(run['epoch'])} epochs"
        return None if value is None else [value(run)]

    return read


# --- which tables, which sentences


@dataclass(frozen=True)
class Kind:
    """Tables whose header has all of these cells; a cell is matched as a regular expression."""

    name: str
    header: Sequence[str]
    reading: Callable[[Table], Reading]

    def fits(self, table: Table) -> bool:
        return all(any(re.fullmatch(cell, title) for title in table.header) for cell in self.header)


KINDS = (
    Kind("times over links, links.json and allreduce.json", [r"(\d+ [MG]bit/s|loopback), P = \d"], link_times),
    Kind("what was asked for", ["asked for", "P = 2", "P = 4"], targets),
    Kind("kernels*.json", ["copy", "select", "recompute", "torch.topk"], kernels),
    Kind("training-*-h200.json", [r"lstman4: mean ms a step", "x dense DDP", "of no communication"], training_steps),
    Kind("simulate.json", ["P", "elements by formula", "applied / k"], simulated_volumes),
    Kind("model.json", ["median error, %", "90 % are within, %"], model_errors),
    *(Kind(f"the study {name}", ["variant", *titles], study_rows(name)) for titles, name in STUDY_TABLES.items()),
    Kind("all studies, best settings", ["dense", "oktopk as it is", "oktopk with the right setting"], best_settings),
    Kind("all studies", ["task", "dense", "oktopk 0.02", "oktopk 0.01"], overview),
    Kind("an4/*.csv", [r"after \d+ epochs", "dense"], an4_rows),
)

WITHOUT_FILE = (
    ("", "600 steps", "2000 steps"),  # longer runs with AdamW
    ("", "held-out accuracy", "held-out loss"),  # what was tried and is not in the product
)
"""Headers of tables in docs/performance.md, docs/planning.md and docs/results that no file is kept of."""


@dataclass(frozen=True)
class Claim:
    """A sentence with `{}` where a figure stands. Without a document it may be anywhere, or nowhere."""

    document: str | None
    words: str
    values: Callable[[], Sequence[float]]

    def pattern(self) -> re.Pattern[str]:
        parts = [re.escape(part).replace(r"\ ", r"\s+") for part in self.words.split("{}")]
        return re.compile(rf"({NUMBER})".join(parts))


def soak() -> Sequence[float]:
    row = rows_of("soak")[0]
    keys = ("rss_mib_at_100", "rss_mib_peak", "drift_relative", "count_over_k_min", "count_over_k_max")
    assert len({round(row[f"rss_mib_at_{part}"]) for part in (10, 50, 100)}) == 1
    return [row["steps"], row["density"], *(row[key] for key in keys), row["first_tenth_ms"], row["last_tenth_ms"]]


def h200(operation: str, key: str, *millions: float) -> list[float]:
    rows = rows_of("kernels-h200")
    return [pick(rows, n=round(each * MILLION), operation=operation)[key] for each in millions]


def bytes_per_pair(wire: str) -> float:
    return pick(rows_of("kernels"), n=10 * MILLION, density=0.01, operation=f"wire, {wire}")["bytes_per_pair"]


def most_applied() -> float:
    rows = [row for row in rows_of("links", "allreduce", "soak") if row["count_over_k_max"] is not None]
    assert min(row["count_over_k_min"] for row in rows) == 1
    return max(row["count_over_k_max"] for row in rows)


def seconds_to(name: str, variant: str, target: float) -> float:
    found = study(name)[variant].reached(target, gbit_seconds)
    assert not isinstance(found, str)
    return found[0]


def moved(reducer: str, ranks: int, key: str) -> float:
    """In parts of k."""
    row = pick(rows_of("simulate"), reducer=reducer, ranks=ranks)
    return row[key] / row["k"]


def deviations() -> list[float]:
    """How far behind dense each variant of the BERT study at 0.01 and 0.02 is."""
    found = study("bert")
    names = [name for name in found.outcomes if re.match(r"oktopk 0\.0[12]\b", name)]
    behind = sorted(found.behind(name) / found.dense.std for name in names)
    return [behind[0], behind[-1]]


def epochs_behind() -> float:
    """From the first epoch in which dense had the training loss that oktopk ends with."""
    dense, last = an4("dense")["loss"], an4("oktopk")["loss"][-1]
    return len(dense) - 1 - next(epoch for epoch, loss in enumerate(dense) if loss <= last)


def alone(name: str) -> list[float]:
    """ResNet-20 dense, of one of the two studies."""
    runs = json.loads((STUDIES / "resnet20-study" / name).read_text())["runs"]
    finals = [run["curve"][-1]["value"] for run in runs if run["variant"] == "dense"]
    return [statistics.fmean(finals), statistics.stdev(finals)]


def calibrated(part: str) -> float:
    machine = json.loads((BENCHMARKS / "calibration-16-cores.json").read_text())["calibration"]["machine"]
    return 1e3 * machine[part]["call_s"]


PERFORMANCE, PLANNING = "docs/performance.md", "docs/planning.md"
CONVERGENCE, AN4 = "docs/results/convergence.md", "docs/results/an4.md"

CLAIMS = (
    Claim(
        None,
        "speech model {} times as fast as dense DDP",
        lambda: [training("lstman4", "oktopk-fp32")["against_dense"]],
    ),
    Claim(
        None,
        "at {} % of the speed without any communication",
        lambda: [100 * training("lstman4", "oktopk-fp32")["of_no_communication"]],
    ),
    Claim(
        None,
        "predictions are off ({} % in the median)",
        lambda: [100 * statistics.median(abs(row["error"]) for row in rows_of("model"))],
    ),
    Claim(PERFORMANCE, "applied elements was between k and {} k", lambda: [most_applied()]),
    Claim(
        PERFORMANCE,
        "is {} times as fast as dense at 10M and {} times at 27.6M on 2 ranks, {} and {} times on 4; at 1M it takes "
        "{} times as long as dense on 2 ranks and {} times on 4",
        lambda: [
            *(speedup("loopback", ranks, "oktopk-fp32", n=n) for ranks in (2, 4) for n in (10 * MILLION, 27_600_000)),
            *(1 / speedup("loopback", ranks, "oktopk-fp32", n=MILLION) for ranks in (2, 4)),
        ],
    ),
    Claim(
        PERFORMANCE,
        "oktopk is at least {} times as fast as it on every link",
        lambda: [min(map(least_over_powersgd, (2, 4)))],
    ),
    Claim(
        PERFORMANCE,
        "{} % at 110M, {} % at 340M; 75 % at 27.6M: {} %",
        lambda: [100 * part for part in h200("select", "of_copy_bandwidth", 110, 340, 27.6)],
    ),
    Claim(
        PERFORMANCE,
        "Recompute within 3x: {}x at 27.6M, {}x and {}x above it",
        lambda: h200("recompute", "against_select", 27.6, 110, 340),
    ),
    Claim(
        PERFORMANCE,
        "{} for the layered synthetic gradient, in fp32; 3.1 and {} in bf16",
        lambda: [bytes_per_pair("fp32"), bytes_per_pair("bf16")],
    ),
    Claim(
        PERFORMANCE,
        "a whole step in bf16 at density 0.01 sent {} kB at P = 2 and {} kB at P = 4",
        lambda: [allreduce("1gbit", ranks, "oktopk-bf16")["bytes_sent"] / 1e3 for ranks in (2, 4)],
    ),
    Claim(
        PERFORMANCE,
        "its median step takes {} ms, {} times as fast as the median step of dense DDP ({} ms)",
        lambda: [
            (ours := training("vgg16", "oktopk-fp32")["median_ms"]),
            (dense := training("vgg16", "ddp-dense")["median_ms"]) / ours,
            dense,
        ],
    ),
    Claim(
        PERFORMANCE,
        "{} reductions at density {}: resident memory {} MiB after 100, 500 and 1000 of them (peak {}), a drift of {} "
        "of all that was ever owed, {} to {} k applied in every step; {} ms a step in the first tenth, {} in the last",
        soak,
    ),
    Claim(PLANNING, "are not normal: {}k here", lambda: [moved("gaussiank", 256, "chosen")]),
    Claim(
        PLANNING,
        "grow with P: {}k on 2 workers, {}k on 64",
        lambda: [moved("topkA", ranks, "applied") for ranks in (2, 64)],
    ),
    Claim(PLANNING, "encodes a buffer for every other ({} ms)", lambda: [calibrated("encode")]),
    Claim(
        CONVERGENCE,
        "All runs are short ({} to {} steps)",
        lambda: [min(steps := [study(name).steps for name in TASKS.values()]), max(steps)],
    ),
    Claim(CONVERGENCE, "2 workers, {} steps of 16 utterances", lambda: [study("an4").steps]),
    Claim(CONVERGENCE, "4 workers, {} steps of 128 images", lambda: [study("resnet20").steps]),
    Claim(CONVERGENCE, "2 workers, {} steps of 128 images", lambda: [study("vgg16").steps]),
    Claim(CONVERGENCE, "2 workers, {} steps of 64 pairs", lambda: [study("bert").steps]),
    Claim(CONVERGENCE, "2 workers on 2 cores, {} steps of 32 pairs", lambda: [study("adamw").steps]),
    Claim(CONVERGENCE, "to 1 Gbit/s, {} steps of 16 utterances", lambda: [study("an4-like").steps]),
    Claim(CONVERGENCE, "a dense of their own ({} ± {}; `study-2.json`)", lambda: alone("study-2.json")),
    Claim(
        CONVERGENCE,
        "moved dense ResNet-20 from {} ± {} to {} ± {}",
        lambda: [*alone("study.json"), *alone("study-2.json")],
    ),
    Claim(
        CONVERGENCE,
        "With momentum correction 0.01 reaches the target in {} s where dense needs {} s, and ends above it; dense "
        "itself spreads widely ({} to {})",
        lambda: [
            *(seconds_to("vgg16", name, 0.4) for name in ("oktopk 0.01, momentum correction", "dense")),
            *(pick_of(study("vgg16").dense.finals) for pick_of in (min, max)),
        ],
    ),
    Claim(CONVERGENCE, "by {} to {} deviations at 0.01 and 0.02", deviations),
    Claim(
        CONVERGENCE,
        "dense takes {} s to a perplexity of 650, 0.01 with momentum correction {} s",
        lambda: [seconds_to("bert", name, 650) for name in ("dense", "oktopk 0.01, momentum correction")],
    ),
    Claim(
        CONVERGENCE,
        "the target is reached in {} steps instead of dense's {}, and in {} s instead of {}",
        lambda: [
            study("an4-like")[name].reached(0.1, lambda point: point[key])[0]  # noqa: B023
            for key in ("step", "time_s")
            for name in ("oktopk 0.01, momentum correction", "dense")
        ],
    ),
    Claim(
        CONVERGENCE,
        "a dense step sends {} MB, {} ms of some",
        lambda: [(sent := (dense := study("an4-like")).dense.bytes_sent / dense.steps) / 1e6, 8e3 * sent / 1e9],
    ),
    Claim(AN4, "dense was {} epochs earlier", lambda: [epochs_behind()]),
    Claim(AN4, "and {} in epoch 15", lambda: [an4("oktopk")["loss"][15]]),
)


# --- the check


def figures(text: str) -> Iterator[Figure]:
    """Everything that a file can say something about. A cell without a look-up has a text no cell can have."""
    for table in tables(text):
        for kind in KINDS:
            if kind.fits(table):
                yield from _figures_of(table, kind)
    for claim in CLAIMS:
        for found in claim.pattern().finditer(text):
            for group, value in enumerate(claim.values(), start=1):
                yield Figure(text.count("\n", 0, found.start(group)) + 1, found[group], [value])


def _figures_of(table: Table, kind: Kind) -> Iterator[Figure]:
    for line in table.lines:
        for column in range(1, len(table.header)):
            printed = line.cells[column]
            try:
                values = kind.reading(table)(line, column)
            except (Unreadable, KeyError, IndexError, ValueError) as error:
                yield Figure(line.number, printed, f"<{kind.name}: {error}>")
                continue
            if isinstance(values, Figure):
                yield values
            elif values is not None:
                yield Figure(line.number, printed, values)


def discrepancies(document: str, text: str) -> list[str]:
    """Where a figure, or a sentence that belongs into this document, is not as the result files have it."""
    found = [
        f"{document}:{each.line}: printed {each.printed!r}, true {true!r}"
        for each in figures(text)
        if (true := mismatch(each.printed, each.values)) is not None
    ]
    missing = [each.words for each in CLAIMS if each.document == document and not each.pattern().search(text)]
    return found + [f"{document}: has no more: {words!r}; adapt CLAIMS" for words in missing]


@pytest.mark.parametrize("document", DOCUMENTS)
def test_figures_are_those_of_the_files(document: str) -> None:
    found = discrepancies(document, DOCUMENTS[document])
    assert not found, "\n".join(found)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_a_document_has_the_table(kind: Kind) -> None:
    assert any(kind.fits(table) for text in DOCUMENTS.values() for table in tables(text))


@pytest.mark.parametrize("document", [name for name in DOCUMENTS if name in (PERFORMANCE, PLANNING, CONVERGENCE, AN4)])
def test_every_table_is_checked_or_known_to_have_no_file(document: str) -> None:
    for table in tables(DOCUMENTS[document]):
        assert any(kind.fits(table) for kind in KINDS) or tuple(table.header) in WITHOUT_FILE, table.header


@pytest.mark.parametrize("document", DOCUMENTS)
def test_a_digit_changed_on_any_line_is_found(document: str) -> None:
    text = DOCUMENTS[document].replace("**", "").replace("−", "-")
    by_line = {each.line: each.printed for each in figures(text) if re.search(r"\d", each.printed)}
    for number, printed in by_line.items():
        lines = text.splitlines()
        changed = re.sub(r"\d(?=\D*$)", lambda digit: str((int(digit[0]) + 1) % 10), printed)
        lines[number - 1], times = re.subn(rf"(?<![\w.]){re.escape(printed)}(?!\d)", changed, lines[number - 1])
        assert times, (number, printed)
        found = discrepancies(document, "\n".join(lines))
        assert any(f"{document}:{number}: printed {changed!r}" in each for each in found), (number, printed, changed)


# --- files, modules, options and settings that documents name

OLD_SYSTEM, RUN_FOLDER = "docs/coming-from-ok-topk.md", "docs/run-folder.md"
"""They also name what the old system had, and what a run writes; test_docs.py checks the tables of the first."""
BENCHES = ("allreduce", "links", "model", "training", "soak", "kernels", "quick")
COMMANDS = ("train", "report", "trace", "simulate", "advise", "plan", "study", "manifest", "data an4-like")
COMMANDS += tuple(f"bench {name}" for name in BENCHES)
COMMAND = re.compile(rf"oktopk ({'|'.join(COMMANDS)})\b")
FILE = re.compile(r"(?!runs/)[\w.-]+(/[\w.-]+)+\.(py|toml|json|md|csv|sh)")


def code(text: str) -> list[str]:
    """The lines of blocks, a continued line as one, without comments; and what stands between backticks."""
    fenced = re.compile(r"^```\w*\n(.*?)^```", re.DOTALL | re.MULTILINE)
    blocks = [*fenced.findall(text), *re.findall(r"(?:^ {4}.*\n)+", text, re.MULTILINE)]
    lines = [line for block in blocks for line in re.sub(r"\\\n", " ", block).replace(" && ", "\n").splitlines()]
    spans = re.findall(r"`([^`]+)`", fenced.sub("", text))
    return [re.sub(r"\s+", " ", re.sub(r"\s+# .*", "", each)).strip() for each in [*lines, *spans]]


@cache
def options_of(command: str) -> frozenset[str]:
    """What its `--help` lists."""
    from oktopk.workbench.cli import main

    with contextlib.redirect_stdout(io.StringIO()) as shown, pytest.raises(SystemExit):
        main([*command.split(), "--help"])
    return frozenset(re.findall(r"--[a-z][\w-]*", shown.getvalue()))


@pytest.mark.parametrize("document", DOCUMENTS)
def test_commands_have_the_options(document: str) -> None:
    for each in code(DOCUMENTS[document]):
        if found := COMMAND.search(each):
            given = re.findall(r"(?<!\S)--[a-z][\w-]*", each[found.end() :])
            assert not set(given) - options_of(found[1]), each
        elif each.startswith("--") and document != OLD_SYSTEM:
            assert any(each.split()[0] in options_of(command) for command in COMMANDS), each


@pytest.mark.parametrize("document", DOCUMENTS)
def test_files_and_modules_are_there(document: str) -> None:
    from tests.unit.test_docs import resolve

    text, folder = DOCUMENTS[document], (ROOT / document).parent
    for target in re.findall(r"\]\(([^)#:]+)\)", text):
        assert (folder / target).exists(), target
    for each in code(text):
        if re.fullmatch(r"oktopk(\.\w+)+", each):
            resolve(each)
        elif FILE.fullmatch(each) and document not in (OLD_SYSTEM, RUN_FOLDER):
            assert any((base / each).exists() for base in (folder, ROOT, ROOT / "src" / "oktopk")), each


def test_fields_of_benchmark_files_are_described() -> None:
    described = {
        name
        for table in tables(DOCUMENTS["benchmarks/README.md"])
        if table.header[0] == "field of a row"
        for line in table.lines
        for name in re.findall(r"\w+", line.label)
    }
    files = [path.stem for path in BENCHMARKS.glob("*.json") if path.stem not in ("simulate", "calibration-16-cores")]
    assert described == {key for row in rows_of(*files) for key in row}


def test_settings_are_there_with_the_defaults() -> None:
    from oktopk.settings import Settings

    described = [
        (name, default)
        for text in DOCUMENTS.values()
        for table in tables(text)
        if table.header[:2] == ["setting", "default"]
        for line in table.lines
        for name, default in zip(re.findall(r"\w+", line.label), line.cells[1].split(", "), strict=True)
    ]
    assert described
    for name, default in described:
        assert getattr(Settings(), name) == ast.literal_eval(default), name
