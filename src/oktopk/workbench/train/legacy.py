"""The old command line, `python main_trainer.py --dnn lstman4 ...`, in terms of TrainConfig."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from oktopk.workbench.train.config import ConfigError, load_config, parse_bool
from oktopk.workbench.train.data.errors import DataError
from oktopk.workbench.train.main import run_training
from oktopk.workbench.train.task_settings import TASKS
from oktopk.workbench.worlds.membership import find_place, refuse


def main(arguments: Sequence[str] | None = None) -> int:
    given = [_with_hyphens(word) for word in (sys.argv[1:] if arguments is None else arguments)]
    options = _parser().parse_args(given)
    try:
        return run_training(
            load_config(options.dnn, _settings(options)), ["-m", "oktopk.workbench.train.legacy", *given]
        )
    except (ConfigError, DataError) as error:
        return refuse("main_trainer.py", error)


def _settings(options: argparse.Namespace) -> dict[str, Any]:
    tasks = {name: info.dataset for name, info in TASKS.items()}
    if options.dnn not in tasks:
        raise ConfigError(f"dnn={options.dnn!r}: unknown; known: {', '.join(tasks)}")
    if options.dataset != tasks[options.dnn]:
        raise ConfigError(f"dataset={options.dataset!r}: {options.dnn} is trained on {tasks[options.dnn]!r}")
    place = find_place()
    if place.starter != "nobody" and options.nworkers != place.size:
        raise ConfigError(
            f"nworkers={options.nworkers}: but {place.starter} started {place.size} processes; make them agree"
        )
    if options.sigma_scale != 2.5:
        raise ConfigError(
            f"sigma-scale={options.sigma_scale!r}: only the default 2.5 is accepted, and it has no effect: gaussiank "
            "takes its threshold from the density"
        )
    compressor = options.compressor if options.compression else "dense"
    values: dict[str, Any] = {
        "name": f"{options.dnn}-n{options.nworkers}-bs{options.batch_size}-{compressor}",
        "data_dir": options.data_dir,
        "workers": options.nworkers,
        "batch_size": options.batch_size,
        "lr": options.lr,
        "epochs": options.max_epochs,
        "nsteps_update": options.nsteps_update,
        "reducer": compressor,
        "density": options.density,
        "pretrain": options.pretrain or "",
    }
    return values


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="main_trainer.py",
        description="The command line that users of Ok-Topk know. `oktopk train` has every setting.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--dnn", default="lstman4", help="model")
    add("--dataset", default="an4", help="its data set")
    add("--data-dir", default="./audio_data", help="folder of the data set")
    add("--nworkers", type=int, default=1, help="workers; must agree with mpirun -np where that is used")
    add("--nwpernode", type=int, default=1, help="workers on a node; read for compatibility, the launcher decides")
    add("--max-epochs", type=int, default=10, help="epochs")
    add("--batch-size", type=int, default=8, help="samples for each worker and step")
    add("--lr", type=float, default=0.01, help="learning rate")
    add("--nsteps-update", type=int, default=1, help="batches accumulated for one step")
    add("--compression", type=parse_bool, nargs="?", const=True, default=False, help="compress gradients")
    add("--compressor", default="oktopk", help="which reducer, where --compression is set")
    add("--sigma-scale", type=float, default=2.5, help="read for compatibility, see the guide")
    add("--density", type=float, default=0.02, help="part of the gradient to send")
    add("--pretrain", default=None, help="checkpoint to take the weights from")
    return parser


def _with_hyphens(word: str) -> str:
    """--max_epochs and --max-epochs are one."""
    if not word.startswith("--"):
        return word
    name, equals, value = word.partition("=")
    return name.replace("_", "-") + equals + value


if __name__ == "__main__":
    sys.exit(main())
