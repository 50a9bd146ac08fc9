"""GPUs partitioned by MIG: handles of instances, and the functions that instances support.

This module restricts the functions of other subjects to the ones that NVML supports under MIG.
"""

import ctypes
from collections.abc import Callable
from struct import Struct
from typing import Any, Final

import pynvml

from gpuledger.mig_profiles import MigGpu, MigSlices
from gpuledger_simulator.gpu_models import Cut, SimulatedInstance
from gpuledger_simulator.nvml.readings import Readings, Utilization
from gpuledger_simulator.nvml.session import Handle, Identity, MigHandle, Session, Subject

# ruff: noqa: N802, N803  # NVML's own names


_MIB: Final = 1 << 20
_MULTIPROCESSORS_PER_SLICE: Final = 16
# Slices by NVML's number of the GPU instance profile; other profiles are not simulated.
_PROFILES: Final = {
    pynvml.NVML_GPU_INSTANCE_PROFILE_1_SLICE: MigSlices(1, 1),
    pynvml.NVML_GPU_INSTANCE_PROFILE_1_SLICE_REV2: MigSlices(1, 2),
    pynvml.NVML_GPU_INSTANCE_PROFILE_2_SLICE: MigSlices(2, 2),
    pynvml.NVML_GPU_INSTANCE_PROFILE_3_SLICE: MigSlices(3, 4),
    pynvml.NVML_GPU_INSTANCE_PROFILE_4_SLICE: MigSlices(4, 4),
    pynvml.NVML_GPU_INSTANCE_PROFILE_7_SLICE: MigSlices(7, 8),
}


