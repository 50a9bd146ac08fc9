"""The GPU source for NVML: opens and closes the library, finds its GPUs and queries them.

A session accepts any object with functions of `pynvml`: the real module, the simulator or a
recording. `open` queries each GPU in a separate thread, so a GPU that hangs delays the others only
for a limited time. If the hanging call returns later, the next `open` finds the GPU under the same
index. A handle is only valid until the library is shut down. `open` therefore creates new
`NvidiaGpu` objects, which determine again which calls the driver supports.

A GPU that does not answer is named by its UUID if possible, so that its alert is the same before
and after a restart of the agent. The UUID is found by the GPU's PCI address: the kernel lists the
UUIDs of its GPUs by address, and the session remembers those of GPUs that have answered before.
NVML numbers the GPUs in the order of their addresses. If the driver does not report the address of
such a GPU, the GPU thus has one of the addresses that are left.
"""

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import structlog
from msgspec.structs import replace

from gpuledger.clock import Clock
from gpuledger.errors import UnavailableError
from gpuledger.records import GpuFacts
from gpuledger_agent.core.incidents import Bus, read_bus, write_bus
from gpuledger_agent.core.raw import CallGroup, ClockReading, FastPoll, SampleCursor
from gpuledger_agent.gpu.nvidia.accounting import AccountingReader
from gpuledger_agent.gpu.nvidia.catalogue import DriverVersion, specs_for
from gpuledger_agent.gpu.nvidia.core import ProcessLists, query_core, query_energy, query_fast_poll
from gpuledger_agent.gpu.nvidia.device_client import DeviceClient, call_nvml, none_where_absent
from gpuledger_agent.gpu.nvidia.events import NvmlDriverEvents, NvmlGpuEvents, pci_buses_of
from gpuledger_agent.gpu.nvidia.gpm import ChipCounters, Gpm, is_of_chip
from gpuledger_agent.gpu.nvidia.inventory import Facts, query_driver_version, query_versions
from gpuledger_agent.gpu.nvidia.library import NvmlLibrary
from gpuledger_agent.gpu.nvidia.mig import MigLayout
from gpuledger_agent.gpu.nvidia.query import QueryPlan
from gpuledger_agent.gpu.nvidia.system_library import SystemNvml, with_own_lists
from gpuledger_agent.gpu.protocol import GpuIdentity
from gpuledger_agent.gpu.threads import CallThread

_log = structlog.get_logger(__name__)


