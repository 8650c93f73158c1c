"""The numbers of a report are those of the files, in its tables and in its pictures, whatever the files hold."""

from __future__ import annotations

import csv
import json
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oktopk.workbench.report.compare import compare_drawings
from oktopk.workbench.report.draw import Drawing, look
from oktopk.workbench.report.figures import run_drawings
from oktopk.workbench.report.html import page, thinned
from oktopk.workbench.report.load import load_run
from oktopk.workbench.report.summary import PHASES, final_numbers, stage_numbers
from oktopk.workbench.report.write import write_report
from tests.pages import Page
from tests.runs import LOOP, REDUCTION, Recipe, write_run

# --- numbers


def mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None


def expected_numbers(folder: Path, workers: int) -> dict[str, Any]:
    """Computed anew from the files."""
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    with (folder / "epochs.csv").open(newline="") as file:
        epochs = list(csv.DictReader(file))
    losses = [step["loss"] for step in steps if step["loss"] is not None]
    expected: dict[str, Any] = {
        "loss": losses[-1] if losses else None,
        "steps_skipped": sum(step["skipped"] for step in steps),
        "bytes_total": sum(step["bytes_sent"] for step in steps),
        "sent_of_dense": None
        if workers == 1
        else sum(step["bytes_sent"] for step in steps) / (len(steps) * 8 * 100_000 * (workers - 1) / workers),
        "samples_per_s": sum(s["samples"] for s in steps) / sum(sum(s["seconds"].values()) for s in steps),
    }
    for key, column in (("epoch_loss", "loss"), ("val_loss", "val_loss"), ("wer", "wer"), ("cer", "cer")):
        values = [float(row[column]) for row in epochs if row[column] != "n/a"]
        expected[key] = values[-1] if values else None
    local = [step for step in steps if step["phase"] == "local" and not step["skipped"]]
    if local:
        expected |= {
            "steps_local": len(local),
            "step_ms_local": mean([1e3 * sum(step["seconds"].values()) for step in local]),
            **{f"ms_local_{stage}": mean([1e3 * step["seconds"][stage] for step in local]) for stage in LOOP},
            **{f"ms_local_{stage}": None for stage in REDUCTION},
        }
    for phase in PHASES:
        mine = [step for step in steps if step["phase"] == phase and not step["skipped"]]
        sent = mean([step["bytes_sent"] for step in mine])
        ring = mean([sum(8 * b["n"] * (workers - 1) / workers for b in step["buckets"]) for step in mine])
        expected |= {
            f"steps_{phase}": len(mine),
            f"sparsity_{phase}": mean([step["sparsity"] for step in mine]),
            f"compression_ratio_{phase}": mean([b["compression_ratio"] for s in mine for b in s["buckets"]]),
            f"bytes_{phase}": sent,
            f"bytes_{phase}_of_ring": sent / ring if sent is not None and ring else None,
            f"step_ms_{phase}": mean([1e3 * sum(step["seconds"].values()) for step in mine]),
        }
        for stage in (*LOOP, *REDUCTION):
            beside = [sum(b["seconds"][stage] for b in s["buckets"]) for s in mine] if stage in REDUCTION else []
            values = beside or [step["seconds"].get(stage, 0.0) for step in mine]
            expected[f"ms_{phase}_{stage}"] = 1e3 * sum(values) / len(values) if values else None
    return expected


@settings(max_examples=15)
@given(data=st.data())
def test_the_numbers_of_a_page_are_those_of_the_files(tmp_path_factory: pytest.TempPathFactory, data: Any) -> None:
    num_steps = data.draw(st.integers(1, 50))
    workers = data.draw(st.integers(1, 5))
    recipe = Recipe(
        steps=num_steps,
        dense_steps=data.draw(st.integers(0, num_steps)),
        steps_per_epoch=data.draw(st.integers(1, 20)),
        workers=workers,
        local_steps=data.draw(st.sampled_from([0, 0, 1, 3])),
        skipped=data.draw(st.frozensets(st.integers(0, num_steps - 1), max_size=3)),
        profile=False,
        seed=data.draw(st.integers(0, 99)),
    )
    folder = tmp_path_factory.mktemp("run") / "made"
    steps = write_run(folder, recipe)
    found = Page(page([(load_run(folder), [])], [])).numbers
    for key, value in expected_numbers(folder, workers).items():
        shown = json.loads(found[key])
        assert shown == (None if value is None else pytest.approx(value, rel=1e-12, abs=0.0)), key
    for step in steps:
        assert json.loads(found[f"step_{step['step']}_loss"]) == step["loss"]
        assert json.loads(found[f"step_{step['step']}_bytes_sent"]) == step["bytes_sent"]


