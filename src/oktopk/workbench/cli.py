"""The command line: oktopk train | report | simulate | advise | plan | bench | study | trace | manifest | data."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_type_hints

from oktopk.workbench.console.words import UsageError
from oktopk.workbench.train.config import ConfigError, TrainConfig, load_config, parse_bool, plain_type, preset_names
from oktopk.workbench.train.data.an4_like import generate
from oktopk.workbench.train.data.errors import DataError
from oktopk.workbench.train.data.manifest import write_manifests
from oktopk.workbench.train.main import run_training
from oktopk.workbench.train.task_settings import TASKS
from oktopk.workbench.worlds.membership import find_place, refuse

_OWN_PARSERS: Mapping[str, tuple[str, str]] = {
    "report": ("oktopk.workbench.report.cli", "look at runs: one page, and pictures"),
    "trace": ("oktopk.workbench.report.trace", "a profiled run as a Chrome trace, for Perfetto"),
    "simulate": ("oktopk.workbench.simulate.command", "what every reducer sends, on many simulated workers"),
    "advise": ("oktopk.workbench.plan.advise_cli", "whether compression would help you, and which"),
    "plan": ("oktopk.workbench.plan.plan_cli", "step times on more workers and other links than one has"),
    "bench": ("oktopk.workbench.bench.cli", "measure, beside what others reach"),
    "study": ("oktopk.workbench.study.cli", "train dense and every reducer over several seeds, and compare"),
}
"""Commands with a `main(arguments) -> int` of their own, loaded when they are wanted."""

_OTHER_FLAGS = {"reducer": ("--compressor",)}
"""Names that people know from the original system."""


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code; what a user did wrong is said in one line."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        if given and given[0] in _OWN_PARSERS:
            module, _ = _OWN_PARSERS[given[0]]
            return int(importlib.import_module(module).main(given[1:]))
        options = _parser().parse_args(given)
        return int(options.run(options, given))
    except (DataError, UsageError) as error:
        return refuse("oktopk", error)
    except BrokenPipeError:  # whoever read what we print has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _train(options: argparse.Namespace, given: list[str]) -> int:
    overrides = {name: value for name in setting_names() if (value := getattr(options, name)) is not None}
    place = find_place()
    if place.starter != "nobody" and options.workers not in (None, place.size):  # that of a preset is no contradiction
        raise ConfigError(f"workers={options.workers}: but {place.starter} started {place.size}; leave --workers out")
    return run_training(load_config(options.preset, overrides), ["-m", "oktopk", *given])


def _manifest(options: argparse.Namespace, given: list[str]) -> int:
    del given
    for path in write_manifests(Path(options.folder), Path(options.out) if options.out else None):
        print(f"{path}: {len(path.read_text().splitlines())} utterances")
    return 0


def _data(options: argparse.Namespace, given: list[str]) -> int:
    del given
    generate(Path(options.folder), num_train=options.train, num_test=options.test, seed=options.seed)
    print(f"{options.folder}: {options.train} training and {options.test} held-out utterances")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="oktopk", description="Training that sends only the gradients that matter.")
    commands = parser.add_subparsers(required=True, metavar="command")

    train = commands.add_parser(
        "train",
        help="train a model on one or several workers",
        description="Train. Values come from the preset; every one can be overridden here.",
        usage="oktopk train [preset] [--setting value ...]",
    )
    train.add_argument(
        "preset", nargs="?", default="demo", help=f"one of {', '.join(preset_names())}, or the path of a TOML file"
    )
    add_settings(train)
    train.set_defaults(run=_train)

    for name, (_, about) in _OWN_PARSERS.items():
        commands.add_parser(name, help=about)

    manifest = commands.add_parser("manifest", help="list the audio files of an AN4 folder in two CSV files")
    manifest.add_argument("folder", help="AN4, with train/an4/wav and test/an4/wav in it")
    manifest.add_argument("--out", help="where to write them; default: into the folder itself")
    manifest.set_defaults(run=_manifest)

    data = commands.add_parser("data", help="generate a data set")
    kinds = data.add_subparsers(required=True, metavar="kind")
    an4_like = kinds.add_parser("an4-like", help="speech-like sounds with AN4-like transcripts, in AN4's layout")
    an4_like.add_argument("folder")
    an4_like.add_argument("--train", type=int, default=480, help="training utterances (default %(default)s)")
    an4_like.add_argument("--test", type=int, default=64, help="held-out utterances (default %(default)s)")
    an4_like.add_argument("--seed", type=int, default=0)
    an4_like.set_defaults(run=_data)
    return parser


def add_settings(parser: argparse.ArgumentParser) -> None:
    """An option for every setting, in its group, hyphens and underscores alike; the tasks' own behind the others."""
    groups: dict[str, Any] = {}
    for name, (title, kind, about) in setting_names().items():
        groups.setdefault(title, parser.add_argument_group(title) if title not in groups else None)
        flags = dict.fromkeys([f"--{name.replace('_', '-')}", f"--{name}", *_OTHER_FLAGS.get(name, ())])
        options: dict[str, Any] = {"dest": name, "default": None, "metavar": kind.__name__.upper()}
        options |= {"type": parse_bool, "nargs": "?", "const": True} if kind is bool else {"type": kind}
        groups[title].add_argument(*flags, help=about.replace("%", "%%"), **options)


def setting_names() -> dict[str, tuple[str, type, str]]:
    """Every setting of the trainer and of its tasks, with its group, type and what it means."""
    found: dict[str, tuple[str, type, str]] = {}
    types = get_type_hints(TrainConfig)
    for item in dataclasses.fields(TrainConfig):
        if item.metadata:
            about = f"{item.metadata['help']} (default: {item.default if item.default != '' else 'none'})"
            found[item.name] = item.metadata.get("group", "compression"), plain_type(types[item.name]), about
    for info in TASKS.values():
        types = get_type_hints(info.settings)
        for item in dataclasses.fields(info.settings):
            tasks = [name for name, each in TASKS.items() if item.name in get_type_hints(each.settings)]
            about = f"{item.metadata['help']} ({', '.join(tasks)})"
            found.setdefault(item.name, ("settings of some tasks", types[item.name], about))
    return found


if __name__ == "__main__":
    sys.exit(main())
