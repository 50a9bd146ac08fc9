"""A played GPU's health changes become incidents: once, with their end, and across restarts."""

from typing import Any

import pytest

from gpuledger.clock import NS_PER_SECOND
from gpuledger.keys import NodeId
from gpuledger.ledger.health import incident_hash
from gpuledger.records import Incident, Severity
from gpuledger_agent.core.gpu_sampler import GpuSampler
from gpuledger_agent.gpu.nvidia.session import NvmlSession
from gpuledger_agent.gpu.protocol import SourceLostError
from gpuledger_agent.monitor import IncidentMonitor
from gpuledger_simulator.clock import ManualClock
from gpuledger_simulator.scenario.load import parse_scenario
from gpuledger_simulator.simulation import Simulation
from tests.ticks import query_all, tick_gpu

EPOCH_NS = 1_790_000_000_000_000_000
H100 = "NVIDIA H100 80GB HBM3"
B200 = "NVIDIA B200"
T4 = "Tesla T4"
TICK_SECONDS = 5
BEGIN, END = 60, 240


class Node:
    """A node with one GPU, whose agent can be restarted."""

    def __init__(
        self,
        *ailments: dict[str, Any],
        model: str = H100,
        works: bool = True,
        faults: list[dict[str, Any]] | None = None,
    ) -> None:
        process = {"node": "n", "command": "train", "gpus": [0], "memory_bytes": 1 << 30}
        content = {
            "name": "ill",
            "nodes": [{"name": "n", "gpus": {"model": model, "ailments": list(ailments)}}],
            "host_processes": [process] if works else [],
            "faults": faults or [],
        }
        self.clock = ManualClock(start_ns=EPOCH_NS)
        run = Simulation(parse_scenario(content), epoch_ns=EPOCH_NS, clock=self.clock)
        self._library = run.node("n").nvml
        self.incidents: list[Incident] = []
        self.start_agent()

    def start_agent(self) -> None:
        """Start an agent without knowledge of the past."""
        self._session = NvmlSession(self._library, monotonic_ns=self.clock.monotonic_ns)
        self._sampler = GpuSampler()
        self._is_open = False
        self._monitor = IncidentMonitor(
            node=NodeId("default", "n"),
            boot_id="boot-1",
            source=self._session,
            clock=self.clock,
            publish=self.incidents.append,
        )

    def run(self, *, until: int) -> list[str]:
        """Tick until a second; return the reported incidents, ends with a minus before them.

        Reports that the GPU is well at the agent's start are left out.
        """
        reported = len(self.incidents)
        while self.clock.time_ns() < EPOCH_NS + until * NS_PER_SECOND:
            self.clock.advance(TICK_SECONDS)
            self._tick()
        return [
            name
            for one in self.incidents[reported:]
            if not (one.present_at_start and one.ended_kinds)
            for name in ([f"-{kind}" for kind in one.ended_kinds or ()] or [one.kind])
        ]

    def _tick(self) -> None:
        try:
            if not self._is_open:
                (self._gpu,) = self._session.open()
                self._is_open = True
            raw = query_all(self._gpu, self._sampler.request_tick(is_set_back=False))
        except SourceLostError:
            self._session.close()
            self._is_open = False
            return
        interval_ns, now_ns = TICK_SECONDS * NS_PER_SECOND, self.clock.monotonic_ns()
        tick = tick_gpu(self._sampler, raw, now_ns=now_ns, interval_ns=interval_ns)
        self._monitor.evaluate_health(tick.details, time_ns=self.clock.time_ns())


def ill(more: dict[str, Any]) -> dict[str, Any]:
    return {"start_seconds": BEGIN, "end_seconds": END, **more}


STATES: dict[str, tuple[str, dict[str, Any]]] = {
    "row_remap_failed": (H100, {"remap_failed": True}),
    "page_retirement_pending": (T4, {"retired_pages_pending": True}),
    "fabric_bandwidth_degraded": (H100, {"fabric": ["bandwidth_degraded"]}),
    "fabric_route_recovery": (H100, {"fabric": ["route_recovery"]}),
    "fabric_route_unhealthy": (B200, {"fabric": ["route_unhealthy"]}),
    "fabric_access_timeout": (H100, {"fabric": ["access_timeout"]}),
    "pcie_link_degraded": (H100, {"pcie_width": 8}),
    "hardware_thermal_slowdown": (H100, {"throttle": "hardware_thermal"}),
    "power_brake_slowdown": (T4, {"throttle": "power_brake"}),
}


@pytest.mark.parametrize("kind", STATES)
def test_a_state_is_an_incident_when_it_begins_and_when_it_ends(kind: str) -> None:
    model, ailment = STATES[kind]
    node = Node(ill(ailment), model=model)
    assert node.run(until=BEGIN - 10) == []
    assert node.run(until=END - 10) == [kind]
    begun = node.incidents[-1]
    assert node.run(until=END + 300) == [f"-{kind}"]
    assert begun.severity in {Severity.WARNING, Severity.CRITICAL}
    assert node.incidents[-1].severity is Severity.INFO


