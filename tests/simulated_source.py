"""A second source of GPUs: the simulator's devices without NVML between them and the agent.

It is as small as a vendor can be: no thread, deadline, breaker, retry or cache, as all of these
lie on the agent's side of the seam (`gpuledger_agent.gpu.protocol`). It has no profiling or health.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any

from gpuledger.clock import Clock
from gpuledger.records import GpuFacts, MigInstance, ProcessKind
from gpuledger_agent.core.incidents import Detection
from gpuledger_agent.core.raw import (
    CallGroup,
    ClockReading,
    FastPoll,
    InstanceIdentity,
    ListedProcess,
    ProcessUtilizationSample,
    RawGpuSample,
    SampleCursor,
    UtilizationSample,
)
from gpuledger_agent.gpu.protocol import (
    FailedError,
    Gpu,
    GpuIdentity,
    LibraryLostError,
    SourceLostError,
)
from gpuledger_simulator.device import SimulatedGpu
from gpuledger_simulator.gpu_models import SimulatedInstance
from gpuledger_simulator.plan import PlannedProcess
from gpuledger_simulator.sampling_windows import SamplingWindows
from gpuledger_simulator.simulation import SimulatedNode
from tests.fakes.gpus import PlainSource, SilentDriver

_MILLI = 1000
_NS_PER_US = 1000
_SECOND_NS = 1_000_000_000


@dataclass(kw_only=True)
class DirectGpu:
    """One simulated device, asked for its truth as a driver's library would tell it."""

    truth: SimulatedGpu
    windows: SamplingWindows
    clock: Clock
    epoch_ns: int
    uptime_ns: int
    error: SourceLostError | None = None
    has_process_accounting = False
    handle = None

    @property
    def uuid(self) -> str:
        return self.truth.facts.uuid

    @property
    def index(self) -> int:
        return self.truth.facts.index

    def query(self, group: CallGroup, cursor: SampleCursor) -> dict[str, Any]:
        if self.error:
            raise self.error
        if group is CallGroup.BOOKS:
            return self._core(cursor)
        if group is CallGroup.READINGS:
            return {"readings": {"power_instant_watts": self._milliwatts()}}
        return {"facts": self._facts()} if group is CallGroup.HEALTH else {}

    def fast_poll(self, cursor: SampleCursor | None, *, at: ClockReading) -> FastPoll:
        told = self._core(cursor or SampleCursor())
        names = told.keys() & set(FastPoll.__struct_fields__)
        if cursor is None:
            names &= {"energy_millijoules", "power_milliwatts"}
        return FastPoll(
            uuid=self.uuid,
            at=at,
            since_us=cursor.process_us if cursor else 0,
            **{name: told[name] for name in names},
        )

    def _core(self, cursor: SampleCursor) -> dict[str, Any]:
        now_ns, facts = self._now_ns(), self.truth.facts
        whole = {
            "model": facts.name,
            "memory_total_bytes": facts.memory_bytes,
            "memory_used_bytes": self.truth.used_bytes(now_ns),
            "memory_reserved_bytes": facts.model.reserved_bytes,
            "power_milliwatts": self._milliwatts(),
            "energy_millijoules": int(self.truth.joules(-self.uptime_ns, now_ns) * _MILLI),
        }
        board = facts.mig_board if facts.cuts else None
        whole["compute_slices"], whole["memory_slices"] = board.whole if board else (1, 1)
        cut = self.truth.cut(now_ns)
        if cut:
            instances = tuple(self._instance(instance) for instance in cut.instances)
            return {**whole, "mig_enabled": True, "instances": instances, "processes": ()}
        return {**whole, **self._utilization(cursor), "processes": self._processes()}

    def _utilization(self, cursor: SampleCursor) -> dict[str, Any]:
        now_ns, windows = self._now_ns(), self.windows
        return {
            "mig_enabled": False if self.truth.facts.cuts else None,
            "samples": tuple(
                UtilizationSample(
                    timestamp_us=window.timestamp_us, percent=windows.gpu_percent(window)
                )
                for window in windows.newer_than(cursor.gpu_us, now_ns=now_ns)
            ),
            "memory_samples": tuple(
                UtilizationSample(
                    timestamp_us=window.timestamp_us, percent=windows.memory_percent(window)
                )
                for window in windows.newer_than(cursor.memory_us, now_ns=now_ns)
            ),
            "process_samples": tuple(
                ProcessUtilizationSample(
                    pid=sample.pid,
                    timestamp_us=sample.timestamp_us,
                    sm_percent=sample.sm_percent,
                    memory_percent=sample.memory_percent,
                )
                for window in windows.newer_than(cursor.process_us, now_ns=now_ns)
                for sample in windows.process_samples(window)
            ),
        }

    def _processes(self, instance: SimulatedInstance | None = None) -> tuple[ListedProcess, ...]:
        return tuple(
            _listed(process, kind, instance)
            for kind in (ProcessKind.COMPUTE, ProcessKind.GRAPHICS, ProcessKind.MPS)
            for process in self.truth.users(self._now_ns())
            if kind.value in process.spec.kinds and self.truth.instance_of(process) == instance
        )

    def _instance(self, instance: SimulatedInstance) -> RawGpuSample:
        processes = self.truth.users(self._now_ns())
        return RawGpuSample(
            uuid=instance.uuid,
            index=self.index,
            model=self.truth.facts.name,
            instance=InstanceIdentity(
                uuid=instance.uuid,
                parent_uuid=self.uuid,
                index=instance.device_index,
                gpu_instance=instance.gpu_instance,
                compute_instance=instance.compute_instance,
                profile=instance.profile,
                gpu_slices=instance.gpu_slices,
                compute_slices=instance.compute_slices,
            ),
            memory_total_bytes=instance.memory_bytes,
            memory_used_bytes=sum(
                process.spec.memory_bytes
                for process in processes
                # Memory is of the GPU instance, and its compute instances share it.
                if (other := self.truth.instance_of(process))
                and other.gpu_instance == instance.gpu_instance
            ),
            processes=self._processes(instance),
            compute_slices=instance.compute_slices,
            memory_slices=instance.slices,
        )

    def _facts(self) -> GpuFacts:
        cut, facts = self.truth.cut(self._now_ns()), self.truth.facts
        return GpuFacts(
            uuid=self.uuid,
            index=self.index,
            model=facts.name,
            memory_total_bytes=facts.memory_bytes,
            mig_enabled=bool(cut) if facts.cuts else None,
            instances=[
                MigInstance(
                    uuid=instance.uuid,
                    gpu_instance=instance.gpu_instance,
                    compute_instance=instance.compute_instance,
                    profile=instance.profile,
                )
                for instance in (cut.instances if cut else ())
            ],
            capabilities=[],
        )

    def _milliwatts(self) -> int:
        now_ns = self._now_ns()
        return round(self.truth.joules(now_ns - _SECOND_NS, now_ns) * _MILLI)

    def _now_ns(self) -> int:
        return self.clock.time_ns() - self.epoch_ns


