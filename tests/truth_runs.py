"""Runs of one GPU under each form of driver: each pod's booked use, compared with its true use.

A class of runs defines what happens on the GPU, a driver how it is reported, and a tick how often
an agent reports. A figure is the worst of a cell of these three over all windows of 60 seconds.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from random import Random
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from gpuledger.clock import NS_PER_SECOND
from gpuledger.keys import NodeId
from gpuledger.records import BusyMethod, Category, NodeSample
from gpuledger_agent.gpu.nvidia.session import NvmlSession
from gpuledger_agent.sampling import Sampler
from gpuledger_enricher.join.booking.books import book_tick
from gpuledger_simulator.clock import ManualClock
from gpuledger_simulator.scenario.load import parse_scenario
from gpuledger_simulator.simulation import SimulatedNode, Simulation
from tests.ticks import take_fast_polls, tick_of
from tests.unit.owners import pod_of

EPOCH_NS: Final = 1_795_000_000_000_000_000
NODE: Final = "gpu-a"
MODEL: Final = "NVIDIA H100 80GB HBM3"
LEAD_SECONDS: Final = 12.0
"""By then an agent has learned its driver's form."""
WINDOW_SECONDS: Final = 60.0
RUN_SECONDS: Final = LEAD_SECONDS + WINDOW_SECONDS + 20.0

TICKS_SECONDS: Final = (1.0, 5.0, 10.0)

DRIVERS: Final[Mapping[str, Mapping[str, Any]]] = {
    "each window": {},
    "windows of 1/4 s, by boot time": {"window_seconds": 0.25, "stamps": "boot"},
    "windows of 1 s": {"window_seconds": 1.0},
    "percents cut off": {"rounding": "down"},
    "idle windows left out": {"ring_idle": "skipped"},
    "rings run dry": {"ring_idle": "dry", "empty_answer": "success"},
    "4,096 samples": {"ring_samples": 4096},
    "mean since the question": {"processes": "mean"},
    "newest window": {"processes": "newest"},
    "mean of windows of use": {"processes": "mean_of_used"},
    "mean, windows of 1 s": {"processes": "mean", "window_seconds": 1.0},
    "newest, idle left out": {"processes": "newest", "ring_idle": "skipped", "stamps": "boot"},
    "from submission to end": {"process_time": "submitted"},
    "a fifth of the windows lost": {"lost_ratio": 0.2},
    "windows 2 s late": {"late_seconds": 2.0},
    "windows 2 to 5 s late": {"late_seconds": 2.0, "busy_late_seconds": 3.0},
    "half of the process windows lost": {"process_lost_ratio": 0.5},
    "process windows 1 s late": {"process_late_seconds": 1.0},
    "process windows of 1 s": {"process_window_seconds": 1.0},
    "windows of 1 s, of processes 3 s late": {"window_seconds": 1.0, "process_late_seconds": 3.0},
    "windows of 1 s, of processes lost": {"window_seconds": 1.0, "process_lost_ratio": 0.3},
    "one process per window": {"processes": "active"},
    "rates without samples": {"has_samples": False},
    "process use reads 0": {"processes": "zero"},
    "no process use": {"processes": "absent"},
}

Watch = Callable[[SimulatedNode, ManualClock], list[NodeSample]]
"""An agent: advances the clock and returns its ticks of a node."""
Lives = Sequence[tuple[float, float, float, float]]
"""For each pod: start and end in seconds, busy ratio, mean seconds of a kernel."""


def _steady(random: Random) -> Lives:
    return [(0.0, 999.0, random.uniform(0.1, 0.45), 0.005) for _ in range(2)]


def _bursts(random: Random) -> Lives:
    return [(0.0, 999.0, random.uniform(0.1, 0.4), random.uniform(0.05, 0.6)) for _ in range(2)]


def _crowd(random: Random) -> Lives:
    return [(0.0, 999.0, random.uniform(0.05, 0.22), random.uniform(0.004, 0.3)) for _ in range(4)]


def _alone(random: Random) -> Lives:
    return [(0.0, 999.0, random.uniform(0.2, 0.8), random.uniform(0.2, 0.9))]


def _pauses(random: Random) -> Lives:
    """One pod that pauses for longer than the driver's ring buffer lasts."""
    return [(0.0, 999.0, random.uniform(0.1, 0.2), random.uniform(2.0, 4.0))]


