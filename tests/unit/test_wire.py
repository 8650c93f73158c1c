"""The wire format: exact round trips, exact sizes, and WireError for everything that is not a whole buffer."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oktopk.types import SparseVector
from oktopk.wire import HEADER_BYTES, VERSION, WireError, decode, encode, split_index_and_value

LAW = settings(derandomize=True, deadline=None, max_examples=100)
MAGIC = b"OKTK"
INT32, INT64, RANGE = 0, 1, 2
LENGTHS = [1, 2, 3, 40, 2**24 - 1, 2**24, 2**24 + 3, 2**31 - 1, 2**31, 2**31 + 1, 2**31 + 5, 2**40]


def vector(indices: list[int], values: list[float], length: int) -> SparseVector:
    return SparseVector(torch.tensor(indices, dtype=torch.int64), torch.tensor(values, dtype=torch.float32), length)


def from_bits(indices: list[int], bits: list[int], length: int) -> SparseVector:
    words = np.array(bits, dtype=np.uint32).view(np.int32).tolist()
    values = torch.tensor(words, dtype=torch.int32).view(torch.float32)
    return SparseVector(torch.tensor(indices, dtype=torch.int64), values, length)


@st.composite
def sparse_vectors(draw: st.DrawFn) -> SparseVector:
    """Any indices and any 32 bits as a value, NaN included; near both ends of the index space, and runs."""
    length = draw(st.sampled_from(LENGTHS))
    near = st.one_of(
        st.integers(0, length - 1),
        st.integers(0, min(length, 20) - 1),
        st.integers(max(0, length - 20), length - 1),
        st.integers(2**24 - 4, 2**24 + 4).filter(lambda index: index < length) if length > 2**24 else st.just(0),
    )
    indices = sorted(draw(st.sets(near, max_size=12)))
    if indices and draw(st.booleans()):
        indices = list(range(indices[0], min(length, indices[0] + draw(st.integers(1, 8)))))
    return from_bits(indices, [draw(st.integers(0, 2**32 - 1)) for _ in indices], length)


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
    reserved: int = 0,
) -> torch.Tensor:
    """A buffer made by hand from the module's description, with a checksum that is right."""
    head = magic + bytes([version, index, value, reserved])
    head += length.to_bytes(8, "little", signed=True) + count.to_bytes(8, "little", signed=True)
    whole_words = (head + bytes(8) + payload)[: (len(head) + 8 + len(payload)) // 4 * 4]
    words = [int(word) for word in np.frombuffer(whole_words, dtype="<i4")]
    total = sum(word * ((position * -7046029254386353131) | 1) for position, word in enumerate(words))
    checksum = (total + 2**63) % 2**64 - 2**63
    return to_buffer(head + checksum.to_bytes(8, "little", signed=True) + payload)


def pack(indices: list[int], values: list[float], index_type: str) -> bytes:
    return np.array(indices, dtype=index_type).tobytes() + np.array(values, dtype="<f4").tobytes()


# --- round trips


@LAW
@given(sparse_vectors())
def test_any_vector_comes_back_bit_for_bit(v: SparseVector) -> None:
    buffer = encode(v)
    assert (buffer.dtype, buffer.dim()) == (torch.uint8, 1)
    assert_same(decode(buffer, v.length), v)


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
        (torch.arange(20)[::2], torch.arange(20.0)[::2], 20),
        (torch.arange(20)[::2], torch.arange(10.0), 2**31 + 5),
        (torch.arange(10).repeat_interleave(2)[::2], torch.arange(10.0), 20),
        (torch.arange(2)[::2], torch.arange(1.0), 20),
        (torch.arange(1), torch.arange(2.0)[::2], 20),
        (torch.arange(0), torch.arange(0.0)[::2], 20),
    ],
    ids=["int32", "int64", "range", "one index", "one value", "no value"],
)
def test_strided_indices_and_values_are_packed_like_their_copies(
    indices: torch.Tensor, values: torch.Tensor, length: int
) -> None:
    copied = vector(indices.tolist(), values.tolist(), length)
    assert to_bytes(encode(SparseVector(indices, values, length))) == to_bytes(encode(copied))


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


@pytest.mark.parametrize("indices", [[0, 2, 5], [4, 5, 6, 7]])
def test_a_decoded_vector_owns_its_memory(indices: list[int]) -> None:
    v = vector(indices, [1.0] * len(indices), 9)
    buffer = encode(v)
    decoded = decode(buffer, 9)
    buffer.fill_(0)
    assert_same(decoded, v)


