"""The library, from its start to its end: opens it and finds the GPUs.

It takes any object with the functions of `pynvml`, the real module or the simulator's.
"""

from typing import Any

from agent.nvml.calls import call_nvml
from agent.nvml.gpu import Gpu
from gpuledger.errors import UnavailableError


class Nvml:
    """The library, from its start to its end."""

    def __init__(self, library: Any) -> None:  # noqa: ANN401  # pynvml is an untyped module
        self._library = library
        self._is_open = False
        self.missing = 0
        """GPUs that the driver counts and that did not answer at the start."""

    def open(self) -> list[Gpu]:
        """Start the library and give the GPUs that answer; raises NvmlLostError."""
        call_nvml(self._library, "nvmlInit")
        self._is_open = True
        count = call_nvml(self._library, "nvmlDeviceGetCount")
        found = [self._find(index) for index in range(count)]
        gpus = [gpu for gpu in found if gpu]
        self.missing = count - len(gpus)
        return gpus

    def close(self) -> None:
        """Let go of the driver; a library that is lost has nothing to let go of."""
        if not self._is_open:
            return
        self._is_open = False
        try:
            call_nvml(self._library, "nvmlShutdown")
        except UnavailableError:
            return

    def _find(self, index: int) -> Gpu | None:
        """Give the GPU at an index; one that is lost must not cost the others."""
        try:
            handle = call_nvml(self._library, "nvmlDeviceGetHandleByIndex", index)
            uuid = call_nvml(self._library, "nvmlDeviceGetUUID", handle)
        except UnavailableError:
            return None
        return Gpu(library=self._library, handle=handle, uuid=uuid, index=index)
