"""Facts of GPUs: permanent ones are read once, settings every time, refusals are reported."""
# ruff: noqa: ANN401  # the binding's structs have no types

from typing import Any

import pynvml
import pytest

from gpuledger.records import Capability, GpuFacts
from gpuledger_agent.core.raw import CallGroup, SampleCursor
from gpuledger_agent.gpu.nvidia.device_client import Key
from gpuledger_agent.gpu.nvidia.inventory import Facts, capabilities_of
from gpuledger_agent.gpu.nvidia.session import NvmlSession
from gpuledger_simulator.clock import ManualClock
from gpuledger_simulator.nvml import SimulatedNvml
from gpuledger_simulator.scenario.load import parse_scenario
from gpuledger_simulator.simulation import Simulation
from tests.fakes.nvml import Altered
from tests.fakes.nvml_pointers import play, referent_of
from tests.ticks import query_all

EPOCH_NS = 1_790_000_000_000_000_000
H100 = "NVIDIA H100 80GB HBM3"


def machine(*groups: dict[str, Any]) -> SimulatedNvml:
    scenario = parse_scenario({"name": "one", "nodes": [{"name": "n", "gpus": list(groups)}]})
    simulation = Simulation(scenario, epoch_ns=EPOCH_NS, clock=ManualClock(start_ns=EPOCH_NS))
    return simulation.node("n").nvml


def facts(library: Any) -> list[GpuFacts]:
    return [
        gpu.query(CallGroup.HEALTH, SampleCursor())["facts"] for gpu in NvmlSession(library).open()
    ]


def test_a_gpu_reports_its_identity_and_its_peers() -> None:
    first, second, third = facts(
        machine({"model": "NVIDIA H100 80GB HBM3", "count": 2}, {"model": "NVIDIA L4"})
    )
    assert (first.architecture, first.compute_capability, first.brand) == (
        "hopper",
        "9.0",
        "Nvidia",
    )
    assert (first.minor_number, first.pci_bus_id) == (0, "00000000:1B:00.0")
    assert (first.pcie_max_link_generation, first.pcie_max_link_width) == (5, 16)
    assert (first.ecc_enabled, first.persistence_enabled) == (True, True)
    assert first.compute_mode == "default"
    assert (first.power_limit_milliwatts, third.power_limit_milliwatts) == (700_000, 72_000)
    assert first.inforom_power_version is None
    assert first.serial != second.serial
    assert first.nvlink_peers == {second.uuid: "ok", third.uuid: "not_supported"}
    assert third.nvlink_peers == {first.uuid: "not_supported", second.uuid: "not_supported"}


def test_an_implausible_power_limit_is_unknown() -> None:
    unlimited = {"nvmlDeviceGetEnforcedPowerLimit": lambda _: 2**32 - 1}
    (found,) = facts(Altered(machine({"model": "NVIDIA L4"}), **unlimited))
    assert found.power_limit_milliwatts is None


def test_permanent_facts_are_read_once() -> None:
    library = Altered(machine({"model": "NVIDIA L4"}))
    (gpu,) = NvmlSession(library).open()
    requested = [gpu.query(CallGroup.HEALTH, SampleCursor())["facts"] for _ in range(3)]
    assert requested[1] == requested[2]
    assert library.calls["nvmlDeviceGetSerial"] == 1
    assert library.calls["nvmlDeviceGetEccMode"] == 3


def test_the_node_reports_its_driver_nvml_and_cuda_versions() -> None:
    nvml = NvmlSession(machine({"model": "NVIDIA L4"}))
    nvml.open()
    assert nvml.versions() == {
        "driver_version": "580.95.05",
        "nvml_version": "13.580.95.05",
        "cuda_driver_version": "13.0",
        "confidential_computing_mode": None,
        "confidential_link_mode": None,
    }


