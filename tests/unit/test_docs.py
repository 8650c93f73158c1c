"""docs/coming-from-ok-topk.md: whatever its tables send a reader to is there."""

from __future__ import annotations

import importlib
import re
from typing import Any

import pytest

from oktopk.registry import reducer_names
from oktopk.workbench.cli import _parser, setting_names
from oktopk.workbench.train.config import preset_names
from tests.worlds import ROOT

GUIDE = (ROOT / "docs" / "coming-from-ok-topk.md").read_text()
COLUMN = "new place"
PATH = re.compile(r"(?=.*(/|\.(py|toml|md|sh|in)$))[\w.-]+(/[\w.-]+)*/?")
DOTTED = re.compile(r"oktopk(\.\w+)+")
FLAG = re.compile(r"--[a-z-]+")


def cells_of_column(text: str, title: str) -> list[str]:
    """That column's cells, of every table that has one."""
    cells: list[str] = []
    column: int | None = None
    for line in text.splitlines():
        if not line.startswith("|"):
            column = None
            continue
        row = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if column is None:
            column = row.index(title) if title in row else -1
        elif column >= 0 and not set(row[column]) <= set("-: "):
            cells.append(row[column])
    return cells


TOKENS = [token for cell in cells_of_column(GUIDE, COLUMN) for token in re.findall(r"`([^`]+)`", cell)]
PATHS = sorted({token for token in TOKENS if PATH.fullmatch(token)})
NAMES = sorted({token for token in TOKENS if DOTTED.fullmatch(token)})
FLAGS = sorted({flag for token in TOKENS if not token.startswith("oktopk ") for flag in FLAG.findall(token)})


def resolve(name: str) -> Any:
    """The module, or what is in it; ImportError or AttributeError where there is none."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        module_name = ".".join(parts[:length])
        try:
            found: Any = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
                raise
            continue
        for part in parts[length:]:
            found = getattr(found, part)
        return found
    raise ImportError(name)


def test_the_tables_were_found() -> None:
    assert len(PATHS) >= 15
    assert len(NAMES) >= 25
    assert len(FLAGS) >= 8


@pytest.mark.parametrize("path", PATHS)
def test_path_exists(path: str) -> None:
    assert (ROOT / path).exists()


@pytest.mark.parametrize("name", NAMES)
def test_name_resolves(name: str) -> None:
    resolve(name)


@pytest.mark.parametrize("flag", FLAGS)
def test_flag_is_a_setting(flag: str) -> None:
    assert flag[2:].replace("-", "_") in setting_names()


def test_commands_parse() -> None:
    commands = [token for token in TOKENS if token.startswith("oktopk ")]
    assert commands
    for command in commands:
        words = [re.sub(r"<.*>", "1", word) for word in command.split()[1:]]
        _parser().parse_args(words)


def test_every_reducer_and_preset_is_named() -> None:
    for name in [*reducer_names(), *preset_names()]:
        assert f"`{name}`" in GUIDE, name


def test_resolve_refuses_what_is_not_there() -> None:
    for name in ("oktopk.nothing", "oktopk.registry.NOTHING", "oktopk.workbench.train.nothing.Nothing"):
        with pytest.raises((ImportError, AttributeError)):
            resolve(name)
