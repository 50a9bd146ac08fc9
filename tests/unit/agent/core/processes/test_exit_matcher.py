"""The end of a process with its usage, also for processes that no list ever showed."""

from collections.abc import Mapping, Sequence

import pytest

from gpuledger.clock import NS_PER_SECOND
from gpuledger.keys import NodeId
from gpuledger.records import GpuTotals, ProcessRecord
from gpuledger_agent.core.processes.accounting.exit_matcher import DriverAccount, ExitMatcher
from gpuledger_agent.core.processes.table import ProcessTable
from gpuledger_agent.host.procfs import ProcessReader
from tests.fakes.nvml import FakeProcfs
from tests.held_objects import is_bounded

SECOND_NS = 1_000_000_000
HALF_NS = SECOND_NS // 2
BOOT_NS = 1_700_000_000 * SECOND_NS
ONE, TWO = "a" * 64, "b" * 64


class Node:
    """A node whose process table and accounts a test advances, one second per tick."""

    def __init__(self) -> None:
        self.procfs = FakeProcfs()
        processes = ProcessReader(self.procfs)
        self.table = ProcessTable(
            processes=processes, node=NodeId("default", "node-1"), boot_id="boot-1"
        )
        self.matcher = ExitMatcher(
            processes=processes, node=NodeId("default", "node-1"), boot_id="boot-1"
        )
        self.seconds = 100
        self.set_by_seconds = 0

    def start(self, pid: int, *, seconds: int, container: str = ONE) -> None:
        self.procfs.start(pid, started_ticks=seconds * 100, cgroup=f"/docker/{container}")

    def tick(
        self,
        listed: Mapping[str, Sequence[int]],
        accounts: Mapping[str, Sequence[DriverAccount] | None],
    ) -> list[ProcessRecord]:
        self.seconds += 1
        boottime_ns = self.seconds * NS_PER_SECOND
        update = self.table.refresh(listed, listed_boottime_ns=boottime_ns, time_ns=boottime_ns)
        return self.matcher.match(
            update,
            accounts,
            time_ns=BOOT_NS + self.set_by_seconds * NS_PER_SECOND + boottime_ns,
            boottime_ns=boottime_ns,
        )


def account(
    pid: int, *, opened: float | None, gpu: str = "GPU-0", busy_ns: int = HALF_NS, held: int = 7
) -> DriverAccount:
    started_ns = None if opened is None else BOOT_NS + round(opened * NS_PER_SECOND)
    return pid, GpuTotals(
        gpu_uuid=gpu, busy_ns=busy_ns, max_memory_bytes=held, started_time_ns=started_ns
    )


def reported(records: Sequence[ProcessRecord]) -> list[tuple[str, int, str | None, int | None]]:
    return [(record.change, record.pid, record.container_id, record.busy_ns) for record in records]


@pytest.fixture
def node() -> Node:
    made = Node()
    made.start(7, seconds=50)
    return made


def test_without_accounts_an_end_is_reported_at_once(node: Node) -> None:
    assert reported(node.tick({"GPU-0": [7]}, {"GPU-0": None})) == [("seen", 7, ONE, None)]
    assert reported(node.tick({"GPU-0": []}, {"GPU-0": None})) == [("ended", 7, ONE, None)]


def test_an_end_has_the_usage_of_the_process(node: Node) -> None:
    node.tick({"GPU-0": [7]}, {"GPU-0": []})
    (end,) = node.tick({"GPU-0": []}, {"GPU-0": [account(7, opened=60, busy_ns=25 * HALF_NS)]})
    assert (end.change, end.busy_ns, end.max_memory_bytes) == ("ended", 25 * HALF_NS, 7)
    assert end.totals == [account(7, opened=60, busy_ns=25 * HALF_NS)[1]]


def test_an_end_waits_for_its_account_for_a_limited_time(node: Node) -> None:
    node.tick({"GPU-0": [7]}, {"GPU-0": []})
    assert node.tick({"GPU-0": []}, {"GPU-0": []}) == []
    late = node.tick({"GPU-0": []}, {"GPU-0": [account(7, opened=60)]})
    assert reported(late) == [("ended", 7, ONE, HALF_NS)]
    assert late[0].time_ns == 102 * SECOND_NS
    node.start(7, seconds=103)
    node.tick({"GPU-0": [7]}, {"GPU-0": []})
    waited = [reported(node.tick({"GPU-0": []}, {"GPU-0": []})) for _ in range(8)]
    assert [len(one) for one in waited] == [0, 0, 0, 0, 0, 1, 0, 0]
    # An account that arrives later does not create a second process.
    assert node.tick({"GPU-0": []}, {"GPU-0": [account(7, opened=103.5)]}) == []


