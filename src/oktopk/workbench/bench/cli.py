"""`oktopk bench WHAT`: the parser, the table, the file."""

from __future__ import annotations

import argparse
import importlib
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from oktopk.registry import describe, reducer_names
from oktopk.workbench.bench import quick
from oktopk.workbench.bench.options import CONTENDERS, OURS, PEERS, PREDICTABLE, TASKS, WIRES, Options
from oktopk.workbench.console import words as read
from oktopk.workbench.console.files import check_folder, write_results
from oktopk.workbench.console.stopping import terminable
from oktopk.workbench.console.tables import Row, table
from oktopk.workbench.console.words import LOOPBACK, LineParser, UsageError
from oktopk.workbench.worlds.world import WorkerFailed

_ABOUT: Mapping[str, str] = {
    "kernels": "the kernels alone, without communication",
    "allreduce": "one allreduce on loopback, beside plain Gloo and DDP's hooks",
    "links": "the same over links of chosen speeds (needs root, ip and tc)",
    "model": "the cost model's predictions beside measured allreduces, on loopback and slower links",
    "training": "whole training steps under DDP",
    "soak": "many reductions: memory, the conservation law, speed at the end",
    "quick": "a short selection of all",
}
_MODULES = tuple(name for name in _ABOUT if name != "quick")


class _Parser(LineParser):
    def error(self, message: str) -> NoReturn:
        if message.endswith("required: WHAT"):
            message = f"WHAT: missing; choose from {', '.join(_ABOUT)}"
        super().error(message)


