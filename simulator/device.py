"""One GPU as physics: kernels that run, memory that is held, energy that is drawn.

Here the truth of a device is asked at any instant since the scenario's start. In which form NVML
tells of it is `nvml`'s business.
"""

from dataclasses import dataclass, field
from threading import Lock
from typing import Final

from simulator.gpu_models import ARCHITECTURES, MODELS, UNLISTED, Architecture, GpuModel
from simulator.health_faults import HealthFaults
from simulator.kernels import Kernels, Stream
from simulator.mig import Cut, SimulatedInstance, cut_at, plan_cuts
from simulator.plan import PlannedProcess
from simulator.scenario.schema import GpuGroup, Node

_NS: Final = 1_000_000_000


@dataclass(frozen=True, kw_only=True)
class DeviceFacts:
    """What never changes of a GPU."""

    uuid: str
    """Its UUID as NVML writes it."""
    index: int
    """The driver's index."""
    name: str
    """Product name."""
    memory_bytes: int
    """Size of its memory."""
    idle_watts: float
    """Draw while no kernel runs."""
    max_watts: float
    """Draw while kernels run."""
    model: GpuModel
    """The product's other facts."""
    ailments: HealthFaults = field(default_factory=HealthFaults)
    """What befalls it."""

    @property
    def architecture(self) -> Architecture:
        """What its generation can be asked for."""
        return ARCHITECTURES[self.model.architecture]

    cuts: list[Cut]
    """How it is cut into instances, one cut after the other."""
    accounting: str
    """`off`, or the version of the driver's accounting."""


def gpu_groups(node: Node) -> list[GpuGroup]:
    """Return the GPUs of a node one by one, in the driver's order."""
    groups = [node.gpus] if isinstance(node.gpus, GpuGroup) else node.gpus
    return [group for group in groups for _ in range(group.count)]


def describe_gpu(group: GpuGroup, *, uuid: str, index: int) -> DeviceFacts:
    """Fill in from the product facts what the scenario leaves out."""
    model = MODELS.get(group.model, UNLISTED)
    memory_bytes = group.memory_bytes or model.memory_bytes
    room_bytes = memory_bytes - model.reserved_bytes
    return DeviceFacts(
        uuid=uuid,
        index=index,
        name=group.model,
        memory_bytes=memory_bytes,
        idle_watts=group.idle_watts or model.idle_watts,
        max_watts=group.max_watts or model.max_watts,
        model=model,
        ailments=HealthFaults(group.ailments),
        cuts=plan_cuts(group.mig, gpu_uuid=uuid, room_bytes=room_bytes),
        accounting=group.accounting,
    )


class SimulatedGpu:
    """One GPU and the processes that ever use it; safe to ask from several threads."""

    def __init__(
        self,
        facts: DeviceFacts,
        processes: list[PlannedProcess],
        *,
        seed: int,
        time_slice_ns: int,
    ) -> None:
        self.facts = facts
        self.processes = processes
        self._lock = Lock()
        self._streams = {
            process: Stream(
                start_ns=process.start_ns,
                end_ns=process.end_ns,
                kernel_ns=round(process.spec.load.kernel_seconds * _NS),
                busy_ratio=process.spec.load.busy_ratio,
                seed=f"{seed}/{facts.uuid}/{process.pid}",
            )
            for process in processes
        }
        self._kernels = {
            place: Kernels(
                [stream for process, stream in self._streams.items() if _place(process) == place],
                time_slice_ns=time_slice_ns,
            )
            for place in {_place(process) for process in processes}
        }

    def busy_ns(self, process: PlannedProcess, start_ns: int, end_ns: int) -> int:
        """Time within [start, end) in which the process's kernels ran."""
        with self._lock:
            self._kernels[_place(process)].run_until(end_ns)
            busy = self._streams[process].busy
            return busy.until(end_ns) - busy.until(start_ns)

    def device_busy_ns(self, start_ns: int, end_ns: int) -> int:
        """Time within [start, end) in which any kernel ran; that of an instance by its share."""
        return sum(
            round(self.busy_ns(process, start_ns, end_ns) * self.share(process))
            for process in self.processes
        )

    def memory_busy_ns(self, process: PlannedProcess, start_ns: int, end_ns: int) -> float:
        """Time within [start, end) in which the process kept the memory controller busy."""
        return self.busy_ns(process, start_ns, end_ns) * process.spec.load.memory_ratio

    def mixed_ns(self, what: str, start_ns: int, end_ns: int) -> float:
        """Time within [start, end) weighed by a part of the processes' kernel mix.

        Of a ratio it is the time in which that part of the chip worked, of a rate in bytes per
        second the bytes times 1e9.
        """
        worked_ns = 0.0
        for process in self.processes:
            busy_ns = self.busy_ns(process, start_ns, end_ns)
            worked_ns += busy_ns * getattr(process.spec.load.mix, what)
        return worked_ns

    def intervals(self, process: PlannedProcess, until_ns: int) -> list[tuple[int, int]]:
        """Return the busy intervals that started before `until_ns`, as (start, end)."""
        with self._lock:
            self._kernels[_place(process)].run_until(until_ns)
            return [span for span in self._streams[process].busy.intervals() if span[0] < until_ns]

    def cut(self, time_ns: int) -> Cut | None:
        """Return the GPU's instances at `time_ns`; `None` while it is whole."""
        return cut_at(self.facts.cuts, time_ns)

    def cuts_within(self, start_ns: int, end_ns: int) -> list[Cut]:
        """Return the cuts that the GPU had at any time within [start, end)."""
        first = self.cut(start_ns)
        return [cut for cut in self.facts.cuts if cut is first or start_ns < cut.start_ns < end_ns]

    def instance_of(self, process: PlannedProcess) -> SimulatedInstance | None:
        """Return the instance in which a process runs; `None` on a whole GPU."""
        cut, place = self.cut(process.start_ns), process.spec.instance
        return None if cut is None or place is None else cut.instances[place]

    def share(self, process: PlannedProcess) -> float:
        """Return the share of the GPU's multiprocessors that a process has at hand."""
        instance = self.instance_of(process)
        return instance.share if instance else 1.0

    def alive(self, time_ns: int) -> list[PlannedProcess]:
        """Return the processes that hold memory at `time_ns`."""
        return [process for process in self.processes if process.alive(time_ns)]

    def used_bytes(self, time_ns: int) -> int:
        """Memory that processes hold at `time_ns`."""
        return sum(process.spec.memory_bytes for process in self.alive(time_ns))

    def active_joules(self, busy_ns: float) -> float:
        """Energy beyond the idle draw that `busy_ns` of kernels cost."""
        return busy_ns / _NS * (self.facts.max_watts - self.facts.idle_watts)

    def joules(self, start_ns: int, end_ns: int) -> float:
        """Energy drawn within [start, end); times before the scenario's start count as idle."""
        idle = (end_ns - start_ns) / _NS * self.facts.idle_watts
        return idle + self.active_joules(self.device_busy_ns(start_ns, end_ns))


def _place(process: PlannedProcess) -> int | None:
    """Return what runs one kernel at a time: the instance, or the whole GPU."""
    return process.spec.instance