@pytest.mark.parametrize(
    ("group", "mode", "link_mode"),
    [
        ({"model": H100}, "off", "none"),
        ({"model": H100, "confidential": "on"}, "on", "none"),
        ({"model": H100, "confidential": "on", "count": 2}, "on", "protected_pcie"),
        ({"model": H100, "confidential": "devtools"}, "devtools", "none"),
        ({"model": "NVIDIA A30", "confidential": "on"}, None, None),
    ],
)
def test_a_node_reports_whether_its_gpus_use_confidential_computing(
    group: dict[str, Any], mode: str | None, link_mode: str | None
) -> None:
    nvml = NvmlSession(machine(group))
    nvml.open()
    message = nvml.versions()
    assert message["confidential_computing_mode"] == mode
    assert message["confidential_link_mode"] == link_mode


CLUSTER = "6f1d0c52-3b7a-4f0e-9c41-8a2b5d7e9f10"
RACK = {
    "chassis_serial_number": "1821224190077", "slot": 14, "tray": 200, "host": 1,
    "cluster_uuid": CLUSTER, "clique": 32766,
}  # fmt: skip


def test_a_gpu_in_a_rack_reports_its_place_and_its_fabric() -> None:
    first, second = facts(machine({"model": H100, "rack": RACK}, {"model": H100}))
    assert (first.fabric_cluster_uuid, first.fabric_clique_id) == (CLUSTER, 32766)
    assert (first.chassis_serial_number, first.chassis_slot) == ("1821224190077", 14)
    # The byte 200 is not text, but the binding treats a single byte as text.
    assert (first.chassis_tray, first.chassis_host, first.module_id) == (200, 1, 1)
    # A machine that is its own fabric has a cluster UUID of zeros.
    assert (second.fabric_cluster_uuid, second.fabric_clique_id) == (None, None)
    assert (second.chassis_serial_number, second.chassis_slot, second.module_id) == (None,) * 3


@pytest.mark.parametrize(
    ("state", "status"),
    [
        (pynvml.NVML_GPU_FABRIC_STATE_IN_PROGRESS, pynvml.NVML_SUCCESS),
        (pynvml.NVML_GPU_FABRIC_STATE_COMPLETED, pynvml.NVML_ERROR_INVALID_STATE),
    ],
)
def test_a_gpu_that_has_not_joined_its_fabric_reports_none(state: int, status: int) -> None:
    library = Altered(machine({"model": H100, "rack": RACK}))

    def fill(_gpu: object, reference: Any) -> int:
        struct = referent_of(reference)
        struct.clusterUuid[:] = [1] * 16
        struct.state, struct.status = state, status
        return 0

    library.functions["nvmlDeviceGetGpuFabricInfoV"] = fill
    (found,) = facts(library)
    assert (found.fabric_cluster_uuid, found.fabric_clique_id) == (None, None)


def test_a_gpu_outside_of_any_chassis_has_a_module_and_no_slot() -> None:
    library = Altered(machine({"model": H100}))

    def fill(_gpu: object, reference: Any) -> int:
        referent_of(reference).moduleId = bytes([5])
        return 0

    library.functions["nvmlDeviceGetPlatformInfo"] = fill
    (found,) = facts(library)
    assert (found.chassis_serial_number, found.chassis_slot, found.module_id) == (None, None, 5)


def test_a_fabric_query_that_failed_keeps_the_last_fabric() -> None:
    library = Altered(machine({"model": H100, "rack": RACK}))
    (gpu,) = NvmlSession(library).open()
    gpu.query(CallGroup.HEALTH, SampleCursor())
    library.refuse("nvmlDeviceGetGpuFabricInfoV", pynvml.NVML_ERROR_TIMEOUT)
    found = gpu.query(CallGroup.HEALTH, SampleCursor())["facts"]
    assert found.fabric_cluster_uuid == CLUSTER


