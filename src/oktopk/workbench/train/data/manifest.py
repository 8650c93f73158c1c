"""Which utterances there are: a folder in AN4's layout, or a csv file that lists them.

    {train,test}/an4/wav/ID.{wav,flac,sph}      {train,test}/an4/txt/ID.txt

A manifest has a line per utterance, audio path and text path, no header. Relative paths start at its own folder, so
that a corpus can be moved together with its manifests.
"""

from __future__ import annotations

import csv
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from oktopk.workbench.train.data.errors import DataError

Split = Literal["train", "test"]

TRAIN_MANIFEST = "an4_train_manifest.csv"
VAL_MANIFEST = "an4_val_manifest.csv"

_MANIFEST_OF: dict[Split, str] = {"train": TRAIN_MANIFEST, "test": VAL_MANIFEST}
_AUDIO_SUFFIXES = (".wav", ".flac", ".sph")
_NUM_NAMED = 3


@dataclass(frozen=True)
class Utterance:
    audio: Path
    text: Path


def scan(folder: Path, split: Split) -> list[Utterance]:
    """All utterances of a split, sorted by ID; DataError unless every audio file has its text and the reverse."""
    wav, txt = folder / split / "an4" / "wav", folder / split / "an4" / "txt"
    for needed in (wav, txt):
        if not needed.is_dir():
            raise DataError(
                f"{folder}: not in AN4's layout: looked for the folder {needed} and found none; "
                f"expected {split}/an4/wav/ID.{{wav,flac,sph}} and {split}/an4/txt/ID.txt"
            )
    audio = _by_id(wav, _AUDIO_SUFFIXES)
    text = _by_id(txt, (".txt",))
    if mute := sorted(audio.keys() - text.keys()):
        raise DataError(f"{wav}: {_named(mute)} without a text in {txt}; add ID.txt or remove the audio")
    if unheard := sorted(text.keys() - audio.keys()):
        raise DataError(f"{txt}: {_named(unheard)} without audio in {wav}; add the audio or remove ID.txt")
    if not audio:
        raise DataError(f"{wav}: holds no audio; expected files ID.wav, ID.flac or ID.sph")
    return [Utterance(audio[key], text[key]) for key in sorted(audio)]


def write_manifests(folder: Path, out: Path | None = None) -> tuple[Path, Path]:
    """Writes the train and the validation manifest of `folder` into `out`, or into itself; returns their paths.

    Each appears whole or not at all. Nothing is written unless both splits are in order.
    """
    folder = folder.resolve()
    target = folder if out is None else out
    train, val = scan(folder, "train"), scan(folder, "test")
    return _write(train, target / TRAIN_MANIFEST), _write(val, target / VAL_MANIFEST)


def read_manifest(path: Path) -> list[Utterance]:
    """The utterances of a manifest, in its order; DataError unless all their files exist. Blank lines do not count."""
    utterances: list[Utterance] = []
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            rows = csv.reader(file, strict=True)
            for row in rows:
                if not row:
                    continue
                if len(row) != 2 or not all(column.strip() for column in row):
                    raise DataError(
                        f"{path}, line {rows.line_num}: expected 'audio path,text path', got {','.join(row)!r}; "
                        f"{_regenerate(path)}"
                    )
                audio, text = (path.parent / column.strip() for column in row)
                utterances.append(Utterance(audio, text))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path}: cannot be read as a manifest ({error}); {_regenerate(path)}") from error
    if not utterances:
        raise DataError(f"{path}: lists no utterance; {_regenerate(path)}")
    missing = [str(file) for item in utterances for file in (item.audio, item.text) if not file.is_file()]
    if missing:
        raise DataError(f"{path}: files it lists do not exist: {_named(missing)}; {_regenerate(path)}")
    return utterances


def find_utterances(data_dir: Path, split: Split) -> list[Utterance]:
    """What the manifest in `data_dir` lists; without one, what lies there in AN4's layout."""
    if not data_dir.is_dir():
        raise DataError(f"{data_dir}: no such data folder; `oktopk data an4-like {data_dir}` makes an embedded corpus")
    manifest = data_dir / _MANIFEST_OF[split]
    return read_manifest(manifest) if manifest.exists() else scan(data_dir, split)


def _by_id(folder: Path, suffixes: tuple[str, ...]) -> dict[str, Path]:
    """The files with one of these suffixes, hidden ones left out; DataError for two with the same ID."""
    found: dict[str, Path] = {}
    for path in sorted(folder.iterdir()):
        if path.suffix.lower() not in suffixes or path.name.startswith("."):
            continue
        if path.stem in found:
            raise DataError(f"{folder}: both {found[path.stem].name} and {path.name}; keep one file per ID")
        found[path.stem] = path
    return found


def _write(utterances: Sequence[Utterance], path: Path) -> Path:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # The folder's own links are followed, as the system does when it goes up with "..".
        start = path.parent.resolve()
        with temporary.open("w", encoding="utf-8", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            for item in utterances:
                writer.writerow(Path(os.path.relpath(part, start)).as_posix() for part in (item.audio, item.text))
        os.replace(temporary, path)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink()
        raise DataError(
            f"{path}: cannot be written ({error.strerror}); name another folder for the manifests, or make it writable"
        ) from error
    return path


def _named(names: Sequence[str]) -> str:
    more = ", ..." if len(names) > _NUM_NAMED else ""
    return f"{', '.join(names[:_NUM_NAMED])}{more} ({len(names)} in all)"


def _regenerate(path: Path) -> str:
    """With the folder that held the manifest as the first guess at where the corpus is."""
    return f"`oktopk manifest {path.parent}` writes it anew from the corpus in that folder"
