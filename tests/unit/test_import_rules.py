"""What import-linter cannot see: submodules of other packages."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import oktopk

PACKAGE = Path(oktopk.__file__).parent
RULES = {
    "torch.distributed": lambda path: (
        path.startswith(("comm/", "workbench/worlds/")) or path in ("adapters/ddp.py", "workbench/bench/peers.py")
    ),
    "mpi4py": lambda path: path.startswith("comm/"),
}


def imported(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


@pytest.mark.parametrize("module", RULES)
def test_only_the_places_that_may_import_it_do(module: str) -> None:
    users = {
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        if any(name == module or name.startswith(f"{module}.") for name in imported(path))
    }
    assert users, "a rule about a module that nobody imports proves nothing"
    assert {user for user in users if not RULES[module](user)} == set()
