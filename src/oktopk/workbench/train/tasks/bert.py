"""bert-base: masked words and next sentences, on any text of documents."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from oktopk.workbench.train.config import TrainConfig
from oktopk.workbench.train.data.documents import Document, find_documents
from oktopk.workbench.train.data.errors import DataError
from oktopk.workbench.train.data.generated_text import write_documents
from oktopk.workbench.train.data.pairs import IGNORED, PairBatch, SentencePairs, Special
from oktopk.workbench.train.data.sampler import BucketedBatches, shard
from oktopk.workbench.train.data.wordpiece import CLS, MASK, PAD, SEP, UNKNOWN, Pieces
from oktopk.workbench.train.models.bert import BertShape, make_bert, scores
from oktopk.workbench.train.task_settings import BertSettings
from oktopk.workbench.train.tasks.base import Workload, data_folder
from oktopk.workbench.train.tasks.common import on_all, perplexity, ratio, seed_torch
from oktopk.workbench.train.tasks.vocabulary import trained_pieces
from oktopk.workbench.worlds.membership import Member


@dataclass(frozen=True)
class PlacedBatch:
    """With its place: the epoch, and which it is of this epoch's."""

    pairs: PairBatch
    epoch: int
    index: int


class BertTask:
    """The callables of the workload."""

    def __init__(self, config: TrainConfig, member: Member) -> None:
        settings: BertSettings = config.task_settings
        folder = data_folder(
            config,
            member,
            lambda folder: write_documents(
                folder, num_train=settings.corpus_train, num_held_out=settings.corpus_test, seed=config.seed
            ),
        )
        documents, held_out = on_all(member, lambda: find_documents(folder))
        if settings.vocabulary:
            pieces = on_all(member, lambda: Pieces.read(Path(settings.vocabulary)))
        else:
            pieces = trained_pieces(config, member, lambda: [line for document in documents for line in document])
        self._member = member
        self._seed = config.seed
        self._batch_size = config.batch_size
        special = Special(
            pad=pieces.number(PAD),
            unknown=pieces.number(UNKNOWN),
            cls=pieces.number(CLS),
            sep=pieces.number(SEP),
            mask=pieces.number(MASK),
        )

        def pairs(of: Sequence[Document]) -> SentencePairs:
            return SentencePairs(
                [pieces.encode(document) for document in of],
                special=special,
                num_pieces=len(pieces.pieces),
                sequence_length=settings.sequence_length,
                seed=config.seed,
            )

        def check(found: SentencePairs) -> SentencePairs:
            needed = config.batch_size * config.nsteps_update * member.place.size
            if len(found) < needed:
                raise DataError(
                    f"{folder}: {len(found)} sentence pairs are too few for a step of {needed}: {config.nsteps_update} "
                    f"x batch_size={config.batch_size} on {member.place.size} workers; use more text or smaller batches"
                )
            return found

        self._train = on_all(member, lambda: check(pairs(documents)))
        self._held_out = on_all(member, lambda: pairs(held_out))
        self.sampler = BucketedBatches(
            durations=self._train.lengths,
            batch_size=config.batch_size,
            rank=member.place.rank,
            size=member.place.size,
            seed=config.seed,
        )
        torch.manual_seed(config.seed)
        shape = BertShape(
            num_pieces=len(pieces.pieces),
            hidden_size=settings.hidden_size,
            num_layers=settings.num_layers,
            num_heads=settings.num_heads,
            sequence_length=settings.sequence_length,
            dropout=settings.dropout,
            pad=special.pad,
        )
        self.model = make_bert(shape).to(member.device).train()

    def batches(self, epoch: int, first: int) -> Iterator[PlacedBatch]:
        for index, indices in enumerate(self.sampler.batches(epoch)[first:], first):
            yield PlacedBatch(self._train.batch(indices, epoch), epoch, index)

    def loss(self, batch: PlacedBatch) -> Tensor:
        seed_torch(self._seed, self._member.place.rank, batch.epoch, batch.index)
        of_pieces, labels, of_next, random_next = self._scores(batch.pairs)
        return nn.functional.cross_entropy(of_pieces, labels) + nn.functional.cross_entropy(of_next, random_next)

    def validate(self) -> dict[str, float | None]:
        """Every held-out pair once, shared out between the workers; always masked in the same way."""
        self.model.eval()
        totals = torch.zeros(6, dtype=torch.float64, device=self._member.device)
        mine = list(shard(len(self._held_out), self._member.place.rank, self._member.place.size))
        with torch.no_grad():
            for start in range(0, len(mine), self._batch_size):
                batch = self._held_out.batch(mine[start : start + self._batch_size], None)
                of_pieces, labels, of_next, random_next = self._scores(batch)
                totals += torch.cat([_judge(of_pieces, labels), _judge(of_next, random_next)])
        self.model.train()
        self._member.comm.all_reduce(totals)
        piece_loss, piece_hits, num_pieces, next_loss, next_hits, num_pairs = (float(each) for each in totals.cpu())
        of_pieces, of_next = ratio(piece_loss, num_pieces), ratio(next_loss, num_pairs)
        return {
            "loss": None if of_pieces is None or of_next is None else of_pieces + of_next,
            "mlm_accuracy": ratio(piece_hits, num_pieces),
            "nsp_accuracy": ratio(next_hits, num_pairs),
            "perplexity": perplexity(of_pieces),
        }

    def _scores(self, batch: PairBatch) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Scores and labels of the masked pieces, then of the next sentences."""
        wanted = batch.labels != IGNORED
        device = self._member.device
        inputs = (each.to(device) for each in (batch.pieces, batch.segments, batch.attended, wanted))
        of_pieces, of_next = scores(self.model, *inputs)
        return of_pieces, batch.labels[wanted].to(device), of_next, batch.random_next.to(device)


def build(config: TrainConfig, member: Member) -> Workload:
    task = BertTask(config, member)
    return Workload(
        model=task.model,
        num_batches=task.sampler.num_batches,
        batches=task.batches,
        loss=task.loss,
        validate=task.validate,
        metrics={
            "mlm_accuracy": "masked-word accuracy",
            "nsp_accuracy": "next-sentence accuracy",
            "perplexity": "perplexity of masked words",
        },
        remarks=list,
    )


def _judge(scores: Tensor, labels: Tensor) -> Tensor:
    """The summed loss, how many are right, and of how many."""
    loss = nn.functional.cross_entropy(scores, labels, reduction="sum")
    hits = (scores.argmax(1) == labels).sum()
    return torch.stack([loss.double(), hits.double(), torch.tensor(float(len(labels))).double().to(loss.device)])
