"""What a training run is: one frozen dataclass, filled from a preset, a TOML file and the command line."""

from __future__ import annotations

import dataclasses
import math
import re
import tomllib
from argparse import ArgumentTypeError
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_origin, get_type_hints

from oktopk.registry import describe
from oktopk.settings import Settings
from oktopk.workbench.console.words import UsageError
from oktopk.workbench.train.task_settings import TASKS
from oktopk.workbench.worlds.membership import COMM_NAMES, DEVICE_NAMES

PRESETS = Path(__file__).parent.parent / "configs"


class ConfigError(UsageError):
    """A setting that cannot be used; the message names the key, the value, the reason and the fix."""


def _setting(default: Any, group: str, help: str) -> Any:
    return field(default=default, metadata={"group": group, "help": help})


@dataclass(frozen=True, kw_only=True)
class TrainConfig(Settings):
    """Every value can be set in a preset and overridden on the command line as --name value."""

    name: str = _setting("run", "run", "folder of this run below out_dir; that of a preset is its own name")
    out_dir: str = _setting("runs", "run", "where run folders are made; nothing is written outside them")
    seed: int = _setting(1, "run", "seed of everything random")
    resume: bool = _setting(False, "run", "continue from this run's last checkpoint")
    pretrain: str = _setting("", "run", "checkpoint to take the weights from, and nothing else")
    checkpoint_every: int = _setting(1, "run", "epochs between checkpoints; 0: only at the end; -1: none")
    quiet: bool = _setting(False, "run", "no progress bars")
    report: bool = _setting(True, "run", "write report.html at the end")
    profile: bool = _setting(False, "run", "record every communication and stage of every worker")
    record_gradients: int = _setting(0, "run", "steps whose gradients are saved, from the first sparse one on")

    task: str = _setting("lstman4", "task", "what to train")
    data_dir: str = _setting("", "task", "the task's data; empty: embedded data, generated into the run folder")
    batch_size: int = _setting(8, "task", "samples for each worker and step")
    task_settings: Any = field(default=None)
    """The chosen task's own settings, of the type that `TASKS` names."""

    epochs: int = _setting(10, "optimisation", "passes over the training data")
    max_steps: int = _setting(0, "optimisation", "stop after this many steps; 0: after the epochs")
    lr: float = _setting(0.01, "optimisation", "learning rate")
    lr_schedule: str = _setting(
        "divide", "optimisation", "divide (by lr_decay), steps (x0.1 at milestones), linear, cosine (to a tenth)"
    )
    lr_decay: float = _setting(1.01, "optimisation", "divide: the learning rate is divided by this after each epoch")
    lr_milestones: str = _setting("", "optimisation", "steps: epochs at which it becomes a tenth, such as 81,122,155")
    lr_warmup_epochs: float = _setting(0.0, "optimisation", "epochs in which it grows from zero")
    optimizer: str = _setting("sgd", "optimisation", "sgd or adamw")
    momentum: float = _setting(0.9, "optimisation", "SGD momentum, or AdamW's first beta")
    adam_beta2: float = _setting(0.999, "optimisation", "AdamW's second beta")
    weight_decay: float = _setting(1e-4, "optimisation", "weight decay")
    norm_clip: float = _setting(400.0, "optimisation", "norm the local gradient is clipped to; 0: not at all")
    nsteps_update: int = _setting(1, "optimisation", "batches accumulated for one step")
    validate_every: int = _setting(1, "optimisation", "epochs between validations; the last epoch always has one")

    compress: str = _setting(
        "gradient", "compression", "what is exchanged: gradient, before the optimizer, or update, behind it"
    )
    local_steps: int = _setting(0, "compression", "steps between two exchanges of what they changed; 0: none is local")
    outer_lr: float = _setting(1.0, "compression", "local_steps: part of the mean change that is applied")
    outer_momentum: float = _setting(0.0, "compression", "local_steps: Nesterov momentum of the mean changes")
    local_stream: bool = _setting(False, "compression", "local_steps: exchange the buckets in turn, not all at once")
    local_delay: int = _setting(0, "compression", "local_steps: steps that go on while an exchange is under way")
    reducer: str = _setting(
        "oktopk", "compression", "which reducer exchanges the gradients; auto: measure, then decide"
    )
    density: float = _setting(0.02, "compression", "part of the gradient to send, in (0, 1]")
    density_ramp_steps: int = _setting(0, "compression", "sparse steps in which the density falls from 0.25")
    dense_vectors: bool = _setting(False, "compression", "biases and norm layers stay dense, in buckets of their own")
    bucket_cap_mb: float = _setting(25.0, "compression", "largest bucket of gradients, in MiB")

    workers: int = _setting(1, "launch", "workers to start here, unless torchrun, mpirun or srun already did")
    comm: str = _setting("auto", "launch", "auto, gloo, nccl or mpi")
    device: str = _setting("auto", "launch", "auto, cpu or cuda")

    def __post_init__(self) -> None:
        try:
            if self.reducer != "auto":
                describe(self.reducer)
            super().__post_init__()
        except ValueError as error:
            raise ConfigError(str(error)) from error
        least: dict[str, float] = {
            "batch_size": 1, "epochs": 1, "nsteps_update": 1, "workers": 1, "validate_every": 1, "max_steps": 0,
            "local_steps": 0, "local_delay": 0, "outer_momentum": 0.0, "checkpoint_every": -1, "record_gradients": 0,
            "lr_warmup_epochs": 0.0, "density_ramp_steps": 0, "momentum": 0.0, "weight_decay": 0.0, "norm_clip": 0.0,
        }  # fmt: skip
        for key, bound in least.items():
            value = getattr(self, key)
            if not value >= bound or value == math.inf:
                raise ConfigError(f"{key}={value!r}: must be at least {bound:g}")
        for key in ("lr", "lr_decay", "bucket_cap_mb", "outer_lr"):
            value = getattr(self, key)
            if not 0.0 < value < math.inf:
                raise ConfigError(f"{key}={value!r}: must be a positive number")
        choices = {
            "comm": COMM_NAMES, "device": DEVICE_NAMES, "optimizer": ("sgd", "adamw"),
            "lr_schedule": ("divide", "steps", "linear", "cosine"), "task": tuple(TASKS),
            "compress": ("gradient", "update"),
        }  # fmt: skip
        for key, allowed in choices.items():
            if getattr(self, key) not in allowed:
                raise ConfigError(f"{key}={getattr(self, key)!r}: must be one of {', '.join(allowed)}")
        for key in ("momentum", "adam_beta2", "outer_momentum"):
            if not getattr(self, key) < 1.0:
                raise ConfigError(f"{key}={getattr(self, key)!r}: must be below 1")
        self._check_compression()
        if not re.fullmatch(r"(\d+(,\d+)*)?", self.lr_milestones):
            raise ConfigError(f"lr_milestones={self.lr_milestones!r}: must be epochs with commas, such as 81,122,155")
        if self.task_settings is None:
            object.__setattr__(self, "task_settings", TASKS[self.task].settings())
        _check_task_settings(self.task_settings)
        if not self.name or Path(self.name).name != self.name or self.name in (".", ".."):
            raise ConfigError(f"name={self.name!r}: must be a plain folder name; use out_dir to put it elsewhere")

    def _check_compression(self) -> None:
        if self.compress == "update" and self.local_steps:
            raise ConfigError(f"local_steps={self.local_steps}: exchanges changes already; leave compress at gradient")
        exchanges_changes = self.compress == "update" or self.local_steps
        if exchanges_changes and self.momentum_correction:
            raise ConfigError(
                f"momentum_correction={self.momentum_correction!r}: is for gradients; set it to 0, because what is "
                "exchanged holds the momentum already"
            )
        if self.local_steps and self.reducer == "auto":
            raise ConfigError("reducer='auto': measures steps that all exchange; choose a reducer for local_steps")
        if self.local_delay and self.local_delay >= self.local_steps:
            raise ConfigError(f"local_delay={self.local_delay}: must be below local_steps={self.local_steps}")

    @property
    def milestones(self) -> list[int]:
        return sorted(int(word) for word in self.lr_milestones.split(",") if word)

    @property
    def run_folder(self) -> Path:
        return Path(self.out_dir) / self.name

    def allreducer_settings(self) -> Settings:
        """The part that an AllReducer is made from."""
        return Settings(**{item.name: getattr(self, item.name) for item in dataclasses.fields(Settings)})

    def as_dict(self) -> dict[str, Any]:
        """Flat: the task's own settings among the others."""
        values = dataclasses.asdict(self)
        own = values.pop("task_settings")
        return {**values, **own}


