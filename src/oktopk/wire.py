"""SparseVector <-> one contiguous byte buffer.

Layout, little-endian, `HEADER_BYTES` = 32 then the payload:

    bytes 0-3  magic "OKTK"      byte 4  version      byte 5  index encoding      byte 6  value encoding      byte 7  0
    bytes 8-15  length of the vector      bytes 16-23  number of elements      bytes 24-31  checksum
    payload: the indices, then the values

The checksum is the sum, in 64 bits, of all other 32-bit words (read as signed), the i-th times (i * HASH_SPREAD) | 1:
any single flipped bit changes it, and so does what was moved.
"""

from __future__ import annotations

from enum import IntEnum

import torch
from torch import Tensor

from oktopk.types import SparseVector, hash_words, ints

HEADER_BYTES = 32
VERSION = 1
_MAGIC = int.from_bytes(b"OKTK", "little")


class WireError(ValueError):
    """A buffer that is not a whole, unharmed SparseVector of this version."""


class IndexEncoding(IntEnum):
    """How the indices travel. RANGE is a run without gaps: only its first index is sent."""

    INT32 = 0
    INT64 = 1
    RANGE = 2


class ValueEncoding(IntEnum):
    FP32 = 0


_INDEX_DTYPE = {
    IndexEncoding.INT32: torch.int32,
    IndexEncoding.INT64: torch.int64,
    IndexEncoding.RANGE: torch.int64,
}
_VALUE_BYTES = {ValueEncoding.FP32: 4}


def index_bytes(encoding: IndexEncoding, count: int) -> int:
    return _INDEX_DTYPE[encoding].itemsize * (1 if encoding is IndexEncoding.RANGE else count)


def encode(vector: SparseVector) -> Tensor:
    """A new uint8 tensor on the vector's device."""
    encoding = _index_encoding(vector)
    count = len(vector)
    cut = HEADER_BYTES + index_bytes(encoding, count)
    buffer = torch.empty(cut + 4 * count, dtype=torch.uint8, device=vector.values.device)
    indices = vector.indices[:1] if encoding is IndexEncoding.RANGE else vector.indices
    buffer[HEADER_BYTES:cut].view(_INDEX_DTYPE[encoding]).copy_(indices)
    buffer[cut:].view(torch.float32).copy_(vector.values)
    head = _MAGIC | VERSION << 32 | encoding << 40 | ValueEncoding.FP32 << 48
    header = buffer[:HEADER_BYTES].view(torch.int64)
    header.copy_(torch.tensor([head, vector.length, count, 0]))
    header[3] = _checksum(buffer)
    return buffer


def decode(buffer: Tensor, length: int) -> SparseVector:
    """The SparseVector of `length` that `encode` packed; WireError for anything else.

    The result owns its memory. Every size is checked against the buffer before it is used.
    """
    count, encoding = _read_header(buffer, length)
    cut = HEADER_BYTES + index_bytes(encoding, count)
    packed = buffer[HEADER_BYTES:cut].clone()
    if encoding is IndexEncoding.RANGE:
        first = int(packed.view(torch.int64).item())
        if not 0 <= first <= length - count:
            raise WireError(f"range {first}+{count} lies outside a vector of length {length}")
        indices = torch.arange(first, first + count, device=buffer.device)
    else:
        indices = packed.view(_INDEX_DTYPE[encoding]).to(torch.int64)
        _check_indices(indices, length)
    values = buffer[cut:].clone().view(torch.float32)
    return SparseVector(indices, values, length)


def split_index_and_value(buffer: Tensor) -> tuple[Tensor, Tensor]:
    """The two halves of an encoded buffer (header and indices, values), as views: together they decode again."""
    words = ints(buffer[:HEADER_BYTES].clone().view(torch.int64))
    cut = HEADER_BYTES + index_bytes(IndexEncoding(words[0] >> 40 & 0xFF), words[2])
    return buffer[:cut], buffer[cut:]


def _index_encoding(vector: SparseVector) -> IndexEncoding:
    count = len(vector)
    if count > 2:  # a run of two is not worth asking the device for its ends
        ends = vector.indices[:: count - 1]
        if int((ends[1] - ends[0]).item()) == count - 1:
            return IndexEncoding.RANGE
    return IndexEncoding.INT32 if vector.length <= 2**31 else IndexEncoding.INT64


def _read_header(buffer: Tensor, length: int) -> tuple[int, IndexEncoding]:
    size = buffer.numel()
    if buffer.dtype != torch.uint8 or buffer.dim() != 1:
        raise WireError(f"expected a flat uint8 buffer, got {buffer.dtype} of shape {tuple(buffer.shape)}")
    if size < HEADER_BYTES:
        raise WireError(f"buffer of {size} bytes is shorter than the {HEADER_BYTES}-byte header")
    words = ints(buffer[:HEADER_BYTES].clone().view(torch.int64))
    head, sent_length, count, checksum = words
    if head & 0xFFFFFFFF != _MAGIC:
        raise WireError(f"foreign buffer: it starts with {head & 0xFFFFFFFF:#010x}, not {_MAGIC:#010x}")
    version, index_code, value_code, reserved = head.to_bytes(8, "little", signed=True)[4:]
    if version != VERSION:
        raise WireError(f"wire version {version}, this library speaks {VERSION}")
    if index_code not in list(IndexEncoding) or value_code not in list(ValueEncoding) or reserved:
        raise WireError(f"unknown encoding: index {index_code}, value {value_code}, reserved {reserved}")
    if sent_length != length:
        raise WireError(f"vector of length {sent_length}, expected {length}")
    if not 0 <= count <= length:
        raise WireError(f"{count} elements in a vector of length {length}")
    encoding = IndexEncoding(index_code)
    expected = HEADER_BYTES + index_bytes(encoding, count) + _VALUE_BYTES[ValueEncoding(value_code)] * count
    if size != expected:
        raise WireError(f"buffer of {size} bytes, its header announces {expected}")
    if int(_checksum(buffer).item()) != checksum:
        raise WireError("checksum does not match: the buffer was damaged on its way")
    return count, encoding


def _check_indices(indices: Tensor, length: int) -> None:
    if indices.numel() == 0:
        return
    ordered = bool((indices[1:] > indices[:-1]).all().item())
    first, last = int(indices[0].item()), int(indices[-1].item())
    if not ordered or first < 0 or last >= length:
        raise WireError(f"indices are not strictly increasing within 0..{length - 1}")


def _checksum(buffer: Tensor) -> Tensor:
    """Of all words but the checksum's own; every part is a whole number of 32-bit words."""
    words = buffer.clone().view(torch.int32)  # a clone is aligned, wherever the buffer came from
    words[6:8] = 0
    return hash_words(words)