def main(arguments: Sequence[str]) -> int:
    """The exit code: 2 where the user asked for something that cannot be, 1 where a worker failed."""
    try:
        with terminable():
            return _bench(arguments)
    except UsageError as error:
        print(f"oktopk: {error}", file=sys.stderr)
        return 2
    except WorkerFailed as error:
        print(f"oktopk: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("oktopk: stopped; nothing was written", file=sys.stderr)
        return 130


def _bench(arguments: Sequence[str]) -> int:
    options = Options.of(vars(parser().parse_args(list(arguments))))
    options.check()
    target = Path(options.out) / f"{options.what}.json"
    check_folder(target.parent)
    start = time.monotonic()
    loaders = {name: _loader(name) for name in _MODULES}
    found = quick.run(options, loaders) if options.what == "quick" else loaders[options.what]()(options)
    rows = [row for row in found if "skipped" not in row]
    skipped = list(dict.fromkeys(f"{row['bench']}: {row['skipped']}" for row in found if "skipped" in row))
    for name in _MODULES:
        mine = [row for row in rows if row["bench"] == name]
        if mine:
            module = _module(name)
            print(f"\n{name}: {_ABOUT[name]}\n{table(module.COLUMNS, mine)}")
            print(getattr(module, "FOOTNOTE", ""))
    for reason in skipped:
        print(f"left out: {reason}")
    more = {"skipped": "; ".join(skipped) or None}
    write_results(target, ["bench", *arguments], rows, time.monotonic() - start, **more)
    print(target)
    return 0


def _loader(name: str) -> Callable[[], Callable[[Options], list[Row]]]:
    """Each benchmark is imported when it is wanted: the kernels' needs what the others do without."""

    def load() -> Callable[[Options], list[Row]]:
        try:
            return _module(name).run
        except ModuleNotFoundError as error:
            reason = f"this installation cannot run it ({error})"
            return lambda _: [{"bench": name, "skipped": reason}]

    return load


def _module(name: str) -> ModuleType:
    return importlib.import_module(f"oktopk.workbench.bench.{name}")


# --- what can be asked


def parser() -> argparse.ArgumentParser:
    whole = _Parser(prog="oktopk bench", description="Measure, beside what others reach, in one run.")
    kinds = whole.add_subparsers(required=True, metavar="WHAT", dest="what")
    made = {name: kinds.add_parser(name, help=about, description=about) for name, about in _ABOUT.items()}
    for each in made.values():
        each.add_argument("--out", default=Options.out, help="folder of the JSON file (default %(default)s)")
        each.add_argument("--kernels", help="which kernels select (default: the library's)")
        _add(each, "--seed", read.count(0), Options.seed, "of the gradients")
        _add(each, "--timeout-s", read.positive, Options.timeout_s, "how long a worker waits for the others")

    _add_sizes(made["kernels"], "1M", "10M", "27.6M")
    _add_densities(made["kernels"], "0.001", "0.01", "0.02")
    _add(made["kernels"], "--iterations", read.count(1), 20, "timed calls")
    _add_device(made["kernels"])

    for name, sizes, densities, iterations in (
        ("allreduce", ("1M", "10M", "27.6M"), ("0.001", "0.01", "0.02"), 20),
        ("links", ("10M",), ("0.01",), 7),
        ("model", ("1M", "10M"), ("0.001", "0.01"), 7),
    ):
        each = made[name]
        _add_many(each, "--ranks", read.count(2), (2, 4), "numbers of processes")
        _add_sizes(each, *sizes)
        _add_densities(each, *densities)
        _add(each, "--iterations", read.count(1), iterations, "timed allreduces of each contender")
        _add(each, "--warmup", read.count(1), Options.warmup, "sparse steps before the first that is timed")
        _add_peers(each, PREDICTABLE if name == "model" else (*PEERS, *OURS))
        others = (name for name in reducer_names() if describe(name).name not in ("oktopk", "dense"))
        _add_many(each, "--reducers", read.one_of(*others), (), "other reducers to measure as well")
    _add_rates(made["links"], "100mbit", "1gbit", "10gbit")
    _add_rates(made["model"], LOOPBACK, "100mbit", "1gbit", "10gbit")

    training = made["training"]
    _add_many(training, "--tasks", read.one_of(*TASKS), TASKS, "models to train")
    _add_many(training, "--ranks", read.count(2), (2,), "numbers of processes")
    _add_device(training)
    _add(training, "--steps", read.count(1), 10, "timed steps of each contender")
    _add(training, "--warmup", read.count(1), 3, "steps before the first that is timed")
    _add_densities(training, "0.01")
    _add_rates(training, LOOPBACK)
    _add(training, "--bucket-cap-mb", read.positive, Options.bucket_cap_mb, "DDP's bucket size in MiB")
    _add_peers(training, CONTENDERS)
    training.add_argument("--tiny", action="store_true", help="very small models, to see that it works")

    soak = made["soak"]
    _add_many(soak, "--ranks", read.count(2), (2,), "numbers of processes")
    _add_sizes(soak, "1M")
    _add_densities(soak, "0.01")
    _add(soak, "--steps", read.count(10), 1000, "reductions")
    _add(soak, "--wire", read.one_of(*WIRES), Options.wire, "how values travel")
    return whole


def _add(parser: argparse.ArgumentParser, flag: str, kind: Callable[[str], Any], default: Any, about: str) -> None:
    parser.add_argument(flag, type=kind, default=default, metavar="X", help=f"{about} (default %(default)s)")


def _add_many(
    parser: argparse.ArgumentParser,
    flag: str,
    kind: Callable[[str], Any],
    default: Sequence[Any],
    about: str,
    *other_flags: str,
) -> None:
    shown = " ".join(str(value) for value in default) or "none"
    text = f"{about} (default {shown})"
    parser.add_argument(flag, *other_flags, type=kind, nargs="+", default=list(default), metavar="X", help=text)


def _add_sizes(parser: argparse.ArgumentParser, *default: str) -> None:
    sizes = [read.size(text) for text in default]
    text = f"elements, n (default {' '.join(default)})"
    parser.add_argument("--sizes", type=read.size, nargs="+", default=sizes, metavar="N", help=text)


def _add_densities(parser: argparse.ArgumentParser, *default: str) -> None:
    densities = [read.density(text) for text in default]
    _add_many(parser, "--densities", read.density, densities, "parts of the gradient to send", "--density")


def _add_rates(parser: argparse.ArgumentParser, *default: str) -> None:
    _add_many(parser, "--rates", read.rate, default, "speeds of the links, such as 100mbit, or loopback")


def _add_device(parser: argparse.ArgumentParser) -> None:
    _add(parser, "--device", read.one_of("cpu", "cuda"), Options.device, "cpu or cuda")


def _add_peers(parser: argparse.ArgumentParser, known: Sequence[str]) -> None:
    _add_many(parser, "--peers", read.one_of(*known), known, "who takes part")
