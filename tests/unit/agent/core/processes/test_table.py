"""A process is identified by pid and start time, never by the pid only."""

from collections.abc import Mapping

import pytest

from gpuledger.clock import NS_PER_MS
from gpuledger.keys import NodeId
from gpuledger.records import ProcessChange
from gpuledger_agent.core.processes.table import UNREADABLE, Location, ProcessTable, TableUpdate
from gpuledger_agent.core.raw import ClockReading
from gpuledger_agent.host.procfs import ProcessReader, read_boot_id
from tests.fakes.nvml import FakeProcfs, stat

TICK_NS = 10 * NS_PER_MS
ONE, TWO = "a" * 64, "b" * 64


@pytest.fixture
def procfs() -> FakeProcfs:
    return FakeProcfs()


@pytest.fixture
def table(procfs: FakeProcfs) -> ProcessTable:
    return ProcessTable(
        processes=ProcessReader(procfs), node=NodeId("default", "node-1"), boot_id="boot-1"
    )


def call(table: ProcessTable, *pids: int, at_ticks: int = 1000, gpu: str = "GPU-0") -> TableUpdate:
    return table.refresh({gpu: pids}, listed_boottime_ns=at_ticks * TICK_NS, time_ns=at_ticks)


def reported(update: TableUpdate) -> list[tuple[str, int, int | None, str | None]]:
    return [
        (
            record.change,
            record.pid,
            record.started_boottime_ns and record.started_boottime_ns // TICK_NS,
            record.container_id,
        )
        for record in update.records
    ]


@pytest.mark.parametrize("command", ["python", "a) b (c", "tab\tand space", "))))"])
def test_start_and_name_are_read_whatever_the_name_contains(
    procfs: FakeProcfs, command: str
) -> None:
    procfs.start(7, started_ticks=123, cgroup=f"/docker/{ONE}", command=command)
    facts = ProcessReader(procfs).read(7)
    assert (facts.started_boottime_ns, facts.command) == (123 * TICK_NS, command)
    assert facts.location == Location(container_id=ONE, line=f"0::/docker/{ONE}")


def test_a_pid_that_is_recycled_during_a_read_is_read_again(procfs: FakeProcfs) -> None:
    procfs.files["/proc/7/stat"] = [stat(7, 100), stat(7, 200)]
    procfs.files["/proc/7/cgroup"] = [f"0::/docker/{ONE}".encode(), f"0::/docker/{TWO}".encode()]
    facts = ProcessReader(procfs).read(7)
    assert (facts.started_boottime_ns, facts.location.container_id) == (200 * TICK_NS, TWO)


@pytest.mark.parametrize("garbage", [b"", b"7", b"7 (x", b"7 (x) S 1 2", b"7 (x) S " + b"x " * 30])
def test_a_process_that_cannot_be_read_has_no_location(procfs: FakeProcfs, garbage: bytes) -> None:
    procfs.files["/proc/7/stat"] = [garbage]
    procfs.files["/proc/7/cgroup"] = [f"0::/docker/{ONE}".encode()]
    assert ProcessReader(procfs).read(7) == UNREADABLE
    assert ProcessReader(procfs).read(8) == UNREADABLE


def test_the_boot_id_is_one_word(procfs: FakeProcfs) -> None:
    assert read_boot_id(procfs) == "boot-1"


def test_a_process_is_reported_when_first_seen_when_changed_and_when_ended(
    procfs: FakeProcfs, table: ProcessTable
) -> None:
    procfs.start(7, started_ticks=100, cgroup=f"/docker/{ONE}")
    assert reported(call(table, 7)) == [(ProcessChange.SEEN, 7, 100, ONE)]
    assert reported(call(table, 7)) == []
    procfs.start(7, started_ticks=100, cgroup=f"/docker/{TWO}")
    assert reported(call(table, 7)) == [(ProcessChange.CHANGED, 7, 100, TWO)]
    procfs.end(7)
    assert reported(call(table, 7)) == []
    assert reported(call(table)) == [(ProcessChange.ENDED, 7, 100, TWO)]
    assert reported(call(table)) == []


def test_a_record_has_all_known_facts(procfs: FakeProcfs, table: ProcessTable) -> None:
    procfs.start(7, started_ticks=100, cgroup=f"/docker/{ONE}", command="train")
    (record,) = call(table, 7).records
    assert (record.node, record.boot_id, record.time_ns) == ("node-1", "boot-1", 1000)
    assert (record.command, record.cgroup_path) == ("train", f"0::/docker/{ONE}")
    assert record.gpu_uuids == ["GPU-0"]
    assert record.pod_uid is None


def test_a_recycled_pid_is_one_process_ended_and_another_one_seen(
    procfs: FakeProcfs, table: ProcessTable
) -> None:
    procfs.start(7, started_ticks=100, cgroup=f"/docker/{ONE}")
    call(table, 7, at_ticks=1000)
    procfs.start(7, started_ticks=1500, cgroup=f"/docker/{TWO}")
    update = call(table, 7, at_ticks=2000)
    assert reported(update) == [
        (ProcessChange.ENDED, 7, 100, ONE),
        (ProcessChange.SEEN, 7, 1500, TWO),
    ]
    assert update.was_recycled(7)