@pytest.mark.parametrize("length", [9, 2**31 + 5])
def test_a_buffer_that_lies_askew_in_memory_decodes(length: int) -> None:
    v = vector([0, 2, 5], [1.0, 2.0, 3.0], length)
    buffer = encode(v)
    shifted = torch.cat([torch.zeros(3, dtype=torch.uint8), buffer])[3:]
    spread = torch.zeros(2 * buffer.numel(), dtype=torch.uint8)
    spread[::2] = buffer
    assert_same(decode(shifted, length), v)
    assert_same(decode(spread[::2], length), v)


# --- sizes and layout


@LAW
@given(sparse_vectors())
def test_the_number_of_bytes_is_what_the_format_says(v: SparseVector) -> None:
    count, indices = len(v), v.indices.tolist()
    if count > 2 and all(after == before + 1 for before, after in pairwise(indices)):
        index_bytes = 8
    else:
        index_bytes = count * (4 if v.length <= 2**31 else 8)
    assert encode(v).numel() == HEADER_BYTES + index_bytes + 4 * count


@pytest.mark.parametrize(("length", "narrow_bytes"), [(2**31, 4), (2**31 + 5, 8)])
def test_a_run_without_gaps_sends_one_index(length: int, narrow_bytes: int) -> None:
    run = vector(list(range(length - 100, length)), [0.5] * 100, length)
    gap = vector([0, *range(length - 99, length)], [0.5] * 100, length)
    assert encode(run).numel() == 32 + 8 + 400
    assert encode(gap).numel() == 32 + 100 * narrow_bytes + 400
    assert_same(decode(encode(run), length), run)


def test_a_full_vector_is_a_run() -> None:
    full = vector([0, 1, 2, 3], [1.0, 2.0, 3.0, 4.0], 4)
    assert encode(full).numel() == 32 + 8 + 16
    assert_same(decode(encode(full), 4), full)


@pytest.mark.parametrize(
    ("v", "by_hand"),
    [
        (
            vector([1, 5, 7], [2.0, -0.5, 1e-45], 9),
            sealed(pack([1, 5, 7], [2.0, -0.5, 1e-45], "<i4"), length=9, count=3, index=INT32),
        ),
        (
            vector([1, 2**31 + 4], [2.0, -0.5], 2**31 + 5),
            sealed(pack([1, 2**31 + 4], [2.0, -0.5], "<i8"), length=2**31 + 5, count=2, index=INT64),
        ),
        (
            vector([6, 7, 8], [2.0, -0.5, 1.0], 9),
            sealed(pack([6], [2.0, -0.5, 1.0], "<i8"), length=9, count=3, index=RANGE),
        ),
        (SparseVector.empty(9, torch.device("cpu")), sealed(b"", length=9, count=0, index=INT32)),
    ],
    ids=["int32", "int64", "range", "empty"],
)
def test_the_bytes_are_those_of_the_description(v: SparseVector, by_hand: torch.Tensor) -> None:
    assert to_bytes(encode(v)) == to_bytes(by_hand)


# --- damage: WireError and nothing else


SMALL = {
    "int32": vector([0, 2, 5], [1.0, -2.0, 3.0], 9),
    "int32 pair": vector([2, 3], [1.0, -2.0], 9),
    "int64": vector([0, 2**31 + 4], [1.0, -2.0], 2**31 + 5),
    "range": vector([3, 4, 5], [1.0, -2.0, 3.0], 9),
    "empty": SparseVector.empty(9, torch.device("cpu")),
}
each_small = pytest.mark.parametrize("v", SMALL.values(), ids=SMALL)


@each_small
def test_every_truncation_is_refused(v: SparseVector) -> None:
    buffer = encode(v)
    for size in range(buffer.numel()):
        refused(buffer[:size], v.length)


@each_small
def test_every_single_flipped_bit_is_refused(v: SparseVector) -> None:
    buffer = encode(v)
    for position in range(buffer.numel()):
        for bit in range(8):
            damaged = buffer.clone()
            damaged[position] ^= 1 << bit
            refused(damaged, v.length)


@each_small
@pytest.mark.parametrize("extra", [1, 2, 3, 4, 7, 8, 12, 32])
def test_an_extended_buffer_is_refused(v: SparseVector, extra: int) -> None:
    for filler in (0, 255):
        longer = torch.cat([encode(v), torch.full((extra,), filler, dtype=torch.uint8)])
        refused(longer, v.length)


@each_small
def test_another_length_is_refused(v: SparseVector) -> None:
    for length in (0, 1, v.length - 1, v.length + 1, 2**31, 2**40, -1):
        assert str(length) in refused(encode(v), length)


@LAW
@given(st.binary(max_size=120), st.integers(0, 50))
def test_random_bytes_are_refused(raw: bytes, length: int) -> None:
    refused(to_buffer(raw), length)


