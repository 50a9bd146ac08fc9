"""The threads of a node's GPUs: asked together once a tick, and what became of each.

How the library is opened, and when again, is decided elsewhere.
"""

from collections.abc import Callable, Mapping, Sequence

from agent.core.raw import RawGpuSample, SampleCursor
from agent.gpu.breaker import BreakerLog
from agent.gpu.nvidia.client import GpuLostError, NvmlLostError
from agent.gpu.nvidia.session import Gpu
from agent.gpu.poll import PollCycle
from agent.gpu.worker import GpuWorker, HealthTimes, LeakedThreads, slow_backoff
from agent.metrics import GPU_DEADLINES_MISSED, GPUS_LOST
from gpuledger.records import GpuFacts

Tell = Callable[[str, str, str], None]
"""Takes an incident's kind, the GPU's UUID and one sentence for people."""


def tell_nobody(_kind: str, _gpu_uuid: str, _message: str) -> None:
    """Keep it to ourselves."""


class GpuAvailability:
    """The GPUs of a node that answered once, and those of them that do not any more."""

    def __init__(self, tell: Tell) -> None:
        self._tell = tell
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

    def lose(self, uuid: str, reason: str) -> None:
        """Take down that a GPU does not answer any more; told where that is news."""
        if uuid in self._lost:
            return
        self._lost[uuid] = reason
        GPUS_LOST.set(len(self._lost))
        self._tell("gpu_lost", uuid, reason)

    def started(self, found: Mapping[int, str], unfound: Mapping[int, str]) -> None:
        """Record a start: by index, the UUIDs that it found and what names the others.

        Those that an earlier start found are lost by their UUID, and not by another name.
        """
        self._indices |= found
        for index, name in unfound.items():
            if index not in self._indices and index not in self._unnamed:
                self._unnamed[index] = name
                self.lose(name, "it does not answer at the start of the library")

    def answered(self, uuid: str, *, index: int) -> None:
        """Record that a GPU answered; told where it was lost, be it by another name."""
        self._known[uuid] = None
        for name in (uuid, self._unnamed.pop(index, None)):
            if name in self._lost:
                self._recover(name)

    def _recover(self, uuid: str) -> None:
        reason = self._lost.pop(uuid)
        GPUS_LOST.set(len(self._lost))
        self._tell("gpu_recovered", uuid, f"it answers again; it was lost: {reason}")

    def tell_all(self, kind: str, message: str) -> None:
        """Report of something that happened to the driver, so to each GPU that was not lost."""
        for uuid in self._known:
            if uuid not in self._lost:
                self._tell(kind, uuid, message)


class GpuPool:
    """Asks all GPUs of an open library."""

    def __init__(
        self, *, losses: GpuAvailability, deadline_seconds: float, health_seconds: float
    ) -> None:
        self._losses = losses
        self._deadline_seconds = deadline_seconds
        self._health_ns = round(health_seconds * 1e9)
        self._abandoned = LeakedThreads()
        self._breaker_log = BreakerLog()
        self._threads: list[GpuWorker] = []
        self._round: PollCycle | None = None
        self.library_lost: str | None = None
        """Why no handle is good any more, where the last answers said so."""
        self.facts: dict[str, GpuFacts] = {}
        """What is known of each GPU, by UUID."""
        self.facts_changes = 0
        """How often that was news."""

    @property
    def uuids(self) -> set[str]:
        """The GPUs that are asked, be it by probes."""
        return {thread.gpu.uuid for thread in self._threads}

    @property
    def accounting_gpus(self) -> list[Gpu]:
        """The GPUs whose driver keeps accounts of processes."""
        return [thread.gpu for thread in self._threads if thread.gpu.keeps_accounts]

    @property
    def is_silent(self) -> bool:
        """Whether there are GPUs, and none of them answers."""
        return bool(self._threads) and all(thread.is_silent for thread in self._threads)

    @property
    def is_stuck(self) -> bool:
        """Whether a call hangs, so that closing the library may hang too."""
        return any(thread.is_stuck for thread in self._threads) or self._abandoned.total() > 0

    @property
    def open_groups(self) -> list[str]:
        """What is not asked of which GPU, for people."""
        return [
            f"{group.value} of {thread.gpu.uuid}"
            for thread in self._threads
            for group in thread.open_groups
        ]

    def begin(self, found: Sequence[Gpu], now_ns: int) -> None:
        """Begin with the handles of a new start; one whose threads all hang is left out."""
        self.library_lost = None
        self._threads = [
            self._thread(gpu, now_ns + place * self._health_ns // len(found), now_ns)
            for place, gpu in enumerate(found)
            if not self._abandoned.is_full(gpu.uuid)
        ]

    def end(self) -> None:
        """Let the threads go; those that hang are abandoned."""
        for thread in self._threads:
            thread.end()
        self._threads = []

    async def ask(self, last_seen: Mapping[str, SampleCursor], now_ns: int) -> list[RawGpuSample]:
        """Return the answers of the GPUs that answered in time."""
        asked = []
        for thread in self._threads:
            seen = last_seen.get(thread.gpu.uuid, SampleCursor())
            question = thread.next_question(seen, last=self._round, now_ns=now_ns)
            if question:
                asked.append((thread, question))
        self._round = PollCycle(deadline_seconds=self._deadline_seconds)
        self._round.ask([(question, thread.hand) for thread, question in asked])
        await self._round.wait()
        judged = [self._judge(thread, self._round, now_ns) for thread, _ in asked]
        answers = [answer for answer in judged if answer]
        GPU_DEADLINES_MISSED.inc(len(self._threads) - len(answers))
        self._take_down_silence()
        self._abandoned.show()
        return answers

    def _judge(self, thread: GpuWorker, ended: PollCycle, now_ns: int) -> RawGpuSample | None:
        uuid = thread.gpu.uuid
        try:
            answer = thread.judge(ended, now_ns)
        except GpuLostError as error:
            self._losses.lose(uuid, str(error))
            thread.end()
            self._threads.remove(thread)
            return None
        except NvmlLostError as error:
            self.library_lost = str(error)
            return None
        if answer:
            self._losses.answered(uuid, index=answer.index)
            if answer.facts and answer.facts != self.facts.get(uuid):
                self.facts[uuid] = answer.facts
                self.facts_changes += 1
        return answer

    def _take_down_silence(self) -> None:
        for thread in self._threads:
            if thread.is_silent and not self.library_lost:
                self._losses.lose(thread.gpu.uuid, thread.silence)

    def _thread(self, gpu: Gpu, health_ns: int, now_ns: int) -> GpuWorker:
        return GpuWorker(
            gpu,
            abandoned=self._abandoned,
            breaker_log=self._breaker_log,
            backoff=slow_backoff,
            health=HealthTimes(origin_ns=health_ns, period_ns=self._health_ns),
            now_ns=now_ns,
        )
