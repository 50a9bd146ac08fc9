"""Ends of processes in ticks: the process, the ticks covered, and the time not yet reported."""

from collections.abc import Sequence

import pytest

from gpuledger.clock import NS_PER_SECOND
from gpuledger.records import (
    ContainerRef,
    GpuProcess,
    GpuReading,
    GpuTotals,
    ProcessExit,
    ProcessKind,
)
from gpuledger_agent.core.processes.accounting.exit_matcher import ExitedProcess
from gpuledger_agent.core.processes.accounting.exit_reporter import ExitReporter
from gpuledger_agent.core.processes.table import UNREADABLE, Location, ProcessFacts
from gpuledger_agent.core.processes.tracker import ContainerTable
from gpuledger_agent.core.tick_clock import TickInterval
from tests.held_objects import count_held

EPOCH_NS = 1_795_000_000 * NS_PER_SECOND
ONE = "a" * 64
IN_ONE = ProcessFacts(
    started_boottime_ns=5 * NS_PER_SECOND, location=Location(container_id=ONE, pod_uid="u")
)
ON_HOST = ProcessFacts(started_boottime_ns=5 * NS_PER_SECOND)


def closed(
    opened: float | None,
    lived: float | None,
    busy: float | None = 0.3,
    *,
    pid: int = 7,
    facts: ProcessFacts = IN_ONE,
    gpu: str = "GPU-0",
) -> ExitedProcess:
    totals = GpuTotals(gpu_uuid=gpu, busy_ns=ns(busy), lifetime_ns=ns(lived))
    return ExitedProcess(pid, facts, totals, ns(opened))


def ns(seconds: float | None) -> int | None:
    return None if seconds is None else round(seconds * NS_PER_SECOND)


class Node:
    """A node with one GPU; ticks last a second, and the first covers second 10."""

    def __init__(self) -> None:
        self.reporter = ExitReporter()
        self.second = 9
        self.containers: list[ContainerRef] = []

    def tick(
        self,
        *ended: ExitedProcess,
        ratio: float = 0.5,
        listed: Sequence[GpuProcess] = (),
        reading: GpuReading | None = None,
        is_accounted: bool = True,
    ) -> list[ProcessExit]:
        self.second += 1
        begin_ns = self.second * NS_PER_SECOND
        covered = TickInterval(
            seq=self.second * 1000,
            begin_ns=begin_ns,
            end_ns=begin_ns + NS_PER_SECOND,
            time_ns=EPOCH_NS + begin_ns + NS_PER_SECOND,
        )
        containers = ContainerTable()
        self.reporter.add(ended)
        ends = self.reporter.report(
            covered,
            gpus=[reading or GpuReading(uuid="GPU-0", index=0, utilization_ratio=ratio)],
            processes=listed,
            accounting_gpus={"GPU-0"} if is_accounted else (),
            container_index=containers.index_of,
        )
        self.containers = containers.refs()
        return ends or []


def listed(*, ended: bool | None = None) -> GpuProcess:
    return GpuProcess(
        gpu=0,
        pid=7,
        kind=ProcessKind.COMPUTE,
        started_boottime_ns=5 * NS_PER_SECOND,
        container=0,
        ended=ended,
    )


@pytest.fixture
def node() -> Node:
    made = Node()
    made.tick(ratio=0.0)
    return made


def test_an_end_is_reported_by_the_tick_that_covers_it(node: Node) -> None:
    node.tick(closed(11.5, 0.4), ratio=0.3)
    # The driver's windows reach a little beyond the end, to 12.07.
    (end,) = node.tick(ratio=0.0)
    assert end == ProcessExit(
        gpu=0,
        pid=7,
        started_boottime_ns=5 * NS_PER_SECOND,
        container=0,
        lifetime_ns=400_000_000,
        busy_ns=300_000_000,
        sampled_busy_ns=0,
        reserved_busy_ns=300_000_000,
        from_seq=11_000,
        from_time_ns=EPOCH_NS + 11 * NS_PER_SECOND,
        until_seq=12_000,
        until_time_ns=EPOCH_NS + 13 * NS_PER_SECOND,
    )
    assert node.containers == [ContainerRef(container_id=ONE, pod_uid="u")]
    assert node.tick() == []


