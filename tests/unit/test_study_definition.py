"""A study's TOML file: what it says, what is wrong with it in one line, and the runs that it makes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from oktopk.workbench.console.words import UsageError
from oktopk.workbench.study.definition import (
    checked_seeds,
    checked_target,
    chosen_variants,
    parse_settings,
    read_study,
    slug,
    study_names,
)
from oktopk.workbench.train.config import TrainConfig
from oktopk.workbench.train.task_settings import TASKS
from tests.studies import CONTENT, make_study, write_study

OWN = ("name", "out_dir", "seed", "resume", "quiet", "report", "checkpoint_every")


def refusal(path: Path) -> str:
    with pytest.raises(UsageError) as caught:
        read_study(str(path))
    assert "\n" not in str(caught.value)
    return str(caught.value)


# --- files


def test_a_study_is_what_its_file_says(tmp_path: Path) -> None:
    study = make_study(tmp_path, better="lower", target=2)
    assert (study.name, study.preset, study.metric, study.higher_is_better) == ("made", "lenet", "accuracy", False)
    assert (study.target, type(study.target), list(study.seeds)) == (2.0, float, [1, 2])
    assert study.settings == CONTENT["settings"]
    assert list(study.variants) == list(CONTENT["variants"])
    assert study.variants == CONTENT["variants"]
    assert study.baseline == "dense"


@pytest.mark.parametrize("first", ["oktopk 0.05", "dense"])
def test_the_first_variant_is_the_baseline(tmp_path: Path, first: str) -> None:
    others = {name: changes for name, changes in CONTENT["variants"].items() if name != first}
    assert make_study(tmp_path, variants={first: {}, **others}).baseline == first


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"colour": "red"}, ["unknown key 'colour'", "known: preset, metric"]),
        *(({key: None}, [f"{key!r} is missing", "needs preset, metric, better"]) for key in CONTENT),
        ({"preset": 3}, ["preset=3", "str"]),
        ({"metric": ["wer"]}, ["metric=['wer']", "str"]),
        ({"better": True}, ["better=True", "str"]),
        ({"better": "bigger"}, ["better='bigger'", "'higher' or 'lower'"]),
        ({"target": "0.5"}, ["target='0.5'", "float"]),
        ({"target": True}, ["target=True", "float"]),
        ({"settings": [1]}, ["settings=[1]", "dict"]),
        ({"variants": "dense"}, ["variants='dense'", "dict"]),
        ({"variants": {}}, ["variants", "at least the one to compare with"]),
        ({"variants": {"dense": {}, "half": 0.5}}, ["variants", "'half'", "table of settings"]),
        ({"variants": {"oktopk 0.01": {}, "OkTopk, 0.01": {}}}, ["'oktopk 0.01'", "'OkTopk, 0.01'", "folder"]),
        ({"seeds": 3}, ["seeds=3", "list"]),
        ({"seeds": []}, ["seeds=[]", "at least one"]),
        ({"seeds": [1, 1]}, ["seeds=[1, 1]", "different"]),
        ({"seeds": [1, -2]}, ["seeds=[1, -2]", "whole numbers"]),
        ({"seeds": [1, 2.5]}, ["seeds=[1, 2.5]", "whole numbers"]),
        ({"seeds": [True]}, ["seeds=[True]", "whole numbers"]),
        ({"seeds": ["1"]}, ["seeds=['1']", "whole numbers"]),
        ({"seeds": [[1], [2]]}, ["seeds=[[1], [2]]", "whole numbers"]),
        ({"variants": {"dense": {}, "four": {"workers": 4}}}, ["'four'", "'workers'", "[settings]"]),
        ({"settings": {"device": "cpu"}}, ["settings", "'device'", "leave it out"]),
    ],
)
def test_a_bad_file_is_refused_in_one_line(tmp_path: Path, changes: dict[str, Any], words: list[str]) -> None:
    path = write_study(tmp_path / "made.toml", **changes)
    said = refusal(path)
    assert all(word in said for word in [f"{path}: ", *words]), said


@pytest.mark.parametrize("key", OWN)
def test_what_a_study_chooses_itself_is_refused_everywhere(tmp_path: Path, key: str) -> None:
    path = tmp_path / "made.toml"
    for where, changes in (
        ("settings", {"settings": {**CONTENT["settings"], key: 1}}),
        ("variants: 'odd'", {"variants": {"dense": {}, "odd": {key: 1}}}),
    ):
        assert (
            refusal(write_study(path, **changes))
            == f"{path}: {where}: {key!r} is chosen by the study itself; leave it out"
        )
    with pytest.raises(UsageError, match=f"^--set: '{key}' is chosen by the study itself; leave it out$"):
        parse_settings([f"{key}=1"])


def test_what_is_no_toml_is_said(tmp_path: Path) -> None:
    path = tmp_path / "made.toml"
    for content in (b"preset = ", b"\xff\xfe"):
        path.write_bytes(content)
        assert refusal(path).startswith(f"{path}: is not valid TOML: ")


@pytest.mark.parametrize("given", ["nowhere.toml", "chess", ".", "studies.toml"])
def test_an_unknown_study_names_those_there_are(given: str) -> None:
    said = refusal(Path(given))
    assert f"study={given!r}" in said
    assert said.endswith(", ".join(study_names()))


def test_a_folder_is_no_study(tmp_path: Path) -> None:
    (tmp_path / "made.toml").mkdir()
    assert "no such study or TOML file" in refusal(tmp_path / "made.toml")


# --- those that come with the package


def test_there_are_packaged_studies() -> None:
    assert "resnet20" in study_names()


@pytest.mark.parametrize("name", study_names())
def test_packaged_studies_make_valid_runs(tmp_path: Path, name: str) -> None:
    study = read_study(name)
    assert study.name == name
    runs = study.runs(tmp_path)
    assert len(runs) == len(study.seeds) * len(study.variants)
    assert len(study.seeds) > 1  # else there is no deviation to compare with
    assert len({run.folder for run in runs}) == len(runs)
    assert {run.folder.parent for run in runs} == {tmp_path}
    assert study.variants[study.baseline]["reducer"] == "dense"
    assert len({json.dumps(changes, sort_keys=True) for changes in study.variants.values()}) == len(study.variants)
    assert len({run.config.workers for run in runs}) == 1
    assert runs[0].config.workers > 1
    for run in runs:
        assert isinstance(run.config, TrainConfig)
        assert run.differences(json.loads(json.dumps(run.config.as_dict()))) == []


# --- runs


def test_runs_go_seed_by_seed_with_what_the_study_chooses(tmp_path: Path) -> None:
    study = make_study(tmp_path)
    runs = study.runs(tmp_path / "out")
    assert [(run.seed, run.variant) for run in runs] == [(seed, name) for seed in (1, 2) for name in study.variants]
    assert [run.folder.name for run in runs[:3]] == [
        "dense-seed-1", "oktopk-0.05-seed-1", "oktopk-0.02-20-dense-steps-seed-1",
    ]  # fmt: skip
    for run in runs:
        config = run.config
        assert (config.seed, config.run_folder.parent) == (run.seed, tmp_path / "out")
        assert (config.quiet, config.report, config.resume, config.checkpoint_every) == (True, False, False, -1)
        assert (config.task, config.workers, config.batch_size) == ("lenet", 2, 16)
    of_variant = {run.variant: run.config for run in runs}
    assert [config.reducer for config in of_variant.values()] == ["dense", "oktopk", "oktopk"]
    assert [config.density for config in of_variant.values()] == [0.05, 0.05, 0.02]  # a variant's own come last
    assert [config.warmup_steps for config in of_variant.values()] == [0, 0, 20]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"preset": "chess"}, ["preset='chess'", "lenet"]),
        ({"settings": {"epoch": 3}}, ["unknown setting epoch=3", "--help"]),
        ({"settings": {"epochs": "three"}}, ["epochs='three'", "int"]),
        ({"variants": {"dense": {}, "all": {"density": 1.5}}}, ["density", "1.5"]),
        ({"variants": {"dense": {}, "sketch": {"reducer": "sketch"}}}, ["reducer", "sketch"]),
    ],
)
def test_settings_that_cannot_be(tmp_path: Path, changes: dict[str, Any], words: list[str]) -> None:
    study = make_study(tmp_path, **changes)
    with pytest.raises(UsageError) as caught:
        study.runs(tmp_path)
    assert all(word in str(caught.value) for word in words)
    assert "\n" not in str(caught.value)


def test_a_run_differs_in_what_would_be_trained_otherwise(tmp_path: Path) -> None:
    run = make_study(tmp_path).runs(tmp_path)[1]
    same = json.loads(json.dumps(run.config.as_dict()))
    assert run.differences(same) == []
    assert run.differences({**same, "out_dir": "elsewhere", "timeout_s": 1.0, "device": "cuda"}) == []
    assert run.differences({**same, "density": 0.5}) == ["density=0.5 there, 0.05 here"]
    assert run.differences({**same, "corpus_train": 65}) == ["corpus_train=65 there, 64 here"]  # the task's own too
    del same["lr"]
    assert run.differences(same) == [f"lr=None there, {run.config.lr} here"]
    assert set(TrainConfig.__dataclass_fields__) - {"task_settings"} <= set(run.config.as_dict())
    assert set(TASKS["lenet"].settings.__dataclass_fields__) <= set(run.config.as_dict())


@pytest.mark.parametrize(("better", "reached"), [("higher", [False, True, True]), ("lower", [True, True, False])])
def test_a_target_is_reached_from_its_side(tmp_path: Path, better: str, reached: list[bool]) -> None:
    study = make_study(tmp_path, better=better)
    assert [study.reached(value) for value in (0.4999, 0.5, 0.5001)] == reached
    assert not study.reached(None)


@pytest.mark.parametrize(
    ("name", "expected"),
    [("oktopk 0.01, bf16", "oktopk-0.01-bf16"), ("../up", "up"), ("topkA (old)", "topka-old"), ("...", "")],
)
def test_folders_have_plain_names(name: str, expected: str) -> None:
    assert slug(name) == expected


# --- the command line's words


def test_set_takes_toml_values_and_text() -> None:
    words = [
        "epochs=3",
        "lr=1e-3",
        "augment=true",
        'wire_dtype="bf16"',
        "reducer=gtopk",
        "lr_milestones=5,7",
        "name_=a=b",
    ]
    assert parse_settings(words) == {
        "epochs": 3, "lr": 1e-3, "augment": True, "wire_dtype": "bf16", "reducer": "gtopk", "lr_milestones": "5,7",
        "name_": "a=b",
    }  # fmt: skip
    assert parse_settings([]) == {}
    assert parse_settings(["epochs=3", "epochs=4"]) == {"epochs": 4}


@pytest.mark.parametrize("word", ["epochs", "=3", "two words=3", "a-b=3", ""])
def test_set_wants_a_setting_and_a_value(word: str) -> None:
    with pytest.raises(UsageError, match=r"^--set: ") as caught:
        parse_settings([word])
    assert repr(word) in str(caught.value)
    assert "epochs=3" in str(caught.value)


def test_only_keeps_the_order_and_the_baseline(tmp_path: Path) -> None:
    study = make_study(tmp_path)
    first, second, third = study.variants
    assert list(chosen_variants(study, [third])) == [first, third]
    assert list(chosen_variants(study, ["oktopk*"])) == [first, second, third]
    assert list(chosen_variants(study, ["*dense steps", "oktopk 0.0?"])) == [first, second, third]
    assert chosen_variants(study, [third])[third] == study.variants[third]
    assert list(chosen_variants(study, ["dense"])) == [first]
    with pytest.raises(UsageError) as caught:
        chosen_variants(study, [second, "Dense"])  # case matters
    assert all(word in str(caught.value) for word in ["--only", "'Dense'", second, third])


def test_seeds() -> None:
    assert checked_seeds([3, 0, 7], "--seeds") == [3, 0, 7]
    with pytest.raises(UsageError, match=r"^--seeds=\[3, 3\]: "):
        checked_seeds([3, 3], "--seeds")


def test_what_variants_differ_in_cannot_be_set_for_all(tmp_path: Path) -> None:
    study = read_study(str(write_study(tmp_path / "made.toml")))
    with pytest.raises(UsageError, match="--set: 'density': variants differ in it"):
        study.with_settings({"density": 0.5})
    assert study.with_settings({"lr": 0.5}).settings == {**study.settings, "lr": 0.5}


@pytest.mark.parametrize("key", ["task", "workers", "batch_size", "nsteps_update", "epochs", "max_steps"])
def test_the_budget_is_the_same_for_all(tmp_path: Path, key: str) -> None:
    path = write_study(tmp_path / "made.toml", variants={"dense": {}, "more": {key: 4}})
    with pytest.raises(UsageError, match=rf"'more': '{key}' is the same for all; set it under \[settings\]"):
        read_study(str(path))


@pytest.mark.parametrize("target", [float("nan"), float("inf")])
def test_a_target_is_a_number(target: float) -> None:
    with pytest.raises(UsageError, match="--target="):
        checked_target(target, "--target")