@dataclass(kw_only=True)
class NvidiaGpu:
    """One GPU of an open library; calls that the driver does not support are made only once."""

    library: object
    """The library that returned the handle."""
    handle: object
    """The library's handle of the GPU."""
    uuid: str
    """The GPU's UUID."""
    index: int
    """The GPU's index in the driver."""
    peers: Sequence[tuple[str, object]] = ()
    """The node's other GPUs, as pairs of UUID and handle."""
    driver: DriverVersion | None = None
    """The driver's version; if it is `None`, fields whose ids differ between drivers are not
    queried."""
    monotonic_ns: Callable[[], int] = time.monotonic_ns
    """The clock that measures the time between two samples."""

    def __post_init__(self) -> None:
        client = self.client = DeviceClient(library=self.library, handle=self.handle)
        # A separate client, because fast polls run in another thread.
        self._fast_client = DeviceClient(library=self.library, handle=self.handle)
        sensors = specs_for(CallGroup.SENSORS, self.driver)
        self._sensors = QueryPlan(client, [spec for spec in sensors if not is_of_chip(spec)])
        self._readings = QueryPlan(client, specs_for(CallGroup.READINGS, self.driver))
        profiling = specs_for(CallGroup.PROFILING, self.driver)
        self._counters = {
            group: ChipCounters(
                client,
                [spec for spec in specs if is_of_chip(spec)],
                group=group,
                monotonic_ns=self.monotonic_ns,
            )
            for group, specs in (
                (CallGroup.SENSORS, sensors),
                (CallGroup.PROFILING, profiling),
            )
        }
        health = specs_for(CallGroup.HEALTH, self.driver)
        self._health = QueryPlan(client, [spec for spec in health if not is_of_chip(spec)])
        # Link rates have separate GPM samples, so they are means since the previous health query.
        self._link_rates = Gpm(
            client,
            [spec for spec in health if is_of_chip(spec)],
            group=CallGroup.HEALTH,
            monotonic_ns=self.monotonic_ns,
        )
        self._mig = MigLayout(client=client, uuid=self.uuid, index=self.index)
        self._lists = ProcessLists()
        self._known_facts: GpuFacts | None = None
        self._layout_version = 0
        self._accounting = AccountingReader(client=client)
        self._facts = Facts(client, uuid=self.uuid, index=self.index, peers=self.peers)

    def query(self, group: CallGroup, cursor: SampleCursor) -> dict[str, Any]:
        """Return the answer to a call group, keyed by field of `RawGpuSample`.

        Raises `SourceLostError`.
        """
        if group is CallGroup.USAGE:
            return self._query_core(cursor)
        if group is CallGroup.SENSORS:
            counters = self._counters[group].query(self._mig.instances)
            return {"sensors": self._sensors.query(), **counters}
        if group is CallGroup.READINGS:
            # Process lists that were empty are queried again at the pace of the readings.
            self._lists.is_due = True
            return {"readings": self._readings.query()}
        if group is CallGroup.PROFILING:
            return self._counters[group].query(self._mig.instances)
        health = {**self._health.query(), **self._link_rates.query().get("health", {})}
        # Query the facts last, because their capabilities cover all calls made before.
        self._known_facts = self._with_layout(self._facts.query())
        return {"health": health, "facts": self._known_facts}

    @property
    def has_process_accounting(self) -> bool:
        """Whether the driver kept process accounting for this GPU at the last query."""
        return self._accounting.is_kept

    def fast_poll(self, cursor: SampleCursor | None, *, at: ClockReading) -> FastPoll:
        """Return the GPU's answer to a fast poll; callable from any thread.

        Raises `SourceLostError`. `cursor` marks the ring buffer entries that were already read;
        `None` requests only the energy.

        Under MIG, only the energy is queried, because the driver does not sample the processes of
        MIG instances.
        """
        client = self._fast_client
        if cursor is None or self._mig.is_enabled:
            answers = query_energy(client)
        else:
            answers = query_fast_poll(client, cursor, self._lists, monotonic_ns=self.monotonic_ns)
        return FastPoll(uuid=self.uuid, at=at, **answers)

    def close(self) -> None:
        """Free the buffers that NVML has allocated for the GPU; the library must be open."""
        for counters in self._counters.values():
            counters.close()
        self._link_rates.close()

    def _query_core(self, cursor: SampleCursor) -> dict[str, Any]:
        core = query_core(self.client, cursor, self._lists, monotonic_ns=self.monotonic_ns)
        was_cut = self._mig.is_enabled
        core |= self._mig.query(core)
        if self._mig.is_enabled != was_cut:
            # The two modes support different functions, so forget functions that fast polls found
            # unsupported.
            self._fast_client.forget()
        # NVML does not document accounting under MIG.
        if not core["mig_enabled"]:
            core["process_stats"] = self._accounting.query(core["processes"])
        if self._known_facts and self._layout_version != self._mig.version:
            # Update the layout at once instead of in the next health query, because the kubelet's
            # device ids are matched to MIG instances by it.
            self._known_facts = self._with_layout(self._known_facts)
            core["facts"] = self._known_facts
        return core

    def _with_layout(self, facts: GpuFacts) -> GpuFacts:
        self._layout_version = self._mig.version
        is_enabled = self._mig.is_enabled
        return replace(facts, instances=self._mig.describe(), mig_enabled=is_enabled)


# How long `open` waits for the GPUs: the driver may need seconds to initialize an unused GPU.
_FIND_SECONDS: Final = 10.0
# How long `open` waits for the kernel's list, which may block while a GPU is initialized.
_READ_SECONDS: Final = 1.0
_INDEX: Final = "INDEX"


@dataclass(frozen=True, kw_only=True)
class _Found:
    """A GPU that answered while the library was being opened."""

    index: int
    uuid: str
    handle: object


KernelGpus = Callable[[], Mapping[Bus, str | None]]
"""Returns the UUID of each GPU that the kernel driver lists, by PCI address; `None` if unknown."""


