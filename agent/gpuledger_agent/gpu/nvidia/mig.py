"""Finds the MIG instances of a GPU in each tick, and queries them by their own handles.

An instance's handle is valid until the GPU is repartitioned, so handles are not kept: each tick
queries every index, and facts about an instance are cached by its UUID. `MigLayout.version`
increases with each change of the layout, so that other code can detect that its data about
instances is outdated.

If the agent has the permission, the GPU's own process lists contain the instance of each process;
three calls then list the processes of all instances. The driver does not report whether the agent
has this permission, and an empty list does not show it either. The GPU's lists are therefore used
once they have contained an instance for every process; until then, each instance is queried
separately.

In a container without permission to monitor MIG, the driver refuses to list instances, and also
refuses values of the whole GPU that are sums over its instances. The tick then has only the GPU's
own sample, marked as `mig_hidden`.

An instance's share of the GPU is given in compute slices and memory slices. The driver reports the
number of the GPU's compute slices with the largest profile. The number of memory slices is the
memory of that profile divided by the memory of the one-slice profile, rounded down, because an
instance has slightly less memory than its slices suggest. A list of products is thus not needed. If
an instance's placement is unknown, the number of its memory slices is computed from its memory and
rounded to the nearest integer.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import pynvml
import structlog

from gpuledger.records import MigInstance
from gpuledger_agent.core.raw import InstanceIdentity, ListedProcess, RawGpuSample
from gpuledger_agent.gpu.nvidia.core import list_processes, query_memory
from gpuledger_agent.gpu.nvidia.device_client import NO_PERMISSION, DeviceClient, small_number
from gpuledger_agent.gpu.nvidia.library import DeviceAttributes, NvmlLibrary

_log = structlog.get_logger(__name__)
_HOLE: Final = object()
_BYTES_PER_MIB: Final = 1 << 20
_PROFILE: Final = re.compile(r" MIG (\S+)$")
_FULL_PROFILES: Final = (
    pynvml.NVML_GPU_INSTANCE_PROFILE_8_SLICE,
    pynvml.NVML_GPU_INSTANCE_PROFILE_7_SLICE,
    pynvml.NVML_GPU_INSTANCE_PROFILE_6_SLICE,
    pynvml.NVML_GPU_INSTANCE_PROFILE_4_SLICE,
    pynvml.NVML_GPU_INSTANCE_PROFILE_2_SLICE,
)
"""Profiles that can span a whole GPU, largest first. The first profile that a GPU supports spans
the whole GPU."""
# The struct's first version, which every driver with MIG supports.
_PROFILE_VERSION: Final = 1
# Values that NVML provides only without MIG. An answer under MIG would not belong to an instance.
_ABSENT: Final = {
    "samples": None,
    "memory_samples": None,
    "percent": None,
    "memory_percent": None,
    "process_samples": None,
}


@dataclass(frozen=True, kw_only=True)
class PhysicalGpuSlices:
    """The numbers of slices into which a GPU can be partitioned; an unknown value is `None`."""

    compute: int | None = None
    """Number of compute slices."""
    memory: int | None = None
    """Number of memory slices."""
    memory_mebibytes: int | None = None
    """Memory of an instance that has all memory slices, in MiB."""

    def memory_slices_of(self, mebibytes: int | None) -> int | None:
        """Return the number of memory slices of an instance with this memory in MiB.

        Return `None` if it is unknown.
        """
        if not (mebibytes and self.memory and self.memory_mebibytes):
            return None
        slices = round(self.memory * mebibytes / self.memory_mebibytes)
        return min(self.memory, max(1, slices))


_WHOLE: Final = PhysicalGpuSlices(compute=1, memory=1)
"""The slices of a GPU that cannot be partitioned."""


@dataclass(kw_only=True)
class InstanceClient:
    """One MIG instance with the client that queries it."""

    identity: InstanceIdentity
    """The instance's ids, profile and slices."""
    client: DeviceClient
    """The client for the instance."""


