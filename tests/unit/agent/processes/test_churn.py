"""Whatever processes do, none is ever shown in a container in which it was not.

A small model of a kernel: processes start, end and move between cgroups, and pids are given again
at once. The agent looks at any time, also in the middle of its own look.
"""

from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from agent.nvml.answers import GpuAnswers, ListedProcess
from agent.sampling import Moment, Sampler
from gpuledger.records import ProcessKind
from tests.fakes.nvml import stat

PIDS = st.integers(min_value=1, max_value=3)
CONTAINERS = st.sampled_from(["", "a" * 64, "b" * 64, "c" * 64])
STEPS = st.one_of(
    st.tuples(st.just("start"), PIDS, CONTAINERS),
    st.tuples(st.just("move"), PIDS, CONTAINERS),
    st.tuples(st.just("end"), PIDS, st.just("")),
)
TICKS = st.lists(
    st.tuples(st.lists(STEPS, max_size=4), st.lists(STEPS, max_size=4)), min_size=2, max_size=8
)
TICK_NS = 10_000_000


@dataclass
class Process:
    started_ticks: int
    container: str
    was_in: set[str] = field(default_factory=set)


class Kernel:
    """Processes by pid, with the past of each; every step and every read takes a clock tick."""

    def __init__(self) -> None:
        self.now_ticks = 1
        self.alive: dict[int, Process] = {}
        self.past: dict[tuple[int, int], Process] = {}
        self.before_reads: list[tuple[str, int, str]] = []
        """Steps that happen while the agent reads, one before each read."""

    def do(self, step: tuple[str, int, str]) -> None:
        what, pid, container = step
        self.now_ticks += 1
        if what == "end":
            self.alive.pop(pid, None)
        elif what == "move" and pid in self.alive:
            self.alive[pid].container = container
            self.alive[pid].was_in.add(container)
        elif what == "start":
            process = Process(self.now_ticks, container, {container})
            self.alive[pid] = self.past[pid, self.now_ticks] = process

    def read(self, path: str) -> bytes:
        if path.endswith("boot_id"):
            return b"boot"
        if self.before_reads:
            self.do(self.before_reads.pop(0))
        _, _, pid, name = path.split("/")
        process = self.alive.get(int(pid))
        if process is None:
            raise FileNotFoundError(path)
        if name == "stat":
            return stat(int(pid), process.started_ticks)
        shown = f"/docker/{process.container}" if process.container else "/system.slice"
        return f"0::{shown}\n".encode()

    def answers(self) -> GpuAnswers:
        processes = tuple(
            ListedProcess(pid=pid, kind=ProcessKind.COMPUTE, memory_bytes=1) for pid in self.alive
        )
        return GpuAnswers(uuid="GPU-0", index=0, processes=processes, process_samples=())

    def moment(self) -> Moment:
        now_ns = self.now_ticks * TICK_NS
        return Moment(time_ns=now_ns, monotonic_ns=now_ns, boottime_ns=now_ns)


@settings(max_examples=150, deadline=None)
@given(TICKS)
def test_no_process_is_ever_shown_where_it_was_not(
    ticks: list[tuple[list[tuple[str, int, str]], list[tuple[str, int, str]]]],
) -> None:
    kernel = Kernel()
    sampler = Sampler(node="node-1", procfs=kernel)
    for steps, meanwhile in ticks:
        for step in steps:
            kernel.do(step)
        asked = kernel.moment()
        listed = {(pid, process.started_ticks) for pid, process in kernel.alive.items()}
        answers = kernel.answers()
        kernel.before_reads = list(meanwhile)
        tick = sampler.sample([answers], asked_boottime_ns=asked.boottime_ns, at=kernel.moment())
        kernel.before_reads = []
        if tick is None:
            continue
        for process in tick.sample.processes:
            place = process.container
            if process.started_boottime_ns is None:
                assert place is None
                continue
            identity = (process.pid, process.started_boottime_ns // TICK_NS)
            assert process.ended or identity in listed
            shown = "" if place is None else tick.sample.containers[place].container_id
            assert shown in kernel.past[identity].was_in