def _listed(
    process: PlannedProcess, kind: ProcessKind, instance: SimulatedInstance | None
) -> ListedProcess:
    return ListedProcess(
        pid=process.pid,
        kind=kind,
        memory_bytes=process.spec.memory_bytes if process.spec.memory_visible else None,
        gpu_instance=instance.gpu_instance if instance else None,
        compute_instance=instance.compute_instance if instance else None,
    )


class DirectSource(PlainSource):
    """The GPUs of a simulated node; a test puts their faults."""

    def __init__(
        self, node: SimulatedNode, *, epoch_ns: int, period_ns: int, uptime_ns: int
    ) -> None:
        super().__init__(SilentDriver(call="driver_events", reason="NotSupported"))
        self.faults: SimpleQueue[Detection] = SimpleQueue()
        self.gpus = [
            DirectGpu(
                truth=gpu,
                windows=SamplingWindows(
                    gpu, period_ns=period_ns, stamp_us=lambda ns: (epoch_ns + ns) // _NS_PER_US
                ),
                clock=node.clock,
                epoch_ns=epoch_ns,
                uptime_ns=uptime_ns,
            )
            for gpu in node.gpus
        ]

    def open(self) -> Sequence[Gpu]:
        self.is_open = True
        return self.gpus

    def versions(self) -> Mapping[str, str | None]:
        if not self.is_open:
            raise LibraryLostError("not open")
        return {"driver_version": "direct 1.0"}

    def gpu_events(self, gpus: Sequence[GpuIdentity], *, clock: Clock) -> "DirectEvents":
        if not gpus:
            raise FailedError("there is no GPU to listen to")
        return DirectEvents(self.faults)


@dataclass
class DirectEvents:
    """The faults that a test has put, one after the other."""

    faults: SimpleQueue[Detection]

    def wait(self, timeout_ms: int) -> Detection | None:
        try:
            return self.faults.get(timeout=timeout_ms / _MILLI)
        except Empty:
            return None

    def close(self) -> None:
        pass