def test_a_process_younger_than_the_drivers_list_is_not_the_listed_one(
    procfs: FakeProcfs, table: ProcessTable
) -> None:
    procfs.start(7, started_ticks=100, cgroup=f"/docker/{ONE}")
    call(table, 7, at_ticks=1000)
    procfs.start(7, started_ticks=2001, cgroup=f"/docker/{TWO}")
    assert reported(call(table, 7, at_ticks=2000)) == []
    assert reported(call(table, at_ticks=3000)) == [(ProcessChange.ENDED, 7, 100, ONE)]


def test_a_process_that_was_never_read_is_not_the_next_owner_of_its_pid(
    procfs: FakeProcfs, table: ProcessTable
) -> None:
    assert reported(call(table, 7, at_ticks=1000)) == [(ProcessChange.SEEN, 7, None, None)]
    procfs.start(7, started_ticks=1500, cgroup=f"/docker/{TWO}")
    assert reported(call(table, 7, at_ticks=2000)) == [
        (ProcessChange.ENDED, 7, None, None),
        (ProcessChange.SEEN, 7, 1500, TWO),
    ]


def test_a_process_that_is_read_late_is_the_same_process(
    procfs: FakeProcfs, table: ProcessTable
) -> None:
    call(table, 7, at_ticks=1000)
    procfs.start(7, started_ticks=500, cgroup=f"/docker/{ONE}")
    assert reported(call(table, 7, at_ticks=2000)) == [(ProcessChange.CHANGED, 7, 500, ONE)]


def test_on_a_gpu_that_does_not_answer_no_process_ends(
    procfs: FakeProcfs, table: ProcessTable
) -> None:
    procfs.start(7, started_ticks=100, cgroup=f"/docker/{ONE}")
    table.refresh({"GPU-0": [7], "GPU-1": [7]}, listed_boottime_ns=10**12, time_ns=1)
    assert table.refresh({"GPU-1": [7]}, listed_boottime_ns=10**12, time_ns=2).records == []
    (record,) = table.refresh(
        {"GPU-0": [7], "GPU-1": []}, listed_boottime_ns=10**12, time_ns=3
    ).records
    assert (record.change, record.gpu_uuids) == (ProcessChange.CHANGED, ["GPU-0"])


def test_only_processes_listed_in_this_tick_are_counted_as_unreadable(
    procfs: FakeProcfs, table: ProcessTable
) -> None:
    """A process often dies with its GPU; that does not mean that /proc hides processes."""
    procfs.start(7, started_ticks=100, cgroup=f"/docker/{ONE}")
    call(table, 7)
    procfs.end(7)
    for at_ticks in range(1100, 1500, 100):
        lost = table.refresh({}, listed_boottime_ns=at_ticks * TICK_NS, time_ns=at_ticks)
        assert (list(lost.now), lost.records, lost.unreadable) == ([7], [], 0)

    assert [change for change, *_ in reported(call(table, at_ticks=1600))] == ["ended"]
    assert call(table, 8, at_ticks=1700).unreadable == 1


def test_only_lingering_ended_processes_are_still_known_and_none_is_reported_again(
    procfs: FakeProcfs, table: ProcessTable
) -> None:
    for pid in (7, 8):
        procfs.start(pid, started_ticks=100, cgroup=f"/docker/{ONE}")
    call(table, 7, 8)
    ended = table.refresh({"GPU-0": []}, lingering=[7], listed_boottime_ns=10**12, time_ns=2)
    assert [change for change, *_ in reported(ended)] == [ProcessChange.ENDED] * 2
    after = table.refresh({"GPU-0": []}, lingering=[], listed_boottime_ns=10**12, time_ns=3)
    assert (list(after.before), after.records) == ([7], [])
    assert not call(table).before


def test_a_lingering_pid_that_is_recycled_is_two_processes(
    procfs: FakeProcfs, table: ProcessTable
) -> None:
    procfs.start(7, started_ticks=100, cgroup=f"/docker/{ONE}")
    call(table, 7, at_ticks=1000)
    table.refresh({"GPU-0": []}, lingering=[7], listed_boottime_ns=2000 * TICK_NS, time_ns=2)
    procfs.start(7, started_ticks=2500, cgroup=f"/docker/{TWO}")
    update = call(table, 7, at_ticks=3000)
    assert update.was_recycled(7)
    assert reported(update) == [(ProcessChange.SEEN, 7, 2500, TWO)]


