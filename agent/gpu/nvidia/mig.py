"""The instances of a GPU that is cut by MIG: found anew in each tick, asked by their own handles.

A handle of an instance is good until the GPU is cut again, so none is kept: at each tick each index
is looked at, and what is known of an instance is kept by its UUID. A parent's list of processes
holds those of its instances where the driver lets us see them; else the instances are asked.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import structlog

from agent.core.raw import InstanceIdentity, ListedProcess, RawGpuSample
from agent.gpu.nvidia.client import DeviceClient
from agent.gpu.nvidia.core import ask_memory, list_processes
from agent.gpu.nvidia.library import DeviceAttributes, NvmlLibrary
from agent.gpu.source import FailedError, UnsupportedError
from gpuledger.records import MigInstance

_log = structlog.get_logger(__name__)
_HOLE: Final = object()
_MAX: Final = 2**31 - 1
_BYTES_PER_MIB: Final = 1 << 20
_PROFILE: Final = re.compile(r" MIG (\S+)$")
# What NVML gives of a whole GPU only; a stray answer under MIG would be of nobody.
_ABSENT: Final = {
    "samples": None,
    "memory_samples": None,
    "percent": None,
    "memory_percent": None,
    "process_samples": None,
}


@dataclass(kw_only=True)
class InstanceClient:
    """One instance and how to ask it."""

    identity: InstanceIdentity
    """Which one it is."""
    client: DeviceClient
    """Asks it."""


@dataclass(kw_only=True)
class Partition:
    """How one GPU is cut now."""

    client: DeviceClient
    """Asks the GPU."""
    uuid: str
    """The GPU's identity."""
    index: int
    """The driver's index of the GPU."""
    instances: Sequence[InstanceClient] = ()
    """The instances as they were at the last question."""
    is_enabled: bool | None = None
    """Whether MIG is on; `None` where the GPU has none."""
    cut: int = 0
    """Counts the layouts that were seen."""
    _most: int = 0
    _lists_all: bool = False
    _known: dict[str, InstanceClient] = field(default_factory=dict)

    def ask(self, books: Mapping[str, Any]) -> dict[str, Any]:
        """Return what changes in the answers of a GPU's books; raises SourceLostError."""
        was, self.is_enabled = self.is_enabled, self._ask_mode()
        if was is not None and was != self.is_enabled:
            # What was refused in one mode may be given in the other.
            self.client.forget()
            self.cut += 1
        if not self.is_enabled:
            self._take([])
            return {"mig_enabled": self.is_enabled}
        self._find_instances()
        own, left = self._share_out(books["processes"])
        instances = tuple(
            self._answer(instance, books["model"], own[instance.identity.uuid])
            for instance in self.instances
        )
        return {**_ABSENT, "mig_enabled": True, "instances": instances, "processes": left}

    def describe(self) -> list[MigInstance]:
        """Return the layout as it was at the last question."""
        return [
            MigInstance(
                uuid=one.uuid,
                gpu_instance=one.gpu_instance,
                compute_instance=one.compute_instance,
                profile=one.profile,
                gpu_slices=one.gpu_slices,
                compute_slices=one.compute_slices,
                placement_start=one.placement_start,
                multiprocessors=one.multiprocessors,
                memory_total_bytes=one.memory_bytes,
            )
            for one in (instance.identity for instance in self.instances)
            if one.gpu_instance is not None and one.compute_instance is not None
        ]

    def _ask_mode(self) -> bool | None:
        try:
            current, _ = self.client.query_or_raise(NvmlLibrary.nvmlDeviceGetMigMode)
        except UnsupportedError:
            return None
        except FailedError:
            return self.is_enabled
        return bool(current)

    def _find_instances(self) -> None:
        self._most = self.client.ask(NvmlLibrary.nvmlDeviceGetMaxMigDeviceCount) or self._most
        found = [one for place in range(self._most) if (one := self._find(place))]
        self._take(found)

    def _take(self, found: list[InstanceClient]) -> None:
        known = {instance.identity.uuid: instance for instance in found}
        if known.keys() != self._known.keys():
            self.cut += 1
            _log.info("mig_layout_changed", gpu=self.uuid, instances=sorted(known))
        self.instances, self._known = found, known

    def _find(self, place: int) -> InstanceClient | None:
        """Return the instance at an index; one whose handle fails now is still there."""
        before = next((one for one in self.instances if one.identity.place == place), None)
        try:
            function = NvmlLibrary.nvmlDeviceGetMigDeviceHandleByIndex
            handle = self.client.list_or_raise(_HOLE, function, place)
            if handle is _HOLE:
                return None
            client = DeviceClient(library=self.client.library, handle=handle)
            uuid = client.query_or_raise(NvmlLibrary.nvmlDeviceGetUUID)
        except UnsupportedError:
            return None
        except FailedError:
            return before
        known = self._known.get(uuid)
        if known is None or known.identity.place != place:
            return InstanceClient(identity=self._identify(client, uuid, place), client=client)
        known.client.handle = handle
        return known

    def _identify(self, client: DeviceClient, uuid: str, place: int) -> InstanceIdentity:
        attributes = client.ask(NvmlLibrary.nvmlDeviceGetAttributes_v2)
        gpu_instance = _small(client.ask(NvmlLibrary.nvmlDeviceGetGpuInstanceId))
        return InstanceIdentity(
            uuid=uuid,
            parent_uuid=self.uuid,
            place=place,
            gpu_instance=gpu_instance,
            compute_instance=_small(client.ask(NvmlLibrary.nvmlDeviceGetComputeInstanceId)),
            profile=_profile(client.ask(NvmlLibrary.nvmlDeviceGetName), attributes),
            gpu_slices=_small(attributes.gpuInstanceSliceCount) if attributes else None,
            compute_slices=_small(attributes.computeInstanceSliceCount) if attributes else None,
            multiprocessors=_small(attributes.multiprocessorCount) if attributes else None,
            memory_bytes=_bytes(attributes.memorySizeMB) if attributes else None,
            placement_start=self._start(gpu_instance),
        )

    def _start(self, gpu_instance: int | None) -> int | None:
        if gpu_instance is None:
            return None
        handle = self.client.ask(NvmlLibrary.nvmlDeviceGetGpuInstanceById, gpu_instance)
        if handle is None:
            return None
        info = DeviceClient(library=self.client.library, handle=handle).ask(
            NvmlLibrary.nvmlGpuInstanceGetInfo
        )
        return int(info.placement.start) if info else None

    def _share_out(
        self, listed: tuple[ListedProcess, ...] | None
    ) -> tuple[dict[str, tuple[ListedProcess, ...] | None], tuple[ListedProcess, ...] | None]:
        """Return each instance its processes, and those that are in none of them."""
        own, left = self._by_ids(listed or ())
        if listed is not None and not left and (listed or self._lists_all):
            # The parent's list is the whole list where it has shown that it is: three calls
            # instead of three for each instance.
            self._lists_all = True
            return {uuid: tuple(found) for uuid, found in own.items()}, ()
        asked: dict[str, tuple[ListedProcess, ...] | None] = {}
        for instance in self.instances:
            uuid = instance.identity.uuid
            answer = list_processes(instance.client)
            asked[uuid] = tuple(own[uuid]) or None if answer is None else answer
        placed = {process.pid for answer in asked.values() for process in answer or ()}
        rest = tuple(process for process in left if process.pid not in placed)
        return asked, rest if listed is not None or asked else None

    def _by_ids(
        self, listed: Sequence[ListedProcess]
    ) -> tuple[dict[str, list[ListedProcess]], list[ListedProcess]]:
        ids = {
            (one.identity.gpu_instance, one.identity.compute_instance): one.identity.uuid
            for one in self.instances
        }
        sizes = Counter(one.identity.gpu_instance for one in self.instances)
        # Where a GPU instance is not cut further, its id alone says enough.
        ids |= {(number, None): uuid for (number, _), uuid in ids.items() if sizes[number] == 1}
        own: dict[str, list[ListedProcess]] = {one.identity.uuid: [] for one in self.instances}
        left: list[ListedProcess] = []
        for process in listed:
            uuid = None
            if process.gpu_instance is not None:
                uuid = ids.get((process.gpu_instance, process.compute_instance))
            (left if uuid is None else own[uuid]).append(process)
        return own, left

    def _answer(
        self,
        instance: InstanceClient,
        model: str | None,
        processes: tuple[ListedProcess, ...] | None,
    ) -> RawGpuSample:
        memory = ask_memory(instance.client)
        return RawGpuSample(
            uuid=instance.identity.uuid,
            index=self.index,
            model=model,
            instance=instance.identity,
            memory_total_bytes=memory.total,
            memory_used_bytes=memory.used,
            memory_reserved_bytes=memory.reserved,
            processes=processes,
        )


def _small(given: int | None) -> int | None:
    """Return an id or a number of parts where it can be one; "none" is the greatest of all."""
    return given if given is not None and 0 <= given <= _MAX else None


def _bytes(mebibytes: int) -> int | None:
    return mebibytes * _BYTES_PER_MIB if 0 < mebibytes <= _MAX else None


def _profile(name: str | None, attributes: DeviceAttributes | None) -> str | None:
    """Return the profile as the driver names it, else as its names are built."""
    found = _PROFILE.search(name or "")
    if found:
        return found[1]
    if not attributes:
        return None
    slices, own = attributes.gpuInstanceSliceCount, attributes.computeInstanceSliceCount
    gigabytes = round(attributes.memorySizeMB / 1024)
    return f"{'' if own == slices else f'{own}c.'}{slices}g.{gigabytes}gb"
