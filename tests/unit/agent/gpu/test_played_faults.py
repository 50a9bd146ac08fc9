"""The driver against a played node: the effects of a scenario's faults."""
# ruff: noqa: ANN401, N802  # faults have many forms; NVML's own names

import asyncio
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest

from gpuledger.runtime import Backoff, Check
from gpuledger_agent.core.raw import RawGpuSample, SampleCursor
from gpuledger_agent.gpu.driver import Driver
from gpuledger_agent.gpu.nvidia.session import NvmlSession
from gpuledger_simulator.clock import ManualClock
from gpuledger_simulator.scenario.load import parse_scenario
from gpuledger_simulator.simulation import Simulation
from tests.fakes.gpus import await_driver_thread, await_probe
from tests.fakes.nvml import Altered
from tests.hanging import HANG_SECONDS

EPOCH_NS = 1_790_000_000_000_000_000
GIB = 1 << 30
PROCESS = {"command": "train", "memory_bytes": GIB, "load": {"busy_ratio": 0.9}}


class LongFastPolls(Altered):
    """A library whose poll for driver events lasts until the tick is over.

    That happens if no GPU answers: the poll takes a millisecond, and such a tick less.
    """

    def __init__(self, library: Any) -> None:
        super().__init__(library)
        self._tick_is_over = threading.Event()
        self._returned = threading.Event()

    def nvmlSystemEventSetWait(self, *arguments: Any) -> Any:
        self._tick_is_over.wait()
        happened = self._library.nvmlSystemEventSetWait(*arguments)
        self._returned.set()
        return happened

    def begin_tick(self) -> None:
        self._tick_is_over.clear()
        self._returned.clear()

    def end_tick(self) -> None:
        """Let a poll return; if none is running, wait only briefly."""
        self._tick_is_over.set()
        self._returned.wait(0.05)


class Node:
    """A driver over a played node, queried once per scenario second."""

    def __init__(
        self,
        *faults: Mapping[str, Any],
        count: int = 2,
        seconds: float = 20,
        has_usual_waits: bool = False,
    ) -> None:
        content: dict[str, Any] = {
            "name": "faulty",
            "nodes": [
                {"name": "node-a", "gpus": {"model": "NVIDIA H100 80GB HBM3", "count": count}}
            ],
            "host_processes": [{"node": "node-a", "gpus": [*range(count)], **PROCESS}],
            "faults": [{"node": "node-a", **fault} for fault in faults],
        }
        self.clock = ManualClock(start_ns=EPOCH_NS)
        played = Simulation(parse_scenario(content), epoch_ns=EPOCH_NS, clock=self.clock).node(
            "node-a"
        )
        self.uuids = [gpu.facts.uuid for gpu in played.gpus]
        self.check = Check()
        self.reported: list[tuple[str, int]] = []
        self.library = LongFastPolls(played.nvml)
        self.driver = Driver(
            NvmlSession(
                self.library,
                monotonic_ns=played.clock.monotonic_ns,
                find_seconds=seconds,
            ),
            clock=self.clock,
            check=self.check,
            deadline_seconds=seconds,
            backoff=Backoff()
            if has_usual_waits
            else Backoff(first_seconds=1, max_seconds=2, jitter=lambda: 1.0),
            lost_gpu_backoff=None
            if has_usual_waits
            else Backoff(first_seconds=2, max_seconds=4, jitter=lambda: 1.0),
            report=lambda kind, name, _: self.reported.append((kind, self.index_of(name))),
        )

    def index_of(self, name: str) -> int:
        """Return the index of a GPU by its UUID, or by its placeholder if the UUID is not known."""
        if name in self.uuids:
            return self.uuids.index(name)
        return int(name.removeprefix("INDEX:"))

    async def tick(
        self, last_seen: Mapping[str, SampleCursor] | None = None
    ) -> dict[int, RawGpuSample]:
        self.library.begin_tick()
        poll = await self.driver.poll(last_seen or {})
        self.library.end_tick()
        self.clock.advance(1)
        return {sample.index: sample for sample in poll.samples} if poll else {}

    async def ticks(self, count: int) -> list[dict[int, RawGpuSample]]:
        return [await self.tick() for _ in range(count)]


@pytest.fixture
def node_with() -> Iterator[Callable[..., Node]]:
    made: list[Node] = []

    def make(
        *faults: Mapping[str, Any],
        count: int = 2,
        seconds: float = 20,
        has_usual_waits: bool = False,
        **fault: Any,
    ) -> Node:
        every = (*faults, fault) if fault else faults
        made.append(Node(*every, count=count, seconds=seconds, has_usual_waits=has_usual_waits))
        return made[-1]

    yield make
    for node in made:
        node.library.end_tick()
        node.driver.close()


