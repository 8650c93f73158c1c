"""The loops over elements: one contract, written in plain torch, for a CPU in Numba and for a GPU in Triton."""

from oktopk.kernels.base import Kernels, Seen

__all__ = ["Kernels", "Seen"]
