"""Communicators: one contract over torch.distributed, MPI and simulated ranks."""

from oktopk.comm.base import CommunicationError, Communicator
from oktopk.comm.counting import CommRecord, CountingCommunicator, Traffic
from oktopk.comm.simulator import InjectedFault, SimulatedCommunicator, World, simulate

__all__ = [
    "CommRecord",
    "CommunicationError",
    "Communicator",
    "CountingCommunicator",
    "InjectedFault",
    "SimulatedCommunicator",
    "Traffic",
    "World",
    "simulate",
]