@dataclass(kw_only=True)
class MigLayout:
    """The MIG instances of one GPU, as found by the last query."""

    client: DeviceClient
    """The client for the GPU."""
    uuid: str
    """The GPU's UUID."""
    index: int
    """The GPU's index in the driver."""
    instances: Sequence[InstanceClient] = ()
    """The instances at the last query."""
    is_enabled: bool | None = None
    """Whether MIG is enabled; `None` if the GPU does not support MIG or has not been queried."""
    version: int = 0
    """Increases with each change of the layout."""
    _max_instances: int = 0
    _lists_all: bool = False
    _is_hidden: bool = False
    _slices: PhysicalGpuSlices | None = None
    _known: dict[str, InstanceClient] = field(default_factory=dict)

    def query(self, core: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields of `RawGpuSample` that depend on MIG; raises `SourceLostError`.

        `core` contains the GPU's other answers to call group USAGE.
        """
        before, self.is_enabled = self.is_enabled, self._query_mode()
        if before is not None and before != self.is_enabled:
            # The two modes support different functions.
            self.client.forget()
            self.version += 1
            self._slices = None
        slices = self._query_slices()
        board = {
            "mig_enabled": self.is_enabled,
            "compute_slices": slices.compute,
            "memory_slices": slices.memory,
        }
        if not self.is_enabled:
            self._record([])
            return board
        self._max_instances = (
            self.client.query(NvmlLibrary.nvmlDeviceGetMaxMigDeviceCount) or self._max_instances
        )
        self._is_hidden = False
        found = (self._find(index) for index in range(self._max_instances))
        self._record([instance for instance in found if instance])
        own, left = self._apportion(core["processes"])
        samples = []
        for instance in self.instances:
            memory = query_memory(instance.client)
            samples.append(
                RawGpuSample(
                    uuid=instance.identity.uuid,
                    index=self.index,
                    model=core["model"],
                    instance=instance.identity,
                    memory_total_bytes=memory.total,
                    memory_used_bytes=memory.used,
                    memory_reserved_bytes=memory.reserved,
                    processes=own[instance.identity.uuid],
                    compute_slices=instance.identity.compute_slices,
                    memory_slices=instance.identity.memory_slices,
                )
            )
        for instance in self.instances:
            self._is_hidden |= NO_PERMISSION in instance.client.outcomes.values()
        return {
            **_ABSENT,
            **board,
            "instances": tuple(samples),
            "processes": left,
            "mig_hidden": self._is_hidden,
        }

    def describe(self) -> list[MigInstance]:
        """Return the inventory records of the instances found by the last query."""
        return [
            MigInstance(
                uuid=identity.uuid,
                gpu_instance=identity.gpu_instance,
                compute_instance=identity.compute_instance,
                profile=identity.profile,
                gpu_slices=identity.gpu_slices,
                compute_slices=identity.compute_slices,
                placement_start=identity.placement_start,
                multiprocessors=identity.multiprocessors,
                memory_total_bytes=identity.memory_bytes,
            )
            for identity in (instance.identity for instance in self.instances)
            # The record requires both ids, and an instance without them cannot be referred to.
            if identity.gpu_instance is not None and identity.compute_instance is not None
        ]

    def _query_mode(self) -> bool | None:
        function = NvmlLibrary.nvmlDeviceGetMigMode
        mode = self.client.query(function)
        if mode is None:
            # After a mere failure, assume that the mode has not changed.
            return None if self.client.is_unsupported((function.__name__,)) else self.is_enabled
        current, _ = mode
        return bool(current)

    def _query_slices(self) -> PhysicalGpuSlices:
        """Return the GPU's slices; query them unless the driver has already answered or refused."""
        if self._slices is None:
            self._slices = self._find_slices()
        return self._slices or PhysicalGpuSlices()

    def _find_slices(self) -> PhysicalGpuSlices | None:
        """Return the GPU's slices; `None` if a call failed."""
        mode, query = NvmlLibrary.nvmlDeviceGetMigMode, self.client.query
        if self.is_enabled is None:
            return _WHOLE if self.client.is_unsupported((mode.__name__,)) else None
        info = NvmlLibrary.nvmlDeviceGetGpuInstanceProfileInfo
        for profile in _FULL_PROFILES:
            full = query(info, profile, _PROFILE_VERSION)
            if full is not None:
                break
            if not self.client.is_unsupported((info.__name__, profile, _PROFILE_VERSION)):
                return None
        else:
            # Some drivers report profiles only while MIG is on. Without MIG, the GPU is one slice.
            return PhysicalGpuSlices() if self.is_enabled else _WHOLE
        smallest = pynvml.NVML_GPU_INSTANCE_PROFILE_1_SLICE
        one_slice = query(info, smallest, _PROFILE_VERSION)
        if one_slice is None and not self.client.is_unsupported(
            (info.__name__, smallest, _PROFILE_VERSION)
        ):
            return None
        return PhysicalGpuSlices(
            compute=small_number(full.sliceCount),
            memory=small_number(full.memorySizeMB // one_slice.memorySizeMB)
            if one_slice and one_slice.memorySizeMB
            else None,
            memory_mebibytes=full.memorySizeMB,
        )

    def _record(self, found: list[InstanceClient]) -> None:
        known = {instance.identity.uuid: instance for instance in found}
        if known.keys() != self._known.keys():
            self.version += 1
            _log.info("mig_layout_changed", gpu=self.uuid, instances=sorted(known))
        self.instances, self._known = found, known

    def _find(self, index: int) -> InstanceClient | None:
        """Return the instance at one of the driver's indices; `None` if there is no instance.

        If a call fails, return the instance that the last query found at the index.
        """
        before = next(
            (instance for instance in self.instances if instance.identity.index == index), None
        )
        # NOT_FOUND means that the index is unused; higher indices may still be used.
        function = NvmlLibrary.nvmlDeviceGetMigDeviceHandleByIndex
        handle = self.client.query_list(_HOLE, function, index)
        self._is_hidden |= self.client.outcomes.get((function.__name__,)) == NO_PERMISSION
        if handle is _HOLE or self.client.is_unsupported((function.__name__,)):
            return None
        client = DeviceClient(library=self.client.library, handle=handle)
        get_uuid = NvmlLibrary.nvmlDeviceGetUUID
        uuid = None if handle is None else client.query(get_uuid)
        self._is_hidden |= NO_PERMISSION in client.outcomes.values()
        if uuid is None:
            # After a mere failure, keep the instance; otherwise its processes would count as ended.
            return None if client.is_unsupported((get_uuid.__name__,)) else before
        known = self._known.get(uuid)
        # Facts that never change are cached by UUID and not queried in each tick.
        if known is None or known.identity.index != index:
            return InstanceClient(identity=self._identify(client, uuid, index), client=client)
        known.client.handle = handle
        return known

    def _identify(self, client: DeviceClient, uuid: str, index: int) -> InstanceIdentity:
        attributes = client.query(NvmlLibrary.nvmlDeviceGetAttributes_v2)
        gpu_instance = small_number(client.query(NvmlLibrary.nvmlDeviceGetGpuInstanceId))
        info = None
        if gpu_instance is not None:
            # The placement is available only from the GPU instance, which has its own handle.
            handle = self.client.query(NvmlLibrary.nvmlDeviceGetGpuInstanceById, gpu_instance)
            if handle is not None:
                parent = DeviceClient(library=self.client.library, handle=handle)
                info = parent.query(NvmlLibrary.nvmlGpuInstanceGetInfo)
        mebibytes = small_number(attributes.memorySizeMB) if attributes else None
        return InstanceIdentity(
            uuid=uuid,
            parent_uuid=self.uuid,
            index=index,
            gpu_instance=gpu_instance,
            compute_instance=small_number(client.query(NvmlLibrary.nvmlDeviceGetComputeInstanceId)),
            profile=_profile(client.query(NvmlLibrary.nvmlDeviceGetName), attributes),
            gpu_slices=small_number(attributes.gpuInstanceSliceCount) if attributes else None,
            compute_slices=(
                small_number(attributes.computeInstanceSliceCount) if attributes else None
            ),
            multiprocessors=small_number(attributes.multiprocessorCount) if attributes else None,
            memory_bytes=mebibytes * _BYTES_PER_MIB if mebibytes else None,
            placement_start=int(info.placement.start) if info else None,
            memory_slices=small_number(info.placement.size)
            if info
            else self._query_slices().memory_slices_of(mebibytes),
        )

    def _apportion(
        self, listed: tuple[ListedProcess, ...] | None
    ) -> tuple[dict[str, tuple[ListedProcess, ...] | None], tuple[ListedProcess, ...] | None]:
        """Return each instance's processes by UUID, and the processes whose instance is unknown.

        `listed` are the processes in the GPU's own lists. `None` means that processes are unknown.
        """
        own, left = self._by_ids(listed or ())
        if listed is not None and not left and (listed or self._lists_all):
            # Once the GPU's lists have proved complete, use only them: three calls instead of
            # three per instance.
            self._lists_all = True
            return {uuid: tuple(found) for uuid, found in own.items()}, ()
        lists: dict[str, tuple[ListedProcess, ...] | None] = {}
        for instance in self.instances:
            uuid = instance.identity.uuid
            found = list_processes(instance.client)
            # If the instance's own list failed, use its processes in the GPU's list.
            lists[uuid] = tuple(own[uuid]) or None if found is None else found
        pids = {process.pid for processes in lists.values() for process in processes or ()}
        rest = tuple(process for process in left if process.pid not in pids)
        return lists, rest if listed is not None or lists else None

    def _by_ids(
        self, listed: Sequence[ListedProcess]
    ) -> tuple[dict[str, list[ListedProcess]], list[ListedProcess]]:
        ids = {
            (
                instance.identity.gpu_instance,
                instance.identity.compute_instance,
            ): instance.identity.uuid
            for instance in self.instances
        }
        sizes = Counter(instance.identity.gpu_instance for instance in self.instances)
        # If a GPU instance has only one compute instance, the GPU instance's id is sufficient.
        ids |= {(number, None): uuid for (number, _), uuid in ids.items() if sizes[number] == 1}
        own: dict[str, list[ListedProcess]] = {
            instance.identity.uuid: [] for instance in self.instances
        }
        left: list[ListedProcess] = []
        for process in listed:
            uuid = None
            if process.gpu_instance is not None:
                uuid = ids.get((process.gpu_instance, process.compute_instance))
            (left if uuid is None else own[uuid]).append(process)
        return own, left


def _profile(name: str | None, attributes: DeviceAttributes | None) -> str | None:
    """Return the MIG profile in the device's name, or else one made from the attributes."""
    found = _PROFILE.search(name or "")
    if found:
        return found[1]
    if not attributes:
        return None
    slices, own = attributes.gpuInstanceSliceCount, attributes.computeInstanceSliceCount
    gigabytes = round(attributes.memorySizeMB / 1024)
    return f"{'' if own == slices else f'{own}c.'}{slices}g.{gigabytes}gb"
