"""Which processes are on a GPU, or in an instance of it."""
# ruff: noqa: N802  # NVML's own names

from typing import Any, Final

import pynvml

from simulator.mig import SimulatedInstance
from simulator.nvml.mig import Mig, MigHandle
from simulator.nvml.session import Handle
from simulator.plan import PlannedProcess

_NO_INSTANCE: Final = 0xFFFFFFFF


class Processes(Mig):
    """The functions that list processes."""

    def nvmlDeviceGetComputeRunningProcesses_v3(self, handle: Handle) -> list[Any]:
        """Return the processes with a compute context."""
        return self._running(handle, "compute")

    def nvmlDeviceGetGraphicsRunningProcesses_v3(self, handle: Handle) -> list[Any]:
        """Return the processes with a graphics context."""
        return self._running(handle, "graphics")

    def nvmlDeviceGetMPSComputeRunningProcesses_v3(self, handle: Handle) -> list[Any]:
        """Return the processes that compute through the multi-process service."""
        return self._running(handle, "mps")

    def _running(self, handle: Handle, kind: str) -> list[Any]:
        gpu = self._whole(handle)
        listed = [
            (process, gpu.instance_of(process))
            for process in gpu.alive(self._since_epoch_ns())
            if kind in process.spec.kinds
        ]
        if isinstance(handle, MigHandle):
            own = self._instance(handle)
            listed = [(process, instance) for process, instance in listed if instance == own]
        return [_process_info(process, instance) for process, instance in listed]


def _process_info(process: PlannedProcess, instance: SimulatedInstance | None) -> Any:  # noqa: ANN401  # nvidia-ml-py's friendly object
    return pynvml.nvmlFriendlyObject(
        {
            "pid": process.pid,
            "usedGpuMemory": process.spec.memory_bytes if process.spec.memory_visible else None,
            "gpuInstanceId": instance.gpu_instance if instance else _NO_INSTANCE,
            "computeInstanceId": instance.compute_instance if instance else _NO_INSTANCE,
        }
    )
