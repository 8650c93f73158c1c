"""What a training run is: one frozen dataclass, filled from a preset, a TOML file and the command line."""

from __future__ import annotations

import dataclasses
import math
import tomllib
from argparse import ArgumentTypeError
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_type_hints

from oktopk.console.words import UsageError
from oktopk.launch import COMM_NAMES, DEVICE_NAMES
from oktopk.registry import canonical_name
from oktopk.settings import Settings

PRESETS = Path(__file__).parent.parent / "configs"


class ConfigError(UsageError):
    """A setting that cannot be used; the message names the key, the value, the reason and the fix."""


def _setting(default: Any, group: str, help: str) -> Any:
    return field(default=default, metadata={"group": group, "help": help})


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Every value can be set in a preset and overridden on the command line as --name value."""

    name: str = _setting("run", "run", "folder of this run below out_dir; that of a preset is its own name")
    out_dir: str = _setting("runs", "run", "where run folders are made; nothing is written outside them")
    seed: int = _setting(1, "run", "seed of everything random")
    resume: bool = _setting(False, "run", "continue from this run's last checkpoint")
    pretrain: str = _setting("", "run", "checkpoint to take the weights from, and nothing else")
    checkpoint_every: int = _setting(1, "run", "epochs between checkpoints; 0: only at the end")
    quiet: bool = _setting(False, "run", "no progress bars")
    report: bool = _setting(True, "run", "write report.html at the end")
    profile: bool = _setting(False, "run", "record every communication and stage of every worker")
    record_gradients: int = _setting(0, "run", "steps whose gradients are saved, from the first sparse one on")

    task: str = _setting("lstman4", "task", "what to train")
    data_dir: str = _setting("", "task", "the task's data; empty: the embedded corpus, generated into the run folder")
    batch_size: int = _setting(8, "task", "utterances for each worker and step")
    conv_channels: int = _setting(32, "task", "channels of the two convolutions")
    hidden_size: int = _setting(800, "task", "width of the LSTM layers")
    num_layers: int = _setting(5, "task", "LSTM layers")
    augment: bool = _setting(False, "task", "vary loudness, position and noise of training audio")
    on_bad_audio: str = _setting("fail", "task", "unreadable audio: `fail`, or `skip` and count")
    corpus_train: int = _setting(480, "task", "training utterances of the embedded corpus")
    corpus_test: int = _setting(64, "task", "held-out utterances of the embedded corpus")

    epochs: int = _setting(10, "optimisation", "passes over the training data")
    max_steps: int = _setting(0, "optimisation", "stop after this many steps; 0: after the epochs")
    lr: float = _setting(0.01, "optimisation", "learning rate")
    lr_decay: float = _setting(1.01, "optimisation", "the learning rate is divided by this after each epoch")
    momentum: float = _setting(0.9, "optimisation", "SGD momentum")
    weight_decay: float = _setting(1e-4, "optimisation", "SGD weight decay")
    norm_clip: float = _setting(400.0, "optimisation", "norm the local gradient is clipped to; 0: not at all")
    nsteps_update: int = _setting(1, "optimisation", "batches accumulated for one step")
    validate_every: int = _setting(1, "optimisation", "epochs between validations; the last epoch always has one")

    compressor: str = _setting(
        "oktopk", "compression", "which reducer exchanges the gradients; auto: measure, then decide"
    )
    density: float = _setting(0.02, "compression", "part of the gradient to send, in (0, 1]")
    warmup_steps: int = _setting(128, "compression", "dense steps before the first sparse one")
    min_sparse_numel: int = _setting(1024, "compression", "smaller buckets stay dense")
    tau: int = _setting(64, "compression", "steps between two agreements on regions")
    tau_prime: int = _setting(32, "compression", "steps between two exact thresholds, where they are reused")
    wire_dtype: str = _setting("fp32", "compression", "how values travel: fp32, or bf16 in half the bytes")
    thresholds: str = _setting("exact", "compression", "oktopk: exact in every step, or reuse for tau_prime steps")
    selector: str = _setting("auto", "compression", "which kernels do the work: auto, torch, numba or triton")
    momentum_correction: float = _setting(0.0, "compression", "momentum before compression (then set momentum 0)")
    bucket_cap_mb: float = _setting(25.0, "compression", "largest bucket of gradients, in MiB")
    guard_every: int = _setting(0, "compression", "check the conservation law every so many steps; 0: never")
    nonfinite: str = _setting("raise", "compression", "NaN in a gradient: `raise` or `skip` the step, on all ranks")

    workers: int = _setting(1, "launch", "workers to start here, unless torchrun, mpirun or srun already did")
    comm: str = _setting("auto", "launch", "auto, gloo, nccl or mpi")
    device: str = _setting("auto", "launch", "auto, cpu or cuda")
    timeout_s: float = _setting(300.0, "launch", "how long a worker waits for the others")

    def __post_init__(self) -> None:
        try:
            if self.compressor != "auto":
                canonical_name(self.compressor)
            self.allreducer_settings()
        except ValueError as error:
            raise ConfigError(str(error)) from error
        least: dict[str, float] = {
            "batch_size": 1, "conv_channels": 1, "hidden_size": 1, "num_layers": 1, "epochs": 1, "nsteps_update": 1,
            "workers": 1, "validate_every": 1, "corpus_train": 1, "corpus_test": 1, "max_steps": 0,
            "checkpoint_every": 0, "record_gradients": 0, "momentum": 0.0, "weight_decay": 0.0, "norm_clip": 0.0,
        }  # fmt: skip
        for key, bound in least.items():
            value = getattr(self, key)
            if not value >= bound or value == math.inf:
                raise ConfigError(f"{key}={value!r}: must be at least {bound:g}")
        for key in ("lr", "lr_decay", "bucket_cap_mb"):
            value = getattr(self, key)
            if not 0.0 < value < math.inf:
                raise ConfigError(f"{key}={value!r}: must be a positive number")
        choices = {"comm": COMM_NAMES, "device": DEVICE_NAMES, "on_bad_audio": ("fail", "skip")}
        for key, allowed in choices.items():
            if getattr(self, key) not in allowed:
                raise ConfigError(f"{key}={getattr(self, key)!r}: must be one of {', '.join(allowed)}")
        if not self.name or Path(self.name).name != self.name or self.name in (".", ".."):
            raise ConfigError(f"name={self.name!r}: must be a plain folder name; use out_dir to put it elsewhere")

    @property
    def run_folder(self) -> Path:
        return Path(self.out_dir) / self.name

    def allreducer_settings(self) -> dict[str, Any]:
        """The part that an AllReducer is made from, checked."""
        names = {item.name for item in dataclasses.fields(Settings)} & {item.name for item in dataclasses.fields(self)}
        settings = {name: getattr(self, name) for name in sorted(names)}
        Settings.of(settings)
        return settings

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


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
    """From plain values; ConfigError for an unknown key or a value of the wrong type."""
    types = get_type_hints(TrainConfig)
    checked: dict[str, Any] = {}
    for key, value in values.items():
        if key not in types:
            raise ConfigError(f"unknown setting {key}={value!r}; `oktopk train --help` lists the known ones")
        expected = types[key]
        if expected is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if type(value) is not expected:
            raise ConfigError(f"{key}={value!r}: must be of type {expected.__name__}, is {type(value).__name__}")
        checked[key] = value
    return TrainConfig(**checked)


def parse_bool(text: str) -> bool:
    """For argparse."""
    known = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
    if text.lower() not in known:
        raise ArgumentTypeError(f"{text!r}: must be True or False")
    return known[text.lower()]