def test_the_outer_of_two_nested_pods_counts_unless_the_node_runs_in_it(procfs: FakeProcfs) -> None:
    outer, inner = f"/pod{'1' * 32}/{'a' * 64}", f"/pod{'2' * 32}/{'b' * 64}"
    procfs.start(7, started_ticks=1, cgroup=f"{outer}{inner}")

    on_a_machine = ProcessReader(procfs).read(7).location
    procfs.files["/proc/self/cgroup"] = [f"0::{outer}/pod{'3' * 32}/{'c' * 64}\n".encode()]
    in_that_pod = ProcessReader(procfs).read(7).location

    assert (on_a_machine.pod_uid, on_a_machine.container_id) == ("1" * 32, "a" * 64)
    assert (in_that_pod.pod_uid, in_that_pod.container_id) == ("2" * 32, "b" * 64)


def listed_at(gpus: Mapping[str, int], *pids: int) -> dict[int, dict[str, ClockReading]]:
    """Return the input of `observe`: the GPUs that list these pids, and their times."""
    times = {
        gpu: ClockReading(time_ns=at, monotonic_ns=0, boottime_ns=at * TICK_NS)
        for gpu, at in gpus.items()
    }
    return dict.fromkeys(pids, times)


def test_a_fast_poll_finds_all_gpus_that_a_process_has_open(
    procfs: FakeProcfs, table: ProcessTable
) -> None:
    procfs.start(7, started_ticks=100, cgroup=f"/docker/{ONE}")
    (seen,) = table.observe(listed_at({"GPU-0": 900, "GPU-1": 901, "GPU-2": 902}, 7))
    assert (seen.change, seen.gpu_uuids) == (ProcessChange.SEEN, ["GPU-0", "GPU-1", "GPU-2"])
    assert table.observe(listed_at({"GPU-0": 910, "GPU-1": 911, "GPU-2": 912}, 7)) == []
    # The process opens another one before the next tick.
    (changed,) = table.observe(listed_at({"GPU-3": 920}, 7))
    assert (changed.change, len(changed.gpu_uuids)) == (ProcessChange.CHANGED, 4)
    gone = table.refresh(
        dict.fromkeys(["GPU-0", "GPU-1", "GPU-2", "GPU-3"], ()),
        listed_boottime_ns=1000 * TICK_NS,
        time_ns=1000,
    )
    (ended,) = gone.records
    assert (ended.change, len(ended.gpu_uuids)) == (ProcessChange.ENDED, 4)


def test_a_process_is_not_on_a_gpu_that_listed_its_pid_before_it_started(
    procfs: FakeProcfs, table: ProcessTable
) -> None:
    procfs.start(7, started_ticks=901, cgroup=f"/docker/{ONE}")
    (seen,) = table.observe(listed_at({"GPU-0": 900, "GPU-1": 902}, 7))
    assert seen.gpu_uuids == ["GPU-1"]
    assert table.observe(listed_at({"GPU-0": 900}, 8)) == []


def test_a_pid_recycled_between_ticks_is_reported_by_the_next_tick(
    procfs: FakeProcfs, table: ProcessTable
) -> None:
    procfs.start(7, started_ticks=100, cgroup=f"/docker/{ONE}")
    call(table, 7, at_ticks=800)
    procfs.start(7, started_ticks=850, cgroup=f"/docker/{TWO}")
    assert table.observe(listed_at({"GPU-1": 900}, 7)) == []
    update = table.refresh({"GPU-1": [7]}, listed_boottime_ns=1000 * TICK_NS, time_ns=1000)
    assert reported(update) == [
        (ProcessChange.ENDED, 7, 100, ONE),
        (ProcessChange.SEEN, 7, 850, TWO),
    ]


@pytest.mark.parametrize("left", [False, True])
def test_a_pid_that_comes_back_between_two_ticks_as_another_process_is_reused(
    procfs: FakeProcfs, table: ProcessTable, *, left: bool
) -> None:
    procfs.start(7, started_ticks=100, cgroup=f"/docker/{ONE}")
    call(table, 7, at_ticks=800)
    if left:
        table.observe({}, polled=["GPU-0"])
        procfs.start(7, started_ticks=850, cgroup=f"/docker/{TWO}")
    table.observe(listed_at({"GPU-0": 900}, 7), polled=["GPU-0"])
    procfs.end(7)
    assert call(table, at_ticks=1000).reused_pids == ({7} if left else set())
    assert not call(table, at_ticks=1100).reused_pids


def test_a_process_that_a_fast_poll_found_is_known_even_if_proc_is_read_too_late(
    procfs: FakeProcfs, table: ProcessTable
) -> None:
    call(table, at_ticks=800)
    procfs.start(7, started_ticks=850, cgroup=f"/docker/{ONE}")
    table.observe(listed_at({"GPU-0": 900}, 7))
    procfs.end(7)
    update = call(table, 7, at_ticks=1000)
    known = update.now[7]
    assert (known.has_ended, known.certain_facts.location.container_id) == (True, ONE)
    assert update.unreadable == 0
    # The next tick has its last samples; the one after that knows nothing about it.
    assert call(table, at_ticks=1100).before[7].certain_facts.location.container_id == ONE
    call(table, 7, at_ticks=1200)
    assert call(table, 7, at_ticks=1300).now[7].certain_facts == UNREADABLE
