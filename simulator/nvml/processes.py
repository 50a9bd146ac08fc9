"""Which processes are on a GPU."""
# ruff: noqa: N802  # NVML's own names

from typing import Any, Final

import pynvml

from simulator.nvml.session import Handle, Session
from simulator.plan import PlannedProcess

_NO_INSTANCE: Final = 0xFFFFFFFF


class Processes(Session):
    """The functions that list processes."""

    def nvmlDeviceGetComputeRunningProcesses_v3(self, handle: Handle) -> list[Any]:
        """Give the processes with a compute context."""
        return self._running(handle, "compute")

    def nvmlDeviceGetGraphicsRunningProcesses_v3(self, handle: Handle) -> list[Any]:
        """Give the processes with a graphics context."""
        return self._running(handle, "graphics")

    def nvmlDeviceGetMPSComputeRunningProcesses_v3(self, handle: Handle) -> list[Any]:
        """Give the processes that compute through the multi-process service."""
        return self._running(handle, "mps")

    def _running(self, handle: Handle, kind: str) -> list[Any]:
        alive = self._gpu(handle).alive(self._since_epoch_ns())
        return [_process_info(process) for process in alive if process.spec.kind == kind]


def _process_info(process: PlannedProcess) -> Any:  # noqa: ANN401  # nvidia-ml-py's friendly object
    return pynvml.nvmlFriendlyObject(
        {
            "pid": process.pid,
            "usedGpuMemory": process.spec.memory_bytes if process.spec.memory_visible else None,
            "gpuInstanceId": _NO_INSTANCE,
            "computeInstanceId": _NO_INSTANCE,
        }
    )
