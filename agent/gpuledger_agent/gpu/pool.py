"""The GPUs of an open source: polled together once a tick, and what became of each.

Whose a pid is, how the source is opened, and when again, is decided elsewhere.
"""

from collections.abc import Callable, Collection, Mapping, Sequence

from gpuledger.clock import NS_PER_SECOND
from gpuledger.records import GpuFacts
from gpuledger_agent.core.raw import RawGpuSample, SampleCursor
from gpuledger_agent.gpu.breaker import BreakerLog, slow_backoff
from gpuledger_agent.gpu.protocol import Gpu, GpuLostError, SourceLostError
from gpuledger_agent.gpu.threads import PollCycle
from gpuledger_agent.gpu.worker import GpuWorker, LeakedThreads, Pace
from gpuledger_agent.metrics import GPU_DEADLINES_MISSED, GPUS_LOST

Report = Callable[[str, str, str], None]
"""Takes an incident's kind, the GPU's UUID and one sentence for people."""


def report_nowhere(_kind: str, _gpu_uuid: str, _message: str) -> None:
    """Report nothing."""


class GpuAvailability:
    """The GPUs of a node that have answered, and which of them are lost."""

    def __init__(self, report: Report) -> None:
        self._report = report
        self._known: dict[str, None] = {}
        self._indices: dict[int, str] = {}
        self._unnamed: dict[int, str] = {}
        self._lost: dict[str, str] = {}

    @property
    def known(self) -> Sequence[str]:
        """The UUIDs of all GPUs that answered once."""
        return tuple(self._known)

    @property
    def lost(self) -> Mapping[str, str]:
        """Why each lost GPU is lost, by UUID."""
        return self._lost

    def record_lost(self, uuid: str, reason: str) -> None:
        """Record that a GPU does not answer any more; reported where that is news."""
        if uuid in self._lost:
            return
        self._lost[uuid] = reason
        GPUS_LOST.set(len(self._lost))
        self._report("gpu_lost", uuid, reason)

    def record_opening(self, found: Mapping[int, str], unfound: Mapping[int, str]) -> None:
        """Record an opening: by index, the UUIDs that it found and what names the others.

        Those that an earlier one found are lost by their UUID, and not by another name.
        """
        self._indices |= found
        for index, name in unfound.items():
            if index not in self._indices and index not in self._unnamed:
                self._unnamed[index] = name
                self.record_lost(name, "it does not answer at the start of the library")

    def record_answer(self, uuid: str, *, index: int) -> None:
        """Record that a GPU answered; reported where it was lost, be it by another name."""
        self._known[uuid] = None
        for name in (uuid, self._unnamed.pop(index, None)):
            if name in self._lost:
                reason = self._lost.pop(name)
                GPUS_LOST.set(len(self._lost))
                message = f"it answers again; it was lost: {reason}"
                self._report("gpu_recovered", name, message)

    def report_all(self, kind: str, message: str) -> None:
        """Report what happened to the driver, so to each GPU that was not lost."""
        for uuid in self._known:
            if uuid not in self._lost:
                self._report(kind, uuid, message)


class GpuPool:
    """Queries all GPUs of an open source."""

    def __init__(
        self,
        *,
        availability: GpuAvailability,
        deadline_seconds: float,
        readings_seconds: float,
        health_seconds: float,
    ) -> None:
        self._availability = availability
        self.deadline_seconds = deadline_seconds
        """How long a tick waits for the GPUs; it is read at each tick."""
        self._readings_ns = round(readings_seconds * NS_PER_SECOND)
        self._health_ns = round(health_seconds * NS_PER_SECOND)
        self._leaked = LeakedThreads()
        self._breaker_log = BreakerLog()
        self.workers: list[GpuWorker] = []
        """One for each GPU of the open source that can be queried."""
        self._cycle: PollCycle | None = None
        self.source_lost: str | None = None
        """Why no GPU can answer any more, where the last answers said so."""
        self.facts: dict[str, GpuFacts] = {}
        """What is known of each GPU, by UUID."""
        self.facts_changes = 0
        """How often that was news."""

    @property
    def uuids(self) -> set[str]:
        """The GPUs that are queried, be it by probes."""
        return {worker.gpu.uuid for worker in self.workers}

    @property
    def accounting_gpus(self) -> list[Gpu]:
        """The GPUs whose driver keeps accounts of processes."""
        return [worker.gpu for worker in self.workers if worker.gpu.has_process_accounting]

    @property
    def is_unresponsive(self) -> bool:
        """Whether there are GPUs, and none of them answers."""
        return bool(self.workers) and all(worker.is_unresponsive for worker in self.workers)

    @property
    def is_stuck(self) -> bool:
        """Whether a call hangs, so that closing the source may hang too."""
        return any(worker.is_stuck for worker in self.workers) or self._leaked.total() > 0

    @property
    def open_groups(self) -> list[str]:
        """What is not queried of which GPU, for people."""
        return [
            f"{group.value} of {worker.gpu.uuid}"
            for worker in self.workers
            for group in worker.open_groups
        ]

    def begin(self, found: Sequence[Gpu], now_ns: int) -> None:
        """Begin with the GPUs of a newly opened source; one whose threads all hang is left out."""
        self.source_lost = None

        def pace(position: int, period_ns: int) -> Pace:
            origin_ns = now_ns + position * period_ns // len(found)
            return Pace(origin_ns=origin_ns, period_ns=period_ns)

        self.workers = [
            GpuWorker(
                gpu,
                leaked=self._leaked,
                breaker_log=self._breaker_log,
                backoff=slow_backoff,
                readings=pace(position, self._readings_ns),
                health=pace(position, self._health_ns),
                now_ns=now_ns,
            )
            for position, gpu in enumerate(found)
            if not self._leaked.is_full(gpu.uuid)
        ]

    def end(self) -> None:
        """Let the threads go; those that hang are leaked."""
        for worker in self.workers:
            worker.end()
        self.workers = []

    def keep_facts(self, uuids: Collection[str], *, indices: Collection[int]) -> None:
        """Forget the GPUs that are neither these nor at these indices: they are no more there."""
        kept = {
            uuid: facts
            for uuid, facts in self.facts.items()
            if uuid in uuids or facts.index in indices
        }
        self.facts_changes += len(kept) < len(self.facts)
        self.facts = kept

    async def poll(self, cursors: Mapping[str, SampleCursor], now_ns: int) -> list[RawGpuSample]:
        """Return the samples of the GPUs that answered in time."""
        started = []
        for worker in self.workers:
            cursor = cursors.get(worker.gpu.uuid, SampleCursor())
            request = worker.next_request(cursor, last=self._cycle, now_ns=now_ns)
            if request:
                started.append((worker, request))
        self._cycle = PollCycle(deadline_seconds=self.deadline_seconds)
        self._cycle.start([(request, worker.thread.submit) for worker, request in started])
        await self._cycle.wait()
        evaluated = [self._evaluate(worker, self._cycle, now_ns) for worker, _ in started]
        samples = [sample for sample in evaluated if sample]
        GPU_DEADLINES_MISSED.inc(len(self.workers) - len(samples))
        # With the library no GPU answers, which says nothing of any one of them.
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
            # No probe can help: only a new opening gives another handle of it.
            self._availability.record_lost(uuid, str(error))
            worker.end()
            self.workers.remove(worker)
            return None
        except SourceLostError as error:
            self.source_lost = str(error)
            return None
        if sample:
            self._availability.record_answer(uuid, index=sample.index)
            if sample.facts and sample.facts != self.facts.get(uuid):
                self.facts[uuid] = sample.facts
                self.facts_changes += 1
        return sample
