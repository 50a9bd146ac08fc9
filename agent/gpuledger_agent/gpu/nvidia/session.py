"""NVML as a source of GPUs: the library from its start to its end, and each GPU that it finds.

A session takes any object with functions of `pynvml`: the real module, the simulator's, a
recording. Opening it finds the GPUs in a thread each, so that one that hangs at the start costs the
others a bounded wait; it is found by a later opening, under the same index. A GPU's handle is good
until the library is shut down, so each opening makes new GPUs, which remember nothing of what an
earlier one did not support.
"""

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from msgspec.structs import replace

from gpuledger.clock import Clock
from gpuledger.errors import UnavailableError
from gpuledger.records import GpuFacts
from gpuledger_agent.core.incidents import read_bus, write_bus
from gpuledger_agent.core.raw import CallGroup, ClockReading, FastPoll, SampleCursor
from gpuledger_agent.gpu.nvidia.accounting import AccountingReader
from gpuledger_agent.gpu.nvidia.catalogue import DriverVersion, specs_for
from gpuledger_agent.gpu.nvidia.core import ProcessLists, query_core, query_energy, query_fast_poll
from gpuledger_agent.gpu.nvidia.device_client import DeviceClient, call_nvml
from gpuledger_agent.gpu.nvidia.events import NvmlDriverEvents, NvmlGpuEvents, pci_buses_of
from gpuledger_agent.gpu.nvidia.gpm import ChipCounters, Gpm, is_of_chip
from gpuledger_agent.gpu.nvidia.inventory import Facts, query_driver_version, query_versions
from gpuledger_agent.gpu.nvidia.library import NvmlLibrary
from gpuledger_agent.gpu.nvidia.mig import MigLayout
from gpuledger_agent.gpu.nvidia.query import QueryPlan
from gpuledger_agent.gpu.nvidia.system_library import SystemNvml, with_own_lists
from gpuledger_agent.gpu.protocol import GpuIdentity
from gpuledger_agent.gpu.threads import CallThread


@dataclass(kw_only=True)
class NvidiaGpu:
    """One GPU of an open library; what it does not support is called once."""

    library: object
    """The library that gave the handle."""
    handle: object
    """The library's own handle."""
    uuid: str
    """Its identity."""
    index: int
    """The driver's index."""
    peers: Sequence[tuple[str, object]] = ()
    """The node's other GPUs, as pairs of UUID and handle."""
    driver: DriverVersion | None = None
    """The driver; of one that is not known only what every driver means alike is queried."""
    monotonic_ns: Callable[[], int] = time.monotonic_ns
    """The clock by which samples are far enough apart."""

    def __post_init__(self) -> None:
        client = self.client = DeviceClient(library=self.library, handle=self.handle)
        # One of its own: it is used by another thread than the rest.
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
        # Samples of its own: what is of each link is the mean over the time between two healths.
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
        """Return the answer to a group, by the fields of `RawGpuSample`; raises SourceLostError."""
        if group is CallGroup.BOOKS:
            return self._query_core(cursor)
        if group is CallGroup.SENSORS:
            counters = self._counters[group].query(self._mig.instances)
            return {"sensors": self._sensors.query(), **counters}
        if group is CallGroup.READINGS:
            # As rarely as these: lists that were empty when they were asked last.
            self._lists.is_due = True
            return {"readings": self._readings.query()}
        if group is CallGroup.PROFILING:
            return self._counters[group].query(self._mig.instances)
        health = {**self._health.query(), **self._link_rates.query().get("health", {})}
        # The facts come last, as their capabilities are those of all calls before.
        self._known_facts = self._with_layout(self._facts.query())
        return {"health": health, "facts": self._known_facts}

    @property
    def has_process_accounting(self) -> bool:
        """Whether its driver keeps accounts of processes, by the last answer."""
        return self._accounting.is_kept

    def fast_poll(self, cursor: SampleCursor | None, *, at: ClockReading) -> FastPoll:
        """Return what is asked of it between two ticks, from any thread; raises SourceLostError.

        Of a GPU that is cut it is the energy alone: processes are of its instances, of which the
        driver samples none.
        """
        client = self._fast_client
        if cursor is None or self._mig.is_enabled:
            answers = query_energy(client)
        else:
            answers = query_fast_poll(client, cursor, self._lists, monotonic_ns=self.monotonic_ns)
        return FastPoll(uuid=self.uuid, at=at, **answers)

    def close(self) -> None:
        """Let go of what the library holds for it; the library must be open."""
        for counters in self._counters.values():
            counters.close()
        self._link_rates.close()

    def _query_core(self, cursor: SampleCursor) -> dict[str, Any]:
        core = query_core(self.client, cursor, self._lists, monotonic_ns=self.monotonic_ns)
        was_cut = self._mig.is_enabled
        core |= self._mig.query(core)
        if self._mig.is_enabled != was_cut:
            # A fast poll that came in between may have been refused what the other mode has.
            self._fast_client.forget()
        # Not under MIG: what the driver accounts for there is not documented.
        if not core["mig_enabled"]:
            core["process_stats"] = self._accounting.query(core["processes"])
        if self._known_facts and self._layout_version != self._mig.version:
            # At once, and not with the next health: kubelet's ids lead to instances by it.
            self._known_facts = self._with_layout(self._known_facts)
            core["facts"] = self._known_facts
        return core

    def _with_layout(self, facts: GpuFacts) -> GpuFacts:
        self._layout_version = self._mig.version
        is_enabled = self._mig.is_enabled
        return replace(facts, instances=self._mig.describe(), mig_enabled=is_enabled)


