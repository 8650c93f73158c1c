"""The wire format: exact round trips, exact sizes, and WireError for everything that is not a whole buffer."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oktopk.kernels.base import Kernels
from oktopk.registry import make_kernels
from oktopk.sparse_vector import SparseVector
from oktopk.wire import HEADER_BYTES, VERSION, ValueEncoding, WireError, decode, encode, rounded, split_index_and_value

LAW = settings(derandomize=True, deadline=None, max_examples=100)
MAGIC = b"OKTK"
INT32, INT64, RANGE, GAPS8, GAPS16 = range(5)
FP32, BF16 = ValueEncoding.FP32, ValueEncoding.BF16
LARGEST_BF16 = float(np.array([0x7F7F0000], dtype=np.uint32).view(np.float32)[0])
LENGTHS = [1, 2, 3, 40, 2**24 - 1, 2**24, 2**24 + 3, 2**31 - 1, 2**31, 2**31 + 1, 2**31 + 5, 2**40]


EDGES = [253, 254, 255, 256, 509, 510, 511, 65534, 65535, 65536, 131070]


def after_gaps(first: int, gaps: Sequence[int]) -> list[int]:
    """The first index, and those behind it with so many left out before each."""
    indices = [first]
    for gap in gaps:
        indices.append(indices[-1] + 1 + gap)
    return indices


def vector(indices: list[int], values: list[float], length: int) -> SparseVector:
    return SparseVector(torch.tensor(indices, dtype=torch.int64), torch.tensor(values, dtype=torch.float32), length)


def from_bits(indices: list[int], bits: list[int], length: int) -> SparseVector:
    words = np.array(bits, dtype=np.uint32).view(np.int32).tolist()
    values = torch.tensor(words, dtype=torch.int32).view(torch.float32)
    return SparseVector(torch.tensor(indices, dtype=torch.int64), values, length)


ANY_BITS = st.integers(0, 2**32 - 1)
BF16_BITS = st.integers(0, 2**16 - 1).filter(lambda word: word & 0x7F80 != 0x7F80).map(lambda word: word << 16)
FINITE_BITS = ANY_BITS.filter(lambda word: word & 0x7F800000 != 0x7F800000)


@st.composite
def sparse_vectors(draw: st.DrawFn, value_bits: st.SearchStrategy[int] = ANY_BITS) -> SparseVector:
    """Any indices and any 32 bits as a value, NaN included; near both ends of the index space, runs, and gaps."""
    length = draw(st.sampled_from(LENGTHS))
    near = st.one_of(
        st.integers(0, length - 1),
        st.integers(0, min(length, 20) - 1),
        st.integers(max(0, length - 20), length - 1),
        st.integers(2**24 - 4, 2**24 + 4).filter(lambda index: index < length) if length > 2**24 else st.just(0),
    )
    indices = sorted(draw(st.sets(near, max_size=12)))
    shape = draw(st.sampled_from(["scattered", "run", "gaps", "wide gaps"]))
    if indices and shape == "run":
        indices = list(range(indices[0], min(length, indices[0] + draw(st.integers(1, 8)))))
    elif indices and shape != "scattered":
        small = st.integers(0, 3) if shape == "gaps" else st.integers(700, 5000)
        gaps = st.lists(st.one_of(small, small, small, st.sampled_from(EDGES)), min_size=6, max_size=20)
        indices = [i for i in after_gaps(indices[0], draw(gaps)) if i < length]
    return from_bits(indices, [draw(value_bits) for _ in indices], length)


def assert_same(left: SparseVector, right: SparseVector) -> None:
    assert left.length == right.length
    assert left.indices.dtype == torch.int64
    assert left.values.dtype == torch.float32
    assert left.indices.tolist() == right.indices.tolist()
    assert left.values.numpy().view(np.int32).tolist() == right.values.numpy().view(np.int32).tolist()


def refused(buffer: torch.Tensor, length: int) -> str:
    """The message of the WireError that decoding must raise."""
    with pytest.raises(WireError) as caught:
        decode(buffer, length)
    assert type(caught.value) is WireError
    return str(caught.value)


def to_buffer(raw: bytes) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(raw, dtype=np.uint8).copy())


def to_bytes(buffer: torch.Tensor) -> bytes:
    return buffer.numpy().tobytes()


def sealed(
    payload: bytes,
    *,
    length: int,
    count: int,
    index: int,
    magic: bytes = MAGIC,
    version: int = VERSION,
    value: int = 0,
    padding: int = 0,
) -> torch.Tensor:
    """A buffer made by hand from the module's description, with a checksum that is right."""
    head = magic + bytes([version, index, value, padding])
    head += length.to_bytes(8, "little", signed=True) + count.to_bytes(8, "little", signed=True)
    whole_words = (head + bytes(8) + payload)[: (len(head) + 8 + len(payload)) // 4 * 4]
    words = [int(word) for word in np.frombuffer(whole_words, dtype="<i4")]
    total = sum(word * ((position * -7046029254386353131) | 1) for position, word in enumerate(words))
    checksum = (total + 2**63) % 2**64 - 2**63
    return to_buffer(head + checksum.to_bytes(8, "little", signed=True) + payload)


def pack(indices: list[int], values: list[float], index_type: str) -> bytes:
    return np.array(indices, dtype=index_type).tobytes() + np.array(values, dtype="<f4").tobytes()


def digits_of(gaps: Sequence[int], width: int) -> bytes:
    """g // 255 bytes of 255 and one of g % 255 for each gap; with two bytes, 65535 in the place of 255."""
    most = 256**width - 1
    digits = [digit for gap in gaps for digit in [most] * (gap // most) + [gap % most]]
    return b"".join(digit.to_bytes(width, "little") for digit in digits)


def gaps_between(indices: Sequence[int]) -> list[int]:
    """Before each index, counted from the first."""
    return [0, *(after - before - 1 for before, after in pairwise(indices))] if indices else []


def value_bytes(values: Sequence[float], value: int) -> bytes:
    """Padded to whole words; for bf16, of values that need no rounding."""
    raw = np.array(values, dtype="<f4").tobytes()
    if value == BF16:
        halves = [raw[start + 2 : start + 4] for start in range(0, len(raw), 4)]
        assert all(raw[start : start + 2] == b"\0\0" for start in range(0, len(raw), 4))
        raw = b"".join(halves)
    return raw + bytes(-len(raw) % 4)


def gaps_by_hand(
    first: int, gaps: Sequence[int], values: Sequence[float], length: int, width: int = 1, value: int = FP32
) -> torch.Tensor:
    packed = first.to_bytes(8, "little", signed=True) + digits_of(gaps, width)
    padding = -len(packed) % 4
    payload = packed + bytes(padding) + value_bytes(values, value)
    index = GAPS8 if width == 1 else GAPS16
    return sealed(payload, length=length, count=len(values), index=index, value=value, padding=padding)


def index_size(v: SparseVector) -> tuple[int, int]:
    """The encoding and its bytes, padding included: the one that may cost the least."""
    count, indices = len(v), v.indices.tolist()
    plain, plain_bytes = (INT32, 4) if v.length <= 2**31 else (INT64, 8)
    span = indices[-1] - indices[0] if indices else 0
    if count > 2 and span == count - 1:
        return RANGE, 8
    at_most = {plain: plain_bytes * count}
    if count > 2:
        at_most |= {GAPS8: 8 + count + span // 255, GAPS16: 8 + 2 * (count + span // 65535)}
    best = min(at_most, key=lambda encoding: at_most[encoding])
    if best == plain:
        return plain, plain_bytes * count
    exact = 8 + len(digits_of(gaps_between(indices), 1 if best == GAPS8 else 2))
    return best, exact + -exact % 4


# --- round trips


@LAW
@given(sparse_vectors())
def test_any_vector_comes_back_bit_for_bit(v: SparseVector) -> None:
    buffer = encode(v)
    assert (buffer.dtype, buffer.dim()) == (torch.uint8, 1)
    assert_same(decode(buffer, v.length), v)


@LAW
@given(sparse_vectors(BF16_BITS))
def test_what_bf16_holds_comes_back_bit_for_bit(v: SparseVector) -> None:
    assert_same(decode(encode(v, BF16), v.length), v)


@pytest.mark.parametrize("value", [FP32, BF16], ids=lambda value: value.name)
@pytest.mark.parametrize("first", [0, 1, 1000, 2**31 - 10**6])
@pytest.mark.parametrize("gap", EDGES)
def test_gaps_at_the_edges_of_a_digit_come_back(gap: int, first: int, value: ValueEncoding) -> None:
    for gaps in ([gap, 0, 0, 0], [0, 0, 0, gap], [gap] * 6, [gap, 1] * 20):
        indices = after_gaps(first, gaps)
        v = vector(indices, [0.5 + i for i in range(len(indices))], 2**31 + 10**7)
        assert_same(decode(encode(v, value), v.length), v)


@pytest.mark.parametrize("length", [2**24 + 4, 2**31, 2**31 + 5, 2**40])
def test_indices_that_a_float_cannot_hold_come_back(length: int) -> None:
    indices = sorted({0, 2**24 - 1, 2**24, 2**24 + 1, 2**24 + 3, length - 3, length - 1})
    v = vector(indices, [float(i) for i in range(len(indices))], length)
    assert_same(decode(encode(v), length), v)


def test_denormals_signed_zeros_and_extremes_come_back() -> None:
    largest = float(torch.finfo(torch.float32).max)
    values = [1e-45, -1e-45, 1.1e-38, -0.0, 0.0, largest, -largest, float("inf"), float("-inf")]
    v = vector(list(range(1, 2 * len(values), 2)), values, 2 * len(values))
    assert_same(decode(encode(v), v.length), v)


@pytest.mark.parametrize("length", [1, 1000, 2**31, 2**31 + 5])
def test_an_empty_vector_is_a_header_alone(length: int) -> None:
    buffer = encode(SparseVector.empty(length, torch.device("cpu")))
    assert buffer.numel() == HEADER_BYTES
    assert_same(decode(buffer, length), SparseVector.empty(length, torch.device("cpu")))


def test_a_whole_vector_of_length_zero_comes_back() -> None:
    nothing = SparseVector.empty(0, torch.device("cpu"))
    assert_same(decode(encode(nothing), 0), nothing)


@pytest.mark.parametrize(
    ("indices", "values", "length"),
    [
        (torch.tensor([0, 0, 5000, 0])[::2], torch.arange(4.0)[::2], 10_000),
        (torch.tensor([0, 0, 2**31, 0])[::2], torch.arange(2.0), 2**31 + 5),
        (torch.arange(20)[::2], torch.arange(20.0)[::2], 20),
        (torch.arange(20)[::2] * 5000, torch.arange(20.0)[::2], 100_000),
        (torch.arange(10).repeat_interleave(2)[::2], torch.arange(10.0), 20),
        (torch.arange(2)[::2], torch.arange(1.0), 20),
        (torch.arange(1), torch.arange(2.0)[::2], 20),
        (torch.arange(0), torch.arange(0.0)[::2], 20),
    ],
    ids=["int32", "int64", "gaps8", "gaps16", "range", "one index", "one value", "no value"],
)
def test_strided_indices_and_values_are_packed_like_their_copies(
    indices: torch.Tensor, values: torch.Tensor, length: int
) -> None:
    copied = vector(indices.tolist(), values.tolist(), length)
    for value in (FP32, BF16):
        strided = encode(SparseVector(indices, values, length), value)
        assert to_bytes(strided) == to_bytes(encode(copied, value))


def test_encode_leaves_the_vector_alone_and_owns_its_result() -> None:
    v = vector([1, 5], [2.0, 3.0], 9)
    buffer = encode(v)
    again = to_bytes(buffer)
    v.indices.fill_(7)
    v.values.fill_(7.0)
    assert to_bytes(buffer) == again
    kept = vector([1, 5], [2.0, 3.0], 9)
    encode(kept).fill_(0)
    assert_same(kept, vector([1, 5], [2.0, 3.0], 9))


@pytest.mark.parametrize("value", [FP32, BF16], ids=lambda value: value.name)
@pytest.mark.parametrize("indices", [[0, 5], [0, 2, 3, 5, 8], [4, 5, 6, 7]], ids=["int32", "gaps8", "range"])
def test_a_decoded_vector_owns_its_memory(indices: list[int], value: ValueEncoding) -> None:
    v = vector(indices, [1.0] * len(indices), 9)
    buffer = encode(v, value)
    decoded = decode(buffer, 9)
    buffer.fill_(0)
    assert_same(decoded, v)


@pytest.mark.parametrize("value", [FP32, BF16], ids=lambda value: value.name)
@pytest.mark.parametrize("indices", [[0, 2, 5], [0, 2000, 5000], [0, 300, 900, 1300, 1301]], ids=str)
@pytest.mark.parametrize("length", [10_000, 2**31 + 5])
def test_a_buffer_that_lies_askew_in_memory_decodes(length: int, indices: list[int], value: ValueEncoding) -> None:
    v = vector(indices, [1.0 + i for i in range(len(indices))], length)
    buffer = encode(v, value)
    shifted = torch.cat([torch.zeros(3, dtype=torch.uint8), buffer])[3:]
    spread = torch.zeros(2 * buffer.numel(), dtype=torch.uint8)
    spread[::2] = buffer
    assert_same(decode(shifted, length), v)
    assert_same(decode(spread[::2], length), v)


# --- sizes and layout


@LAW
@given(sparse_vectors())
def test_the_number_of_bytes_is_what_the_format_says(v: SparseVector) -> None:
    encoding, index_bytes = index_size(v)
    for value, itemsize in ((FP32, 4), (BF16, 2)):
        buffer = encode(v, value)
        values = itemsize * len(v)
        assert buffer.numel() == HEADER_BYTES + index_bytes + values + -values % 4
        assert (int(buffer[5]), int(buffer[6])) == (encoding, value)


def test_every_index_encoding_is_among_the_vectors_that_are_tried() -> None:
    """Else the law above would say nothing about some."""
    seen = set()

    @settings(LAW, max_examples=1000)
    @given(sparse_vectors())
    def look(v: SparseVector) -> None:
        seen.add(index_size(v)[0])

    look()
    assert seen == {INT32, INT64, RANGE, GAPS8, GAPS16}


@pytest.mark.parametrize("length", [1, 1000, 2**31, 2**31 + 5, 2**40])
def test_an_index_never_costs_more_than_it_would_alone(length: int) -> None:
    """4 bytes and 8 for the whole, or 8 where a vector is longer than 2^31, whatever the gaps are."""
    each = 4 if length <= 2**31 else 8
    rng = np.random.default_rng(5)
    for count in (1, 2, 3, 10, 100, 1000):
        for spread in (count, 3 * count, 100 * count, 1000 * count, 100_000 * count, length):
            if count > min(spread, length):
                continue
            indices = sorted({int(i) for i in rng.integers(0, min(spread, length), size=count)})
            v = vector(indices, [1.0] * len(indices), length)
            buffer = encode(v)
            assert buffer.numel() - HEADER_BYTES - 4 * len(v) <= each * len(v) + 8
            assert_same(decode(buffer, length), v)


@pytest.mark.parametrize(("value", "most_bytes"), [(FP32, 5.5), (BF16, 3.5)], ids=["fp32", "bf16"])
def test_a_pair_costs_little_at_density_one_percent(value: ValueEncoding, most_bytes: float) -> None:
    n, k = 1_000_000, 10_000
    indices = np.sort(np.random.default_rng(6).permutation(n)[:k])
    v = SparseVector(torch.from_numpy(indices), torch.ones(k), n)
    buffer = encode(v, value)
    assert buffer.numel() <= most_bytes * k
    index_bytes = buffer.numel() - HEADER_BYTES - (4 if value is FP32 else 2) * k
    assert index_bytes / k == pytest.approx(1.08, abs=0.02)
    assert_same(decode(buffer, n), v)


@pytest.mark.parametrize(("length", "narrow_bytes"), [(2**31, 4), (2**31 + 5, 8)])
def test_a_run_without_gaps_sends_one_index(length: int, narrow_bytes: int) -> None:
    run = vector(list(range(length - 100, length)), [0.5] * 100, length)
    torn = vector([0, *range(length - 99, length)], [0.5] * 100, length)
    broken = vector([*range(length - 200, length - 101), length - 1], [0.5] * 100, length)
    assert encode(run).numel() == 32 + 8 + 400
    assert encode(torn).numel() == 32 + 100 * narrow_bytes + 400  # gaps would be as long as the vector
    assert encode(broken).numel() == 32 + 8 + 100 + 400
    for v in (run, torn, broken):
        assert_same(decode(encode(v), length), v)


def test_a_full_vector_is_a_run() -> None:
    full = vector([0, 1, 2, 3], [1.0, 2.0, 3.0, 4.0], 4)
    assert encode(full).numel() == 32 + 8 + 16
    assert encode(full, BF16).numel() == 32 + 8 + 8
    assert_same(decode(encode(full), 4), full)


MIXED = [0, 254, 255, 256, 510, 0, 3]
WIDE = [0, 65534, 65535, 65536, 131070, 4000, 9000, 700, 0, 3000, 255, 256, 65]
BY_HAND: dict[str, tuple[SparseVector, ValueEncoding, torch.Tensor]] = {
    "int32": (
        vector([1, 5], [2.0, 1e-45], 9),
        FP32,
        sealed(pack([1, 5], [2.0, 1e-45], "<i4"), length=9, count=2, index=INT32),
    ),
    "int32 far apart": (
        vector([1, 10**8, 10**9], [2.0, -0.5, 1.0], 2**31),
        FP32,
        sealed(pack([1, 10**8, 10**9], [2.0, -0.5, 1.0], "<i4"), length=2**31, count=3, index=INT32),
    ),
    "int64": (
        vector([1, 2**31 + 4], [2.0, -0.5], 2**31 + 5),
        FP32,
        sealed(pack([1, 2**31 + 4], [2.0, -0.5], "<i8"), length=2**31 + 5, count=2, index=INT64),
    ),
    "range": (
        vector([6, 7, 8], [2.0, -0.5, 1.0], 9),
        FP32,
        sealed(pack([6], [2.0, -0.5, 1.0], "<i8"), length=9, count=3, index=RANGE),
    ),
    "empty": (SparseVector.empty(9, torch.device("cpu")), FP32, sealed(b"", length=9, count=0, index=INT32)),
    "gaps8": (vector([1, 5, 7], [2.0, -0.5, 1e-45], 9), FP32, gaps_by_hand(1, [0, 3, 1], [2.0, -0.5, 1e-45], 9)),
    "gaps8 with escapes": (
        vector(after_gaps(7, MIXED[1:]), [1.0] * 7, 10**6),
        FP32,
        gaps_by_hand(7, MIXED, [1.0] * 7, 10**6),
    ),
    "gaps8 in a vector longer than 2^31": (
        vector([2**40, 2**40 + 2, 2**40 + 9], [1.0, 2.0, 3.0], 2**41),
        FP32,
        gaps_by_hand(2**40, [0, 1, 6], [1.0, 2.0, 3.0], 2**41),
    ),
    "gaps16": (
        vector(after_gaps(3, WIDE[1:]), [1.0] * 13, 10**6),
        FP32,
        gaps_by_hand(3, WIDE, [1.0] * 13, 10**6, width=2),
    ),
    "bf16": (
        vector([1, 5], [2.0, -0.5], 9),
        BF16,
        sealed(
            np.array([1, 5], "<i4").tobytes() + value_bytes([2.0, -0.5], BF16),
            length=9,
            count=2,
            index=INT32,
            value=BF16,
        ),
    ),
    "bf16 padded": (
        vector([5], [3.0], 9),
        BF16,
        sealed(b"\5\0\0\0\x40\x40\0\0", length=9, count=1, index=INT32, value=BF16),
    ),
    "bf16 gaps": (
        vector([1, 5, 7], [2.0, -0.5, 1.0], 9),
        BF16,
        gaps_by_hand(1, [0, 3, 1], [2.0, -0.5, 1.0], 9, value=BF16),
    ),
    "bf16 wide gaps": (
        vector(after_gaps(3, WIDE[1:-1]), [1.0] * 12, 10**6),
        BF16,
        gaps_by_hand(3, WIDE[:-1], [1.0] * 12, 10**6, width=2, value=BF16),
    ),
}


@pytest.mark.parametrize(("v", "value", "by_hand"), BY_HAND.values(), ids=BY_HAND)
def test_the_bytes_are_those_of_the_description(v: SparseVector, value: ValueEncoding, by_hand: torch.Tensor) -> None:
    assert to_bytes(encode(v, value)) == to_bytes(by_hand)
    assert_same(decode(by_hand, v.length), v)


def test_the_bytes_of_gaps_are_those_written_here() -> None:
    """One buffer byte by byte, so that the description above cannot be wrong in the same way as the code."""
    buffer = encode(vector([2, 3, 259, 1000], [1.0, -2.0, 0.5, 4.0], 1001), BF16)
    payload = "02000000000000000000ff00ffffe600803f00c0003f8040"
    assert to_bytes(buffer)[:8] == b"OKTK" + bytes([2, 3, 1, 1])
    assert to_bytes(buffer)[8:24] == (1001).to_bytes(8, "little") + (4).to_bytes(8, "little")
    assert to_bytes(buffer)[32:].hex() == payload


# --- rounding for the wire


def by_bits(value: int) -> float:
    return float(np.array([value], dtype=np.uint32).view(np.float32)[0])


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (1.0 + 2.0**-8, 1.0),  # half way: to the even one
        (1.0 + 3 * 2.0**-8, 1.0 + 2.0**-6),
        (1.0 + 2.0**-8 + 2.0**-20, 1.0 + 2.0**-7),
        (by_bits(0x7F7FFFFF), LARGEST_BF16),
        (by_bits(0x7F7F8000), LARGEST_BF16),  # half way to infinity
        (by_bits(0x7F7F7FFF), LARGEST_BF16),
        (by_bits(0x00000001), 0.0),
        (by_bits(0x00018000), by_bits(0x00020000)),  # denormals are ordinary numbers
        (by_bits(0x00010000), by_bits(0x00010000)),
        (0.0, 0.0),
    ],
)
def test_a_value_becomes_the_nearest_bf16_and_never_infinity(value: float, expected: float) -> None:
    v = vector([3, 4], [value, -value], 9)
    result = rounded(v, BF16)
    assert result.values.tolist() == [expected, -expected]
    assert result.indices.tolist() == [3, 4]
    assert v.values.tolist() == [value, -value]


@LAW
@given(sparse_vectors(FINITE_BITS))
def test_rounded_is_what_arrives(v: SparseVector) -> None:
    result = rounded(v, BF16)
    assert bool(torch.isfinite(result.values).all())
    assert not np.any(result.values.numpy().view(np.uint32) & 0xFFFF)
    assert_same(decode(encode(result, BF16), v.length), result)
    assert_same(rounded(result, BF16), result)
    inside = v.values.abs() <= LARGEST_BF16
    allowed = 2.0**-8 * v.values.double().abs() + 2.0**-134
    assert bool(((result.values.double() - v.values.double()).abs() <= allowed)[inside].all())
    assert bool((result.values.abs() == LARGEST_BF16)[~inside].all())


@LAW
@given(sparse_vectors(FINITE_BITS))
def test_fp32_needs_no_rounding(v: SparseVector) -> None:
    assert rounded(v, FP32) is v


# --- whoever encodes, anyone decodes

KERNELS = ["torch", "numba"]


def on_cpu(name: str) -> Kernels:
    return make_kernels(name).on(torch.device("cpu"))


@pytest.mark.parametrize("value", [FP32, BF16], ids=lambda value: value.name)
@LAW
@given(v=sparse_vectors(BF16_BITS))
def test_all_kernels_write_the_same_bytes_and_read_each_others(v: SparseVector, value: ValueEncoding) -> None:
    kernels = [on_cpu(name) for name in KERNELS]
    buffers = [encode(v, value, each) for each in kernels]
    assert all(to_bytes(buffer) == to_bytes(buffers[0]) for buffer in buffers)
    for buffer, reader in zip(buffers, reversed(kernels), strict=True):
        assert_same(decode(buffer, v.length, reader), v)


@pytest.mark.parametrize("name", KERNELS)
def test_all_kernels_refuse_the_same_damage(name: str) -> None:
    v, value, buffer = BY_HAND["bf16 gaps"]
    kernels = on_cpu(name)
    assert_same(decode(buffer, v.length, kernels), v)
    for position in range(buffer.numel()):
        damaged = buffer.clone()
        damaged[position] ^= 0x10
        with pytest.raises(WireError):
            decode(damaged, v.length, kernels)
    for gaps in ([0, 3, 3], [0, 3], [0, 3, 1, 0], [0, 3, 255]):
        raw = gaps_by_hand(1, gaps, [2.0, -0.5, 1.0], 9, value=value)
        with pytest.raises(WireError):
            decode(raw, 9, kernels)


# --- damage: WireError and nothing else


SMALL = {
    "int32": vector([0, 2000, 5000], [1.0, -2.0, 3.0], 5003),
    "int32 pair": vector([2, 3], [1.0, -2.0], 9),
    "int64": vector([0, 2**31 + 4], [1.0, -2.0], 2**31 + 5),
    "range": vector([3, 4, 5], [1.0, -2.0, 3.0], 9),
    "empty": SparseVector.empty(9, torch.device("cpu")),
    "gaps8": vector([0, 2, 5], [1.0, -2.0, 3.0], 9),
    "gaps8 without padding": vector([0, 2, 5, 6], [1.0, -2.0, 3.0, 4.0], 9),
    "gaps8 with escapes": vector([4, 259, 600, 601, 602, 604], [1.0] * 6, 1000),
    "gaps16": vector([9, 3000, 70_000, 71_000, 72_000, 73_000, 74_000], [1.0] * 7, 10**6),
}
SMALL_AND_VALUE = [(v, value) for v in SMALL.values() for value in ValueEncoding]
SMALL_IDS = [f"{name} {value.name}" for name in SMALL for value in ValueEncoding]
each_small = pytest.mark.parametrize(("v", "value"), SMALL_AND_VALUE, ids=SMALL_IDS)


def test_the_small_vectors_are_encoded_as_they_are_called() -> None:
    codes = {INT32: "int32", INT64: "int64", RANGE: "range", GAPS8: "gaps8", GAPS16: "gaps16"}
    for name, v in SMALL.items():
        assert name.startswith(codes[int(encode(v)[5])]) or name == "empty"


@each_small
def test_every_truncation_is_refused(v: SparseVector, value: ValueEncoding) -> None:
    buffer = encode(v, value)
    for size in range(buffer.numel()):
        refused(buffer[:size], v.length)


@each_small
def test_every_single_flipped_bit_is_refused(v: SparseVector, value: ValueEncoding) -> None:
    buffer = encode(v, value)
    for position in range(buffer.numel()):
        for bit in range(8):
            damaged = buffer.clone()
            damaged[position] ^= 1 << bit
            refused(damaged, v.length)


@each_small
@pytest.mark.parametrize("extra", [1, 2, 3, 4, 7, 8, 12, 32])
def test_an_extended_buffer_is_refused(v: SparseVector, value: ValueEncoding, extra: int) -> None:
    for filler in (0, 255):
        longer = torch.cat([encode(v, value), torch.full((extra,), filler, dtype=torch.uint8)])
        refused(longer, v.length)


@each_small
def test_another_length_is_refused(v: SparseVector, value: ValueEncoding) -> None:
    for length in (0, 1, v.length - 1, v.length + 1, 2**31, 2**40, -1):
        assert str(length) in refused(encode(v, value), length)


@LAW
@given(st.binary(max_size=120), st.integers(0, 50))
def test_random_bytes_are_refused(raw: bytes, length: int) -> None:
    refused(to_buffer(raw), length)


@LAW
@given(st.binary(max_size=80), st.integers(0, 50), st.integers(0, 4), st.integers(0, 1), st.integers(0, 3))
def test_random_bytes_behind_a_right_start_are_refused(
    raw: bytes, length: int, index: int, value: int, padding: int
) -> None:
    start = MAGIC + bytes([VERSION, index, value, padding]) + length.to_bytes(8, "little")
    refused(to_buffer(start + raw), length)


EXTREME = st.one_of(
    st.integers(-3, 12), st.sampled_from([2**31 - 1, 2**31, 2**32, 2**62, 2**63 - 1, -(2**31), -(2**63)])
)


def test_values_that_changed_places_are_noticed() -> None:
    buffer = encode(SparseVector(torch.tensor([1, 5, 9]), torch.tensor([1.0, 2.0, 3.0]), 10))
    words = buffer.view(torch.int32)
    assert words[-3:].view(torch.float32).tolist() == [1.0, 2.0, 3.0]
    words[[-3, -2]] = words[[-2, -3]]
    with pytest.raises(WireError, match="checksum"):
        decode(buffer, 10)


@LAW
@given(st.data())
def test_whatever_a_right_checksum_covers_is_refused_or_a_proper_vector(data: st.DataObject) -> None:
    """Random sizes, encodings and payloads that pass the checksum: nothing malformed may get through."""
    length, count = data.draw(EXTREME), data.draw(EXTREME)
    index = data.draw(st.integers(0, 2))
    indices = data.draw(st.lists(EXTREME, max_size=6))
    fits = indices if index != INT32 else [max(-(2**31), min(2**31 - 1, i)) for i in indices]
    num_values = data.draw(st.sampled_from([len(fits), max(0, min(count, 12))]))
    payload = pack(fits, [1.0] * num_values, "<i4" if index == INT32 else "<i8")
    refused_or_proper(sealed(payload, length=length, count=count, index=index), length, count)


def refused_or_proper(buffer: torch.Tensor, length: int, count: int) -> None:
    for name in KERNELS:
        try:
            decoded = decode(buffer, length, on_cpu(name))
        except WireError:
            continue
        found = decoded.indices.tolist()
        assert len(found) == decoded.values.numel() == count
        assert found == sorted(set(found))
        assert all(0 <= i < length for i in found)


@LAW
@given(st.data())
def test_whatever_gaps_a_right_checksum_covers_are_refused_or_a_proper_vector(data: st.DataObject) -> None:
    length, first = data.draw(EXTREME), data.draw(EXTREME)
    width = data.draw(st.sampled_from([1, 2]))
    digit = st.one_of(st.integers(0, 2), st.just(256**width - 1), st.integers(0, 256**width - 1))
    digits = data.draw(st.lists(digit, max_size=10))
    finished = sum(value != 256**width - 1 for value in digits)
    count = data.draw(st.one_of(st.just(finished), st.just(len(digits)), EXTREME))
    packed = first.to_bytes(8, "little", signed=True) + b"".join(d.to_bytes(width, "little") for d in digits)
    padding = data.draw(st.one_of(st.just(-len(packed) % 4), st.integers(0, 4)))
    value = data.draw(st.sampled_from(ValueEncoding))
    payload = packed + bytes(padding) + value_bytes([1.0] * max(0, min(count, 12)), value)
    index = GAPS8 if width == 1 else GAPS16
    buffer = sealed(payload, length=length, count=count, index=index, value=value, padding=padding)
    refused_or_proper(buffer, length, count)


@pytest.mark.parametrize("width", [1, 2])
@pytest.mark.parametrize(
    ("first", "gaps"),
    [(0, [0, 0, 7]), (6, [0, 0, 1]), (9, [0, 0, 0]), (3, [0, 600, 0]), (-1, [0, 0, 0]), (2**62, [0, 0, 0])],
    ids=str,
)
def test_gaps_that_leave_the_vector_are_refused(first: int, gaps: list[int], width: int) -> None:
    message = refused(gaps_by_hand(first, gaps, [1.0, 2.0, 3.0], 9, width), 9)
    assert "outside" in message
    assert str(first) in message


@pytest.mark.parametrize("width", [1, 2])
@pytest.mark.parametrize("first", [2**63 - 1, -(2**63)])
def test_gaps_that_would_overflow_are_refused(first: int, width: int) -> None:
    assert "outside" in refused(gaps_by_hand(first, [0, 5, 300], [1.0, 2.0, 3.0], 2**40, width), 2**40)


@pytest.mark.parametrize("width", [1, 2])
def test_gaps_may_just_reach_the_end_of_the_vector(width: int) -> None:
    decoded = decode(gaps_by_hand(5, [0, 0, 1], [1.0, 2.0, 3.0], 9, width), 9)
    assert decoded.indices.tolist() == [5, 6, 8]


@pytest.mark.parametrize("width", [1, 2])
@pytest.mark.parametrize("gaps", [[0], [0, 1], [0, 1, 0, 0], [0, 1, 0, 0, 0, 0, 0]], ids=str)
def test_another_number_of_gaps_than_values_is_refused(gaps: list[int], width: int) -> None:
    refused(gaps_by_hand(0, gaps, [1.0, 2.0, 3.0], 9, width), 9)


@pytest.mark.parametrize("width", [1, 2])
def test_a_gap_that_does_not_end_is_refused(width: int) -> None:
    most = 256**width - 1
    for tail in ([most], [most, most]):
        packed = (0).to_bytes(8, "little") + b"".join(d.to_bytes(width, "little") for d in [0, 1, *tail])
        padding = -len(packed) % 4
        payload = packed + bytes(padding) + value_bytes([1.0, 2.0], FP32)
        index = GAPS8 if width == 1 else GAPS16
        assert "gaps" in refused(sealed(payload, length=10**6, count=2, index=index, padding=padding), 10**6)


def test_half_a_two_byte_gap_is_refused() -> None:
    payload = bytes(8) + b"\0\0\1\0\1\0\0" + bytes(1) + value_bytes([1.0, 2.0, 3.0], FP32)
    assert "not whole" in refused(sealed(payload, length=9, count=3, index=GAPS16, padding=1), 9)


def test_padding_that_hides_a_gap_is_refused() -> None:
    payload = bytes(8) + b"\0\1\1\0" + value_bytes([1.0, 2.0, 3.0], FP32)
    assert decode(sealed(payload, length=9, count=3, index=GAPS8, padding=1), 9).indices.tolist() == [0, 2, 4]
    for padding in (0, 2, 3):
        refused(sealed(payload, length=9, count=3, index=GAPS8, padding=padding), 9)


@pytest.mark.parametrize(
    "indices",
    [[5, 2, 7], [2, 2, 7], [2, 7, 7], [0, 1, 9], [-1, 1, 2], [2, 100, 3], [7, 5, 2], [1, 2, 2**31 - 1]],
    ids=str,
)
@pytest.mark.parametrize(("index", "index_type"), [(INT32, "<i4"), (INT64, "<i8")], ids=["int32", "int64"])
def test_unsorted_double_or_outside_indices_are_refused(indices: list[int], index: int, index_type: str) -> None:
    payload = pack(indices, [1.0, 2.0, 3.0], index_type)
    message = refused(sealed(payload, length=9, count=3, index=index), 9)
    assert "strictly increasing" in message


@pytest.mark.parametrize("first", [7, 9, 10, -1, -3, 2**31, 2**62, 2**63 - 1, -(2**63)])
def test_a_range_that_leaves_the_vector_is_refused(first: int) -> None:
    message = refused(sealed(pack([first], [1.0, 2.0, 3.0], "<i8"), length=9, count=3, index=RANGE), 9)
    assert "outside" in message
    assert str(first) in message


@pytest.mark.parametrize("count", [-1, -3, -(2**63), 10, 2**31, 2**61, 2**62, 2**63 - 1])
@pytest.mark.parametrize("index", [INT32, INT64, RANGE, GAPS8, GAPS16])
def test_an_impossible_count_is_refused(count: int, index: int) -> None:
    message = refused(sealed(pack([1], [1.0], "<i8"), length=9, count=count, index=index), 9)
    assert str(count) in message


@pytest.mark.parametrize("count", [0, 2, 4])
def test_a_count_that_does_not_match_the_payload_is_refused(count: int) -> None:
    message = refused(sealed(pack([0, 2, 5], [1.0, 2.0, 3.0], "<i4"), length=9, count=count, index=INT32), 9)
    assert "announces" in message


@pytest.mark.parametrize("version", [0, 1, 3, 127, 255])
def test_another_version_is_refused_and_named(version: int) -> None:
    payload = pack([0, 2, 5], [1.0, 2.0, 3.0], "<i4")
    message = refused(sealed(payload, length=9, count=3, index=INT32, version=version), 9)
    assert f"version {version}" in message


@pytest.mark.parametrize("magic", [b"KTKO", b"OKTL", b"\0\0\0\0", b"\xff\xff\xff\xff", b"oktk"])
def test_a_foreign_buffer_is_refused(magic: bytes) -> None:
    payload = pack([0, 2, 5], [1.0, 2.0, 3.0], "<i4")
    assert "foreign" in refused(sealed(payload, length=9, count=3, index=INT32, magic=magic), 9)


@pytest.mark.parametrize(
    "codes",
    [
        {"index": 5},
        {"index": 255},
        {"index": INT32, "value": 2},
        {"index": INT32, "value": 255},
        {"index": INT32, "padding": 4},
        {"index": INT32, "padding": 255},
    ],
    ids=str,
)
def test_an_unknown_encoding_is_refused(codes: dict[str, int]) -> None:
    payload = pack([0, 2, 5], [1.0, 2.0, 3.0], "<i4")
    assert "unknown encoding" in refused(sealed(payload, length=9, count=3, **codes), 9)


@pytest.mark.parametrize("padding", [1, 2, 3])
@pytest.mark.parametrize("index", [INT32, INT64, RANGE])
def test_padding_where_there_is_none_is_refused(index: int, padding: int) -> None:
    """Indices that are not gaps end on whole words."""
    indices = pack([3] if index == RANGE else [3, 4, 5], [], "<i4" if index == INT32 else "<i8")
    for payload in (indices + bytes(padding), indices + bytes(4)):
        refused(sealed(payload + pack([], [1.0] * 3, "<i4"), length=9, count=3, index=index, padding=padding), 9)


def test_a_negative_length_is_refused_even_where_it_is_expected() -> None:
    refused(sealed(b"", length=-1, count=0, index=INT32), -1)


@pytest.mark.parametrize("dtype", [torch.int8, torch.bool, torch.int32, torch.int64, torch.float32, torch.float64])
def test_a_buffer_of_another_dtype_is_refused(dtype: torch.dtype) -> None:
    buffer = encode(SMALL["gaps8"])
    assert "uint8" in refused(buffer.to(dtype), 9)
    assert "uint8" in refused(torch.zeros(0, dtype=dtype), 9)


def test_a_buffer_that_is_not_flat_is_refused() -> None:
    buffer = encode(SMALL["gaps8"])
    for shaped in (buffer.unsqueeze(0), buffer.unsqueeze(1), buffer.view(2, -1), buffer[0], buffer.view(2, 2, -1)):
        assert "flat" in refused(shaped, 9)


# --- halves


@LAW
@given(v=sparse_vectors(BF16_BITS), value=st.sampled_from(ValueEncoding))
def test_the_two_halves_are_views_that_join_to_the_buffer(v: SparseVector, value: ValueEncoding) -> None:
    buffer = encode(v, value)
    index_half, value_half = split_index_and_value(buffer)
    assert to_bytes(value_half) == value_bytes(v.values.tolist(), value)
    assert index_half.data_ptr() == buffer.data_ptr()
    assert index_half.untyped_storage().data_ptr() == value_half.untyped_storage().data_ptr()
    assert_same(decode(torch.cat([index_half, value_half]), v.length), v)