@pytest.mark.parametrize(
    ("model", "call", "supported", "reason"),
    [
        ("NVIDIA H100 80GB HBM3", "nvmlGpmQueryDeviceSupport", True, None),
        ("NVIDIA H100 80GB HBM3", "nvmlDeviceGetFieldValues:82", True, None),
        ("NVIDIA H100 80GB HBM3", "nvmlDeviceGetFieldValues:29", False, "NotSupported"),
        ("NVIDIA L4", "nvmlGpmMetricsGet", False, "NotSupported"),
        ("NVIDIA L4", "nvmlDeviceGetFieldValues:82", False, "NotSupported"),
        ("NVIDIA L4", "nvmlDeviceGetTemperatureThreshold:1", False, "NotSupported"),
        ("Tesla T4", "nvmlDeviceGetRemappedRows", False, "NotSupported"),
        ("Tesla T4", "nvmlDeviceGetFieldValues:29", True, None),
        ("Tesla T4", "nvmlDeviceGetGpuFabricInfoV", False, "NotSupported"),
    ],
)
def test_each_call_is_reported_with_the_drivers_reason_if_it_is_refused(
    model: str,
    call: str,
    supported: bool,  # noqa: FBT001  # a column of the table
    reason: str | None,
) -> None:
    (gpu,) = NvmlSession(machine({"model": model})).open()
    found = query_all(gpu).facts
    assert found
    reported = {capability.call: capability for capability in found.capabilities}
    assert reported[call] == Capability(call=call, supported=supported, reason=reason)


def test_a_call_that_was_made_with_only_one_argument_is_reported_without_it() -> None:
    outcomes: dict[Key, str | None] = {
        ("a", 1): None,
        ("b", 1): None,
        ("b", 2): "NotSupported",
        ("c",): "NoPermission",
    }
    assert [(one.call, one.supported, one.reason) for one in capabilities_of(outcomes)] == [
        ("a", True, None),
        ("b:1", True, None),
        ("b:2", False, "NotSupported"),
        ("c", False, "NoPermission"),
    ]


def test_restarting_the_library_probes_everything_again() -> None:
    library = Altered(machine({"model": "NVIDIA L4"}))
    nvml = NvmlSession(library)
    for _ in range(2):
        (gpu,) = nvml.open()
        for _ in range(2):
            gpu.query(CallGroup.PROFILING, SampleCursor())
        nvml.close()
    assert library.calls["nvmlGpmQueryDeviceSupport"] == 2


def test_a_fact_that_failed_is_read_again_until_it_is_known() -> None:
    library = Altered(machine({"model": "NVIDIA L4"}, {"model": "NVIDIA L4"}))
    library.refuse("nvmlDeviceGetSerial", pynvml.NVML_ERROR_TIMEOUT)
    library.refuse("nvmlDeviceGetVbiosVersion", pynvml.NVML_ERROR_NOT_SUPPORTED)
    library.refuse("nvmlDeviceGetP2PStatus", pynvml.NVML_ERROR_TIMEOUT)
    gpu = NvmlSession(library).open()[0]
    first = query_all(gpu).facts
    library.functions.clear()
    second = query_all(gpu).facts
    assert first
    assert second
    assert (first.serial, first.vbios_version, first.nvlink_peers) == (None, None, None)
    assert second.serial
    assert second.nvlink_peers
    assert second.vbios_version is None


def test_an_implausible_fact_is_absent() -> None:
    library = Altered(machine({"model": "NVIDIA L4"}))
    library.functions["nvmlDeviceGetMinorNumber"] = lambda _gpu: 2**32 - 1
    library.functions["nvmlDeviceGetArchitecture"] = lambda _gpu: 2**32 - 1
    library.functions["nvmlDeviceGetEccMode"] = lambda _gpu: [7, 7]
    (found,) = facts(library)
    assert (found.minor_number, found.architecture, found.ecc_enabled) == (None, None, None)


def test_invalid_text_loses_only_its_own_fact(monkeypatch: pytest.MonkeyPatch) -> None:
    def write(text: bytes) -> Any:
        def fill(_gpu: object, buffer: Any, _size: object) -> int:
            buffer.value = text
            return 0

        return fill

    client = play(
        monkeypatch,
        {"nvmlDeviceGetSerial": write(b"\xff\xfe"), "nvmlDeviceGetName": write(b"NVIDIA L4")},
    )
    found = Facts(client, uuid="GPU-0", index=0, peers=()).query()
    assert (found.model, found.serial) == ("NVIDIA L4", None)
