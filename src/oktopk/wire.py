"""SparseVector <-> one contiguous byte buffer.

Layout, little-endian, `HEADER_BYTES` = 32 then the payload:

    bytes 0-3  magic "OKTK"   byte 4  version   byte 5  index encoding   byte 6  value encoding   byte 7  padding
    bytes 8-15  length of the vector      bytes 16-23  number of elements      bytes 24-31  checksum
    payload: the indices, `padding` (0 to 3) zero bytes, the values, zero bytes up to a whole number of 32-bit words

Indices as gaps: the first index in 8 bytes, then how many elements are left out before each index, counted from the
first; the gap g as g // 255 bytes of 255 ("so many, and more follows") and one of g % 255. In two-byte digits 65535
takes the place of 255. At density 0.01 that is 1.08 bytes an index, where no code can do with less than 1.01. The
shortest encoding is chosen by what it may cost at most, so it never exceeds 4 bytes an index (8 in a vector of more
than 2^31 elements) and 8 bytes.

The checksum is the sum, in 64 bits, of all other 32-bit words (read as signed), the i-th times (i * HASH_SPREAD) | 1:
any single flipped bit changes it, and so does what was moved.
"""

from __future__ import annotations

import math
from enum import IntEnum

import torch
from torch import Tensor

from oktopk.kernels.base import Kernels
from oktopk.kernels.torch_ops import TorchKernels, digits
from oktopk.sparse_vector import SparseVector, ints, to_narrow

HEADER_BYTES = 32
VERSION = 2
_FIRST_BYTES = 8
_WORD_BYTES = 4
_PLAIN = TorchKernels()
_MAGIC = int.from_bytes(b"OKTK", "little")


class WireError(ValueError):
    """A buffer that is not a whole, unharmed SparseVector of this version."""


class IndexEncoding(IntEnum):
    """How the indices travel. RANGE is a run without gaps: only its first index is sent."""

    INT32 = 0
    INT64 = 1
    RANGE = 2
    GAPS8 = 3
    GAPS16 = 4


class ValueEncoding(IntEnum):
    FP32 = 0
    BF16 = 1


VALUE_DTYPES = {ValueEncoding.FP32: torch.float32, ValueEncoding.BF16: torch.bfloat16}
_INDEX_DTYPES = {
    IndexEncoding.INT32: torch.int32,
    IndexEncoding.INT64: torch.int64,
    IndexEncoding.RANGE: torch.int64,
}
_GAP_WIDTHS = {IndexEncoding.GAPS8: 1, IndexEncoding.GAPS16: 2}


def rounded(vector: SparseVector, encoding: ValueEncoding) -> SparseVector:
    """With values that `encoding` carries exactly; what does not fit becomes the largest that does."""
    if encoding is ValueEncoding.FP32:
        return vector
    return SparseVector(vector.indices, to_narrow(vector.values, VALUE_DTYPES[encoding]).float(), vector.length)


def encode(vector: SparseVector, values: ValueEncoding = ValueEncoding.FP32, kernels: Kernels = _PLAIN) -> Tensor:
    """A new uint8 tensor on the vector's device. Values are cast: `rounded` says to what."""
    count = len(vector)
    encoding, first = _index_encoding(vector)
    parts: list[Tensor]
    if encoding in _GAP_WIDTHS:
        encoded = kernels.encode_gaps(vector.indices - first, _GAP_WIDTHS[encoding])
        parts = [vector.indices[:1].clone(memory_format=torch.contiguous_format).view(torch.uint8), encoded]
    else:
        indices = vector.indices[:1] if encoding is IndexEncoding.RANGE else vector.indices
        parts = [indices.to(_INDEX_DTYPES[encoding]).clone(memory_format=torch.contiguous_format).view(torch.uint8)]
    index_size = sum(part.numel() for part in parts)
    start = HEADER_BYTES + _whole_words(index_size)
    stop = start + VALUE_DTYPES[values].itemsize * count
    buffer = torch.empty(_whole_words(stop), dtype=torch.uint8, device=vector.values.device)
    torch.cat(parts, out=buffer[HEADER_BYTES : HEADER_BYTES + index_size])
    buffer[HEADER_BYTES + index_size : start] = 0
    buffer[start:stop].view(VALUE_DTYPES[values]).copy_(vector.values)
    buffer[stop:] = 0
    padding = start - HEADER_BYTES - index_size
    head = _MAGIC | VERSION << 32 | encoding << 40 | values << 48 | padding << 56
    header = buffer[:HEADER_BYTES].view(torch.int64)
    header.copy_(torch.tensor([head, vector.length, count, 0]))
    header[3] = kernels.hash_words(buffer.view(torch.int32))
    return buffer


