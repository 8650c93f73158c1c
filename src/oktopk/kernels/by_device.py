"""The kernels for each device, by the name of the setting `kernels`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

import torch

from oktopk.kernels.base import Kernels
from oktopk.kernels.torch_ops import TorchKernels

logger = logging.getLogger("oktopk")


class DeviceKernels:
    """The kernels for each kind of device, made when first asked for; plain torch where none were given."""

    def __init__(self, makers: Mapping[str, Callable[[], Kernels]]) -> None:
        self._makers = makers
        self._made: dict[str, Kernels] = {}

    def on(self, device: torch.device) -> Kernels:
        if device.type not in self._made:
            self._made[device.type] = self._makers.get(device.type, TorchKernels)()
        return self._made[device.type]


def _numba() -> Kernels:
    """ImportError where there is no numba."""
    from oktopk.kernels.numba_ops import NumbaKernels

    return NumbaKernels()


def _triton() -> Kernels:
    """ImportError where there is no triton."""
    from oktopk.kernels.triton_ops import TritonKernels

    return TritonKernels()


def _or_plain(make: Callable[[], Kernels]) -> Callable[[], Kernels]:
    def made() -> Kernels:
        try:
            return make()
        except ImportError as error:
            logger.warning("fast kernels are not installed (%s): plain torch does their work, more slowly", error)
            return TorchKernels()

    return made


KERNELS: Mapping[str, Mapping[str, Callable[[], Kernels]]] = {
    "auto": {"cpu": _or_plain(_numba), "cuda": _or_plain(_triton)},
    "torch": {},
    "numba": {"cpu": _numba},
    "triton": {"cuda": _triton},
}
"""For each name, who does the work on which kind of device; plain torch does it on all others."""
