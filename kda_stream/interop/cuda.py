"""`CudaHost`: registers arenas with CUDA, by way of torch, for copies to a GPU."""

from __future__ import annotations

import ctypes
from typing import Any, Final

from ..errors import ErrorCode, MemoryRefusedError

_PORTABLE: Final = 1  # cudaHostRegisterPortable: page-locked for every device of the process


class CudaHost:
    """A `HostRegistrar` for CUDA: `PinnedArena(nbytes, register=CudaHost())`.

    It calls cudaHostRegister and cudaHostUnregister of the runtime that torch uses, which is
    imported and made ready here. `device` is the GPU whose context both calls are made in, by any
    thread; by default the one that is current here.

    Raises `MemoryRefusedError` when there is no torch, or none with CUDA and a GPU.

    Example: `stream_kda_layers(checkpoint, slots=3, register=CudaHost())`.
    """

    def __init__(self, device: int | None = None) -> None:
        try:
            import torch

            self._cuda: Any = torch.cuda
            self._cuda.cudart()
            self.device: int = self._cuda.current_device() if device is None else device
        except (ImportError, AssertionError, RuntimeError) as error:
            raise MemoryRefusedError(
                ErrorCode.REGISTER_REFUSED,
                "there is no CUDA to register memory with",
                expected="torch built with CUDA, and a GPU",
                got=str(error),
                hint="install such a torch, see that nvidia-smi lists a GPU; or leave register out",
            ) from None

    def register(self, address: int, nbytes: int) -> int:
        """Register and page-lock [address, address + nbytes); 0, or the number of cudaError_t."""
        return self._call("cudaHostRegister", address, nbytes, _PORTABLE)

    def unregister(self, address: int) -> int:
        """Take that back for what was registered at `address`; 0, or the number of cudaError_t."""
        return self._call("cudaHostUnregister", address)

    def _call(self, name: str, *arguments: int) -> int:
        with self._cuda.device(self.device):
            runtime = self._cuda.cudart()
            answer = int(getattr(runtime, name)(*arguments))
            if answer != 0:
                _clear_last_error(runtime)
        return answer


def _clear_last_error(runtime: Any) -> None:
    """Take back what the runtime keeps of a refusal: the thread's next launch would be told of it.

    Torch does not bind the function, but loads the runtime for the whole process to see.
    """
    for place in (runtime, ctypes.CDLL(None)):
        clear = getattr(place, "cudaGetLastError", None)
        if clear is not None:
            clear()
            return
