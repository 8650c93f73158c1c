"""Layout: one object for equal names and sizes, for as long as anybody holds it."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from oktopk import Bucket, Layout
from oktopk import bucket as bucket_module

NAMED = [("embedding.weight", 12), ("norm.bias", 1), ("out.weight", 7)]


def some_layouts() -> st.SearchStrategy[list[tuple[str, int]]]:
    sizes = st.lists(st.integers(0, 9), min_size=1, max_size=8)
    return sizes.map(lambda found: [(f"p{number}", size) for number, size in enumerate(found)])


def names_of_all() -> Iterator[str]:
    return (layout.key for layout in list(bucket_module._layouts.values()))


def test_equal_names_and_sizes_are_one_object_however_they_are_given() -> None:
    layout = Layout.of(NAMED)
    assert Layout.of(tuple(NAMED)) is layout
    assert Layout.of(pair for pair in NAMED) is layout
    assert Layout.of([(str(name), int(size)) for name, size in NAMED]) is layout


def test_any_difference_makes_another_layout() -> None:
    layout = Layout.of(NAMED)
    others = [
        Layout.of(reversed(NAMED)),
        Layout.of(NAMED[:-1]),
        Layout.of([*NAMED, ("more", 0)]),
        Layout.of([("embedding.weight", 12), ("norm.bias", 1), ("out.weight", 8)]),
        Layout.of([("embedding.weight", 12), ("norm.bia", 1), ("out.weight", 7)]),
    ]
    assert len({layout, *others}) == 1 + len(others)
    assert all(other != layout for other in others)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_pickled_layout_is_the_same_object_again(protocol: int) -> None:
    layout = Layout.of(NAMED)
    assert pickle.loads(pickle.dumps(layout, protocol)) is layout


def test_copies_are_the_same_object() -> None:
    layout = Layout.of(NAMED)
    assert copy.copy(layout) is layout
    assert copy.deepcopy({"held": [layout, layout]})["held"] == [layout, layout]
    assert copy.deepcopy(layout) is layout
    bucket = Bucket(torch.ones(20), layout)
    assert copy.deepcopy(bucket).layout is layout


def test_a_layout_unpickled_where_it_was_unknown_is_interned() -> None:
    pickled = pickle.dumps(Layout.of([("only here", 3)]))
    gc.collect()
    assert "only here:3" not in names_of_all()
    layout = pickle.loads(pickled)
    assert Layout.of([("only here", 3)]) is layout


def test_it_is_forgotten_when_nobody_holds_it() -> None:
    layout = Layout.of([("soon gone", 5)])
    bucket = Bucket(torch.zeros(5), layout)
    del layout
    gc.collect()
    assert "soon gone:5" in names_of_all(), "a bucket holds it"
    del bucket
    gc.collect()
    assert "soon gone:5" not in names_of_all()


def test_hashing_does_not_look_at_the_parameters() -> None:
    """Counted, not timed: a name that counts how often it is hashed."""
    hashed = []

    class Name(str):
        def __hash__(self) -> int:
            hashed.append(self)
            return str.__hash__(self)

    layout = Layout.of([(Name(f"p{number}"), 4) for number in range(1000)])
    hashed.clear()
    found = {layout: "lane"}
    assert found[layout] == "lane"
    assert layout == layout
    assert hashed == []


def test_nothing_can_be_added_to_it() -> None:
    with pytest.raises(AttributeError):
        Layout.of(NAMED).step = 3  # pyright: ignore[reportAttributeAccessIssue]


def test_an_empty_layout_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one parameter"):
        Layout.of([])


# --- slots


@given(some_layouts())
def test_slots_follow_each_other_without_gap(named: list[tuple[str, int]]) -> None:
    layout = Layout.of(named)
    assert [(slot.name, slot.numel) for slot in layout.slots] == named
    assert layout.numel == sum(size for _, size in named)
    flat = torch.arange(layout.numel)
    assert torch.equal(torch.cat([slot.part(flat) for slot in layout.slots]), flat)


@given(some_layouts())
def test_slot_at_is_right_at_every_element(named: list[tuple[str, int]]) -> None:
    """Every element, so every edge, with empty parameters before, between and behind."""
    layout = Layout.of(named)
    owners = [name for name, size in named for _ in range(size)]
    assert [layout.slot_at(index).name for index in range(layout.numel)] == owners
    for index in range(layout.numel):
        slot = layout.slot_at(index)
        assert slot.offset <= index < slot.offset + slot.numel


@given(some_layouts(), st.integers(0, 5))
def test_beyond_the_end_there_is_no_slot(named: list[tuple[str, int]], beyond: int) -> None:
    layout = Layout.of(named)
    with pytest.raises(IndexError):
        layout.slot_at(layout.numel + beyond)


# --- threads


def test_threads_that_ask_at_once_get_one_object() -> None:
    """Dropped and asked for again all the time, so that making, finding and forgetting meet."""
    num_threads, rounds = 8, 200
    together = threading.Barrier(num_threads)
    found: list[list[int]] = [[] for _ in range(rounds)]
    failed: list[BaseException] = []

    def ask() -> None:
        try:
            for number in range(rounds):
                together.wait(30)
                layout = Layout.of([(f"round {number}", 3), ("weight", 2)])
                found[number].append(id(layout))
                together.wait(30)  # all hold theirs: one id is one object
                del layout
        except BaseException as error:
            failed.append(error)
            together.abort()

    threads = [threading.Thread(target=ask) for _ in range(num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    assert all(len(ids) == num_threads and len(set(ids)) == 1 for ids in found)
    gc.collect()
    assert not [key for key in names_of_all() if key.startswith("round ")]
