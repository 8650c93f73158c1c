"""The contract of a communicator, as functions that every rank of any implementation runs."""

from __future__ import annotations

import traceback
from collections.abc import Callable

import pytest
import torch

from oktopk.comm import CommRecord, CountingCommunicator
from oktopk.comm.base import Communicator, all_gather_int, all_gather_ints
from oktopk.registry import make_communicator


def here() -> torch.device:
    return torch.get_default_device()


def message(sender: int, receiver: int, size: int) -> torch.Tensor:
    """What `sender` has for `receiver`: lengths differ, some are empty."""
    length = (7 * sender + 3 * receiver) % 5 * 11
    generator = _seeded(sender * size + receiver)
    return torch.randint(0, 256, (length,), dtype=torch.uint8, generator=generator, device="cpu").to(here())


def _seeded(seed: int) -> torch.Generator:
    return torch.Generator(device="cpu").manual_seed(seed)


def _noise(n: int, dtype: torch.dtype, rank: int) -> torch.Tensor:
    return (torch.randn(n, dtype=dtype, generator=_seeded(rank), device="cpu") * 10.0 ** (rank % 7)).to(here())


def check_rank_and_size(comm: Communicator) -> None:
    assert 0 <= comm.rank < comm.size


def check_all_reduce_sums_integers_exactly_past_32_bits(comm: Communicator) -> None:
    tensor = torch.tensor([2**40 + comm.rank, -comm.rank])
    comm.all_reduce(tensor)
    ranks = sum(range(comm.size))
    assert tensor.tolist() == [comm.size * 2**40 + ranks, -ranks]


def check_all_reduce_gives_the_same_bits_everywhere(comm: Communicator) -> None:
    for dtype in (torch.float32, torch.float64):
        for n in (1, 3, 1000):
            everyone = [_noise(n, dtype, r) for r in range(comm.size)]
            mine = everyone[comm.rank].clone()
            comm.all_reduce(mine)
            torch.testing.assert_close(mine, sum(everyone))
            for other in comm.all_gather_v(mine.view(torch.uint8)):
                assert torch.equal(other.view(dtype), mine)


def check_all_reduce_touches_nothing_beside_its_tensor(comm: Communicator) -> None:
    whole = torch.full((7,), 5)
    comm.all_reduce(whole[2:4])
    assert whole.tolist() == [5, 5, 5 * comm.size, 5 * comm.size, 5, 5, 5]


def check_all_gather_v_of_uneven_lengths(comm: Communicator) -> None:
    gathered = comm.all_gather_v(message(comm.rank, 0, comm.size))
    assert len(gathered) == comm.size
    for rank, buffer in enumerate(gathered):
        assert torch.equal(buffer, message(rank, 0, comm.size))


def check_all_gather_v_of_nothing(comm: Communicator) -> None:
    gathered = comm.all_gather_v(torch.empty(0, dtype=torch.uint8))
    assert [buffer.numel() for buffer in gathered] == [0] * comm.size


def check_all_gather_v_of_sizes_that_all_know(comm: Communicator) -> None:
    for shift in range(2):
        sizes = [message(rank, shift, comm.size).numel() for rank in range(comm.size)]
        gathered = comm.all_gather_v(message(comm.rank, shift, comm.size), sizes)
        assert len(gathered) == comm.size
        for rank, buffer in enumerate(gathered):
            assert torch.equal(buffer, message(rank, shift, comm.size))
            assert buffer.device.type == here().type
    assert [b.numel() for b in comm.all_gather_v(torch.empty(0, dtype=torch.uint8), [0] * comm.size)] == [0] * comm.size


def check_known_sizes_are_not_sent(comm: Communicator) -> None:
    """One message of the buffer alone to each peer, instead of a length and it."""
    counting = CountingCommunicator(comm)
    mine = torch.full((10 * comm.rank,), comm.rank, dtype=torch.uint8)
    counting.all_gather_v(mine)
    counting.all_gather_v(mine, [10 * rank for rank in range(comm.size)])
    told, known = counting.take()
    peers, others = comm.size - 1, [rank for rank in range(comm.size) if rank != comm.rank]
    assert told.operation == known.operation == "all_gather_v"
    assert (known.bytes_sent, known.messages_sent) == (10 * comm.rank * peers, peers if comm.rank else 0)
    assert (known.bytes_received, known.messages_received) == (10 * sum(others), sum(1 for rank in others if rank))
    assert (told.bytes_sent, told.bytes_received) == (known.bytes_sent + 8 * peers, known.bytes_received + 8 * peers)
    assert told.messages_sent == known.messages_sent + peers