def test_a_lasting_state_is_reported_once() -> None:
    node = Node({"start_seconds": BEGIN, "sram_uncorrected": 5})
    assert node.run(until=BEGIN + 300) == ["sram_threshold_exceeded"]


@pytest.mark.parametrize(
    ("model", "ailment", "kind", "words"),
    [
        (H100, {"ecc_uncorrected": 2}, "ecc_uncorrected", "2 more, 2 in all"),
        (B200, {"nvlink_failed_recoveries": 1, "nvlink": 7}, "nvlink_recovery_failed", "link 7"),
    ],
)
def test_a_new_error_is_an_incident(
    model: str, ailment: dict[str, Any], kind: str, words: str
) -> None:
    node = Node({"start_seconds": BEGIN, **ailment}, model=model)
    assert node.run(until=BEGIN + 120) == [kind]
    assert node.incidents[-1].message.endswith(words)
    assert node.incidents[-1].severity is Severity.CRITICAL


ALL_AT_ONCE: dict[str, Any] = {
    "recovery": "reset",
    "remap_failed": True,
    "sram_uncorrected": 4,
    "ecc_uncorrected": 4,
    "fabric": ["route_unhealthy"],
}


def test_a_state_from_before_the_agent_is_one_incident_however_often_the_agent_starts() -> None:
    node = Node(ALL_AT_ONCE)
    reported = {"recovery_action", "row_remap_failed", "sram_threshold_exceeded"}
    reported.add("fabric_route_unhealthy")
    assert set(node.run(until=60)) == reported
    first = list(node.incidents)
    assert all(one.present_at_start for one in first)
    assert all("at the agent's first reading" in one.message for one in first)
    output = {one.kind: one.message for one in first}
    assert output["recovery_action"] == (
        "The driver requests RESET_GPU: already the case at the agent's first reading"
    )
    well = [one.message for one in first if one.ended_kinds]
    assert all(one.startswith("State absent: ") for one in well)
    assert not any("already the case" in one for one in well)

    node.start_agent()
    assert set(node.run(until=120)) == reported
    again = node.incidents[len(first) :]
    assert {one.time_ns for one in again}.isdisjoint(one.time_ns for one in first)
    assert {incident_hash(one) for one in again} == {incident_hash(one) for one in first}


def test_a_restarted_agent_reports_what_has_ended_meanwhile() -> None:
    node = Node(
        ill({"fabric": ["route_unhealthy"], "throttle": "power_brake", "recovery": "reset"})
    )
    assert set(node.run(until=END - 10)) == {
        "fabric_route_unhealthy",
        "power_brake_slowdown",
        "recovery_action",
    }
    node.clock.advance(60)
    node.start_agent()
    assert node.run(until=END + 300) == []
    ended = {
        kind
        for one in node.incidents
        if one.present_at_start and one.time_ns > EPOCH_NS + END * NS_PER_SECOND
        for kind in one.ended_kinds or ()
    }
    assert {"fabric_route_unhealthy", "power_brake_slowdown", "recovery_action"} <= ended


def test_reloading_the_driver_is_neither_an_error_nor_an_end() -> None:
    reload = {"node": "n", "kind": "driver_reload", "start_seconds": 200, "end_seconds": 230}
    before = {"start_seconds": 50, "ecc_uncorrected": 3, "nvlink_failed_recoveries": 2}
    after = {"start_seconds": 500, "ecc_uncorrected": 1}
    node = Node(before, after, {"remap_failed": True}, model=B200, faults=[reload])
    assert node.run(until=199) == ["row_remap_failed", "ecc_uncorrected", "nvlink_recovery_failed"]
    assert node.run(until=490) == []
    assert node.run(until=600) == ["ecc_uncorrected"]
    assert node.incidents[-1].message.endswith("1 more, 1 in all")


GARBLED = (
    "nvmlDeviceGetFieldValues",
    "nvmlDeviceGetTotalEccErrors",
    "nvmlDeviceGetRemappedRows",
    "nvmlDeviceGetSramEccErrorStatus",
    "nvmlDeviceGetGpuFabricInfoV",
    "nvmlDeviceGetCurrPcieLinkGeneration",
    "nvmlDeviceGetMaxPcieLinkWidth",
    "nvmlDeviceGetPerformanceState",
)


@pytest.mark.parametrize("model", [H100, B200, T4])
@pytest.mark.parametrize(("calls", "begin"), [([], 100), (GARBLED, 100), (GARBLED, 0)])
def test_implausible_values_are_not_incidents(model: str, calls: list[str], begin: int) -> None:
    fault = {"node": "n", "kind": "garbage", "start_seconds": begin, "end_seconds": 200}
    node = Node(model=model, faults=[{**fault, "calls": list(calls)}])
    assert node.run(until=300) == []


def test_a_link_that_slows_down_while_the_gpu_is_idle_is_not_an_incident() -> None:
    assert Node(works=False).run(until=300) == []