class NvmlSession:
    """The NVML library as a `GpuSource`."""

    def __init__(
        self,
        library: object,
        *,
        monotonic_ns: Callable[[], int] = time.monotonic_ns,
        find_seconds: float = _FIND_SECONDS,
        kernel_gpus: KernelGpus = dict,
    ) -> None:
        self.library = library
        """An object with the functions of `pynvml`: real, simulated or recorded."""
        self._nvml = with_own_lists(library)
        self._monotonic_ns = monotonic_ns
        self._find_seconds = find_seconds
        self._gpus: list[NvidiaGpu] = []
        self._finding: dict[int, Future[_Found | None]] = {}
        self._is_open = False
        self._kernel_gpus = kernel_gpus
        self._reading: Future[Mapping[Bus, str | None]] | None = None
        self._slots: dict[int, Bus] = {}
        """The GPUs' PCI addresses by driver index, as far as they are known."""
        self._uuids: dict[Bus, str] = {}
        """The UUID of each GPU that has ever answered, by PCI address."""
        self._addresses: dict[str, Bus] = {}
        """The PCI address of each GPU, by UUID or by name in `unfound`."""
        self.unfound: Mapping[int, str] = {}
        """Names of the GPUs that did not answer when the library was last opened, by driver
        index."""
        self.driver_events = NvmlDriverEvents(self._nvml)
        """Events about the driver itself."""

    @property
    def origin(self) -> str:
        """Path of the driver's library; empty if it is simulated, recorded or not found."""
        return self.library.path if isinstance(self.library, SystemNvml) else ""

    @property
    def is_stuck(self) -> bool:
        """Whether a call with which `open` looked for a GPU still hangs.

        The next `open` would have to wait for that call.
        """
        # Use a copy, because the thread that opens may change the dictionary meanwhile.
        return any(not finding.done() for finding in list(self._finding.values()))

    def open(self) -> list[NvidiaGpu]:
        """Initialize the library and return the GPUs that answer. Raises SourceLostError."""
        call_nvml(self._nvml, NvmlLibrary.nvmlInit)
        # From here on the library has to be shut down, even if a later step fails.
        self._is_open = True
        count = call_nvml(self._nvml, NvmlLibrary.nvmlDeviceGetCount)
        # Query the version each time, because the driver may have been replaced.
        driver = DriverVersion.parse(query_driver_version(self._nvml))
        found = self._find_all(count)
        self._gpus = [
            NvidiaGpu(
                library=self._nvml,
                handle=gpu.handle,
                uuid=gpu.uuid,
                index=gpu.index,
                peers=[(other.uuid, other.handle) for other in found if other is not gpu],
                driver=driver,
                monotonic_ns=self._monotonic_ns,
            )
            for gpu in found
        ]
        for gpu in found:
            if bus := self._slots.get(gpu.index):
                self._uuids[bus], self._addresses[gpu.uuid] = gpu.uuid, bus
        indices = set(range(count)) - {gpu.index for gpu in found}
        self.unfound = self._name(sorted(indices)) if indices else {}
        return self._gpus

    def is_answering(self, name: str) -> bool:
        """Return whether a lost GPU answers by its PCI address, or by its index if that is unknown.

        Its UUID and its memory are queried, because a lost GPU may still have a handle.
        """
        bus = self._addresses.get(name)
        kind, _, index = name.partition(":")
        try:
            if bus:
                address = "{:08X}:{:02X}:{:02X}.0".format(*bus)
                handle = call_nvml(self._nvml, NvmlLibrary.nvmlDeviceGetHandleByPciBusId, address)
            elif kind == _INDEX:
                handle = call_nvml(self._nvml, NvmlLibrary.nvmlDeviceGetHandleByIndex, int(index))
            else:
                return False
            call_nvml(self._nvml, NvmlLibrary.nvmlDeviceGetUUID, handle)
            none_where_absent(
                lambda: call_nvml(self._nvml, NvmlLibrary.nvmlDeviceGetMemoryInfo, handle)
            )
        except UnavailableError:
            return False
        return True

    def versions(self) -> Mapping[str, str | None]:
        """Return the node's driver versions, keyed by field of `Inventory`.

        Raises `SourceLostError`.
        """
        return query_versions(self._nvml)

    def gpu_events(self, gpus: Sequence[GpuIdentity], *, clock: Clock) -> NvmlGpuEvents:
        """Create an event set with these GPUs registered; raises UnavailableError."""
        return NvmlGpuEvents(self._nvml, gpus, clock=clock)

    def pci_buses(self, gpus: Sequence[GpuIdentity]) -> Mapping[str, str]:
        """Return the GPUs' UUIDs by PCI address, without GPUs that do not answer."""
        return pci_buses_of(self._nvml, gpus)

    def close(self) -> None:
        """Free the buffers allocated for the GPUs, and shut the library down; ignore errors."""
        if not self._is_open:
            return
        self._is_open = False
        gpus, self._gpus = self._gpus, []
        for gpu in gpus:
            with contextlib.suppress(UnavailableError):
                gpu.close()
        # Shut down even if a GPU failed to close; otherwise the library cannot be reinitialized.
        with contextlib.suppress(UnavailableError):
            call_nvml(self._nvml, NvmlLibrary.nvmlShutdown)

    def _find_all(self, count: int) -> list[_Found]:
        """Query each GPU's handle and UUID; return the GPUs that answered in time.

        Each GPU is queried in its own thread, so that a GPU that hangs does not block the others.
        """
        # The driver may number the GPUs differently than when the library was last opened.
        self._slots = {}
        for index in range(count):
            # If a previous search is done, its handle belongs to the previous initialization.
            if index not in self._finding or self._finding[index].done():
                worker = CallThread(f"find-{index}")
                self._finding[index] = worker.start(partial(self._find, index))
                worker.end()
        finding = {index: self._finding[index] for index in range(count)}
        wait(finding.values(), timeout=self._find_seconds)
        # A late thread keeps running: the next `open` waits for it instead of starting another.
        done = [index for index, future in finding.items() if future.done()]
        return [gpu for index in done if (gpu := self._finding.pop(index).result())]

    def _find(self, index: int) -> _Found | None:
        """Return the GPU at an index; `None` if it does not answer.

        An error of any kind concerns only this GPU, because the others must still be found.
        """
        try:
            handle = call_nvml(self._nvml, NvmlLibrary.nvmlDeviceGetHandleByIndex, index)
            # A GPU that does not return its UUID may still return its PCI address.
            with contextlib.suppress(UnavailableError, UnicodeDecodeError):
                slot = call_nvml(self._nvml, NvmlLibrary.nvmlDeviceGetPciInfo_v3, handle).busId
                if bus := read_bus(slot):
                    self._slots[index] = bus
            uuid = call_nvml(self._nvml, NvmlLibrary.nvmlDeviceGetUUID, handle)
        except UnavailableError:
            return None
        except Exception:  # noqa: BLE001  # see the docstring
            _log.exception("gpu_search_failed", gpu_index=index)
            return None
        return _Found(index=index, uuid=uuid, handle=handle) if uuid else None

    def _name(self, indices: Sequence[int]) -> Mapping[int, str]:
        """Return the names of the GPUs at these indices, which did not answer."""
        kernel = self._read_kernel()
        known = {**self._uuids, **{bus: uuid for bus, uuid in kernel.items() if uuid}}
        left = sorted((kernel or self._uuids).keys() - self._slots.values())
        lacking = [index for index in indices if index not in self._slots]
        if len(left) == len(lacking):
            self._slots |= zip(lacking, left, strict=True)
        names = {}
        for index in indices:
            bus = self._slots.get(index)
            name = f"{_INDEX}:{index}" if bus is None else known.get(bus) or write_bus(bus)
            names[index] = name
            if bus:
                self._addresses[name] = bus
        return names

    def _read_kernel(self) -> Mapping[Bus, str | None]:
        """Return the GPUs that the kernel lists; none if reading the list takes too long."""
        if self._reading is None or self._reading.done():
            worker = CallThread("kernel-gpus")
            self._reading = worker.start(self._kernel_gpus)
            worker.end()
        wait([self._reading], timeout=_READ_SECONDS)
        return self._reading.result() if self._reading.done() else {}