class Mig(Subject):
    """The functions of MIG, and the functions that work differently or not at all on instances."""

    def __init__(
        self,
        session: Session,
        *,
        identity: Identity,
        readings: Readings,
        utilization: Utilization,
    ) -> None:
        super().__init__(session)
        self._identity, self._readings, self._utilization = identity, readings, utilization

    def nvmlDeviceGetMigMode(self, device: Handle) -> list[int]:
        """Return the current MIG mode and the mode after the next reset."""
        self._mig_gpu(device)
        mode = int(self._cut(device) is not None)
        return [mode, mode]

    def nvmlDeviceGetMaxMigDeviceCount(self, device: Handle) -> int:
        """Return the maximum number of instances on the GPU; 0 if it is not partitioned."""
        return self._mig_gpu(device).whole.compute if any(self.nvmlDeviceGetMigMode(device)) else 0

    def nvmlDeviceGetMigDeviceHandleByIndex(self, device: Handle, index: int) -> Handle:
        """Return the handle of an instance; raise NotFound if there is no instance at the index."""
        self.check_permission(device)
        return self._handle(device, lambda one: one.device_index == index)

    def nvmlDeviceGetDeviceHandleFromMigDeviceHandle(self, migDevice: Handle) -> Handle:
        """Return the handle of the GPU that contains an instance."""
        self.instance_of(migDevice)
        return Handle(migDevice.index, migDevice.session)

    def nvmlDeviceGetGpuInstanceId(self, device: Handle) -> int:
        """Return the id of the GPU instance that contains an instance."""
        return self.instance_of(device).gpu_instance

    def nvmlDeviceGetGpuInstanceById(self, device: Handle, gpuInstanceId: int) -> Handle:
        """Return the handle of a GPU instance; raise NotFound if the id is unknown."""
        self.check_permission(device)
        return self._handle(device, lambda one: one.gpu_instance == gpuInstanceId)

    def nvmlGpuInstanceGetInfo(self, gpuInstance: Handle) -> Any:  # noqa: ANN401  # a ctypes struct
        """Return the id and placement of a GPU instance; the profile's number is not simulated."""
        instance = self.instance_of(gpuInstance)
        info = pynvml.c_nvmlGpuInstanceInfo_t()
        info.id = instance.gpu_instance
        info.placement.start, info.placement.size = instance.start, instance.slices
        return info

    def nvmlDeviceGetGpuInstanceProfileInfo(
        self, device: Handle, profile: int, version: int = 2
    ) -> Any:  # noqa: ANN401  # a ctypes struct
        """Return a profile's slices and memory; raise NotSupported if the GPU lacks the profile."""
        mig_gpu, slices = self._mig_gpu(device), _PROFILES.get(profile)
        if slices is None or slices not in mig_gpu.profiles.values() or version != 1:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        facts = self._session.gpu(device).facts
        info = pynvml.c_nvmlGpuInstanceProfileInfo_t()
        info.id, info.sliceCount = profile, slices.compute
        info.memorySizeMB = facts.room_bytes * slices.memory // mig_gpu.whole.memory // _MIB
        return info

    def nvmlDeviceGetComputeInstanceId(self, device: Handle) -> int:
        """Return the id of an instance within its GPU instance."""
        return self.instance_of(device).compute_instance

    def nvmlDeviceGetAttributes_v2(self, device: Handle) -> Any:  # noqa: ANN401  # a ctypes struct
        """Return an instance's share of the GPU: multiprocessors, slices and memory."""
        instance = self.instance_of(device)
        attributes = pynvml.c_nvmlDeviceAttributes()
        attributes.multiprocessorCount = instance.compute_slices * _MULTIPROCESSORS_PER_SLICE
        attributes.gpuInstanceSliceCount = instance.gpu_slices
        attributes.computeInstanceSliceCount = instance.compute_slices
        attributes.memorySizeMB = instance.memory_bytes // _MIB
        return attributes

    def nvmlDeviceGetUUID(self, handle: Handle) -> str:
        """Return the UUID of a GPU or an instance."""
        if isinstance(handle, MigHandle):
            return self.instance_of(handle).uuid
        return self._identity.nvmlDeviceGetUUID(handle)

    def nvmlDeviceGetName(self, handle: Handle) -> str:
        """Return the product name; an instance's name ends with its profile."""
        if isinstance(handle, MigHandle):
            instance = self.instance_of(handle)
            return f"{self._session.whole_gpu(handle).facts.name} MIG {instance.profile}"
        return self._identity.nvmlDeviceGetName(handle)

    def nvmlDeviceGetMemoryInfo(self, handle: Handle, version: int | None = None) -> Any:  # noqa: ANN401  # a ctypes struct
        """Return the memory of a GPU, or of the GPU instance that contains an instance."""
        if not isinstance(handle, MigHandle):
            self.check_permission(handle)
            return self._readings.nvmlDeviceGetMemoryInfo(handle, version)
        instance, gpu = self.instance_of(handle), self._session.whole_gpu(handle)
        # Compute instances share the memory of their GPU instance, so the processes of all compute
        # instances count.
        used = sum(
            process.spec.memory_bytes
            for process in gpu.users(self._session.since_epoch_ns())
            if (own := gpu.instance_of(process)) and own.gpu_instance == instance.gpu_instance
        )
        memory = pynvml.c_nvmlMemory_v2_t() if version else pynvml.c_nvmlMemory_t()
        memory.total, memory.used = instance.memory_bytes, used
        memory.free = instance.memory_bytes - used
        if version:
            memory.version = version
        return memory

    def nvmlDeviceGetUtilizationRates(self, handle: Handle) -> Any:  # noqa: ANN401  # a ctypes struct
        """Return the newest window's utilization in percent; raise NotSupported under MIG."""
        self._check_whole(handle)
        return self._utilization.nvmlDeviceGetUtilizationRates(handle)

    def nvmlDeviceGetSamples(
        self, device: Handle, sampling_type: int, timeStamp: int
    ) -> tuple[int, list[Any]]:
        """Return the ring buffer's samples; raise NotSupported under MIG, except for power."""
        if sampling_type != pynvml.NVML_TOTAL_POWER_SAMPLES:
            self._check_whole(device)
        return self._utilization.nvmlDeviceGetSamples(device, sampling_type, timeStamp)

    def nvmlDeviceGetProcessUtilization(self, handle: Handle, timeStamp: int) -> list[Any]:
        """Return the buffered process samples; raise NotSupported under MIG."""
        self._check_whole(handle)
        return self._utilization.nvmlDeviceGetProcessUtilization(handle, timeStamp)

    def _handle(self, device: Handle, is_meant: Callable[[SimulatedInstance], bool]) -> MigHandle:
        for instance in filter(is_meant, self._instances(device)):
            return MigHandle(device.index, device.session, instance.uuid)
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)

    def instance_of(self, handle: Handle) -> SimulatedInstance:
        """Return a handle's instance; raise InvalidArgument for a GPU or a deleted instance."""
        if not isinstance(handle, MigHandle):
            raise pynvml.NVMLError(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        # Compared by UUID, because a new layout may have another instance at the same index.
        for instance in self._instances(handle):
            if instance.uuid == handle.uuid:
                return instance
        raise pynvml.NVMLError(pynvml.NVML_ERROR_INVALID_ARGUMENT)

    def check_permission(self, handle: Handle) -> None:
        """Raise NoPermission if the GPU is partitioned and its instances are hidden."""
        if self._cut(handle) and not self._session.driver.mig_monitor:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NO_PERMISSION)

    def _instances(self, handle: Handle) -> tuple[SimulatedInstance, ...]:
        cut = self._cut(handle)
        return cut.instances if cut else ()

    def _check_whole(self, handle: Handle) -> None:
        # The driver does not measure the utilization of MIG-partitioned GPUs and their instances.
        if self._cut(handle):
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)

    def _mig_gpu(self, device: Handle) -> MigGpu:
        mig_gpu = self._session.gpu(device).facts.mig_gpu
        if mig_gpu is None:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return mig_gpu

    def _cut(self, handle: Handle) -> Cut | None:
        return self._session.whole_gpu(handle).cut(self._session.since_epoch_ns())