def preset_names() -> list[str]:
    return sorted(path.stem for path in PRESETS.glob("*.toml"))


def load_config(preset: str, overrides: Mapping[str, Any]) -> TrainConfig:
    """The preset (a name, or the path of a TOML file) with `overrides` on top; ConfigError for what does not fit."""
    path = Path(preset) if preset.endswith(".toml") else PRESETS / f"{preset}.toml"
    if not path.is_file():
        raise ConfigError(f"preset={preset!r}: no such preset or TOML file; presets: {', '.join(preset_names())}")
    try:
        values = tomllib.loads(path.read_text())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"preset={preset!r}: {path} is not valid TOML: {error}") from error
    return make_config({"name": path.stem, **values, **overrides})


def make_config(values: Mapping[str, Any]) -> TrainConfig:
    """From plain values, the task's own among them; ConfigError for an unknown key or a value of the wrong type."""
    task = values.get("task", TrainConfig.task)
    if task not in TASKS:
        raise ConfigError(f"task={task!r}: unknown; known: {', '.join(TASKS)}")
    general, own = get_type_hints(TrainConfig), get_type_hints(TASKS[task].settings)
    del general["task_settings"]
    for key, value in values.items():
        if key not in general and key not in own:
            owners = [name for name, info in TASKS.items() if key in get_type_hints(info.settings)]
            where = f"it belongs to {', '.join(owners)}, not to {task}" if owners else "`oktopk train --help` lists all"
            raise ConfigError(f"unknown setting {key}={value!r}; {where}")
    checked = {key: _of_type(key, value, plain_type((general | own)[key])) for key, value in values.items()}
    mine = TASKS[task].settings(**{key: value for key, value in checked.items() if key in own})
    return TrainConfig(**{key: value for key, value in checked.items() if key in general}, task_settings=mine)


def plain_type(hint: Any) -> type:
    """The type of a setting's value; one of several words is a str."""
    return str if get_origin(hint) is Literal else hint


def _of_type(key: str, value: Any, expected: type) -> Any:
    if expected is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if type(value) is not expected:
        raise ConfigError(f"{key}={value!r}: must be of type {expected.__name__}, is {type(value).__name__}")
    return value


def _check_task_settings(settings: Any) -> None:
    for item in dataclasses.fields(settings):
        value, least, choices = getattr(settings, item.name), item.metadata["least"], item.metadata["choices"]
        if least is not None and not least <= value < math.inf:
            raise ConfigError(f"{item.name}={value!r}: must be at least {least:g}")
        if choices and value not in choices:
            raise ConfigError(f"{item.name}={value!r}: must be one of {', '.join(choices)}")


def parse_bool(text: str) -> bool:
    """For argparse."""
    known = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
    if text.lower() not in known:
        raise ArgumentTypeError(f"{text!r}: must be True or False")
    return known[text.lower()]
