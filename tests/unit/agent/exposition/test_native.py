"""Our own names on the page: base units, `_info` metrics, containers."""

from itertools import product

import pytest
from msgspec.structs import replace

from gpuledger.keys import NodeId
from gpuledger.records import (
    ContainerRef,
    GpuHealth,
    GpuLimits,
    GpuThrottling,
    JobAllocation,
)
from gpuledger_agent.core.incidents import make_incident
from gpuledger_agent.exposition.device import COUNTED_FROM_ZERO
from gpuledger_agent.settings import ExpositionSettings
from tests.unit.agent.exposition.builders import (
    GIB,
    Node,
    allocation,
    gpu,
    incident,
    instance,
    inventory,
    node,
    process,
    row,
    sample,
)

FULL = ExpositionSettings(profile="full")
INCIDENTS = "gpuledger_node_gpu_incidents_total"


def reported(it: Node, *labels: str) -> dict[tuple[str, ...], float]:
    """Return the counts of reported incidents by some of their labels."""
    counts = it.values(INCIDENTS, *labels, "severity")
    return {key[: len(labels)]: count for key, count in counts.items() if count}


def test_readings_per_link_are_shown_as_their_total() -> None:
    it = node(FULL)
    health = GpuHealth(
        nvlink_link_replays_totals={"0": 2, "5": 40},
        nvlink_link_effective_bit_error_ratios={"0": 1e-15, "5": 3e-12},
    )
    it.show(sample(gpu(0, health=health)))
    assert it.values("gpuledger_node_gpu_nvlink_errors_total", "kind") == {("dl_replay",): 42}
    assert it.values("gpuledger_node_gpu_nvlink_bit_error_ratio", "kind") == {("effective",): 3e-12}


def test_own_values_equal_those_of_the_record() -> None:
    it = node(FULL)
    it.show(
        sample(
            gpu(
                0,
                utilization_ratio=0.25,
                memory_used_bytes=GIB + 1,
                throttling=GpuThrottling(
                    power_ns_total=1_500_000_000, thermal_ns_total=500_000_000
                ),
                limits=GpuLimits(power_limit_enforced_milliwatts=700_000),
                health=GpuHealth(remapped_rows_failed=False, recovery_action="reset"),
            )
        )
    )
    assert it.values("gpuledger_node_gpu_utilization_ratio", "gpu_uuid", "model", "node") == {
        ("GPU-0", "NVIDIA H100 80GB HBM3", "node-1"): 0.25
    }
    assert it.values("gpuledger_node_gpu_memory_used_bytes", "gpu_index") == {("0",): GIB + 1}
    assert it.values("gpuledger_node_gpu_throttled_seconds_total", "reason") == {
        ("power",): 1.5,
        ("thermal",): 0.5,
    }
    assert it.values("gpuledger_node_gpu_power_limit_watts", "limit") == {("enforced",): 700.0}
    assert it.values("gpuledger_node_gpu_remapped_rows_failed", "gpu_index") == {("0",): 0}
    assert it.values("gpuledger_node_gpu_recovery_action_info", "action") == {("reset",): 1}


def test_each_reason_for_lower_clocks_is_0_or_1_and_unknown_ones_share_a_label() -> None:
    it = node(FULL)
    it.show(sample(gpu(0, throttling=GpuThrottling(reasons=0x4 | 0x200 | 0x400)), gpu(1)))
    shown = it.values("gpuledger_node_gpu_throttle_reason", "gpu_index", "reason")
    assert {key for key, value in shown.items() if value == 1} == {
        ("0", "power_cap"), ("0", "other")
    }  # fmt: skip
    assert {key for key, value in shown.items() if value == 0} >= {("0", "hw_thermal")}
    assert {index for index, _ in shown} == {"0"}


def test_each_link_has_its_measured_rates() -> None:
    it = node(FULL)
    health = GpuHealth(
        nvlink_link_sent_bytes_per_second={"0": 5, "3": 0},
        nvlink_link_received_bytes_per_second={"0": 7},
    )
    it.show(sample(gpu(0, health=health)))
    assert it.values("gpuledger_node_gpu_nvlink_bytes_per_second", "nvlink", "direction") == {
        ("0", "sent"): 5, ("3", "sent"): 0, ("0", "received"): 7
    }  # fmt: skip