def test_a_long_step_table_is_thinned_evenly_and_says_so(tmp_path: Path) -> None:
    write_run(tmp_path / "made", Recipe(steps=1000, profile=False, buckets=[("w", 2000)]))
    run = load_run(tmp_path / "made")
    shown = [step.step for step in thinned(run.steps)]
    assert (shown[0], shown[-1], len(shown)) == (0, 999, 300)
    assert {later - earlier for earlier, later in pairwise(shown)} <= {3, 4}
    assert "Steps (300 of 1,000, evenly chosen)" in Page(page([(run, [])], [])).words


@given(cut=st.integers(0, 400))
@settings(max_examples=30)
def test_a_run_killed_anywhere_keeps_its_whole_lines(tmp_path_factory: pytest.TempPathFactory, cut: int) -> None:
    folder = tmp_path_factory.mktemp("run") / "made"
    write_run(folder, Recipe(steps=4, profile=False, buckets=[("w", 2000)]))
    path = folder / "metrics.jsonl"
    text = path.read_text()
    kept = text[: max(0, len(text) - 4 * cut)]
    path.write_text(kept)
    run = load_run(folder)
    whole = kept.count("\n") + (kept[-1:] == "}")
    assert [step.step for step in run.steps] == list(range(whole))
    assert final_numbers(run)
    assert stage_numbers(run)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)


@settings(max_examples=40)
@given(data=st.data())
def test_values_of_any_shape_do_no_harm(tmp_path_factory: pytest.TempPathFactory, data: Any) -> None:
    folder = tmp_path_factory.mktemp("run") / "made"
    steps = write_run(folder, Recipe(steps=3, dense_steps=1, profile=False, buckets=[("w", 2000)]))
    keys = data.draw(st.lists(st.sampled_from(sorted(steps[0])), max_size=4))
    for key in keys:
        steps[1][key] = data.draw(JSON)
    bucket = steps[2]["buckets"][0]
    bucket[data.draw(st.sampled_from(sorted(bucket)))] = data.draw(JSON)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
    facts = json.loads((folder / "run.json").read_text())
    facts[data.draw(st.sampled_from(sorted(facts)))] = data.draw(JSON)
    (folder / "run.json").write_text(json.dumps(facts))
    text = page([(load_run(folder), [])], [])
    assert not re.search(r'data-value="(nan|-?inf)', text, re.IGNORECASE)


# --- pictures


@pytest.fixture
def drawn(tmp_path: Path) -> tuple[list[dict[str, Any]], dict[str, Drawing]]:
    steps = write_run(tmp_path / "made", Recipe(workers=4))
    with look():
        made = run_drawings(load_run(tmp_path / "made"))
    return steps, {each.name: each for each in made if isinstance(each, Drawing)}


def lines_of(drawing: Drawing, panel: int = 0) -> dict[str, list[float]]:
    return {str(line.get_label()): list(line.get_ydata()) for line in drawing.figure.axes[panel].lines}


def test_bytes_are_drawn_against_the_ring_and_the_bounds(drawn: Any) -> None:
    steps, drawings = drawn
    found = lines_of(drawings["bytes-per-step"])
    k = 2000
    assert found["sent"] == [step["bytes_sent"] for step in steps]
    assert found["dense ring"] == [8 * 100_000 * 3 / 4] * 60
    assert found["bound 6k(P-1)/P"] == [4 * 6 * k * 3 / 4] * 40
    assert found["least 2k(P-1)/P"] == [4 * 2 * k * 3 / 4] * 40
    sent = sum(step["bytes_sent"] for step in steps[20:]) / 40
    assert f"{sent / 600_000:.1%} of a dense ring (600.0 kB)" in drawings["bytes-per-step"].caption
    assert f"{sent / 36_000:.2f} times the bound of oktopk, 6k(P-1)/P" in drawings["bytes-per-step"].caption


def test_what_was_chosen_and_the_thresholds_are_drawn_as_logged(drawn: Any) -> None:
    steps, drawings = drawn
    found = lines_of(drawings["chosen-and-applied"])
    sparse = steps[20:]
    for label, key in (("chosen, first worker", "local_count"), ("applied", "global_count"), ("k", "k")):
        assert found[label] == [sum(bucket[key] for bucket in step["buckets"]) for step in sparse]
    for panel, side in enumerate(("local", "global")):
        by_bucket = lines_of(drawings["thresholds"], panel)
        for place, name in enumerate(("conv.weight..lstm.0.bias", "lstm.1.weight..out.bias")):
            assert by_bucket[name] == [step["buckets"][place][f"{side}_threshold"] for step in sparse]
    borders = [line for line in drawings["sparsity"].figure.axes[0].lines if list(line.get_xdata()) == [20.0, 20.0]]
    assert len(borders) == 1, "the border between dense and sparse is marked"


