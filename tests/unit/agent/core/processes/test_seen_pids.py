"""Whom an account belongs to that was seen between two ticks, and whom never."""

import pytest

from agent.core.processes.accounting.exit_matcher import DriverAccount, SeenPids
from agent.host.procfs import ProcessReader
from gpuledger.clock import NS_PER_SECOND
from gpuledger.records import GpuTotals
from tests.fakes.nvml import FakeProcfs
from tests.held_objects import is_bounded

BOOT_NS = 1_700_000_000 * NS_PER_SECOND
ONE, TWO = "a" * 64, "b" * 64


def account(pid: int, *, opened: float | None) -> DriverAccount:
    started_ns = None if opened is None else BOOT_NS + round(opened * NS_PER_SECOND)
    return pid, GpuTotals(gpu_uuid="GPU-0", busy_ns=500_000_000, started_time_ns=started_ns)


def seen(pid: int, *, started: int, at: int) -> SeenPids:
    procfs = FakeProcfs()
    procfs.start(pid, started_ticks=started * 100, cgroup=f"/docker/{ONE}")
    seen_pids = SeenPids(processes=ProcessReader(procfs))
    seen_pids.record([pid], seen_boottime_ns=at * NS_PER_SECOND)
    return seen_pids


@pytest.mark.parametrize(
    ("opened", "started", "is_known"),
    [
        (60.0, 50, True),
        (50.0, 50, True),
        # Of whoever had the pid before, or has had it since.
        (40.0, 50, False),
        (70.0, 50, False),
        (None, 50, False),
        # What was seen in /proc came after what was seen on the GPU.
        (60.0, 62, False),
    ],
)
def test_an_account_is_the_seen_processs_where_that_was_there_all_the_while(
    opened: float | None, started: int, *, is_known: bool
) -> None:
    seen_pids = seen(7, started=started, at=61)
    found = seen_pids.find(account(7, opened=opened), [BOOT_NS])
    assert (found and found.location.container_id) == (ONE if is_known else None)


def test_nobody_elses_pid_is_known() -> None:
    assert seen(7, started=50, at=61).find(account(8, opened=60), [BOOT_NS]) is None


def test_one_that_is_gone_already_is_not_known() -> None:
    seen_pids = SeenPids(processes=ProcessReader(FakeProcfs()))
    seen_pids.record([7], seen_boottime_ns=61 * NS_PER_SECOND)
    assert seen_pids.find(account(7, opened=60), [BOOT_NS]) is None


def test_a_pid_that_is_seen_again_is_its_latest_process() -> None:
    procfs = FakeProcfs()
    seen_pids = SeenPids(processes=ProcessReader(procfs))
    for seconds, container in ((50, ONE), (70, TWO)):
        procfs.start(7, started_ticks=seconds * 100, cgroup=f"/docker/{container}")
        seen_pids.record([7], seen_boottime_ns=(seconds + 1) * NS_PER_SECOND)
    found = seen_pids.find(account(7, opened=70.5), [BOOT_NS])
    assert found is not None
    assert found.location.container_id == TWO
    assert seen_pids.find(account(7, opened=50.5), [BOOT_NS]) is None


def test_memory_of_them_is_bounded() -> None:
    procfs = FakeProcfs()
    seen_pids = SeenPids(processes=ProcessReader(procfs))
    for pid in range(5000):
        procfs.start(pid, started_ticks=1, cgroup="/")
    assert is_bounded(
        seen_pids,
        lambda pid: seen_pids.record([pid], seen_boottime_ns=NS_PER_SECOND),
        times=2500,
    )