# A GPU that nobody uses may have to be woken up first, which takes seconds.
_FIND_SECONDS: Final = 10.0


@dataclass(frozen=True, kw_only=True)
class _Found:
    """A GPU that answered."""

    index: int
    uuid: str
    handle: object


class NvmlSession:
    """The library, as a `GpuSource`."""

    def __init__(
        self,
        library: object,
        *,
        monotonic_ns: Callable[[], int] = time.monotonic_ns,
        find_seconds: float = _FIND_SECONDS,
    ) -> None:
        self.library = library
        """The functions of `pynvml`, real or played."""
        self._nvml = with_own_lists(library)
        self._monotonic_ns = monotonic_ns
        self._find_seconds = find_seconds
        self._gpus: list[NvidiaGpu] = []
        self._finding: dict[int, Future[_Found | None]] = {}
        self._is_open = False
        self._slots: dict[int, str] = {}
        self.unfound: Mapping[int, str] = {}
        """What names the GPUs that the driver counts and that did not answer at the start."""
        self.driver_events = NvmlDriverEvents(self._nvml)
        """What the driver says of itself."""

    @property
    def origin(self) -> str:
        """Where the library was found, for people; empty where it is played, or not found yet."""
        return self.library.path if isinstance(self.library, SystemNvml) else ""

    @property
    def is_stuck(self) -> bool:
        """Whether a GPU that an opening looked for has not answered yet; another would wait too."""
        # A copy, as the thread that opens may change it meanwhile.
        return any(not finding.done() for finding in list(self._finding.values()))

    def open(self) -> list[NvidiaGpu]:
        """Start the library; return the GPUs that answer. Raises SourceLostError."""
        call_nvml(self._nvml, NvmlLibrary.nvmlInit)
        # It has to be shut down from here on, whatever comes next.
        self._is_open = True
        count = call_nvml(self._nvml, NvmlLibrary.nvmlDeviceGetCount)
        # At each opening: the driver may be another one since the last.
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
        indices = set(range(count)) - {gpu.index for gpu in found}
        self.unfound = {index: self._slots.get(index, f"INDEX:{index}") for index in indices}
        return self._gpus

    def versions(self) -> Mapping[str, str | None]:
        """Return the versions by the fields of `Inventory`; raises SourceLostError."""
        return query_versions(self._nvml)

    def gpu_events(self, gpus: Sequence[GpuIdentity], *, clock: Clock) -> NvmlGpuEvents:
        """Make an event set in which these GPUs are registered; raises UnavailableError."""
        return NvmlGpuEvents(self._nvml, gpus, clock=clock)

    def pci_buses(self, gpus: Sequence[GpuIdentity]) -> Mapping[str, str]:
        """Return the GPUs' UUIDs by the PCI addresses at which they are plugged in."""
        return pci_buses_of(self._nvml, gpus)

    def close(self) -> None:
        """Let go of the driver; a library that is lost has nothing to let go of."""
        if not self._is_open:
            return
        self._is_open = False
        gpus, self._gpus = self._gpus, []
        for gpu in gpus:
            with contextlib.suppress(UnavailableError):
                gpu.close()
        # However the GPUs ended: a library that is not shut down is not started anew either.
        with contextlib.suppress(UnavailableError):
            call_nvml(self._nvml, NvmlLibrary.nvmlShutdown)

    def _find_all(self, count: int) -> list[_Found]:
        """Find the GPUs, each in a thread: one that hangs must not cost the others."""
        for index in range(count):
            # One that is done now was found too late, with a handle of the start before.
            if index not in self._finding or self._finding[index].done():
                worker = CallThread(f"find-{index}")
                self._finding[index] = worker.start(partial(self._find, index))
                worker.end()
        finding = {index: self._finding[index] for index in range(count)}
        wait(finding.values(), timeout=self._find_seconds)
        # The thread of one that is late goes on: the next opening waits for it, not for another.
        done = [index for index, future in finding.items() if future.done()]
        return [gpu for index in done if (gpu := self._finding.pop(index).result())]

    def _find(self, index: int) -> _Found | None:
        """Return the GPU at an index; one that is lost must not cost the others."""
        try:
            handle = call_nvml(self._nvml, NvmlLibrary.nvmlDeviceGetHandleByIndex, index)
        except UnavailableError:
            return None
        try:
            uuid = call_nvml(self._nvml, NvmlLibrary.nvmlDeviceGetUUID, handle)
        except UnavailableError:
            # A GPU that does not say who it is may still say where it is plugged in.
            with contextlib.suppress(UnavailableError):
                slot = call_nvml(self._nvml, NvmlLibrary.nvmlDeviceGetPciInfo_v3, handle).busId
                if bus := read_bus(slot):
                    self._slots[index] = write_bus(bus)
            return None
        return _Found(index=index, uuid=uuid, handle=handle)