async def test_a_lost_gpu_is_missing_while_it_is_lost_and_the_other_never(
    node_with: Callable[..., Node],
) -> None:
    node = node_with(kind="lost", gpus=[0], start_seconds=5, end_seconds=15)
    ticks = await node.ticks(15)
    async with asyncio.timeout(HANG_SECONDS):
        while len(node.reported) < 2:  # it is reopened in a thread, however busy the machine is
            ticks.append(await node.tick())
    ticks += await node.ticks(5)
    assert all(1 in tick for tick in ticks)
    there = [0 in tick for tick in ticks]
    assert there[:5] == [True] * 5
    assert not any(there[5:15])
    assert there[-5:] == [True] * 5
    assert node.reported == [("gpu_lost", 0), ("gpu_recovered", 0)]
    assert node.check.is_ok


LONG_LOSS: dict[str, Any] = {"kind": "lost", "gpus": [0], "start_seconds": 5, "end_seconds": 405}


async def test_a_gpu_that_was_lost_for_long_is_back_within_30_seconds(
    node_with: Callable[..., Node],
) -> None:
    """The source is reopened rarely by then, because that disturbs the other GPUs."""
    node = node_with(LONG_LOSS, has_usual_waits=True)
    there = []
    for _ in range(440):
        tick = await node.tick()
        assert 1 in tick
        there.append(0 in tick)
        await_probe(node.driver)
        await_driver_thread(node.driver)
    assert there[:5] == [True] * 5
    assert not any(there[5:405])
    assert all(there[405 + 31 :])
    assert node.library.calls["nvmlInit"] < 15
    assert node.reported == [("gpu_lost", 0), ("gpu_recovered", 0)]


@pytest.mark.parametrize(
    ("count", "faults"),
    [
        pytest.param(1, [{"kind": "lost", "start_seconds": 5, "end_seconds": 15}], id="the only"),
        pytest.param(2, [{"kind": "lost", "start_seconds": 5, "end_seconds": 15}], id="at once"),
        pytest.param(
            2,
            [
                {"kind": "lost", "gpus": [0], "start_seconds": 5, "end_seconds": 15},
                {"kind": "lost", "gpus": [1], "start_seconds": 8, "end_seconds": 20},
            ],
            id="one after another",
        ),
        pytest.param(2, [{"kind": "lost", "end_seconds": 15}], id="from the start"),
        pytest.param(2, [{"kind": "hang", "start_seconds": 5, "end_seconds": 40}], id="hanging"),
    ],
)
async def test_a_node_that_lost_all_its_gpus_sees_them_again(
    node_with: Callable[..., Node], count: int, faults: list[dict[str, Any]]
) -> None:
    node = node_with(*faults, count=count, seconds=0.2 if faults[0]["kind"] == "hang" else 20)
    ticks = await node.ticks(120)
    assert not all(ticks), "for a while no GPU answers"
    assert sorted(ticks[-1]) == [*range(count)]
    recovered = [gpu for kind, gpu in node.reported if kind == "gpu_recovered"]
    assert sorted(recovered) == sorted(gpu for kind, gpu in node.reported if kind == "gpu_lost")
    assert node.check.is_ok


async def test_a_reloaded_driver_comes_back_with_counters_from_zero(
    node_with: Callable[..., Node],
) -> None:
    node = node_with(kind="driver_reload", start_seconds=5, end_seconds=10)
    ticks = await node.ticks(20)
    there = [bool(tick) for tick in ticks]
    assert there[:10] == [True] * 5 + [False] * 5
    assert all(there[-7:])
    before, after = ticks[4][0].energy_millijoules, ticks[-1][0].energy_millijoules
    assert before
    assert after
    assert after < before
    assert node.reported == [("driver_reloaded", 0), ("driver_reloaded", 1)]


async def test_the_driver_can_be_unbound_and_the_node_comes_back(
    node_with: Callable[..., Node],
) -> None:
    node = node_with(kind="unbind", start_seconds=5, end_seconds=30)
    ticks = await node.ticks(5)
    assert all(ticks)
    for _ in range(200):
        # The poll for it runs in the library's thread, between two ticks.
        await_driver_thread(node.driver)
        ticks.append(await node.tick())
        if len(node.reported) == 4:
            break
    unresponsive = sum(not tick for tick in ticks)
    assert 23 <= unresponsive <= 27
    assert node.reported[:2] == [("driver_unbound", 0), ("driver_unbound", 1)]
    assert node.reported[2:] == [("driver_reloaded", 0), ("driver_reloaded", 1)]


@pytest.mark.parametrize("calls", [["nvmlDeviceGetPowerUsage"], []])
async def test_unsupported_calls_lose_only_their_own_values(
    node_with: Callable[..., Node], calls: list[str]
) -> None:
    node = node_with(kind="not_supported", gpus=[0], calls=calls, start_seconds=2)
    ticks = await node.ticks(6)
    assert all(len(tick) == 2 for tick in ticks)
    assert ticks[-1][0].power_milliwatts is None
    assert ticks[-1][1].power_milliwatts is not None
    assert bool(ticks[-1][0].processes) == bool(calls)
    assert not node.reported


async def test_lists_that_grow_between_two_calls_are_still_read(
    node_with: Callable[..., Node],
) -> None:
    node = node_with(kind="growing_list", failures=2)
    ticks = await node.ticks(3)
    assert all(len(tick[0].processes or ()) == 1 for tick in ticks)
