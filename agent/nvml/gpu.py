"""One GPU of an open library, asked a group of questions at a time.

Whether a value can be true is judged elsewhere. Safe to ask different GPUs from different threads.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace

from agent.nvml.catalogue import CATALOGUE
from agent.nvml.core import list_processes, query_core
from agent.nvml.device import DeviceClient
from agent.nvml.gpm import Gpm
from agent.nvml.instance_counters import InstanceCounters
from agent.nvml.inventory import Facts
from agent.nvml.mig import Partition
from agent.nvml.process_accounting import AccountingReader
from agent.nvml.query import QueryPlan
from agent.nvml.raw import CallGroup, RawGpuSample, SampleCursor
from gpuledger.records import GpuFacts


@dataclass(kw_only=True)
class Gpu:
    """One GPU of an open library; what it does not support is asked once."""

    library: Any
    """The library that gave the handle."""
    handle: Any
    """The library's own handle."""
    uuid: str
    """Its identity."""
    index: int
    """The driver's index."""
    peers: Sequence[tuple[str, Any]] = ()
    """The node's other GPUs, as pairs of UUID and handle."""
    monotonic_ns: Callable[[], int] = time.monotonic_ns
    """The clock by which samples are far enough apart."""

    def __post_init__(self) -> None:
        asker = self.asker = DeviceClient(library=self.library, handle=self.handle)
        # With a memory of its own: it is asked by another thread than the rest.
        self._beside = DeviceClient(library=self.library, handle=self.handle)
        self._readings = QueryPlan(asker, CATALOGUE[CallGroup.READINGS])
        self._gpm = Gpm(asker, CATALOGUE[CallGroup.PROFILING], monotonic_ns=self.monotonic_ns)
        self._health = QueryPlan(asker, CATALOGUE[CallGroup.HEALTH])
        self._partition = Partition(asker=asker, uuid=self.uuid, index=self.index)
        self._told: GpuFacts | None = None
        self._told_cut = 0
        self._accounting = AccountingReader(asker=asker)
        self._counters = InstanceCounters(
            asker, CATALOGUE[CallGroup.PROFILING], monotonic_ns=self.monotonic_ns
        )
        self._facts = Facts(asker, uuid=self.uuid, index=self.index, peers=self.peers)

    def answers_of(self, group: CallGroup, last_seen: SampleCursor) -> dict[str, Any]:
        """Ask one group, by the fields of `RawGpuSample`.

        Raises NvmlLostError where the library must be started again.
        """
        if group is CallGroup.BOOKS:
            return self._books(last_seen)
        if group is CallGroup.READINGS:
            return {"readings": self._readings.ask()}
        if group is CallGroup.PROFILING:
            return self._profiling()
        health = self._health.ask()
        # The facts come last, as they tell which of all questions were refused.
        self._told = self._with_layout(self._facts.ask())
        return {"health": health, "facts": self._told}

    def answer(self, last_seen: SampleCursor) -> RawGpuSample:
        """Ask everything; raises NvmlLostError where the library must be started again."""
        given: dict[str, Any] = {}
        for group in CallGroup:
            given |= self.answers_of(group, last_seen)
        return RawGpuSample(uuid=self.uuid, index=self.index, **given)

    @property
    def keeps_accounts(self) -> bool:
        """Whether its driver keeps accounts of processes, by the last answer."""
        return self._accounting.is_kept

    def running_pids(self) -> frozenset[int] | None:
        """Return who is on the GPU, from any thread; `None` where a list failed.

        Raises NvmlLostError.
        """
        listed = list_processes(self._beside)
        return None if listed is None else frozenset(one.pid for one in listed)

    def close(self) -> None:
        """Let go of what the library holds for it; the library must be open."""
        self._gpm.close()
        self._counters.close()

    def _books(self, last_seen: SampleCursor) -> dict[str, Any]:
        books = query_core(self.asker, last_seen)
        books |= self._partition.ask(books)
        if not books["mig_enabled"]:
            books["accounted"] = self._accounting.ask(books["processes"])
        if self._told and self._told_cut != self._partition.cut:
            # At once, and not with the next health: kubelet's ids lead to instances by it.
            self._told = self._with_layout(self._told)
            books["facts"] = self._told
        return books

    def _with_layout(self, facts: GpuFacts) -> GpuFacts:
        self._told_cut = self._partition.cut
        is_enabled = self._partition.is_enabled
        return replace(facts, instances=self._partition.describe(), mig_enabled=is_enabled)

    def _profiling(self) -> dict[str, Any]:
        of_instances = self._counters.ask(self._partition.instances)
        return {**self._gpm.ask(), "instance_profiling": of_instances}
