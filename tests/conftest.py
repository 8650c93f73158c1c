"""Gloo worlds that live for the whole test session: starting one costs more than most tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

from tests.worlds import GlooWorld

settings.register_profile("oktopk", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("oktopk")
torch.set_num_threads(1)


@pytest.fixture(scope="session")
def gloo_worlds() -> Iterator[dict[int, GlooWorld]]:
    worlds = {size: GlooWorld(size) for size in (2, 3, 4)}
    yield worlds
    for world in worlds.values():
        world.close()


@pytest.fixture(params=[2, 3, 4], ids=lambda size: f"gloo{size}")
def gloo(request: pytest.FixtureRequest, gloo_worlds: dict[int, GlooWorld]) -> GlooWorld:
    return gloo_worlds[request.param]


@pytest.fixture
def gloo2(gloo_worlds: dict[int, GlooWorld]) -> GlooWorld:
    return gloo_worlds[2]
