"""The driver's event sets, through the simulator's."""

import pytest

from gpuledger.clock import NS_PER_SECOND
from gpuledger_agent.gpu.nvidia.events import NvmlGpuEvents, pci_buses_of
from gpuledger_simulator.clock import ManualClock
from tests.unit.agent.core.incidents.builders import EPOCH_NS, failing_node, gpus_of


@pytest.mark.parametrize("version", ["v3", "v2"])
def test_a_played_driver_reports_each_event_of_its_scenario_once_and_in_order(version: str) -> None:
    clock = ManualClock(start_ns=EPOCH_NS)
    node = failing_node(
        {"at_seconds": 3, "event": "double_bit_error", "gpu": 1},
        {"at_seconds": 2, "xid": 48, "gpu_instance": 9, "compute_instance": 0},
        {"at_seconds": 2.5, "xid": 63, "reported_by": "kmsg"},
        {"at_seconds": 9, "xid": 79},
        clock=clock,
        events={"version": version},
    )
    gpus = gpus_of(node)
    events = NvmlGpuEvents(node.nvml, gpus, clock=clock)
    early = events.wait(0)
    clock.advance(4)
    first, second, third = events.wait(0), events.wait(0), events.wait(0)

    assert early is third is None
    assert first is not None
    assert second is not None
    assert (first.xid, first.gpu_uuid, first.gpu_instance) == (48, gpus[0].uuid, 9)
    assert (second.kind, second.gpu_uuid) == ("ecc_uncorrected", gpus[1].uuid)
    taken_ns = EPOCH_NS + (2 if version == "v3" else 4) * NS_PER_SECOND
    assert first.time_ns == taken_ns
    events.close()


def test_gpus_are_found_by_their_pci_address() -> None:
    node = failing_node()
    gpus = gpus_of(node)

    assert pci_buses_of(node.nvml, gpus) == {
        "00000000:1B:00.0": gpus[0].uuid,
        "00000000:2B:00.0": gpus[1].uuid,
    }


def test_gpus_without_a_pci_address_are_left_out() -> None:
    node = failing_node()
    gpus = gpus_of(node)
    node.nvml.nvmlShutdown()

    assert pci_buses_of(node.nvml, gpus) == {}
