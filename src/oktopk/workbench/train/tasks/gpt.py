"""gpt: the next token of any text, in bytes or WordPieces."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from oktopk.comm.base import all_gather_int
from oktopk.workbench.train.config import TrainConfig
from oktopk.workbench.train.data.errors import DataError
from oktopk.workbench.train.data.generated_text import write_documents
from oktopk.workbench.train.data.sampler import RandomPlaces
from oktopk.workbench.train.data.text_folder import MAX_FILE_BYTES, FolderText, read_text
from oktopk.workbench.train.data.text_tokens import ByteTokens, HeldOutWindows, PieceTokens, Tokens, windows
from oktopk.workbench.train.models.gpt import Gpt, GptShape
from oktopk.workbench.train.task_settings import GptSettings
from oktopk.workbench.train.tasks.base import Workload, data_folder
from oktopk.workbench.train.tasks.common import on_all, perplexity, ratio, seed_torch
from oktopk.workbench.worlds.membership import Member

_VOCABULARY_BYTES = 64 * 2**20


@dataclass(frozen=True)
class TokenBatch:
    """Tokens and the tokens that follow them, (batch, length); `index` is the batch's place in its epoch."""

    tokens: Tensor
    targets: Tensor
    epoch: int
    index: int


class GptTask:
    """The callables of the workload."""

    def __init__(self, config: TrainConfig, member: Member) -> None:
        settings: GptSettings = config.task_settings
        place, length = member.place, settings.sequence_length
        folder = data_folder(
            config,
            member,
            lambda folder: write_documents(
                folder, num_train=settings.corpus_train, num_held_out=settings.corpus_test, seed=config.seed
            ),
        )
        text = on_all(member, lambda: read_text(folder, without=(Path(config.out_dir), config.run_folder)))
        _check_same(text, folder, member)
        tokens = ByteTokens() if settings.tokens == "bytes" else _piece_tokens(config, member, text)
        stream = tokens.encode(text.train)
        if len(stream) <= length:
            raise DataError(
                f"{folder}: {len(stream)} training tokens are too few for a sample of sequence_length={length} and the "
                "token after it; use more text, or make it smaller"
            )
        self._member = member
        self._seed = config.seed
        self._batch_size = config.batch_size
        self._length = length
        self._bf16 = settings.compute_dtype == "bf16"
        self._text = text
        self._train = stream
        self._held_out = HeldOutWindows(
            tokens.encode(text.held_out), tokens.line_end, length=length, rank=place.rank, size=place.size
        )
        self._places = RandomPlaces(
            num_places=len(stream) - length,
            batch_size=config.batch_size,
            rank=place.rank,
            size=place.size,
            seed=config.seed,
        )
        wanted = settings.batches_per_epoch or len(stream) // (config.batch_size * length * place.size)
        self.num_batches = max(config.nsteps_update, wanted)
        torch.manual_seed(config.seed)
        shape = GptShape(
            num_tokens=tokens.num_tokens,
            hidden_size=settings.hidden_size,
            num_layers=settings.num_layers,
            num_heads=settings.num_heads,
            sequence_length=length,
            dropout=settings.dropout,
        )
        self.model = Gpt(shape).to(member.device)

    def batches(self, epoch: int, first: int) -> Iterator[TokenBatch]:
        for index in range(first, self.num_batches):
            starts = self._places.batch(epoch, index)
            yield TokenBatch(*windows(self._train, starts, self._length), epoch, index)

    def loss(self, batch: TokenBatch) -> Tensor:
        seed_torch(self._seed, self._member.place.rank, batch.epoch, batch.index)
        return self._loss(batch.tokens, batch.targets, "mean")

    def validate(self) -> dict[str, float | None]:
        """Every held-out token once, shared out between the workers."""
        totals = torch.zeros(2, dtype=torch.float64, device=self._member.device)
        self.model.eval()
        with torch.no_grad():
            for tokens, targets in self._held_out.batches(self._batch_size):
                totals[0] += self._loss(tokens, targets, "sum")
                totals[1] += targets.numel()
        self.model.train()
        self._member.comm.all_reduce(totals)
        total, num_tokens = float(totals[0]), float(totals[1])
        loss = ratio(total, num_tokens)
        return {
            "loss": loss,
            "perplexity": perplexity(loss),
            "bits_per_byte": total / math.log(2.0) / len(self._text.held_out) if num_tokens else None,
        }

    def remarks(self) -> list[str]:
        left_out = self._text.left_out
        if not left_out or not self._member.is_first:  # it is the same on all workers
            return []
        return [
            f"files left out: {len(left_out)}, the first {left_out[0]}; a text file is UTF-8 without NUL and has "
            f"at most {MAX_FILE_BYTES >> 20} MiB"
        ]

    def _loss(self, tokens: Tensor, targets: Tensor, reduction: str) -> Tensor:
        device = self._member.device
        with torch.autocast(device.type, torch.bfloat16, enabled=self._bf16):
            scores = self.model(tokens.to(device))
        return nn.functional.cross_entropy(
            scores.float().flatten(0, 1), targets.to(device).flatten(), reduction=reduction
        )


def build(config: TrainConfig, member: Member) -> Workload:
    task = GptTask(config, member)
    return Workload(
        model=task.model,
        num_batches=task.num_batches,
        batches=task.batches,
        loss=task.loss,
        validate=task.validate,
        metrics={"perplexity": "perplexity", "bits_per_byte": "bits per byte"},
        remarks=task.remarks,
    )


def _check_same(text: FolderText, folder: Path, member: Member) -> None:
    """A folder in which somebody works may change between two readings; workers must not train on different texts."""
    digest = hashlib.blake2b(text.train, digest_size=7)
    digest.update(text.held_out)
    if len(set(all_gather_int(member.comm, int.from_bytes(digest.digest(), "little"), member.device))) > 1:
        raise DataError(f"{folder}: the workers found different files there; copy it to where nothing changes")


def _piece_tokens(config: TrainConfig, member: Member, text: FolderText) -> Tokens:
    """A small text has fewer pieces than `vocabulary_size`: the model has its size all the same.

    A vocabulary is found from _VOCABULARY_BYTES of a large text, so that the other workers do not wait for long.
    """
    from oktopk.workbench.train.data.wordpiece import SEP  # only here are tokenizers needed
    from oktopk.workbench.train.tasks.vocabulary import trained_pieces

    each = math.ceil(len(text.train) / _VOCABULARY_BYTES)
    pieces = trained_pieces(config, member, lambda: text.train.decode().split("\n")[::each])
    num_tokens = max(len(pieces.pieces), config.task_settings.vocabulary_size)
    return PieceTokens(pieces, num_tokens, pieces.number(SEP))
