"""WordPiece: vocabularies that are read or trained, and sentences in their pieces."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.models import WordPiece
from tokenizers.normalizers import BertNormalizer
from tokenizers.pre_tokenizers import BertPreTokenizer
from tokenizers.trainers import WordPieceTrainer

from oktopk.workbench.train.data.errors import DataError
from oktopk.workbench.train.data.text_files import read_lines

PAD, UNKNOWN, CLS, SEP, MASK = SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
_INSIDE = "##"
_MOST_CHARACTERS = 1000


@dataclass(frozen=True)
class Pieces:
    """A vocabulary, by number. It is of lower case unless one of its pieces has an upper-case letter."""

    pieces: tuple[str, ...]
    _tokenizer: Tokenizer = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        numbers = {piece: number for number, piece in enumerate(self.pieces)}
        cased = any(piece != piece.lower() for piece in self.pieces if piece not in SPECIAL)
        tokenizer = _tokenizer(WordPiece(numbers, unk_token=UNKNOWN), lowercase=not cased)
        object.__setattr__(self, "_tokenizer", tokenizer)

    @classmethod
    def read(cls, path: Path) -> Pieces:
        """From a file with one piece a line; DataError for one that is no vocabulary."""
        pieces = tuple(line for line in read_lines(path) if line)
        lacking = [piece for piece in SPECIAL if piece not in pieces]
        if lacking:
            raise DataError(f"{path}: is no WordPiece vocabulary, it lacks {lacking[0]}; it must have one piece a line")
        repeated = next((piece for piece, count in Counter(pieces).items() if count > 1), None)
        if repeated is not None:
            raise DataError(f"{path}: has {repeated!r} twice; every piece must be there once")
        if len(pieces) == len(SPECIAL):
            raise DataError(f"{path}: has no pieces but the special ones")
        return cls(pieces)

    @classmethod
    def train(cls, sentences: Sequence[str], most: int) -> Pieces:
        """At most so many pieces, unless there are more characters; the same for the same sentences."""
        tokenizer = _tokenizer(WordPiece(unk_token=UNKNOWN), lowercase=True)
        words = _words(sentences)
        characters = Counter[str]()
        for word, count in words.items():
            characters.update(dict.fromkeys(word, count))
        alphabet = sorted(sorted(characters), key=lambda each: -characters[each])[:_MOST_CHARACTERS]
        inside = sorted({each for word in words for each in word[1:]} & set(alphabet))
        trainer = WordPieceTrainer(
            vocab_size=most,
            min_frequency=2,
            # The trainer numbers what is inside of words, and the letters it may leave out, in an order that is
            # another in every run, and decides ties by these numbers: they are given here to be the same.
            special_tokens=[*SPECIAL, *(_INSIDE + each for each in inside)],
            initial_alphabet=alphabet,
            limit_alphabet=len(alphabet),
            continuing_subword_prefix=_INSIDE,
            show_progress=False,
        )
        tokenizer.train_from_iterator(sentences, trainer)
        numbers = tokenizer.get_vocab()
        return cls(tuple(sorted(numbers, key=lambda piece: numbers[piece])))

    def number(self, piece: str) -> int:
        return self.pieces.index(piece)

    def encode(self, sentences: Sequence[str]) -> list[list[int]]:
        return [encoded.ids for encoded in self._tokenizer.encode_batch_fast(sentences, add_special_tokens=False)]


def _tokenizer(model: WordPiece, lowercase: bool) -> Tokenizer:
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = BertNormalizer(lowercase=lowercase)
    tokenizer.pre_tokenizer = BertPreTokenizer()
    return tokenizer


def _words(sentences: Iterable[str]) -> Counter[str]:
    """As the trainer will see them."""
    normalizer, splitter = BertNormalizer(lowercase=True), BertPreTokenizer()
    words = Counter[str]()
    for sentence in sentences:
        words.update(word for word, _ in splitter.pre_tokenize_str(normalizer.normalize_str(sentence)))
    return words