_NO_INSTANCE: Final = 0xFFFFFFFF
_NO_BYTES: Final = (1 << 64) - 1
_ROW: Final = Struct("@IQII")
"""A row of a process list, with the pid, the memory in bytes, and the ids of the GPU instance and
the compute instance."""
_LISTS: Final = {
    "nvmlDeviceGetComputeRunningProcesses_v3": "compute",
    "nvmlDeviceGetGraphicsRunningProcesses_v3": "graphics",
    "nvmlDeviceGetMPSComputeRunningProcesses_v3": "mps",
}


class Processes(Subject):
    """The functions that list processes."""

    def __init__(self, session: Session, mig: Mig) -> None:
        super().__init__(session)
        self._mig = mig

    def nvmlDeviceGetComputeRunningProcesses_v3(self, handle: Handle) -> list[Any]:
        """Return the processes with a compute context."""
        return self._running(handle, "compute")

    def nvmlDeviceGetGraphicsRunningProcesses_v3(self, handle: Handle) -> list[Any]:
        """Return the processes with a graphics context."""
        return self._running(handle, "graphics")

    def nvmlDeviceGetMPSComputeRunningProcesses_v3(self, handle: Handle) -> list[Any]:
        """Return the clients of the multi-process service (MPS)."""
        return self._running(handle, "mps")

    def find_function(self, name: str) -> Callable[..., int]:
        """Return the driver's own function with this name, which nvidia-ml-py calls.

        The function fills in a process list and returns an NVML error code. Raise FunctionNotFound
        for an unknown name.
        """
        kind = _LISTS.get(name)
        if kind is None:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)

        def fill(handle: Handle, count: Any, rows: Any) -> int:  # noqa: ANN401  # a reference, and a buffer
            try:
                written = self._write(handle, kind)
            except pynvml.NVMLError as error:
                return int(error.value)
            size = count._obj  # noqa: SLF001  # what ctypes.byref refers to
            room, size.value = size.value, len(written)
            if rows is None and self._session.driver.process_size_answer == "success":
                size.value = 0
                return int(pynvml.NVML_SUCCESS)
            if written and (rows is None or room < len(written)):
                return int(pynvml.NVML_ERROR_INSUFFICIENT_SIZE)
            ctypes.memmove(rows, b"".join(written), sum(map(len, written)))
            return int(pynvml.NVML_SUCCESS)

        return fill

    def _running(self, handle: Handle, kind: str) -> list[Any]:
        """Return a process list as nvidia-ml-py reads it.

        nvidia-ml-py expects rows of 24 bytes, so it misreads longer rows.
        """
        written = self._write(handle, kind)
        if self._session.driver.process_size_answer == "success":
            return []
        read = b"".join(written)[: _ROW.size * len(written)]
        names = ("pid", "usedGpuMemory", "gpuInstanceId", "computeInstanceId")
        processes = [dict(zip(names, row, strict=True)) for row in _ROW.iter_unpack(read)]
        for process in processes:
            if process["usedGpuMemory"] == _NO_BYTES:
                process["usedGpuMemory"] = None
        return [pynvml.nvmlFriendlyObject(process) for process in processes]

    def _write(self, handle: Handle, kind: str) -> list[bytes]:
        """Return the rows of a process list in the driver's format."""
        self._mig.check_permission(handle)
        gpu = self._session.whole_gpu(handle)
        listed = [
            (process, gpu.instance_of(process))
            for process in gpu.users(self._session.since_epoch_ns())
            if kind in process.spec.kinds
        ]
        if isinstance(handle, MigHandle):
            own = self._mig.instance_of(handle)
            listed = [(process, instance) for process, instance in listed if instance == own]
        # Simulated memory is never protected.
        behind = bytes(self._session.driver.process_row_bytes - _ROW.size)
        return [
            _ROW.pack(
                process.pid,
                process.spec.memory_bytes if process.spec.memory_visible else _NO_BYTES,
                instance.gpu_instance if instance else _NO_INSTANCE,
                instance.compute_instance if instance else _NO_INSTANCE,
            )
            + behind
            for process, instance in listed
        ]