def check_all_to_all_v_of_uneven_lengths(comm: Communicator) -> None:
    received = comm.all_to_all_v([message(comm.rank, peer, comm.size) for peer in range(comm.size)])
    for rank, buffer in enumerate(received):
        assert torch.equal(buffer, message(rank, comm.rank, comm.size))


def check_all_to_all_v_of_large_buffers(comm: Communicator) -> None:
    base = 2_000_000 // comm.size**2
    sent = [torch.full((base + peer,), comm.rank, dtype=torch.uint8) for peer in range(comm.size)]
    for rank, buffer in enumerate(comm.all_to_all_v(sent)):
        assert buffer.numel() == base + comm.rank
        assert bool((buffer == rank).all())


def check_all_to_all_v_refuses_the_wrong_number_of_buffers(comm: Communicator) -> None:
    with pytest.raises(ValueError, match=f"each of {comm.size} ranks"):
        comm.all_to_all_v([torch.empty(0, dtype=torch.uint8)] * (comm.size + 1))
    comm.barrier()


def check_all_to_all_each_of_uneven_lengths(comm: Communicator) -> None:
    """By rank, as all_to_all_v gives them all at once; some are empty, one's own is among them."""
    outgoing = [message(comm.rank, peer, comm.size) for peer in range(comm.size)]
    for rank, (one, other) in enumerate(
        zip(list(comm.all_to_all_each(outgoing)), comm.all_to_all_v(outgoing), strict=True)
    ):
        assert torch.equal(one, other)
        assert torch.equal(one, message(rank, comm.rank, comm.size))
        assert one.device.type == here().type


def check_all_to_all_each_of_nothing(comm: Communicator) -> None:
    nothing = torch.empty(0, dtype=torch.uint8)
    assert [b.numel() for b in comm.all_to_all_each([nothing] * comm.size)] == [0] * comm.size
    to_the_last = [nothing] * (comm.size - 1) + [torch.full((5,), comm.rank, dtype=torch.uint8)]
    received = [b.tolist() for b in comm.all_to_all_each(to_the_last)]
    assert received == [[rank] * 5 if comm.rank == comm.size - 1 else [] for rank in range(comm.size)]


def check_all_to_all_each_of_large_buffers(comm: Communicator) -> None:
    base = 2_000_000 // comm.size**2
    sent = [torch.full((base + peer,), comm.rank, dtype=torch.uint8) for peer in range(comm.size)]
    for rank, buffer in enumerate(comm.all_to_all_each(sent)):
        assert buffer.numel() == base + comm.rank
        assert bool((buffer == rank).all())


def check_all_to_all_each_refuses_the_wrong_number_of_buffers(comm: Communicator) -> None:
    for count in (comm.size - 1, comm.size + 1):
        with pytest.raises(ValueError, match=f"each of {comm.size} ranks"):
            list(comm.all_to_all_each([torch.empty(0, dtype=torch.uint8)] * count))
    comm.barrier()


def check_all_to_all_each_gives_buffers_that_belong_to_the_receiver(comm: Communicator) -> None:
    outgoing = [torch.full((4,), comm.rank, dtype=torch.uint8) for _ in range(comm.size)]
    received = []
    for buffer in comm.all_to_all_each(outgoing):
        received.append(buffer.tolist())
        buffer.fill_(77)
    assert received == [[rank] * 4 for rank in range(comm.size)]
    assert all(buffer.tolist() == [comm.rank] * 4 for buffer in outgoing)
    comm.barrier()


def check_all_to_all_is_counted_the_same_one_by_one(comm: Communicator) -> None:
    counting = CountingCommunicator(comm)
    outgoing = [message(comm.rank, peer, comm.size) for peer in range(comm.size)]
    counting.all_to_all_v(outgoing)
    for _ in counting.all_to_all_each(outgoing):
        pass
    at_once, one_by_one = counting.take()
    for record in (at_once, one_by_one):
        assert (record.operation, record.peer) == ("all_to_all_v", None)
        assert record.seconds >= 0.0
    assert _volume_of(at_once) == _volume_of(one_by_one)
    sizes = [buffer.numel() for peer, buffer in enumerate(outgoing) if peer != comm.rank]
    assert one_by_one.bytes_sent == sum(sizes) + 8 * len(sizes)
    assert one_by_one.messages_sent == len(sizes) + sum(1 for size in sizes if size)