@LAW
@given(st.binary(max_size=80), st.integers(0, 50))
def test_random_bytes_behind_a_right_start_are_refused(raw: bytes, length: int) -> None:
    start = MAGIC + bytes([VERSION, 0, 0, 0]) + length.to_bytes(8, "little")
    refused(to_buffer(start + raw), length)


EXTREME = st.one_of(
    st.integers(-3, 12), st.sampled_from([2**31 - 1, 2**31, 2**32, 2**62, 2**63 - 1, -(2**31), -(2**63)])
)


def test_values_that_changed_places_are_noticed() -> None:
    buffer = encode(SparseVector(torch.tensor([1, 5, 9]), torch.tensor([1.0, 2.0, 3.0]), 10))
    words = buffer.view(torch.int32)
    words[[11, 12]] = words[[12, 11]]
    with pytest.raises(WireError, match="checksum"):
        decode(buffer, 10)


@LAW
@given(st.data())
def test_whatever_a_right_checksum_covers_is_refused_or_a_proper_vector(data: st.DataObject) -> None:
    """Random sizes, encodings and payloads that pass the checksum: nothing malformed may get through."""
    length, count = data.draw(EXTREME), data.draw(EXTREME)
    index = data.draw(st.integers(0, 3))
    indices = data.draw(st.lists(EXTREME, max_size=6))
    fits = indices if index != INT32 else [max(-(2**31), min(2**31 - 1, i)) for i in indices]
    num_values = data.draw(st.sampled_from([len(fits), max(0, min(count, 12))]))
    payload = pack(fits, [1.0] * num_values, "<i4" if index == INT32 else "<i8")
    try:
        decoded = decode(sealed(payload, length=length, count=count, index=index), length)
    except WireError:
        return
    found = decoded.indices.tolist()
    assert len(found) == decoded.values.numel() == count
    assert found == sorted(set(found))
    assert all(0 <= i < length for i in found)


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
@pytest.mark.parametrize("index", [INT32, INT64, RANGE])
def test_an_impossible_count_is_refused(count: int, index: int) -> None:
    message = refused(sealed(pack([1], [1.0], "<i8"), length=9, count=count, index=index), 9)
    assert str(count) in message


@pytest.mark.parametrize("count", [0, 2, 4])
def test_a_count_that_does_not_match_the_payload_is_refused(count: int) -> None:
    message = refused(sealed(pack([0, 2, 5], [1.0, 2.0, 3.0], "<i4"), length=9, count=count, index=INT32), 9)
    assert "announces" in message


@pytest.mark.parametrize("version", [0, 2, 127, 255])
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
        {"index": 3},
        {"index": 255},
        {"index": INT32, "value": 1},
        {"index": INT32, "value": 255},
        {"index": INT32, "reserved": 1},
        {"index": INT32, "reserved": 255},
    ],
    ids=str,
)
def test_an_unknown_encoding_is_refused(codes: dict[str, int]) -> None:
    payload = pack([0, 2, 5], [1.0, 2.0, 3.0], "<i4")
    assert "unknown encoding" in refused(sealed(payload, length=9, count=3, **codes), 9)


def test_a_negative_length_is_refused_even_where_it_is_expected() -> None:
    refused(sealed(b"", length=-1, count=0, index=INT32), -1)


@pytest.mark.parametrize("dtype", [torch.int8, torch.bool, torch.int32, torch.int64, torch.float32, torch.float64])
def test_a_buffer_of_another_dtype_is_refused(dtype: torch.dtype) -> None:
    buffer = encode(SMALL["int32"])
    assert "uint8" in refused(buffer.to(dtype), 9)
    assert "uint8" in refused(torch.zeros(0, dtype=dtype), 9)


def test_a_buffer_that_is_not_flat_is_refused() -> None:
    buffer = encode(SMALL["int32"])
    for shaped in (buffer.unsqueeze(0), buffer.unsqueeze(1), buffer.view(2, -1), buffer[0], buffer.view(2, 2, -1)):
        assert "flat" in refused(shaped, 9)


# --- halves


@LAW
@given(sparse_vectors())
def test_the_two_halves_are_views_that_join_to_the_buffer(v: SparseVector) -> None:
    buffer = encode(v)
    index_half, value_half = split_index_and_value(buffer)
    assert value_half.numel() == 4 * len(v)
    assert to_bytes(value_half) == v.values.numpy().tobytes()
    assert index_half.data_ptr() == buffer.data_ptr()
    assert index_half.untyped_storage().data_ptr() == value_half.untyped_storage().data_ptr()
    assert_same(decode(torch.cat([index_half, value_half]), v.length), v)