def decode(buffer: Tensor, length: int, kernels: Kernels = _PLAIN) -> SparseVector:
    """The SparseVector of `length` that `encode` encoded; WireError for anything else.

    The result owns its memory. Every size is checked against the buffer before it is used.
    """
    aligned = buffer.clone()
    count, index_encoding, value_encoding, padding = _read_header(aligned, length, kernels)
    dtype = VALUE_DTYPES[value_encoding]
    start = aligned.numel() - _whole_words(dtype.itemsize * count)
    values = aligned[start : start + dtype.itemsize * count].view(dtype)
    encoded = aligned[HEADER_BYTES : start - padding]
    indices = _decode_indices(encoded, index_encoding, count, length, kernels)
    return SparseVector(indices, values.float() if values.dtype != torch.float32 else values, length)


def split_index_and_value(buffer: Tensor) -> tuple[Tensor, Tensor]:
    """The two halves of an encoded buffer (header and indices, values), as views: together they decode again."""
    words = ints(buffer[:HEADER_BYTES].clone().view(torch.int64))
    itemsize = VALUE_DTYPES[ValueEncoding(words[0] >> 48 & 0xFF)].itemsize
    cut = buffer.numel() - _whole_words(itemsize * words[2])
    return buffer[:cut], buffer[cut:]


def expected_bytes(count: float, span: float, *, length: int, value_bytes: int) -> float:
    """The mean size of an encoded vector of `length` whose `count` elements lie anywhere within `span` indices."""
    plain = (4 if length <= 2**31 else 8) * count
    gaps = [_expected_gap_bytes(count, span, width) for width in _GAP_WIDTHS.values()] if count > 2 else []
    values = _expected_whole_words(value_bytes * count)
    return HEADER_BYTES + _expected_whole_words(min([plain, *gaps])) + values


def expected_run_bytes(count: float, *, value_bytes: int) -> float:
    """The size of an encoded vector whose `count` elements lie side by side."""
    return HEADER_BYTES + _FIRST_BYTES + value_bytes * count


def _expected_gap_bytes(count: float, span: float, width: int) -> float:
    """Indices as gaps, where each index is taken with the same probability, one after the other."""
    largest = digits(width)[1]
    reaching = (1.0 - min(1.0, count / span)) ** largest  # the part of the gaps that do not fit into one digit
    return _FIRST_BYTES + width * count / (1.0 - reaching) if reaching < 1.0 else math.inf


def _expected_whole_words(size: float) -> float:
    """Padding is half of the most that it can be, on average."""
    return size + (_WORD_BYTES - 1) / 2 if size % _WORD_BYTES else size


