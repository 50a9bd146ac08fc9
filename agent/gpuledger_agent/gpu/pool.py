"""Queries all GPUs of an open source once per tick, and tracks which of them are lost.

Other modules open the source and attribute processes.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Final

from msgspec.structs import replace

from gpuledger.clock import NS_PER_SECOND
from gpuledger.records import GpuFacts
from gpuledger_agent.core.raw import RawGpuSample, SampleCursor
from gpuledger_agent.gpu.breaker import BreakerLog, probe_backoff
from gpuledger_agent.gpu.protocol import Gpu, GpuLostError, SourceLostError
from gpuledger_agent.gpu.threads import CpuWait, PollCycle, read_cpu_wait
from gpuledger_agent.gpu.worker import GpuWorker, LeakedThreads, Pace
from gpuledger_agent.metrics import GPU_DEADLINES_MISSED, GPUS_LOST

Report = Callable[[str, str, str], None]
"""Reports an incident: takes its kind, the GPU's UUID and one sentence for people."""


def report_nowhere(_kind: str, _gpu_uuid: str, _message: str) -> None:
    """Discard the report."""


UNKNOWN_UUID_PREFIXES: Final = ("PCI:", "INDEX:")
"""Beginnings of the names of GPUs whose UUID is unknown."""
_UNFOUND: Final = "it did not answer when the library was opened"


class GpuAvailability:
    """Tracks which GPUs of the node have answered and which are lost, and reports changes."""

    def __init__(self, report: Report) -> None:
        self._report = report
        self._known: dict[str, None] = {}
        self._indices: dict[int, str] = {}
        self._unnamed: dict[int, str] = {}
        self._lost: dict[str, str] = {}

    @property
    def known(self) -> Sequence[str]:
        """The UUIDs of all GPUs that have ever answered."""
        return tuple(self._known)

    @property
    def lost(self) -> Mapping[str, str]:
        """The reason of each loss, by the GPU's UUID or its name in `GpuSource.unfound`."""
        return self._lost

    def record_lost(self, uuid: str, reason: str) -> None:
        """Record that a GPU no longer answers, and report it if it was not already lost."""
        if uuid in self._lost:
            return
        self._lost[uuid] = reason
        GPUS_LOST.set(len(self._lost))
        self._report("gpu_lost", uuid, reason)

    def record_opening(self, found: Mapping[int, str], unfound: Mapping[int, str]) -> None:
        """Record which GPUs answered when the source was opened, and which did not.

        `found` contains the UUIDs of the GPUs that answered, and `unfound` the names of the others,
        by the driver's index. A GPU in `unfound` is recorded as lost. If its name is not its UUID,
        it must not have answered before: the caller records such a GPU by its UUID.
        """
        self._indices |= found
        for index, name in unfound.items():
            if not name.startswith(UNKNOWN_UUID_PREFIXES):
                self.record_lost(name, _UNFOUND)
            elif index not in self._indices and index not in self._unnamed:
                self._unnamed[index] = name
                self.record_lost(name, _UNFOUND)

    def record_answer(self, uuid: str, *, index: int) -> None:
        """Record that a GPU answered; if it was lost, report that it has recovered.

        It may have been reported as lost under its UUID and under its name in `GpuSource.unfound`.
        The recovery is reported under the same names.
        """
        self._known[uuid] = None
        for name in (uuid, self._unnamed.pop(index, None)):
            if name in self._lost:
                reason = self._lost.pop(name)
                GPUS_LOST.set(len(self._lost))
                message = f"it answers again; it was lost: {reason}"
                self._report("gpu_recovered", name, message)

    def report_all(self, kind: str, message: str) -> None:
        """Report an incident of this kind for each known GPU that is not lost."""
        for uuid in self._known:
            if uuid not in self._lost:
                self._report(kind, uuid, message)


