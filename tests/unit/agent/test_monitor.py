"""The monitor: detections from all sources become incidents, each reported once and at once."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress

import pytest
from typing_extensions import override

from gpuledger.clock import NS_PER_SECOND
from gpuledger.keys import NodeId
from gpuledger.records import GpuDetails, GpuHealth, Incident, IncidentProcess, Severity
from gpuledger.runtime import Check
from gpuledger_agent.core.incidents import Detection
from gpuledger_agent.core.processes.table import ProcessTable
from gpuledger_agent.gpu.nvidia.session import NvmlSession
from gpuledger_agent.host.kmsg import Kmsg
from gpuledger_agent.host.procfs import ProcessReader
from gpuledger_agent.metrics import INCIDENTS, INCIDENTS_DROPPED, INCIDENTS_DUPLICATE
from gpuledger_agent.monitor import IncidentMonitor
from gpuledger_simulator.simulation import SimulatedNode
from tests.fakes.nvml import FakeProcfs
from tests.hanging import HANG_SECONDS
from tests.metric_values import value_of
from tests.unit.agent.core.incidents.builders import (
    EPOCH_NS,
    PatientClock,
    Reported,
    failing_node,
    gpus_of,
    pausing,
)

GPU = "GPU-1"


def healthy(health: GpuHealth) -> GpuDetails:
    return GpuDetails(uuid=GPU, health=health)


WELL = GpuHealth(recovery_action="none", remapped_rows_pending=False, remapped_rows_failed=False)


def watch_of(
    node: SimulatedNode,
    reported: Reported,
    *,
    processes: Sequence[IncidentProcess] = (),
    open_kmsg: Callable[[], Kmsg] | None = None,
    check: Check | None = None,
) -> IncidentMonitor:
    return IncidentMonitor(
        node=NodeId("default", "node-a"),
        boot_id="boot-1",
        source=NvmlSession(node.nvml, monotonic_ns=node.clock.monotonic_ns),
        clock=node.clock,
        publish=reported,
        processes_on=lambda _uuid, _instance: processes,
        open_kmsg=open_kmsg,
        kmsg_check=check,
    )


@asynccontextmanager
async def running(watch: IncidentMonitor) -> AsyncIterator[None]:
    task = asyncio.create_task(watch.run())
    for _ in range(5):
        await asyncio.sleep(0)
    try:
        yield
    finally:
        watch.closing()
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


@pytest.fixture
def clock() -> PatientClock:
    return PatientClock(start_ns=EPOCH_NS)


@pytest.fixture
def reported() -> Reported:
    return Reported()


@pytest.fixture
def idle(reported: Reported, clock: PatientClock) -> IncidentMonitor:
    return watch_of(failing_node(clock=clock), reported)


def xid(code: int = 79, *, source: str = "nvml", at: float = 0, **more: object) -> Detection:
    given = {"kind": "xid", "gpu_uuid": GPU, "xid": code, "source": source, **more}
    return Detection(time_ns=EPOCH_NS + round(at * NS_PER_SECOND), **given)  # type: ignore[arg-type]  # a test's own fields


async def test_an_event_is_reported_with_the_processes_on_the_gpu(
    clock: PatientClock, reported: Reported
) -> None:
    node = failing_node({"at_seconds": 1, "xid": 48, "gpu_instance": 3}, clock=clock)
    on_it = [IncidentProcess(pid=7, command="train", pod_uid="uid-train")]
    watch = watch_of(node, reported, processes=on_it)
    gpus = gpus_of(node)
    waits = asyncio.Event()
    node.nvml.events.pause = pausing(waits)
    async with running(watch):
        await asyncio.to_thread(watch.opened, gpus)
        await asyncio.wait_for(waits.wait(), HANG_SECONDS)
        clock.advance(2)
        incident = await reported.next()

    assert (incident.kind, incident.xid, incident.source) == ("xid", 48, "nvml")
    assert (incident.gpu_uuid, incident.gpu_instance) == (gpus[0].uuid, 3)
    assert incident.gpu_index == 0
    assert incident.time_ns == EPOCH_NS + NS_PER_SECOND
    assert incident.processes == on_it


async def test_a_lost_gpu_keeps_its_index_and_an_unknown_one_has_none(
    reported: Reported, idle: IncidentMonitor, clock: PatientClock
) -> None:
    """The library does not list a lost GPU when it is reopened."""
    gpus = gpus_of(failing_node(clock=clock))
    try:
        idle.opened(gpus)
        idle.opened(gpus[:1])
    finally:
        idle.closing()
    for uuid in (*(gpu.uuid for gpu in gpus), "PCI:0000:3B:00"):
        idle.report("gpu_lost", uuid, "it is lost")

    assert [one.gpu_index for one in reported.incidents] == [0, 1, None]


async def test_a_detection_from_both_sources_is_reported_once_and_counted(
    reported: Reported, clock: PatientClock
) -> None:
    node = failing_node({"at_seconds": 1, "xid": 79, "reported_by": "kmsg"}, clock=clock)
    watch = watch_of(node, reported, open_kmsg=node.open_kmsg)
    watch.opened(gpus_of(node))
    before = value_of(INCIDENTS_DUPLICATE.labels(source="nvml"))
    async with running(watch):
        clock.advance(2)
        first = await reported.next()
        watch.handle(xid(gpu_uuid=node.gpus[0].facts.uuid, at=1.2))

    assert (first.source, first.gpu_uuid) == ("kmsg", node.gpus[0].facts.uuid)
    assert reported.incidents == [first]
    assert value_of(INCIDENTS_DUPLICATE.labels(source="nvml")) == before + 1


async def test_events_are_reported_even_if_the_kernel_log_cannot_be_read(
    reported: Reported, clock: PatientClock
) -> None:
    def refuse() -> Kmsg:
        raise PermissionError(1, "Operation not permitted")

    node, check = failing_node(clock=clock), Check()
    watch = watch_of(node, reported, open_kmsg=refuse, check=check)
    async with running(watch):
        watch.hand_over(xid())
        assert (await reported.next()).xid == 79
    assert "cannot read the kernel log" in check.detail


async def test_a_detection_from_before_the_loop_ran_is_reported(
    idle: IncidentMonitor, reported: Reported
) -> None:
    idle.hand_over(xid())
    async with running(idle):
        assert (await reported.next()).xid == 79


async def test_detections_that_overflow_are_counted_and_the_oldest_are_kept(
    idle: IncidentMonitor, reported: Reported
) -> None:
    before = value_of(INCIDENTS_DROPPED)
    for number in range(5000):
        idle.hand_over(xid(31, at=number))

    async with running(idle):
        first = await reported.next()
        while len(reported.incidents) < 4096:
            await reported.next()
    assert value_of(INCIDENTS_DROPPED) == before + 5000 - 4096
    assert first.time_ns == EPOCH_NS


class SleepingClock(PatientClock):
    """Records how long it was slept."""

    slept_seconds = 0.0

    @override
    async def sleep(self, seconds: float) -> None:
        self.slept_seconds += seconds
        await super().sleep(seconds)


async def test_a_burst_is_reported_no_faster_than_a_disk_can_write_it(reported: Reported) -> None:
    clock = SleepingClock(start_ns=EPOCH_NS)
    watch = watch_of(failing_node(clock=clock), reported)
    for number in range(2000):
        watch.hand_over(xid(31, at=number))
    async with running(watch):
        while len(reported.incidents) < 2000:
            await reported.next()
    assert 0.9 <= clock.slept_seconds <= 2


def test_a_process_from_the_kernel_log_is_reported_even_if_it_has_ended(
    reported: Reported, clock: PatientClock
) -> None:
    watch = watch_of(failing_node(clock=clock), reported, processes=[IncidentProcess(pid=7)])
    watch.handle(xid(source="kmsg", pid=9, command="gone"))
    watch.handle(xid(31, source="kmsg", pid=7, command="there"))

    assert [one.processes for one in reported.incidents] == [
        [IncidentProcess(pid=7), IncidentProcess(pid=9, command="gone")],
        [IncidentProcess(pid=7)],
    ]


def test_an_incident_from_the_agent_has_the_agents_message(
    idle: IncidentMonitor, reported: Reported
) -> None:
    before = value_of(INCIDENTS.labels(kind="gpu_lost", source="agent"))
    idle.report("gpu_lost", GPU, "nvmlDeviceGetName: GPU is lost")
    idle.report("gpu_lost", GPU, "nvmlDeviceGetName: GPU is lost")

    first, second = reported.incidents
    assert first == second
    assert first.severity is Severity.CRITICAL
    assert first.message.endswith("for this GPU: nvmlDeviceGetName: GPU is lost")
    assert (first.node, first.boot_id, first.time_ns) == ("node-a", "boot-1", EPOCH_NS)
    assert value_of(INCIDENTS.labels(kind="gpu_lost", source="agent")) == before + 2


def test_a_repartitioning_seen_by_an_event_and_a_later_tick_is_reported_once(
    idle: IncidentMonitor, reported: Reported, clock: PatientClock
) -> None:
    idle.handle(Detection(kind="mig_changed", gpu_uuid=GPU, time_ns=EPOCH_NS, source="nvml"))
    clock.advance(5)
    idle.report("mig_changed", GPU, "it has 7g.80gb now")
    idle.report("mig_changed", "GPU-2", "it has no instances now")
    clock.advance(15)
    idle.report("mig_changed", GPU, "it has no instances now")

    found = [(one.gpu_uuid, one.source) for one in reported.incidents]
    assert found == [(GPU, "nvml"), ("GPU-2", "agent"), (GPU, "agent")]


def news(reported: Reported) -> list[Incident]:
    """Return the incidents that were not present at the start."""
    return [one for one in reported.incidents if not one.present_at_start]


def test_a_worse_reading_without_an_event_is_reported_once(
    idle: IncidentMonitor, reported: Reported
) -> None:
    worse = GpuHealth(recovery_action="reset", remapped_rows_pending=True)
    for second, health in enumerate([WELL, worse, worse, GpuHealth(), worse]):
        idle.evaluate_health(healthy(health), time_ns=EPOCH_NS + second * NS_PER_SECOND)

    assert [(one.kind, one.action) for one in news(reported)] == [
        ("recovery_action", "RESET_GPU"),
        ("row_remap_pending", "RESET_GPU"),
    ]
    assert {one.time_ns for one in news(reported)} == {EPOCH_NS + NS_PER_SECOND}


def test_a_worse_reading_that_an_event_explains_is_not_reported_again(
    idle: IncidentMonitor, reported: Reported
) -> None:
    idle.evaluate_health(healthy(WELL), time_ns=EPOCH_NS)
    idle.handle(xid(63, at=5))
    idle.handle(xid(154, at=5, source="kmsg", action="RESET_GPU"))
    worse = GpuHealth(recovery_action="reset", remapped_rows_pending=True)
    idle.evaluate_health(healthy(worse), time_ns=EPOCH_NS + 10 * NS_PER_SECOND)

    assert [one.xid for one in news(reported)] == [63, 154]


@pytest.mark.parametrize(("gpu", "at"), [("GPU-2", 5), (GPU, -120)])
def test_an_event_of_another_gpu_or_from_long_ago_explains_nothing(
    idle: IncidentMonitor, reported: Reported, gpu: str, at: float
) -> None:
    idle.evaluate_health(healthy(WELL), time_ns=EPOCH_NS)
    idle.handle(xid(63, gpu_uuid=gpu, at=at))
    idle.evaluate_health(
        healthy(GpuHealth(remapped_rows_pending=True)), time_ns=EPOCH_NS + 10 * NS_PER_SECOND
    )

    assert [one.kind for one in news(reported)] == ["xid", "row_remap_pending"]


def test_earlier_reports_do_not_suppress_new_changes_in_readings(
    idle: IncidentMonitor, reported: Reported
) -> None:
    states = [(0, "none"), (1, "reset"), (5, "none"), (9, "reset")]
    for number, (errors, action) in enumerate(states):
        health = GpuHealth(recovery_action=action, ecc_uncorrected_volatile_total=errors)
        idle.evaluate_health(healthy(health), time_ns=EPOCH_NS + number * 10 * NS_PER_SECOND)

    kinds = [one.kind for one in news(reported) if not one.ended_kinds]
    assert kinds.count("ecc_uncorrected") == 3
    assert kinds.count("recovery_action") == 3  # RESET, NONE, RESET
    assert "4 more, 9 in all" in news(reported)[-1].message


def test_an_event_explains_readings_for_a_minute_even_during_a_storm(
    idle: IncidentMonitor, reported: Reported
) -> None:
    idle.evaluate_health(healthy(WELL), time_ns=EPOCH_NS)
    idle.handle(xid(63, at=5))
    for number in range(100):
        idle.handle(xid(31, at=6 + number / 10))
        idle.handle(xid(13, gpu_uuid="GPU-2", at=6 + number / 10))
    idle.evaluate_health(
        healthy(GpuHealth(remapped_rows_pending=True)), time_ns=EPOCH_NS + 30 * NS_PER_SECOND
    )

    assert {one.kind for one in news(reported)} == {"xid"}


def test_the_process_table_returns_the_processes_on_a_gpu_or_its_instances() -> None:
    procfs = FakeProcfs()
    procfs.start(7, started_ticks=5, cgroup="/system.slice/ssh.service", command="train")
    procfs.start(9, started_ticks=5, cgroup="/system.slice/ssh.service", command="other")
    table = ProcessTable(
        processes=ProcessReader(procfs), node=NodeId("default", "node-a"), boot_id="boot-1"
    )
    table.refresh(
        {"GPU-1": [], "MIG-1": [7], "GPU-2": [9]}, listed_boottime_ns=10**12, time_ns=EPOCH_NS
    )

    assert table.processes_on({"GPU-1", "MIG-1"}) == [
        IncidentProcess(pid=7, started_boottime_ns=50_000_000, command="train")
    ]
    assert table.processes_on({"GPU-3"}) == []