def _index_encoding(vector: SparseVector) -> tuple[IndexEncoding, int]:
    """The shortest, by the most bytes it may need, and the first index."""
    plain, count = IndexEncoding.INT32 if vector.length <= 2**31 else IndexEncoding.INT64, len(vector)
    if count <= 2:  # not worth asking the device for the ends
        return plain, 0
    first, last = ints(vector.indices[:: count - 1])
    span = last - first
    if span == count - 1:
        return IndexEncoding.RANGE, first
    most_bytes = {plain: _INDEX_DTYPES[plain].itemsize * count}
    for encoding, width in _GAP_WIDTHS.items():
        most_bytes[encoding] = _FIRST_BYTES + width * (count + span // digits(width)[1])
    return min(most_bytes, key=lambda encoding: most_bytes[encoding]), first


def _decode_indices(encoded: Tensor, encoding: IndexEncoding, count: int, length: int, kernels: Kernels) -> Tensor:
    if encoding in (IndexEncoding.INT32, IndexEncoding.INT64):
        indices = encoded.view(_INDEX_DTYPES[encoding]).to(torch.int64)
        _check_indices(indices, length)
        return indices
    first = int(encoded[:_FIRST_BYTES].view(torch.int64).item())
    if encoding is IndexEncoding.RANGE:
        if not 0 <= first <= length - count:
            raise WireError(f"range {first}+{count} lies outside a vector of length {length}")
        return torch.arange(first, first + count, device=encoded.device)
    offsets = kernels.decode_gaps(encoded[_FIRST_BYTES:], _GAP_WIDTHS[encoding], count)
    if offsets is None:
        raise WireError(f"the gaps are not those of {count} indices")
    last = first + (int(offsets[-1].item()) if count else 0)
    if not (first >= 0 and last < length):
        raise WireError(f"indices {first} to {last} lie outside a vector of length {length}")
    return offsets.add_(first)


def _whole_words(size: int) -> int:
    return -(-size // _WORD_BYTES) * _WORD_BYTES


def _read_header(buffer: Tensor, length: int, kernels: Kernels) -> tuple[int, IndexEncoding, ValueEncoding, int]:
    """Number of elements, the encodings, and the padding behind the indices."""
    size = buffer.numel()
    if buffer.dtype != torch.uint8 or buffer.dim() != 1:
        raise WireError(f"expected a flat uint8 buffer, got {buffer.dtype} of shape {tuple(buffer.shape)}")
    if size < HEADER_BYTES:
        raise WireError(f"buffer of {size} bytes is shorter than the {HEADER_BYTES}-byte header")
    head, sent_length, count, checksum = ints(buffer[:HEADER_BYTES].view(torch.int64))
    if head & 0xFFFFFFFF != _MAGIC:
        raise WireError(f"foreign buffer: it starts with {head & 0xFFFFFFFF:#010x}, not {_MAGIC:#010x}")
    version, index_code, value_code, padding = head.to_bytes(8, "little", signed=True)[4:]
    if version != VERSION:
        raise WireError(f"wire version {version}, this library speaks {VERSION}")
    if index_code not in list(IndexEncoding) or value_code not in list(ValueEncoding) or padding >= _WORD_BYTES:
        raise WireError(f"unknown encoding: index {index_code}, value {value_code}, padding {padding}")
    if sent_length != length:
        raise WireError(f"vector of length {sent_length}, expected {length}")
    if not 0 <= count <= length:
        raise WireError(f"{count} elements in a vector of length {length}")
    index_encoding, value_encoding = IndexEncoding(index_code), ValueEncoding(value_code)
    _check_size(size, count, index_encoding, value_encoding, padding)
    words = buffer.view(torch.int32).clone()
    words[6:8] = 0
    if kernels.hash_words(words) != checksum:
        raise WireError("checksum does not match: the buffer was damaged on its way")
    return count, index_encoding, value_encoding, padding


def _check_size(size: int, count: int, index: IndexEncoding, value: ValueEncoding, padding: int) -> None:
    """What is not gaps has a size known beforehand; gaps are at least one digit each."""
    index_size = size - HEADER_BYTES - _whole_words(VALUE_DTYPES[value].itemsize * count) - padding
    if index in _GAP_WIDTHS:
        least = _FIRST_BYTES + _GAP_WIDTHS[index] * count
        if size % _WORD_BYTES or index_size < least or (index_size - _FIRST_BYTES) % _GAP_WIDTHS[index]:
            raise WireError(f"buffer of {size} bytes, its header announces {count} gaps: cut off, or not whole")
        return
    expected = _INDEX_DTYPES[index].itemsize * (1 if index is IndexEncoding.RANGE else count)
    if padding or index_size != expected:
        expected += size - index_size
        raise WireError(f"buffer of {size} bytes, its header announces {expected}")


def _check_indices(indices: Tensor, length: int) -> None:
    if indices.numel() == 0:
        return
    ordered = bool((indices[1:] > indices[:-1]).all().item())
    first, last = int(indices[0].item()), int(indices[-1].item())
    if not ordered or first < 0 or last >= length:
        raise WireError(f"indices are not strictly increasing within 0..{length - 1}")