def test_a_process_on_two_gpus_ends_once_with_both(node: Node) -> None:
    both = {"GPU-0": [7], "GPU-1": [7]}
    node.tick(both, {"GPU-0": [], "GPU-1": []})
    gone: dict[str, list[int]] = {"GPU-0": [], "GPU-1": []}
    assert node.tick(gone, {"GPU-0": [account(7, opened=60)], "GPU-1": []}) == []
    other = account(7, opened=60, gpu="GPU-1", busy_ns=4 * HALF_NS, held=9)
    (end,) = node.tick(gone, {"GPU-0": [], "GPU-1": [other]})
    assert (end.busy_ns, end.max_memory_bytes) == (5 * HALF_NS, 9)
    assert [one.gpu_uuid for one in end.totals or ()] == ["GPU-0", "GPU-1"]


def test_usage_of_a_gpu_that_a_process_left_waits_for_its_end(node: Node) -> None:
    node.tick({"GPU-0": [7], "GPU-1": [7]}, {"GPU-0": [], "GPU-1": []})
    left = node.tick({"GPU-0": [7], "GPU-1": []}, {"GPU-1": [account(7, opened=60, gpu="GPU-1")]})
    assert reported(left) == [("changed", 7, ONE, None)]
    for _ in range(20):
        assert node.tick({"GPU-0": [7], "GPU-1": []}, {"GPU-0": [], "GPU-1": []}) == []
    (end,) = node.tick(
        {"GPU-0": [], "GPU-1": []},
        {"GPU-0": [account(7, opened=60, busy_ns=2 * HALF_NS)], "GPU-1": []},
    )
    assert end.busy_ns == 3 * HALF_NS


def test_a_process_that_no_list_ever_showed_is_seen_and_ended(node: Node) -> None:
    records = node.tick({"GPU-0": []}, {"GPU-0": [account(9, opened=100.2, busy_ns=HALF_NS // 2)]})
    assert reported(records) == [("seen", 9, None, None), ("ended", 9, None, HALF_NS // 2)]
    assert {one.started_boottime_ns for one in records} == {None}


def test_an_unlisted_process_that_still_runs_is_identified_by_its_files(node: Node) -> None:
    records = node.tick({"GPU-0": []}, {"GPU-0": [account(7, opened=100.2)]})
    assert reported(records) == [("seen", 7, ONE, None), ("ended", 7, ONE, HALF_NS)]


def test_an_unlisted_process_whose_pid_was_recycled_has_no_container(node: Node) -> None:
    node.start(9, seconds=101, container=TWO)
    records = node.tick({"GPU-0": []}, {"GPU-0": [account(9, opened=100.2)]})
    assert [one.container_id for one in records] == [None, None]


def test_a_repeated_account_is_reported_once(node: Node) -> None:
    given = {"GPU-0": [account(9, opened=100.2)]}
    assert [len(node.tick({"GPU-0": []}, given)) for _ in range(3)] == [2, 0, 0]


def test_an_account_that_began_after_the_last_list_belongs_to_another_process(node: Node) -> None:
    """The driver keeps a pid's latest account only: the earlier usage is lost, not mixed up."""
    node.tick({"GPU-0": [7]}, {"GPU-0": []})
    first = node.tick({"GPU-0": []}, {"GPU-0": [account(7, opened=101.5, busy_ns=HALF_NS // 5)]})
    assert [(one.change, one.busy_ns) for one in first] == [("seen", None), ("ended", HALF_NS // 5)]
    rest = [one for _ in range(8) for one in node.tick({"GPU-0": []}, {"GPU-0": []})]
    assert reported(rest) == [("ended", 7, ONE, None)]


def test_an_account_from_before_a_process_started_is_not_its_own(node: Node) -> None:
    """A recycled pid: the new process still runs, and its account is open."""
    node.start(7, seconds=99, container=TWO)
    node.tick({"GPU-0": [7]}, {"GPU-0": []})
    records = node.tick({"GPU-0": [7]}, {"GPU-0": [account(7, opened=60)]})
    assert [(one.change, one.container_id) for one in records] == [("seen", None), ("ended", None)]


def test_a_clock_step_loses_no_account(node: Node) -> None:
    """The driver stamped the start before the clock was set."""
    node.tick({"GPU-0": [7]}, {"GPU-0": []})
    node.set_by_seconds = 3600
    node.tick({"GPU-0": [7]}, {"GPU-0": []})
    ends = node.tick({"GPU-0": []}, {"GPU-0": [account(7, opened=60)]})
    assert reported(ends) == [("ended", 7, ONE, HALF_NS)]


def test_an_account_without_a_start_is_matched_by_pid(node: Node) -> None:
    node.tick({"GPU-0": [7]}, {"GPU-0": []})
    assert reported(node.tick({"GPU-0": []}, {"GPU-0": [account(7, opened=None)]})) == [
        ("ended", 7, ONE, HALF_NS)
    ]


def test_memory_is_bounded(node: Node) -> None:
    def feed(number: int) -> None:
        node.tick({"GPU-0": []}, {"GPU-0": [account(number + 10, opened=node.seconds)]})
        node.matcher.exited.clear()

    assert is_bounded(node.matcher, feed, times=1000)
