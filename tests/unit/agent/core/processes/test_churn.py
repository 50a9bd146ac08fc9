"""Whatever processes do, none is ever shown in a container that it was never in.

A small model of a kernel and a driver: processes start, open GPUs and MIG instances, move between
cgroups, fork into each other's pids at once, hide from `/proc` and end; cgroup paths are rewritten
in the forms of several runtimes. The agent may query at any time: in the middle of the driver's
list, between the list and `/proc`, and between two reads of one process.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Final

from hypothesis import event, given
from hypothesis import strategies as st

from gpuledger.clock import NS_PER_MS
from gpuledger.keys import NodeId
from gpuledger.records import ContainerRef, ProcessChange, ProcessKind, ProcessRecord
from gpuledger_agent.core.raw import (
    ClockReading,
    FastPoll,
    InstanceIdentity,
    ListedProcess,
    ProcessAccounting,
    RawGpuSample,
)
from gpuledger_agent.core.tick import NodeTick
from gpuledger_agent.sampling import Sampler
from tests.examples import examples
from tests.fakes.nvml import stat

TICK_NS: Final = 10 * NS_PER_MS
# A kernel does not reuse a pid within a second, and accounts differ by at least as much.
STEP_TICKS: Final = 200
UIDS = {letter: f"{letter * 8}-0000-4000-8000-{letter * 12}" for letter in "abc"}
CONTAINERS = ["", *"abc"]
SHAPES: Final = (
    "0::/kubepods.slice/kubepods-pod{slug}.slice/cri-containerd-{id}.scope",
    "0::/kubepods/burstable/pod{uid}/{id}",
    "0::/../kubepods-pod{slug}.slice/crio-{id}.scope",
    "12:pids:/\n11:memory:/kubepods/pod{uid}/{id}\n1:name=systemd:/kubepods/pod{uid}/{id}",
    "0::/docker/{outer}/kubelet/kubepods/pod{uid}/{id}",
    "0::/kubepods.slice/kubepods-pod{slug}.slice:cri-containerd:{id} (deleted)",
    "0::/kubepods/pod{uid}/{id}/kubepods/podffffffff-0000-4000-8000-ffffffffffff/{outer}",
)
HOST_SHAPES: Final = (
    "0::/system.slice/ssh.service",
    "0::/machine.slice/libpod-conmon-{outer}.scope",
    "0::/user.slice/user-1000.slice/app-pod-{uid}.scope",
    "0::/",
)
DEVICES: Final = ("GPU-0", "GPU-1", "MIG-1", "MIG-2")

pids = st.integers(min_value=1, max_value=3)
steps = st.one_of(
    st.tuples(st.just("start"), pids, st.sampled_from(CONTAINERS)),
    st.tuples(st.just("move"), pids, st.sampled_from(CONTAINERS)),
    st.tuples(st.just("rewrite"), pids, st.sampled_from([str(n) for n in range(len(SHAPES))])),
    st.tuples(st.just("open"), pids, st.sampled_from(DEVICES)),
    st.tuples(st.just("close"), pids, st.sampled_from(DEVICES)),
    st.tuples(st.just("hide"), pids, st.just("")),
    st.tuples(st.just("end"), pids, st.just("")),
    # An end after which the pid is reused at once: a recycled pid.
    st.tuples(st.just("exchange"), pids, st.sampled_from(CONTAINERS)),
)
Step = tuple[str, int, str]
some = st.lists(steps, max_size=4)
# Steps before a fast poll, before each read of its files, before the list, within the list (between
# two devices), and before each read of a file.
rounds = st.lists(st.tuples(some, some, some, some, some), min_size=2, max_size=8)
Round = tuple[list[Step], list[Step], list[Step], list[Step], list[Step]]


@dataclass(eq=False)
class Process:
    """A process of the model, with all containers in which it ever was."""

    pid: int
    started_ticks: int
    container: str
    shape: int = 0
    is_hidden: bool = False
    was_in: set[str] = field(default_factory=set)
    opened: dict[str, int] = field(default_factory=dict)
    """The time at which it opened each device."""


class Machine:
    """A kernel and a driver; a step takes two seconds, a read a hundredth of a second."""

    def __init__(self) -> None:
        self.now_ticks = 1
        self.alive: dict[int, Process] = {}
        self.past: dict[tuple[int, int], Process] = {}
        self.accounts: dict[tuple[str, int], ProcessAccounting] = {}
        self.owners: dict[tuple[str, int, int], Process] = {}
        self.before_reads: list[Step] = []

    def do(self, step: Step) -> None:
        what, pid, value = step
        self.now_ticks += STEP_TICKS
        process = self.alive.get(pid)
        if what in ("start", "exchange"):
            self._end(pid)
            self._start(pid, value, on="GPU-0" if what == "exchange" else None)
        elif process is None:
            return
        elif what == "end":
            self._end(pid)
        elif what == "move":
            process.container = value
            process.was_in.add(value)
        elif what == "rewrite":
            process.shape = int(value)
        elif what == "open":
            process.opened.setdefault(value, self.now_ticks)
        elif what == "close":
            self._close(process, value)
        elif what == "hide":
            process.is_hidden = True

    def read(self, path: str) -> bytes:
        if path.endswith("self/cgroup"):
            raise FileNotFoundError(path)
        if path.endswith("boot_id"):
            return b"boot"
        self.now_ticks += 1
        if self.before_reads:
            self.do(self.before_reads.pop(0))
        _, _, pid, name = path.split("/")
        process = self.alive.get(int(pid))
        if process is None or process.is_hidden:
            raise FileNotFoundError(path)
        return (
            stat(process.pid, process.started_ticks)
            if name == "stat"
            else cgroup_of(process).encode()
        )

    def listed(self, device: str) -> tuple[ListedProcess, ...]:
        return tuple(
            ListedProcess(pid=one.pid, kind=ProcessKind.COMPUTE, memory_bytes=1)
            for one in self.alive.values()
            if device in one.opened
        )

    def process_stats(self, device: str) -> tuple[ProcessAccounting, ...]:
        return tuple(one for (where, _), one in self.accounts.items() if where == device)

    def moment(self) -> ClockReading:
        now_ns = self.now_ticks * TICK_NS
        return ClockReading(time_ns=now_ns, monotonic_ns=now_ns, boottime_ns=now_ns)

    def _start(self, pid: int, container: str, *, on: str | None) -> None:
        self.now_ticks += STEP_TICKS
        process = Process(pid, self.now_ticks, container, was_in={container})
        process.opened = {on: self.now_ticks} if on else {}
        self.alive[pid] = self.past[pid, self.now_ticks] = process

    def _end(self, pid: int) -> None:
        process = self.alive.pop(pid, None)
        for device in list(process.opened) if process else ():
            assert process
            self._close(process, device)

    def _close(self, process: Process, device: str) -> None:
        opened_ticks = process.opened.pop(device, None)
        if opened_ticks is None:
            return
        started_us = opened_ticks * TICK_NS // 1000
        # The ring buffer keeps only the latest account of a pid.
        self.accounts[device, process.pid] = ProcessAccounting(
            pid=process.pid,
            started_us=started_us,
            lived_ms=(self.now_ticks - opened_ticks) * TICK_NS // NS_PER_MS,
            gpu_percent=50.0,
            memory_percent=None,
            max_memory_bytes=1,
        )
        self.owners[device, process.pid, started_us * 1000] = process


def cgroup_of(process: Process) -> str:
    letter = process.container
    shapes = SHAPES if letter else HOST_SHAPES
    uid = UIDS[letter or "a"]
    return shapes[process.shape % len(shapes)].format(
        uid=uid, slug=uid.replace("-", "_"), id=(letter or "a") * 64, outer="f" * 64
    )


def query_driver(
    machine: Machine, meanwhile: list[Step]
) -> tuple[list[RawGpuSample], set[tuple[int, int]]]:
    """Query the driver, which lists one device after another while steps happen."""
    seen: set[tuple[int, int]] = set()
    lists: dict[str, tuple[ListedProcess, ...]] = {}
    accounts: dict[str, tuple[ProcessAccounting, ...]] = {}
    for device in DEVICES:
        if meanwhile:
            machine.do(meanwhile.pop(0))
        lists[device] = machine.listed(device)
        accounts[device] = machine.process_stats(device)
        seen |= {(one.pid, machine.alive[one.pid].started_ticks) for one in lists[device]}
    instances = tuple(
        RawGpuSample(
            uuid=uuid,
            index=1,
            processes=lists[uuid],
            instance=InstanceIdentity(uuid=uuid, parent_uuid="GPU-1", index=0),
        )
        for uuid in ("MIG-1", "MIG-2")
    )
    answers = [
        RawGpuSample(
            uuid="GPU-0",
            index=0,
            processes=lists["GPU-0"],
            process_samples=(),
            process_stats=accounts["GPU-0"],
        ),
        RawGpuSample(
            uuid="GPU-1", index=1, processes=lists["GPU-1"], mig_enabled=True, instances=instances
        ),
    ]
    return answers, seen


@examples(150)
@given(rounds)
def test_no_process_is_shown_on_a_gpu_or_in_a_container_that_it_never_used(
    world: list[Round],
) -> None:
    machine = Machine()
    sampler = Sampler(node=NodeId("default", "node-1"), procfs=machine)
    reported: list[ProcessRecord] = []
    for before_scan, scanned, before, within, between in world:
        take_polls(machine, sampler, before_scan, scanned)
        for step in before:
            machine.do(step)
        requested = machine.moment()
        answers, listed = query_driver(machine, list(within))
        machine.before_reads = list(between)
        tick = sampler.sample(answers, at=requested)
        machine.before_reads = []
        if tick is not None:
            check_entries(machine, tick, listed)
            check_ends(machine, tick)
            reported += tick.processes
    check_records(machine, reported)


def take_polls(machine: Machine, sampler: Sampler, before: list[Step], within: list[Step]) -> None:
    """Take a fast poll of each GPU, one after another, while steps happen."""
    polls = []
    steps = iter(before)
    for uuid in ("GPU-0", "GPU-1"):
        requested, listed = machine.moment(), machine.listed(uuid)
        polls.append(FastPoll(uuid=uuid, at=requested, processes=tuple(listed)))
        for step in islice(steps, 2):
            machine.do(step)
    machine.before_reads = list(within)
    sampler.take_fast_polls(polls)
    machine.before_reads = []


def check_ends(machine: Machine, tick: NodeTick) -> None:
    """Each end belongs to a process that had closed the GPU, in a container that it was in."""
    for end in tick.sample.ended_processes or ():
        event("an end")
        process = machine.past[end.pid, end.started_boottime_ns // TICK_NS]
        assert tick.sample.gpus[end.gpu].uuid == "GPU-0"
        assert process in machine.owners.values()
        shown = None if end.container is None else tick.sample.containers[end.container]
        check_place(process, shown)


def check_entries(machine: Machine, tick: NodeTick, listed: set[tuple[int, int]]) -> None:
    """Each entry belongs to a process that the driver listed, in a container that it was in."""
    for process in tick.sample.processes:
        place = process.container
        if process.started_boottime_ns is None:
            event("an entry without a process")
            assert place is None
            continue
        identity = (process.pid, process.started_boottime_ns // TICK_NS)
        event("an entry of an ended process" if process.ended else "an entry of a process")
        assert process.ended or identity in listed
        shown = None if place is None else tick.sample.containers[place]
        check_place(machine.past[identity], shown)


def check_place(process: Process, shown: ContainerRef | None) -> None:
    if shown is None:
        assert "" in process.was_in
        return
    (letter,) = {(shown.container_id or "")[0]}
    assert letter in process.was_in
    assert shown.pod_uid == UIDS[letter]


def check_records(machine: Machine, reported: Sequence[ProcessRecord]) -> None:
    """Records agree; totals belong to the process that used them; only what began can end."""
    begun: set[tuple[int, int]] = set()
    for record in reported:
        for total in record.totals or ():
            assert total.started_time_ns is not None
            owner = machine.owners[total.gpu_uuid, record.pid, total.started_time_ns]
            event("totals")
            if record.started_boottime_ns is not None:
                assert owner.started_ticks == record.started_boottime_ns // TICK_NS
        if record.started_boottime_ns is None:
            assert record.container_id is None
            continue
        identity = (record.pid, record.started_boottime_ns // TICK_NS)
        process = machine.past[identity]
        if record.container_id is not None:
            assert record.container_id[0] in process.was_in
            assert record.pod_uid == UIDS[record.container_id[0]]
        if record.change is ProcessChange.SEEN:
            begun.add(identity)
        else:
            assert identity in begun