def test_the_place_of_a_gpu_in_its_fabric_and_rack_is_in_info_metrics() -> None:
    known = inventory(0, 1)
    placed = replace(
        known.gpus[0],
        fabric_cluster_uuid="6f1d0c52",
        fabric_clique_id=0,
        chassis_serial_number="18212",
        chassis_slot=14,
        chassis_tray=0,
        module_id=2,
    )
    it = node(FULL)
    it.show(
        sample(gpu(0), gpu(1)),
        inventory=replace(
            known, gpus=[placed, known.gpus[1]], confidential_computing_mode="devtools"
        ),
    )
    assert it.values(
        "gpuledger_node_gpu_fabric_cluster_info", "gpu_index", "cluster_uuid", "clique_id"
    ) == {("0", "6f1d0c52", "0"): 1}
    labels = ("gpu_index", "chassis_serial_number", "slot", "tray", "host", "module")
    assert it.values("gpuledger_node_gpu_rack_info", *labels) == {
        ("0", "18212", "14", "0", "", "2"): 1
    }
    assert it.values(
        "gpuledger_node_info", "confidential_computing_mode", "confidential_link_mode"
    ) == {("devtools", ""): 1}


def test_only_video_engines_in_use_are_shown() -> None:
    it = node(one="ml/a/main")
    it.show(
        sample(
            gpu(0),
            containers=["one", "two"],
            processes=[
                process(0, 0, pid=1, decoder_utilization_ratio=0.75),
                process(0, 0, pid=2, decoder_utilization_ratio=0.5, encoder_utilization_ratio=0.25),
                process(0, 1, pid=3),
            ],
        )
    )
    assert it.values("gpuledger_container_gpu_engine_busy_ratio", "pod", "engine") == {
        ("a", "decoder"): 1.0, ("a", "encoder"): 0.25
    }  # fmt: skip


def test_facts_are_info_metrics() -> None:
    it = node()
    it.show(
        sample(
            gpu(0, mig_enabled=True),
            instance(3),
            allocations=[allocation(0, "ml/a/main", gpu_instance=3)] * 2,
        ),
        inventory=inventory(0),
    )
    assert it.values("gpuledger_node_info", "driver_version", "boot_id") == {
        ("570.86.15", "boot"): 1
    }
    assert it.values(
        "gpuledger_node_gpu_info", "gpu_uuid", "parent_uuid", "mig_profile", "serial"
    ) == {
        ("GPU-0", "", "", "1650"): 1,
        ("MIG-0-3-0", "GPU-0", "1g.10gb", "1650"): 1,
    }
    assert it.values("gpuledger_node_gpu_allocation_info", "pod", "resource") == {
        ("a", "nvidia.com/gpu"): 1
    }


def test_a_container_has_the_use_of_its_processes_on_each_gpu() -> None:
    it = node(one="ml/a/main")
    it.show(
        sample(
            gpu(0),
            gpu(1),
            containers=["one", "two"],
            processes=[
                process(0, 0, pid=1),
                process(1, 0, pid=1, sm_utilization_ratio=None),
                process(1, 1, pid=2),
            ],
        )
    )
    labels = ("gpu_index", "namespace", "pod", "container", "pod_uid", "container_id")
    assert it.values("gpuledger_container_gpu_busy_ratio", *labels) == {
        ("0", "ml", "a", "main", "uid-one", "one"): 0.25,
        ("1", "", "", "", "uid-two", "two"): 0.25,
    }
    assert it.values("gpuledger_container_gpu_memory_bytes", "gpu_index", "pod_uid") == {
        ("0", "uid-one"): GIB,
        ("1", "uid-one"): GIB,
        ("1", "uid-two"): GIB,
    }


def test_use_and_allocation_of_a_mig_instance_have_the_same_labels() -> None:
    """Whether the device plugin names the instance by its UUID or by its number."""
    uuid = "MIG-11111111-1111-1111-1111-111111111111"
    first = {"index": 0, "parent_uuid": "GPU-0", "gpu_instance": 1, "compute_instance": 0}
    it = node(one="ml/a/main", two="ml/b/main", uids={"ml/a": ["uid-one"], "ml/b": ["uid-two"]})
    named = replace(allocation(0, "ml/a/main", gpu_instance=1), device_id=uuid)
    numbered = allocation(0, "ml/b/main", gpu_instance=2)
    it.show(
        sample(
            gpu(0, mig_enabled=True),
            row(uuid=uuid, utilization_ratio=0.5, **first),
            instance(2, utilization_ratio=0.25),
            containers=["one", "two"],
            processes=[
                process(each, each - 1, pid=each, sm_utilization_ratio=None) for each in (1, 2)
            ],
            allocations=[named, numbered],
        )
    )
    labels = ("gpu_uuid", "namespace", "pod", "container", "pod_uid")
    of_a, of_b = (uuid, "ml", "a", "main", "uid-one"), ("MIG-0-2-0", "ml", "b", "main", "uid-two")
    assert it.values("gpuledger_container_gpu_busy_ratio", *labels) == {of_a: 0.5, of_b: 0.25}
    assert it.values("gpuledger_container_gpu_memory_bytes", *labels).keys() == {of_a, of_b}
    assert it.values("gpuledger_node_gpu_allocation_info", *labels) == {of_a: 1, of_b: 1}