def _turnover(random: Random) -> Lives:
    made: list[tuple[float, float, float, float]] = []
    at = random.uniform(0.0, 5.0)
    while at < RUN_SECONDS:
        end = at + random.uniform(6.0, 25.0)
        made.append((at, end, random.uniform(0.2, 0.5), 0.01))
        at = end + random.choice([0.1, 1.0, 4.0]) * random.uniform(0.3, 1.0)
    return [*made, (0.0, 999.0, random.uniform(0.1, 0.4), 0.02)]


CLASSES: Final[Mapping[str, Callable[[Random], Lives]]] = {
    "one pod, bursts": _alone,
    "one pod, long pauses": _pauses,
    "two pods, steady": _steady,
    "two pods, bursts": _bursts,
    "four pods": _crowd,
    "turnover beside a pod": _turnover,
}


class Use(NamedTuple):
    """The use of a GPU, in the fields of a scenario."""

    pods: Sequence[Mapping[str, Any]]
    """For each pod: start, end, and processes."""
    gpu: Mapping[str, Any] = MappingProxyType({})
    """Further fields of the GPU."""
    node: Mapping[str, Any] = MappingProxyType({})
    """Further fields of the node."""
    host: Sequence[Mapping[str, Any]] = ()
    """Processes outside pods."""
    driver: Mapping[str, Any] = MappingProxyType({})
    """Fields of the driver."""
    call_seconds: float = 0.0
    """Duration of each of the driver's calls that return samples or processes."""


def _process(load: float, kernel: float, **more: Any) -> dict[str, Any]:  # noqa: ANN401  # a scenario's fields
    draw = {"draw_ratio": more.pop("draw_ratio")} if "draw_ratio" in more else {}
    return {
        "command": "python",
        "gpus": [0],
        "load": {"busy_ratio": load, "kernel_seconds": kernel, **draw},
        "memory_bytes": 2**30,
        **more,
    }


