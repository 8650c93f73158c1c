"""What a study compares: a preset, what all its runs share, and variants of it, from a TOML file."""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, cast

from oktopk.workbench.console.words import UsageError
from oktopk.workbench.train.config import PRESETS, TrainConfig, load_config

STUDIES = PRESETS / "studies"
_KEYS = {
    "preset": str,
    "metric": str,
    "better": str,
    "target": float,
    "seeds": list,
    "settings": dict,
    "variants": dict,
}
_OWN = ("name", "out_dir", "seed", "resume", "quiet", "report", "checkpoint_every", "device", "comm")
"""Settings that a study chooses itself."""
_SAME_FOR_ALL = ("task", "workers", "batch_size", "nsteps_update", "epochs", "max_steps")
"""Settings that make up the budget, which variants share."""
_NO_DIFFERENCE = ("out_dir", "timeout_s", "device")
"""Settings that a finished run may differ in from one that is asked for."""


@dataclass(frozen=True)
class Run:
    variant: str
    seed: int
    config: TrainConfig

    @property
    def folder(self) -> Path:
        return self.config.run_folder

    def differences(self, found: Mapping[str, Any]) -> list[str]:
        """What a run's config.json says that is not what this run would do."""
        mine = self.config.as_dict()
        return [
            f"{key}={found.get(key)!r} there, {mine[key]!r} here"
            for key in mine
            if key not in _NO_DIFFERENCE and found.get(key) != mine[key]
        ]


@dataclass(frozen=True)
class Study:
    """The first variant is what the others are compared with."""

    name: str
    preset: str
    metric: str
    higher_is_better: bool
    target: float
    seeds: Sequence[int]
    settings: Mapping[str, Any]
    variants: Mapping[str, Mapping[str, Any]]

    @property
    def baseline(self) -> str:
        return next(iter(self.variants))

    def runs(self, folder: Path) -> list[Run]:
        """Seed by seed, so that a study that is stopped early has all variants; ConfigError for a bad setting."""
        return [self._run(variant, seed, folder) for seed in self.seeds for variant in self.variants]

    def _run(self, variant: str, seed: int, folder: Path) -> Run:
        own: dict[str, Any] = {
            "name": f"{slug(variant)}-seed-{seed}",
            "out_dir": str(folder),
            "seed": seed,
            "quiet": True,
            "report": False,
            "checkpoint_every": -1,
        }
        return Run(variant, seed, load_config(self.preset, {**self.settings, **self.variants[variant], **own}))

    def with_settings(self, settings: Mapping[str, Any]) -> Study:
        """UsageError for one that variants have of their own: their names would not be true any more."""
        for key in settings:
            if any(key in changes for changes in self.variants.values()):
                raise UsageError(f"--set: {key!r}: variants differ in it; change a copy of the study's TOML file")
        return replace(self, settings={**self.settings, **settings})

    def reached(self, value: float | None) -> bool:
        return value is not None and (value >= self.target if self.higher_is_better else value <= self.target)


def slug(text: str) -> str:
    return re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-.")


def study_names() -> list[str]:
    return sorted(path.stem for path in STUDIES.glob("*.toml"))


def read_study(given: str) -> Study:
    """One of `study_names()`, or the path of a TOML file; UsageError for what is none."""
    path = Path(given) if given.endswith(".toml") else STUDIES / f"{given}.toml"
    if not path.is_file():
        raise UsageError(f"study={given!r}: no such study or TOML file; studies: {', '.join(study_names())}")
    try:
        values = tomllib.loads(path.read_text())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: is not valid TOML: {error}") from error
    return _checked(path, values)


def _checked(path: Path, values: dict[str, Any]) -> Study:
    for key in values:
        if key not in _KEYS:
            raise UsageError(f"{path}: unknown key {key!r}; known: {', '.join(_KEYS)}")
    for key, kind in _KEYS.items():
        if key not in values:
            raise UsageError(f"{path}: {key!r} is missing; a study needs {', '.join(_KEYS)}")
        value = float(values[key]) if kind is float and type(values[key]) is int else values[key]
        if type(value) is not kind:
            raise UsageError(f"{path}: {key}={values[key]!r}: must be of type {kind.__name__}")
    if values["better"] not in ("higher", "lower"):
        raise UsageError(f"{path}: better={values['better']!r}: must be 'higher' or 'lower'")
    variants = cast("dict[str, Any]", values["variants"])
    if not variants:
        raise UsageError(f"{path}: variants: there is none; name at least the one to compare with")
    for name, changes in variants.items():
        if not isinstance(changes, dict):
            raise UsageError(f"{path}: variants: {name!r} must be a table of settings, such as {{ density = 0.01 }}")
        _check_free(f"{path}: variants: {name!r}", cast("dict[str, Any]", changes))
        for key in _SAME_FOR_ALL:
            if key in changes:
                raise UsageError(f"{path}: variants: {name!r}: {key!r} is the same for all; set it under [settings]")
    for a, b in ((a, b) for a in variants for b in variants if a < b):
        if slug(a) == slug(b):
            raise UsageError(f"{path}: variants: {a!r} and {b!r} would share a folder; name them more differently")
    _check_free(f"{path}: settings", values["settings"])
    return Study(
        name=path.stem,
        preset=values["preset"],
        metric=values["metric"],
        higher_is_better=values["better"] == "higher",
        target=checked_target(float(values["target"]), f"{path}: target"),
        seeds=checked_seeds(values["seeds"], f"{path}: seeds"),
        settings=values["settings"],
        variants=variants,
    )


def checked_seeds(seeds: Sequence[Any], where: str) -> list[int]:
    if not seeds or any(type(seed) is not int or seed < 0 for seed in seeds) or len(set(seeds)) < len(seeds):
        raise UsageError(f"{where}={seeds!r}: must be different whole numbers, at least one")
    return list(seeds)


def checked_target(target: float, where: str) -> float:
    if not math.isfinite(target):
        raise UsageError(f"{where}={target!r}: must be a number that the metric can reach")
    return target


def parse_settings(words: Sequence[str]) -> dict[str, Any]:
    """`key=value` as on the command line of a study; what is no TOML value is text."""
    found: dict[str, Any] = {}
    for word in words:
        key, equals, text = word.partition("=")
        if not equals or not key.isidentifier():
            raise UsageError(f"--set: {word!r}: must be a setting and its value, such as epochs=3")
        try:
            found[key] = tomllib.loads(f"value = {text}")["value"]
        except tomllib.TOMLDecodeError:
            found[key] = text
    _check_free("--set", found)
    return found


def chosen_variants(study: Study, patterns: Sequence[str]) -> dict[str, Mapping[str, Any]]:
    """Those that match, and the one that they are compared with."""
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in study.variants):
            raise UsageError(f"--only: {pattern!r} fits no variant; they are: {', '.join(study.variants)}")
    return {
        name: changes
        for name, changes in study.variants.items()
        if name == study.baseline or any(fnmatchcase(name, pattern) for pattern in patterns)
    }


def _check_free(where: str, settings: Mapping[str, Any]) -> None:
    for key in settings:
        if key in _OWN:
            raise UsageError(f"{where}: {key!r} is chosen by the study itself; leave it out")