def test_a_process_of_the_host_has_no_container(node: Node) -> None:
    (end,) = node.tick(closed(11.2, 0.4, facts=ON_HOST))
    assert end.container is None
    assert node.containers == []


def test_an_end_has_the_sampled_time_and_the_reserved_time(node: Node) -> None:
    """Its samples count in the ticks that listed it, from the first of them on."""
    node.tick(ratio=0.2)
    node.tick(ratio=0.4, listed=[listed()])
    (end,) = node.tick(closed(11.9, 1.5, 1.0), ratio=0.1, listed=[listed(ended=True)])
    assert end.sampled_busy_ns == 500_000_000
    # It was not listed in second 11, and had the GPU open for its last 0.1 s plus one window.
    assert end.reserved_busy_ns == 200_000_000
    assert (end.from_seq, end.until_seq) == (11_000, 13_000)


def test_ends_on_one_gpu_share_its_unattributed_time(node: Node) -> None:
    ends = node.tick(closed(11.2, 0.4), closed(11.3, 0.4, pid=8), ratio=0.3)
    assert [one.reserved_busy_ns for one in ends] == [150_000_000, 150_000_000]


@pytest.mark.parametrize(
    ("end", "reason"),
    [
        (closed(11.2, 0.4, facts=UNREADABLE), "unidentified"),
        (closed(None, 0.4), "undated"),
        (closed(11.2, None), "undated"),
        (closed(11.2, 0.4, None), "undated"),
        # The agent's first tick began at 10.
        (closed(9.9, 0.4), "older"),
    ],
)
def test_an_end_that_cannot_be_reported_is_counted_with_its_reason(
    node: Node, end: ExitedProcess, reason: str
) -> None:
    assert node.tick(end) == node.tick() == []
    assert node.reporter.unreported == {reason: 1}


def test_an_end_waits_for_a_tick_of_its_gpu_for_a_limited_time(node: Node) -> None:
    other = GpuReading(uuid="GPU-1", index=1, utilization_ratio=0.5)
    assert node.tick(closed(11.2, 0.4), reading=other) == []
    assert [one.pid for one in node.tick()] == [7]

    ends = [node.tick(closed(13.2, 0.4), reading=other)]
    ends += [node.tick(reading=other) for _ in range(130)]
    assert sum(map(len, ends)) == 0
    assert node.reporter.unreported == {"gpu_gone": 1}


def test_a_gpu_with_mig_has_no_time_to_reserve(node: Node) -> None:
    whole = GpuReading(uuid="GPU-0", index=0, utilization_ratio=0.9, mig_enabled=True)
    (end,) = node.tick(closed(11.2, 0.4), reading=whole)
    assert end.reserved_busy_ns == 0


def test_without_accounts_nothing_is_remembered() -> None:
    closing = ExitReporter()
    covered = TickInterval(seq=1, begin_ns=0, end_ns=NS_PER_SECOND, time_ns=EPOCH_NS)
    gpus = [GpuReading(uuid="GPU-0", index=0, utilization_ratio=0.5)]
    before = count_held(closing)
    reported = closing.report(
        covered,
        gpus=gpus,
        processes=[],
        accounting_gpus=set(),
        container_index=ContainerTable().index_of,
    )
    assert reported is None
    assert count_held(closing) == before


def test_a_gpu_without_accounting_is_forgotten_after_two_minutes(node: Node) -> None:
    never = count_held(ExitReporter())
    for _ in range(5):
        node.tick(listed=[listed()])
    assert count_held(node.reporter) > never
    # An account that arrives with the last tick is still reported.
    (end,) = node.tick(closed(15.2, 0.4), is_accounted=False)
    assert end.pid == 7
    for _ in range(130):
        node.tick(listed=[listed()], is_accounted=False)
    assert count_held(node.reporter) <= never
    # If it is enabled again, the sampled time of processes that began meanwhile is not known.
    assert node.tick() == node.tick(closed(100.2, 0.4)) == []
    assert node.reporter.unreported == {"older": 1}


def test_a_removed_gpu_is_forgotten_after_two_minutes(node: Node) -> None:
    other = GpuReading(uuid="GPU-1", index=1, utilization_ratio=0.5)
    for _ in range(130):
        node.tick(reading=other, is_accounted=False)
    assert count_held(node.reporter) <= count_held(ExitReporter())