def _volume_of(record: CommRecord) -> tuple[int, ...]:
    return record.bytes_sent, record.bytes_received, record.messages_sent, record.messages_received


def check_home_is_the_device_or_the_host(comm: Communicator) -> None:
    assert comm.home(torch.device("cpu")) == torch.device("cpu")
    home = comm.home(here())
    assert home.type in ("cpu", here().type)
    with torch.device(home):  # buffers kept there can be sent
        check_all_to_all_v_of_uneven_lengths(comm)


def check_results_belong_to_the_receiver(comm: Communicator) -> None:
    mine = torch.full((4,), comm.rank, dtype=torch.uint8)
    gathered = comm.all_gather_v(mine)
    mine.fill_(99)
    gathered[0].fill_(77)
    comm.barrier()
    assert [int(buffer[0]) for buffer in gathered[1:]] == list(range(1, comm.size))


def check_messages_between_two_ranks_stay_in_order(comm: Communicator) -> None:
    sizes = [5, 0, 1000, 1]
    after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    if comm.size == 1:
        return
    for index, size in enumerate(sizes):
        outgoing = torch.full((size,), index, dtype=torch.uint8)
        if comm.rank % 2 == 0:
            comm.send(outgoing, after)
        if comm.rank % 2 == 1 or (comm.rank == 0 and comm.size % 2 == 1):
            arrived = comm.recv(before, here())
            assert arrived.tolist() == [index] * size
    comm.barrier()


def check_broadcast_from_every_root(comm: Communicator) -> None:
    for root in range(comm.size):
        for tensor in (torch.full((3, 2), float(comm.rank)), torch.tensor(comm.rank)):
            comm.broadcast(tensor, root)
            assert bool((tensor == root).all())


def check_all_gather_int(comm: Communicator) -> None:
    assert all_gather_int(comm, comm.rank * 2**33 - 5, here()) == [rank * 2**33 - 5 for rank in range(comm.size)]


def check_all_gather_ints(comm: Communicator) -> None:
    ranks = range(comm.size)
    found = all_gather_ints(comm, [comm.rank * 2**33 - 5, 7, -comm.rank], here())
    assert found == [[rank * 2**33 - 5 for rank in ranks], [7] * comm.size, [-rank for rank in ranks]]


def check_operations_in_a_row_do_not_mix(comm: Communicator) -> None:
    for round_ in range(5):
        check_all_to_all_v_of_uneven_lengths(comm)
        total = torch.tensor([round_])
        comm.all_reduce(total)
        assert total.item() == round_ * comm.size
        check_all_gather_v_of_uneven_lengths(comm)


def check_all_reduce_in_any_shape_and_layout(comm: Communicator) -> None:
    """Scalars, nothing, matrices, what is not contiguous; small and large."""
    for n in (1, 200):
        grid = torch.arange(2 * n, dtype=torch.float64).reshape(2, n)
        expected = grid * sum(range(1, comm.size + 1))
        for view in (
            lambda t: t,
            lambda t: t.t(),
            lambda t: t[:, ::2],
            lambda t: t[1],
            lambda t: t[:, 0],
            lambda t: t[:0],
        ):
            whole = grid * (comm.rank + 1)
            comm.all_reduce(view(whole))
            assert torch.equal(view(whole), view(expected))
    scalar = torch.tensor(comm.rank)
    comm.all_reduce(scalar)
    assert scalar.tolist() == sum(range(comm.size))
    rows = torch.arange(8192).reshape(2, -1).t() + comm.rank  # too large to go straight to every peer
    comm.all_reduce(rows)
    assert torch.equal(rows, torch.arange(8192).reshape(2, -1).t() * comm.size + sum(range(comm.size)))


CHECKS: dict[str, Callable[[Communicator], None]] = {
    name.removeprefix("check_"): fn for name, fn in list(globals().items()) if name.startswith("check_")
}


def run_all(comm: Communicator) -> dict[str, str | None]:
    """Every check, plain and through the counting wrapper: name -> None, or what went wrong."""
    verdicts: dict[str, str | None] = {}
    for name, check in CHECKS.items():
        try:
            check(comm)
            check(CountingCommunicator(comm))
            verdicts[name] = None
        except BaseException:
            verdicts[name] = traceback.format_exc()
            break  # the ranks may be out of step now
    return verdicts


def run_all_over(transport: str, device: str = "cpu") -> dict[str, str | None]:
    """For the processes of a real world."""
    comm = make_communicator(transport, timeout_s=20.0)
    try:
        with torch.device(device):
            return run_all(comm)
    finally:
        comm.close()
