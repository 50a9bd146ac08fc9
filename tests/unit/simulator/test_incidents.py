"""Failures in a scenario, and their sources."""

from typing import Any

import pynvml
import pytest

from gpuledger.errors import UserError
from gpuledger_simulator.clock import ManualClock
from gpuledger_simulator.nvml import SimulatedNvml
from gpuledger_simulator.nvml.events import EventSet
from gpuledger_simulator.scenario.load import parse_scenario
from gpuledger_simulator.simulation import SimulatedNode, Simulation
from tests.unit.simulator.mig_builders import cut_simulation

EPOCH_NS = 1_790_000_000_000_000_000
XID, RETIREMENT = 0x8, 0x400


def content(*incidents: dict[str, Any], **node: Any) -> dict[str, Any]:  # noqa: ANN401  # a scenario's fields
    return {
        "name": "failing",
        "nodes": [{"name": "node-a", "gpus": {"model": "NVIDIA L4"}, **node}],
        "incidents": [
            {"node": "node-a", "gpu": 0, "at_seconds": 1, **incident} for incident in incidents
        ],
    }


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(start_ns=EPOCH_NS)


def node_of(clock: ManualClock, *incidents: dict[str, Any], **node: Any) -> SimulatedNode:  # noqa: ANN401  # a scenario's fields
    scenario = parse_scenario(content(*incidents, **node))
    return Simulation(scenario, epoch_ns=EPOCH_NS, clock=clock).node("node-a")


def registered(library: SimulatedNvml, bits: int = XID) -> EventSet:
    library.nvmlInit()
    events: EventSet = library.nvmlEventSetCreate()
    library.nvmlDeviceRegisterEvents(library.nvmlDeviceGetHandleByIndex(0), bits, events)
    return events


def fails_with(code: int, library: SimulatedNvml, events: EventSet, timeout_ms: int = 0) -> bool:
    with pytest.raises(pynvml.NVMLError) as raised:
        library.nvmlEventSetWait_v2(events, timeout_ms)
    return bool(raised.value.value == code)


def test_an_event_is_reported_once_and_not_before_its_time(clock: ManualClock) -> None:
    library = node_of(clock, {"xid": 79}).nvml
    events = registered(library)
    assert fails_with(pynvml.NVML_ERROR_TIMEOUT, library, events)
    clock.advance(1)
    assert library.nvmlEventSetWait_v2(events, 0).eventData == 79
    assert fails_with(pynvml.NVML_ERROR_TIMEOUT, library, events)


def test_a_new_event_set_does_not_report_earlier_events(clock: ManualClock) -> None:
    library = node_of(clock, {"xid": 79}).nvml
    clock.advance(2)
    assert fails_with(pynvml.NVML_ERROR_TIMEOUT, library, registered(library))


def test_only_registered_events_are_reported(clock: ManualClock) -> None:
    library = node_of(clock, {"xid": 79}, {"event": "memory_retirement"}).nvml
    events = registered(library, RETIREMENT)
    clock.advance(2)
    assert library.nvmlEventSetWait_v2(events, 0).eventType == RETIREMENT
    assert fails_with(pynvml.NVML_ERROR_TIMEOUT, library, events)


def test_a_burst_is_a_number_of_events_a_millisecond_apart(clock: ManualClock) -> None:
    library = node_of(clock, {"xid": 31, "times": 3}).nvml
    events = registered(library)
    clock.advance(2)
    stamps = []
    for _ in range(3):
        event = pynvml.c_nvmlEventSetWait_v3_t()
        library.nvmlEventSetWait_v3(events, event)
        stamps.append(event.timestampUsec - EPOCH_NS // 1000)
    assert stamps == [1_000_000, 1_001_000, 1_002_000]


def test_a_wait_lasts_for_its_timeout_and_sees_new_events(
    clock: ManualClock,
) -> None:
    library = node_of(clock, {"xid": 79}).nvml
    events = registered(library)
    library.events.pause = lambda _seconds: clock.advance(0.5)
    assert library.nvmlEventSetWait_v2(events, 60_000).eventData == 79


def test_closing_the_library_ends_the_wait(clock: ManualClock) -> None:
    library = node_of(clock).nvml
    events = registered(library)
    library.events.pause = lambda _seconds: library.nvmlShutdown()
    assert fails_with(pynvml.NVML_ERROR_UNINITIALIZED, library, events, 60_000)


def test_a_driver_of_version_2_has_no_version_3(clock: ManualClock) -> None:
    library = node_of(clock, {"xid": 79}, events={"version": "v2"}).nvml
    events = registered(library)
    with pytest.raises(pynvml.NVMLError) as raised:
        library.nvmlEventSetWait_v3(events, pynvml.c_nvmlEventSetWait_v3_t())
    assert raised.value.value == pynvml.NVML_ERROR_FUNCTION_NOT_FOUND


def test_an_event_that_a_gpu_does_not_support_cannot_be_registered(clock: ManualClock) -> None:
    library = node_of(clock, events={"types": XID}).nvml
    with pytest.raises(pynvml.NVMLError) as raised:
        registered(library, XID | RETIREMENT)
    assert raised.value.value == pynvml.NVML_ERROR_NOT_SUPPORTED


def test_a_repartitioning_is_an_event(clock: ManualClock) -> None:
    library = cut_simulation(clock).node("node-a").nvml
    events = registered(library, 0x100)
    clock.advance(30)
    assert library.nvmlEventSetWait_v2(events, 0).eventType == pynvml.nvmlEventMigConfigChange


def test_the_kernel_log_uses_stamps_since_boot(clock: ManualClock) -> None:
    node = node_of(clock, {"xid": 13, "pid": 7, "text": "Graphics"}, uptime_seconds=100)
    log = node.open_kmsg()
    with pytest.raises(BlockingIOError):
        log.read()
    clock.advance(1)
    assert log.read() == (
        b"4,1001,101000000,-;NVRM: Xid (PCI:0000:1b:00): 13, pid=7, name=<unknown>, Graphics\n"
    )


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"node": "node-x"}, "incidents[0].node: unknown node 'node-x'; did you mean 'node-a'?"),
        ({"gpu": 1}, "incidents[0].gpu: node-a has no GPU 1; available: 0 to 0"),
        ({"xid": None}, "set either xid or an event other than 'xid'; got xid None"),
        ({"event": "unavailable"}, "got xid 79 and event 'unavailable'"),
    ],
)
def test_an_error_is_reported_with_its_place(change: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError) as raised:
        parse_scenario(content({"xid": 79, **change}))
    assert words in str(raised.value)