class GpuPool:
    """Queries all GPUs of a GPU source that has been opened."""

    def __init__(
        self,
        *,
        availability: GpuAvailability,
        deadline_seconds: float,
        readings_seconds: float,
        health_seconds: float,
        cpu_wait: CpuWait = read_cpu_wait,
    ) -> None:
        self._cpu_wait = cpu_wait
        self._availability = availability
        self.deadline_seconds = deadline_seconds
        """How long a tick waits for the GPUs, in seconds; read in each tick."""
        self._readings_ns = round(readings_seconds * NS_PER_SECOND)
        self._health_ns = round(health_seconds * NS_PER_SECOND)
        self._leaked = LeakedThreads()
        self._breaker_log = BreakerLog()
        self.workers: list[GpuWorker] = []
        """The workers, one for each GPU of the open source that can be queried."""
        self._cycle: PollCycle | None = None
        self.source_lost: str | None = None
        """Why the whole source is lost; `None` if the last answers do not show that it is lost."""
        self.facts: dict[str, GpuFacts] = {}
        """The latest facts about each GPU that was found, by UUID. Before a GPU's first answer to a
        query of its facts, they contain only its identity."""
        self.facts_changes = 0
        """Number of times that `facts` has changed."""

    @property
    def uuids(self) -> set[str]:
        """The UUIDs of the GPUs that are queried or probed."""
        return {worker.gpu.uuid for worker in self.workers}

    @property
    def accounting_gpus(self) -> list[Gpu]:
        """The GPUs for which the driver keeps process accounting."""
        return [worker.gpu for worker in self.workers if worker.gpu.has_process_accounting]

    @property
    def is_unresponsive(self) -> bool:
        """Whether there are GPUs but all of them are unresponsive."""
        return bool(self.workers) and all(worker.is_unresponsive for worker in self.workers)

    @property
    def is_stuck(self) -> bool:
        """Whether a call has not returned yet, so that closing the source may hang too."""
        return any(worker.is_stuck for worker in self.workers) or self._leaked.total() > 0

    @property
    def open_groups(self) -> list[str]:
        """The call groups with an open breaker, each with its GPU, as texts for people."""
        return [
            f"{group.value} of {worker.gpu.uuid}"
            for worker in self.workers
            for group in worker.open_groups
        ]

    def begin(self, found: Sequence[Gpu], now_ns: int) -> None:
        """Start to query the GPUs of a newly opened source.

        A GPU that has the maximum number of hanging threads is not queried.
        """
        self.source_lost = None
        for gpu in found:
            # A GPU that the inventory does not list counts as removed, so list each GPU at once.
            if gpu.uuid not in self.facts:
                self.facts[gpu.uuid] = GpuFacts(
                    uuid=gpu.uuid, index=gpu.index, instances=[], capabilities=[]
                )
                self.facts_changes += 1

        def pace(position: int, period_ns: int) -> Pace:
            origin_ns = now_ns + position * period_ns // len(found)
            return Pace(origin_ns=origin_ns, period_ns=period_ns)

        self.workers = [
            GpuWorker(
                gpu,
                leaked=self._leaked,
                breaker_log=self._breaker_log,
                backoff=probe_backoff,
                readings=pace(position, self._readings_ns),
                health=pace(position, self._health_ns),
                now_ns=now_ns,
            )
            for position, gpu in enumerate(found)
            if not self._leaked.is_full(gpu.uuid)
        ]

    def end(self) -> None:
        """Stop querying and end the threads of all GPUs; threads that hang are left running."""
        for worker in self.workers:
            worker.end()
        self.workers = []

    def keep_facts(self, uuids: Collection[str], *, indices: Collection[int]) -> None:
        """Keep only the facts about GPUs that have one of these UUIDs or one of these indices."""
        kept = {
            uuid: facts
            for uuid, facts in self.facts.items()
            if uuid in uuids or facts.index in indices
        }
        self.facts_changes += len(kept) < len(self.facts)
        self.facts = kept

    async def poll(self, cursors: Mapping[str, SampleCursor], now_ns: int) -> list[RawGpuSample]:
        """Query the GPUs for a tick, and return the samples of the GPUs that answered in time.

        Also record GPUs that are lost or answer again, and set `source_lost`. `cursors` are the
        positions in the GPUs' ring buffers, by UUID.
        """
        started = []
        for worker in self.workers:
            cursor = cursors.get(worker.gpu.uuid, SampleCursor())
            request = worker.next_request(cursor, last=self._cycle, now_ns=now_ns)
            if request:
                started.append((worker, request))
        self._cycle = PollCycle(deadline_seconds=self.deadline_seconds, cpu_wait=self._cpu_wait)
        self._cycle.start([(request, worker.thread.submit) for worker, request in started])
        await self._cycle.wait()
        evaluated = [self._evaluate(worker, self._cycle, now_ns) for worker, _ in started]
        samples = [sample for sample in evaluated if sample]
        GPU_DEADLINES_MISSED.inc(len(self.workers) - len(samples))
        # If the library is lost, no GPU answers, so no single GPU can be called lost.
        for worker in () if self.source_lost else self.workers:
            if worker.is_unresponsive:
                self._availability.record_lost(worker.gpu.uuid, worker.silence)
        self._leaked.update_metric()
        return samples

    def _evaluate(self, worker: GpuWorker, cycle: PollCycle, now_ns: int) -> RawGpuSample | None:
        uuid = worker.gpu.uuid
        try:
            sample = worker.evaluate(cycle, now_ns)
        except GpuLostError as error:
            # Probes cannot help: only reopening the source gives a new handle.
            self._availability.record_lost(uuid, str(error))
            worker.end()
            self.workers.remove(worker)
            return None
        except SourceLostError as error:
            self.source_lost = str(error)
            return None
        if sample:
            self._availability.record_answer(uuid, index=sample.index)
            known = self.facts[uuid]
            facts = sample.facts or known
            if facts.model is None and sample.model is not None:
                facts = replace(facts, model=sample.model)
            if facts != known:
                self.facts[uuid] = facts
                self.facts_changes += 1
        return sample
