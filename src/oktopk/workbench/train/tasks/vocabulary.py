"""A WordPiece vocabulary that one worker makes and all of them use."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from oktopk.workbench.console.files import write_text
from oktopk.workbench.train.config import TrainConfig
from oktopk.workbench.train.data.errors import DataError
from oktopk.workbench.train.data.wordpiece import Pieces
from oktopk.workbench.train.tasks.common import on_all
from oktopk.workbench.worlds.membership import Member


def trained_pieces(config: TrainConfig, member: Member, sentences: Callable[[], Sequence[str]]) -> Pieces:
    """The first worker trains it on `sentences()` and writes it to vocabulary.txt in the run's folder; all read it.

    At most `vocabulary_size` pieces. A run that goes on goes on with the vocabulary it has.
    """
    path = config.run_folder / "vocabulary.txt"

    def train() -> None:
        if member.is_first and not (config.resume and path.is_file()):
            _write(path, Pieces.train(sentences(), config.task_settings.vocabulary_size))

    on_all(member, train)
    return on_all(member, lambda: Pieces.read(path))


def _write(path: Path, made: Pieces) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, "".join(f"{piece}\n" for piece in made.pieces))
    except OSError as error:
        raise DataError(f"{path}: cannot be written ({error.strerror}); choose another out_dir") from error
