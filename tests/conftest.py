"""Gloo worlds that start when a test first asks for one, and then live for the whole test session."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

from tests.worlds import GlooWorld

settings.register_profile("oktopk", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("oktopk")
torch.set_num_threads(1)


class Worlds(dict[int, GlooWorld]):
    """By size. Starting a world costs more than most tests: `worlds[size]` starts it where nobody did before."""

    def __missing__(self, size: int) -> GlooWorld:
        self[size] = GlooWorld(size)
        return self[size]


@pytest.fixture(scope="session")
def gloo_worlds() -> Iterator[dict[int, GlooWorld]]:
    worlds = Worlds()
    yield worlds
    for world in worlds.values():
        world.close()


@pytest.fixture(params=[2, 3, 4], ids=lambda size: f"gloo{size}")
def gloo(request: pytest.FixtureRequest, gloo_worlds: dict[int, GlooWorld]) -> GlooWorld:
    return gloo_worlds[request.param]


@pytest.fixture
def gloo2(gloo_worlds: dict[int, GlooWorld]) -> GlooWorld:
    return gloo_worlds[2]