@pytest.fixture
def drawn_local(tmp_path: Path) -> tuple[list[dict[str, Any]], dict[str, Drawing]]:
    steps = write_run(tmp_path / "made", Recipe(workers=4, local_steps=4))
    with look():
        made = run_drawings(load_run(tmp_path / "made"))
    return steps, {each.name: each for each in made if isinstance(each, Drawing)}


def test_local_steps_are_in_no_picture_of_exchanges_and_mark_no_border(drawn_local: Any) -> None:
    steps, drawings = drawn_local
    exchanges = [step for step in steps if step["phase"] != "local"]
    assert [step["step"] for step in exchanges] == [*range(20), *range(23, 60, 4)]
    found = lines_of(drawings["bytes-per-step"])
    assert found["sent"] == [step["bytes_sent"] for step in exchanges]
    assert found["dense ring"] == [8 * 100_000 * 3 / 4] * 30
    assert drawings["bytes-per-step"].caption.endswith("30 of 60 steps are local and send nothing.")
    assert lines_of(drawings["sparsity"])["sparsity"] == [step["sparsity"] for step in exchanges]
    for name in ("sparsity", "loss-over-steps", "bytes-per-step"):
        axes = drawings[name].figure.axes[0]
        borders = [list(line.get_xdata()) for line in axes.lines if len(set(line.get_xdata())) == 1]
        assert borders == [[20.0, 20.0]], "where the steps begin that lead to the first sparse exchange"
        assert [text.get_text() for text in axes.texts] == ["sparse from here"]
    axes = drawings["stages"].figure.axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == [
        "dense loop", "dense reduction", "sparse loop", "sparse reduction", "local loop",
    ]  # fmt: skip


def test_stages_stand_in_two_bars_for_each_phase(drawn: Any) -> None:
    steps, drawings = drawn
    axes = drawings["stages"].figure.axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == [
        "dense loop", "dense reduction", "sparse loop", "sparse reduction",
    ]  # fmt: skip
    widths = [bar.get_width() for bar in axes.patches]
    assert len(widths) == 2 * (len(LOOP) + len(REDUCTION))
    for place, stage in enumerate(LOOP):
        assert widths[place] == pytest.approx(1e3 * sum(step["seconds"][stage] for step in steps[:20]) / 20)
    for place, stage in enumerate(REDUCTION, start=2 * len(LOOP) + len(REDUCTION)):
        total = sum(bucket["seconds"][stage] for step in steps[20:] for bucket in step["buckets"])
        assert widths[place] == pytest.approx(1e3 * total / 40)


def test_profiles_give_sizes_and_ways(drawn: Any) -> None:
    _, drawings = drawn
    labels = [label.get_text() for label in drawings["message-sizes"].figure.axes[0].get_yticklabels()]
    assert labels == ["all_reduce\n72 messages", "all_to_all_v\n36 messages", "send\n24 messages"]
    assert "median message is 66.7 kB" in drawings["message-sizes"].caption, "400 kB in 6 messages each"
    moved = drawings["who-to-whom"].figure.axes[0].collections[0].get_array().filled(0.0)
    for source in range(4):
        for target in range(4):
            direct = sum(900 + 100 * target + 10 * step for step in range(3)) if target != source else 0
            assert moved[source, target] == direct + 3 * 64 * (target == (source + 1) % 4)
    assert "4.8 MB more went by collectives" in drawings["who-to-whom"].caption


def test_runs_are_compared_over_what_they_had_sent(tmp_path: Path) -> None:
    names = ("a", "b")
    steps = {name: write_run(tmp_path / name, Recipe(seed=seed, profile=False)) for seed, name in enumerate(names)}
    with look():
        made = compare_drawings([load_run(tmp_path / name) for name in names])
    axes = next(each.figure.axes[0] for each in made if each.name == "compare-loss-over-bytes-sent")
    for name, line in zip(names, axes.lines, strict=True):
        sent = [step["bytes_sent"] for step in steps[name]]
        losses = [step["loss"] for step in steps[name]]
        assert line.get_label() == name
        assert list(line.get_xdata()) == [sum(sent[: 15 * epoch]) for epoch in (1, 2, 3, 4)]
        assert list(line.get_ydata()) == pytest.approx([sum(losses[at : at + 15]) / 15 for at in (0, 15, 30, 45)])


def test_pictures_are_files_too(tmp_path: Path) -> None:
    write_run(tmp_path / "made", Recipe(steps=30, profile=False))
    write_report([tmp_path / "made"], tmp_path / "elsewhere")
    for path in (tmp_path / "elsewhere" / "report").iterdir():
        content = path.read_bytes()
        assert content.startswith(b"\x89PNG")
        assert int.from_bytes(content[16:20]) == 5 * 150, "five inches at 150 dots"
    assert not (tmp_path / "made" / "report.html").exists()