def _pods(*processes: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return [{"processes": own} for own in processes]


def _short(random: Random) -> Use:
    """One pod with processes shorter than the interval between fast polls, about one per second."""
    starts = [second + random.uniform(0.0, 0.8) for second in range(int(RUN_SECONDS) + 2)]
    lives = [
        _process(0.8, 0.005, start_seconds=start, end_seconds=start + random.uniform(0.02, 0.08))
        for start in starts
    ]
    return Use(_pods(lives))


def _contexts(random: Random) -> Use:
    """Two pods whose contexts draw power, one almost without kernels."""
    loads = [
        [_process(random.uniform(0.2, 0.5), random.uniform(0.005, 0.3))],
        [_process(0.02, 0.005)],
    ]
    return Use(_pods(*loads), gpu={"context_watts": 50.0})


def _draws(random: Random) -> Use:
    """Two pods; one's kernels draw a third of the power of the other's."""
    loads = [
        [_process(random.uniform(0.2, 0.45), random.uniform(0.005, 0.3), draw_ratio=draw)]
        for draw in (0.33, 1.0)
    ]
    return Use(_pods(*loads))


def _instances(random: Random) -> Use:
    """Three pods, each in its own instance."""
    loads = [
        [_process(random.uniform(0.2, 0.8), random.uniform(0.005, 0.3), instance=place)]
        for place in range(3)
    ]
    return Use(_pods(*loads), gpu=_CUT)


def _shared_instance(random: Random) -> Use:
    """Two pods that time-slice one instance; one has three times the other's memory."""
    loads = [
        [
            _process(
                random.uniform(0.1, 0.45), 0.01, instance=1, memory_bytes=(1 + 2 * number) * 2**30
            )
        ]
        for number in range(2)
    ]
    return Use(_pods(*loads), gpu=_CUT)


def _set_forward(random: Random) -> Use:
    """Two pods that work in bursts, while the wall clock is set forward."""
    return at_steps(random, random.choice([0.4, 3.0, 60.0, 3600.0]))


def _set_back(random: Random) -> Use:
    """The same, while it is set back."""
    return at_steps(random, -random.choice([0.1, 0.4, 3.0, 8.0, 3600.0]))


def at_steps(random: Random, by_seconds: float) -> Use:
    """Return the use of two pods that work in bursts while the wall clock steps once."""
    loads = [[_process(random.uniform(0.2, 0.45), random.uniform(0.1, 0.6))] for _ in range(2)]
    step = {"at_seconds": random.uniform(30.0, 40.0), "by_seconds": by_seconds}
    return Use(_pods(*loads), node={"clock_steps": [step]})


def _reused_pid(random: Random) -> Use:
    """Two pods whose processes have the same pid one after the other, beside a third pod."""
    lives: list[list[Mapping[str, Any]]] = [[], []]
    end, number = 0.5, 0
    while end < RUN_SECONDS:
        start = end + random.uniform(0.1, 0.9)
        end = start + random.uniform(2.0, 12.0)
        load = random.uniform(0.2, 0.6)
        life = _process(load, 0.02, start_seconds=start, end_seconds=end, pid=_REUSED_PID)
        lives[number % 2].append(life)
        number += 1
    return Use(_pods(*lives, [_process(0.25, 0.02)]))


def _reused_briefly(random: Random) -> Use:
    """The same, but every second process lives for about a second."""
    lives: list[list[Mapping[str, Any]]] = [[], []]
    end = 0.5
    while end < RUN_SECONDS:
        for own, seconds in zip(lives, ((2.0, 12.0), (0.3, 1.5)), strict=True):
            start = end + random.uniform(0.1, 0.9)
            end = start + random.uniform(*seconds)
            load = random.uniform(0.2, 0.6)
            own.append(_process(load, 0.02, start_seconds=start, end_seconds=end, pid=_REUSED_PID))
    return Use(_pods(*lives, [_process(0.25, 0.02)]))


def _recut(random: Random) -> Use:
    """A pod in an instance, then one in an instance of the next layout."""
    at = random.uniform(30.0, 40.0)
    layouts = [{"instances": ["3g.40gb", "3g.40gb"]}, {"instances": ["1g.10gb", "4g.40gb"]}]
    first = _process(random.uniform(0.6, 0.9), 0.3, instance=0, end_seconds=at - 0.1)
    second = _process(random.uniform(0.6, 0.9), 0.3, instance=1, start_seconds=at + 0.1)
    return Use(
        _pods([first], [second]), gpu={"mig": [layouts[0], {**layouts[1], "start_seconds": at}]}
    )


def _mps(random: Random) -> Use:
    """Two pods whose MPS server is in the list of MPS clients, and alone has samples."""
    loads = [
        [_process(random.uniform(0.1, 0.45), 0.02, kind="mps", also=["compute"])] for _ in range(2)
    ]
    server = _process(0.0005, 0.0005, kind="compute", also=["mps"])
    server |= {"command": "nvidia-cuda-mps-server", "memory_bytes": 2**27}
    return Use(_pods(*loads), host=[server], driver={"mps_samples": "server"})


def _turns(random: Random) -> Use:
    """Two pods that take turns in less than a second."""
    length = random.uniform(0.3, 1.0)
    visits = {"length_seconds": length, "every_seconds": 2 * length, "count": 300}
    loads = [
        [_process(0.9, 0.004, visits={**visits, "first_seconds": length * place})]
        for place in range(2)
    ]
    return Use(_pods(*loads))


def _filled(random: Random) -> Use:
    """Two pods, one with kernels that fill a fifth of the chip, if the driver reports this part."""
    loads = [[_process(random.uniform(0.3, 0.5), 0.005, draw_ratio=fill)] for fill in (0.2, 1.0)]
    return Use(_pods(*loads), driver={"process_time": "filled"})


def _slow_calls(random: Random) -> Use:
    """Processes that start and end beside a pod."""
    return _use(_turnover(random))._replace(call_seconds=0.3)


def _slow_newest(random: Random) -> Use:
    """Two pods that work in bursts, if the driver returns only the newest window of a process."""
    return _use(_bursts(random))._replace(call_seconds=0.3, driver={"processes": "newest"})


_REUSED_PID: Final = 777_777
_CUT: Final = {"mig": [{"instances": ["1g.10gb", "3g.40gb", "2g.20gb"]}]}
FURTHER: Final[Mapping[str, Callable[[Random], Use]]] = {
    "shorter than a look": _short,
    "contexts that draw": _contexts,
    "kernels of different draw": _draws,
    "a pod an instance of MIG": _instances,
    "two pods in an instance": _shared_instance,
}
"""Uses whose accuracy does not depend on the driver's process samples; each has its own bound."""

EVENTS: Final[Mapping[str, Callable[[Random], Use]]] = {
    "clock set forward": _set_forward,
    "clock set back": _set_back,
    "a pid comes again": _reused_pid,
    "a pid comes again and ends": _reused_briefly,
    "MIG reconfigured": _recut,
    "MPS server among its clients": _mps,
    "pods take turns": _turns,
    "kernels that fill a fifth": _filled,
    "calls of 300 ms": _slow_calls,
    "newest window, calls of 300 ms": _slow_newest,
}
"""Events after which a driver's answers describe use only in part."""

UNMEASURED: Final = frozenset({"process use reads 0", "no process use"})
"""Drivers that do not report each process's use of a shared GPU."""
CLAIMS: Final = frozenset({BusyMethod.EXCLUSIVE, BusyMethod.PROCESS_UTILIZATION})
"""Methods that claim to measure GPU-seconds."""
ESTIMATED: Final = {
    "a fifth of the windows lost": 0.02,
    "windows 2 s late": 0.04,
    "windows 2 to 5 s late": 0.07,
    "half of the process windows lost": 0.08,
    "process windows 1 s late": 0.13,
    "process windows of 1 s": 0.11,
    "windows of 1 s, of processes 3 s late": 0.17,
    "windows of 1 s, of processes lost": 0.06,
    "one process per window": 0.03,
    "rates without samples": 0.011,
}
"""Drivers whose windows are missing, late or of different lengths, so that GPU-seconds are
estimates; each with the bound of its error."""
MODELLED: Final = frozenset({"from submission to end"})
"""Drivers whose process samples exceed the device's use: a model converts them to shares."""


class Amounts(NamedTuple):
    """A pod's use in a tick."""

    busy_ns: float = 0
    """Time for which its kernels ran."""
    byte_ns: float = 0
    """Its memory times the time for which it had it."""
    millijoules: float = 0
    """Energy drawn while its kernels ran."""

    def plus(self, other: "Amounts", times: int = 1) -> "Amounts":
        """Return the sums, with `other` counted `times` times."""
        return Amounts(*(one + times * more for one, more in zip(self, other, strict=True)))


@dataclass(frozen=True, kw_only=True)
class Played:
    """An agent's ticks of a run, and the truth."""

    samples: Sequence[NodeSample]
    simulation: Simulation
    node: SimulatedNode

    def booked(self) -> list[Mapping[str | None, Amounts]]:
        """Return each pod's use by the books of each tick, by UID."""
        found: list[Mapping[str | None, Amounts]] = []
        for sample in self.samples:
            own: dict[str | None, Amounts] = defaultdict(Amounts)
            for entry in chain.from_iterable(books.entries for books in book_tick(sample)):
                if entry.category is Category.POD:
                    uid = pod_of(entry, sample)
                    byte_ns = (entry.memory_bytes or 0) * sample.interval_ns
                    of_entry = Amounts(entry.busy_ns or 0, byte_ns, entry.energy_millijoules or 0)
                    own[uid] = own[uid].plus(of_entry)
            found.append(own)
        return found

    def true(self) -> list[Mapping[str, Amounts]]:
        """Return each pod's true use in the time that each tick covers, by UID."""
        gpu = self.node.gpus[0]
        found: list[Mapping[str, Amounts]] = []
        for begin_ns, end_ns in self.spans():
            own: dict[str, Amounts] = defaultdict(Amounts)
            for process in gpu.processes:
                if process.pod is None:
                    continue
                busy_ns = gpu.busy_ns(process, begin_ns, end_ns)
                lived_ns = process.on_gpu_ns(begin_ns, end_ns)
                instance = gpu.instance_of(process)
                # An instance has a part of the GPU's idle draw, by memory.
                part = instance.memory_bytes / gpu.facts.memory_bytes if instance else 1.0
                joules = busy_ns / NS_PER_SECOND * gpu.facts.idle_watts * part
                joules += gpu.kernel_joules(process, begin_ns, end_ns)
                joules += gpu.context_joules_of(process, begin_ns, end_ns)
                of_process = Amounts(
                    busy_ns,
                    process.spec.memory_bytes * lived_ns,
                    joules * 1000,
                )
                uid = self.simulation.uid(process.pod)
                own[uid] = own[uid].plus(of_process)
            found.append(own)
        return found

    def device(self, begin: int, end: int) -> Amounts:
        """Return the device's time, memory and energy in these ticks."""
        gpu, ticks = self.node.gpus[0], self.spans()[begin:end]
        begin_ns, end_ns = ticks[0][0], ticks[-1][1]
        length_ns = end_ns - begin_ns
        joules = gpu.joules(begin_ns, end_ns)
        return Amounts(length_ns, gpu.facts.memory_bytes * length_ns, joules * 1000)

    def spans(self) -> list[tuple[int, int]]:
        """Return the time of each tick since the scenario's start, which no wall clock shows."""
        end_ns = self.samples[0].time_ns - EPOCH_NS - self.samples[0].interval_ns
        found = []
        for sample in self.samples:
            begin_ns, end_ns = end_ns, end_ns + sample.interval_ns
            found.append((begin_ns, end_ns))
        return found

    def methods(self) -> list[set[BusyMethod | None]]:
        """Return, for each tick, how the busy time of the GPU and its instances was determined."""
        return [{books.busy_method for books in book_tick(sample)} for sample in self.samples]

    def is_known(self) -> list[bool]:
        """Return, for each tick, whether its busy time is known."""
        rows = [{row.uuid for row in sample.gpus} for sample in self.samples]
        return [
            # A GPU with instances reports it in their rows. A deleted instance has no row.
            all(row.utilization_ratio is not None for row in sample.gpus if not row.mig_enabled)
            and own == before
            for sample, own, before in zip(self.samples, rows, [rows[0], *rows], strict=False)
        ]


@dataclass(frozen=True, kw_only=True)
class Errors:
    """A cell's errors relative to the device, over all its windows of 60 s and pods."""

    largest: Amounts
    """The largest error of GPU-seconds, byte-seconds and joules."""
    mean: Amounts
    """The mean error of each."""
    claimed: float
    """The largest error of GPU-seconds in the ticks whose methods claim to measure them."""
    unknown: float
    """Fraction of the ticks without a known busy time."""
    methods: Sequence[str]
    """How busy time was determined, most frequent first."""


def errors_of(played: Played, *, sampling_interval_seconds: float) -> Errors:
    """Return the errors of a run's books after the agent has learned its driver."""
    # Slow calls make ticks longer.
    lengths = sorted(sample.interval_ns / NS_PER_SECOND for sample in played.samples)
    usual_seconds = max(sampling_interval_seconds, lengths[len(lengths) // 2])
    count, first = round(WINDOW_SECONDS / usual_seconds), round(LEAD_SECONDS / usual_seconds)
    booked, true, known = played.booked(), played.true(), played.is_known()
    methods = played.methods()
    claims = [bool(of_tick & CLAIMS) for of_tick in methods]
    found: list[Amounts] = []
    claimed = 0.0
    for begin in range(first, len(booked) - count + 1):
        # Ticks of unknown busy time do not count, because they claim nothing.
        ticks = [at for at in range(begin, begin + count) if known[at]]
        device = played.device(begin, begin + count)
        for uid in {uid for at in ticks for uid in true[at]}:
            off, claimed_ns = Amounts(), 0.0
            for at in ticks:
                before_ns = off.busy_ns
                off = off.plus(booked[at].get(uid, Amounts()))
                off = off.plus(true[at].get(uid, Amounts()), -1)
                claimed_ns += (off.busy_ns - before_ns) * claims[at]
            claimed = max(claimed, abs(claimed_ns) / device.busy_ns)
            found.append(Amounts(*(abs(one) / of for one, of in zip(off, device, strict=True))))
    return Errors(
        largest=Amounts(*(max(column, default=0.0) for column in zip(*found, strict=True))),
        mean=Amounts(*(sum(column) / len(found) for column in zip(*found, strict=True))),
        claimed=claimed,
        methods=[
            str(method)
            for method, _ in Counter(chain.from_iterable(methods[first:])).most_common()
            if method is not None
        ],
        unknown=known[first:].count(False) / max(1, len(known[first:])),
    )


def play_cell(
    kind: str,
    driver: Mapping[str, Any],
    *,
    sampling_interval_seconds: float,
    seed: int,
    gpu: Mapping[str, Any] = MappingProxyType({}),
) -> Played:
    """Let an agent observe a run of a class under a driver."""
    random = Random(f"{kind}/{seed}")  # noqa: S311  # a scenario, not a secret
    made = FURTHER.get(kind) or EVENTS.get(kind)
    use = made(random) if made else _use(CLASSES[kind](random))
    return play_use(
        use, driver, sampling_interval_seconds=sampling_interval_seconds, random=random, gpu=gpu
    )


def play_lives(
    lives: Lives,
    driver: Mapping[str, Any],
    *,
    sampling_interval_seconds: float,
    random: Random,
    watched_by: Watch | None = None,
) -> Played:
    """Let `watched_by` observe these pods; by default it is an agent that polls in time."""
    return play_use(
        _use(lives),
        driver,
        sampling_interval_seconds=sampling_interval_seconds,
        random=random,
        watched_by=watched_by,
    )


def play_use(
    use: Use,
    driver: Mapping[str, Any],
    *,
    sampling_interval_seconds: float,
    random: Random,
    gpu: Mapping[str, Any] = MappingProxyType({}),
    watched_by: Watch | None = None,
) -> Played:
    """Let an agent observe a use of a GPU, as `play_lives` does."""
    clock = ManualClock(start_ns=EPOCH_NS)
    scenario = parse_scenario(_scenario(use, {**driver, **use.driver}, {**use.gpu, **gpu}))
    simulation = Simulation(scenario, epoch_ns=EPOCH_NS, clock=clock)
    node = simulation.node(NODE)
    if use.call_seconds:
        slow: Any = SlowCalls(node.nvml, clock, use.call_seconds)
        node = replace(node, nvml=slow)
    clock.advance(random.uniform(0.0, 1.0))
    return Played(
        samples=watched_by(node, clock)
        if watched_by
        else watch(
            node, clock, sampling_interval_seconds=sampling_interval_seconds, seconds=RUN_SECONDS
        ),
        simulation=simulation,
        node=node,
    )


class SlowCalls:
    """A driver whose samples and lists take some time; time passes only in its calls."""

    def __init__(self, nvml: Any, clock: ManualClock, seconds: float) -> None:  # noqa: ANN401  # a module or its stand-in
        self._nvml, self._clock, self._seconds = nvml, clock, seconds

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401  # whatever it has
        function = getattr(self._nvml, name)
        if name not in _SLOW_CALLS:
            return function

        def slow(*arguments: object) -> object:
            self._clock.advance(self._seconds / 2)
            try:
                return function(*arguments)
            finally:
                self._clock.advance(self._seconds / 2)

        return slow


_SLOW_CALLS: Final = frozenset(
    {
        "nvmlDeviceGetSamples",
        "nvmlDeviceGetProcessUtilization",
        "nvmlDeviceGetComputeRunningProcesses_v3",
    }
)


def watch(
    node: SimulatedNode, clock: ManualClock, *, sampling_interval_seconds: float, seconds: float
) -> list[NodeSample]:
    """Return the ticks of an agent that has just started, with fast polls in between."""
    sampler = Sampler(node=NodeId("default", node.name), procfs=node.procfs)
    gpus = NvmlSession(node.nvml, monotonic_ns=node.clock.monotonic_ns).open()
    made = []
    end_ns, tick_ns = clock.monotonic_ns() + seconds * NS_PER_SECOND, 250_000_000
    while clock.monotonic_ns() < end_ns:
        if tick := tick_of(sampler, gpus, node.clock):
            made.append(tick.sample)
        take_fast_polls(sampler, gpus, clock, node.clock, tick_ns)
        tick_ns = round(sampling_interval_seconds * NS_PER_SECOND)
    return made


def _use(lives: Lives) -> Use:
    return Use(
        [
            {"start_seconds": start, "end_seconds": end, "processes": [_process(load, kernel)]}
            for start, end, load, kernel in lives
        ]
    )


def _scenario(use: Use, driver: Mapping[str, Any], gpu: Mapping[str, Any]) -> dict[str, object]:
    return {
        "name": "truth",
        "nodes": [
            {"name": NODE, "gpus": {"model": MODEL, **gpu}, "driver": dict(driver), **use.node}
        ],
        "host_processes": [{"node": NODE, **process} for process in use.host],
        "pods": [
            {
                "namespace": "research",
                "name": f"pod-{number}",
                "node": NODE,
                **{name: value for name, value in pod.items() if name != "processes"},
                "containers": [{"name": "main", "processes": pod["processes"]}],
            }
            for number, pod in enumerate(use.pods)
        ],
    }