@pytest.mark.parametrize("other", [0, None], ids=["another container", "the host"])
def test_the_users_of_an_instance_have_no_busy_ratio_if_the_driver_reports_none(
    other: int | None,
) -> None:
    it = node()
    it.show(
        sample(
            gpu(0, mig_enabled=True),
            instance(1, utilization_ratio=0.5),
            containers=["one", "two"],
            processes=[
                process(1, 1, pid=1, sm_utilization_ratio=None),
                process(1, other, pid=2, sm_utilization_ratio=None),
            ],
        )
    )
    assert it.values("gpuledger_container_gpu_busy_ratio", "pod_uid") == {}


def test_a_job_has_the_use_of_its_processes_and_its_allocation() -> None:
    it = node()
    shown = sample(gpu(0), processes=[process(0, 0)])
    tick = replace(
        shown.sample,
        containers=[ContainerRef(job_id="4242")],
        job_allocations=[JobAllocation(gpu_uuid="GPU-0", job_id="4242", gpu_instance=7)],
    )
    it.show(shown._replace(sample=tick))
    (busy,) = it.lines("gpuledger_container_gpu_busy_ratio")
    (given,) = it.lines("gpuledger_node_gpu_job_allocation_info")
    assert busy.endswith(',gpu_index="0",job_id="4242"} 0.25')
    assert given.endswith('{node="node-1",gpu_uuid="GPU-0",gpu_instance="7",job_id="4242"} 1')


def test_incident_counts_never_expire() -> None:
    it = node()
    it.show(sample(gpu(0)), incidents=[incident(0, 31), incident(0, kind="gpu_lost")])
    it.show(sample(gpu(0)), incidents=[incident(0, 31)])
    assert reported(it, "kind", "severity") == {("xid", "warning"): 2, ("gpu_lost", "warning"): 1}


def test_xids_and_losses_are_counted_from_zero_on_each_gpu_of_the_inventory() -> None:
    it = node()
    it.show(sample(gpu(0)), inventory=inventory(0, 1))
    labels = ("gpu_index", "kind")
    shown = it.values(INCIDENTS, *labels, "severity")
    assert set(shown.values()) == {0}
    assert {key[:2] for key in shown} == set(product("01", COUNTED_FROM_ZERO))


@pytest.mark.parametrize("kind", COUNTED_FROM_ZERO)
def test_the_series_of_an_incident_existed_at_zero_with_its_severity(kind: str) -> None:
    it = node()
    it.show(sample(gpu(0)), inventory=inventory(0))
    before = it.values(INCIDENTS, "kind", "severity")
    it.view.record_incident(
        make_incident(
            kind=kind,
            node=NodeId("default", "node-1"),
            boot_id="boot",
            gpu_uuid="GPU-0",
            time_ns=1,
            xid=79 if kind == "xid" else None,
        )
    )
    after = it.values(INCIDENTS, "kind", "severity")
    assert after.keys() == before.keys()
    assert sum(after.values()) == 1


def test_a_gpu_that_is_well_at_the_start_is_not_an_incident() -> None:
    it = node()
    it.show(sample(gpu(0)), inventory=inventory(0))
    ended = replace(incident(0, kind="state_ended"), ended_kinds=["row_remap_failed"])
    it.view.record_incident(replace(ended, present_at_start=True))
    assert "state_ended" not in it.page().decode()
    it.view.record_incident(ended)
    assert reported(it, "kind") == {("state_ended",): 1}


def test_own_names_can_be_left_out() -> None:
    it = node(ExpositionSettings(native_metrics=False))
    it.show(sample(gpu(0, temperature_celsius=40)))
    assert b"gpuledger_" not in it.page()
    assert it.lines("DCGM_FI_DEV_GPU_TEMP")


def test_incidents_of_a_gpu_outlive_its_readings() -> None:
    it = node()
    it.show(sample(gpu(0), gpu(1)), inventory=inventory(0, 1))
    it.clock.advance(10)
    it.show(sample(gpu(1)))
    it.view.record_incident(incident(0, kind="gpu_lost"))
    it.view.record_incident(incident(0, 79))
    assert it.values("gpuledger_node_gpu_up", "gpu_index") == {("0",): 0, ("1",): 1}
    labels = ("gpu_uuid", "gpu_index")
    assert it.values("gpuledger_node_gpu_xids_total", *labels, "xid") == {("GPU-0", "0", "79"): 1}
    assert reported(it, *labels, "kind") == {
        ("GPU-0", "0", "gpu_lost"): 1,
        ("GPU-0", "0", "xid"): 1,
    }
