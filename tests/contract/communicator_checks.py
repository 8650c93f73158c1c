"""The contract of a communicator, as functions that every rank of any implementation runs."""

from __future__ import annotations

import traceback
from collections.abc import Callable

import pytest
import torch

from oktopk.comm import CountingCommunicator
from oktopk.comm.base import Communicator, all_gather_int
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


def check_all_gather_v_of_uneven_lengths(comm: Communicator) -> None:
    gathered = comm.all_gather_v(message(comm.rank, 0, comm.size))
    assert len(gathered) == comm.size
    for rank, buffer in enumerate(gathered):
        assert torch.equal(buffer, message(rank, 0, comm.size))


def check_all_gather_v_of_nothing(comm: Communicator) -> None:
    gathered = comm.all_gather_v(torch.empty(0, dtype=torch.uint8))
    assert [buffer.numel() for buffer in gathered] == [0] * comm.size


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


def check_operations_in_a_row_do_not_mix(comm: Communicator) -> None:
    for round_ in range(5):
        check_all_to_all_v_of_uneven_lengths(comm)
        total = torch.tensor([round_])
        comm.all_reduce(total)
        assert total.item() == round_ * comm.size
        check_all_gather_v_of_uneven_lengths(comm)


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
