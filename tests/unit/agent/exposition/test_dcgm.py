"""Series for users of dcgm-exporter: names, labels, units, and which pod a series belongs to."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given as generated
from hypothesis import strategies as st
from msgspec.structs import replace

from gpuledger.records import (
    DeviceAllocation,
    GpuHealth,
    GpuProcess,
    GpuProfiling,
    GpuThrottling,
    GpuTraffic,
    JobAllocation,
)
from gpuledger_agent.settings import ExpositionSettings
from tests.unit.agent.exposition.builders import (
    GIB,
    Reported,
    Row,
    allocation,
    gpu,
    incident,
    instance,
    inventory,
    node,
    process,
    sample,
)

MIB = 1 << 20
OWNER = "ml/train-0/main"
PARTS = ExpositionSettings(pod_series=True)


def settings_with(tmp_path: Path, *lines: str, **values: object) -> ExpositionSettings:
    file = tmp_path / "counters.csv"
    file.write_text("\n".join(lines))
    return ExpositionSettings(counters_file=file, **values)  # type: ignore[arg-type]  # a test's own values


def test_a_series_has_dcgm_exporters_labels_in_their_order() -> None:
    it = node()
    it.show(
        sample(gpu(3, temperature_celsius=41), allocations=[allocation(3, OWNER)]),
        inventory=inventory(3),
    )
    (line,) = it.lines("DCGM_FI_DEV_GPU_TEMP")
    assert line == (
        'DCGM_FI_DEV_GPU_TEMP{gpu="3",UUID="GPU-3",pci_bus_id="00000000:13:00.0",device="nvidia3"'
        ',modelName="NVIDIA H100 80GB HBM3",hostname="node-1",DCGM_FI_DRIVER_VERSION="570.86.15"'
        ',container="main",namespace="ml",pod="train-0"} 41'
    )


@pytest.mark.parametrize("uuid", ["UUID", "uuid"])
def test_on_request_labels_have_their_names_in_dcgm_exporter_1(uuid: str) -> None:
    it = node(ExpositionSettings(dcgm_old_labels=uuid == "uuid", dcgm_pod_uid=True))
    it.show(sample(gpu(3, temperature_celsius=41), allocations=[allocation(3, OWNER)]))
    (line,) = it.lines("DCGM_FI_DEV_GPU_TEMP")
    names = ("container", "namespace", "pod")
    if uuid == "uuid":
        names = ("container_name", "pod_namespace", "pod_name")
    assert f'gpu="3",{uuid}="GPU-3",' in line
    assert line.endswith('{}="main",{}="ml",{}="train-0"}} 41'.format(*names))


@pytest.mark.parametrize(
    ("devices", "shown"),
    [
        ("f", ["GPU-0", "GPU-2", "MIG-7"]),
        ("g+i", ["GPU-0", "GPU-2", "MIG-7"]),
        ("g", ["GPU-0", "GPU-1", "GPU-2"]),
        ("i", ["MIG-7"]),
        ("g:0", ["GPU-0"]),
        ("g:0,1", ["GPU-0", "GPU-1"]),
        ("g:1-2", ["GPU-1", "GPU-2"]),
        ("g:2-5+i", ["GPU-2", "MIG-7"]),
        ("i+g:0", ["GPU-0", "MIG-7"]),
        ("g:9", []),
    ],
)
def test_the_setting_selects_the_devices_with_series(devices: str, shown: list[str]) -> None:
    it = node(ExpositionSettings(dcgm_devices=devices))
    used = {"memory_used_bytes": MIB}
    it.show(sample(gpu(0, **used), gpu(1, **used), instance(7, of=1, **used), gpu(2, **used)))
    found = it.values("DCGM_FI_DEV_FB_USED", "UUID", "GPU_I_ID")
    assert sorted(f"MIG-{id_}" if id_ else uuid for uuid, id_ in found) == shown


@pytest.mark.parametrize(
    "devices",
    [
        "",
        "x",
        "f:0",
        "f+g",
        "g+g",
        "g:",
        "g:a",
        "g:0-",
        "g:0-1-2",
        "g:-1",
        "i:0",
        "g:0 ",
        "g:٣",
        "G",
    ],
)
def test_any_other_selection_of_devices_is_invalid(devices: str) -> None:
    with pytest.raises(ValueError, match="dcgm_devices: expected f, g, i"):
        ExpositionSettings(dcgm_devices=devices)


def with_jobs(reported: Reported, *jobs: tuple[str, str, int | None]) -> Reported:
    held = [
        JobAllocation(gpu_uuid=uuid, job_id=job, gpu_instance=number) for uuid, job, number in jobs
    ]
    return reported._replace(sample=replace(reported.sample, job_allocations=held))


@pytest.mark.parametrize(
    ("jobs", "shown"),
    [
        ([("GPU-0", "4242", None)], {"GPU-0": "4242", "GPU-1": None}),
        ([("GPU-0", "4242", None), ("GPU-0", "4243", None)], {"GPU-0": None, "GPU-1": None}),
        ([("GPU-1", "4242", None)], {"GPU-0": None, "GPU-1": "4242"}),
    ],
    ids=["one", "two: the series occurs once", "another's"],
)
def test_a_device_allocated_to_one_job_has_dcgm_exporters_job_label(
    jobs: list[tuple[str, str, int | None]], shown: dict[str, str | None]
) -> None:
    it = node()
    it.show(with_jobs(sample(*(gpu(one, temperature_celsius=41) for one in (0, 1))), *jobs))
    lines = it.lines("DCGM_FI_DEV_GPU_TEMP")
    found = {uuid: line for uuid in shown for line in lines if f'UUID="{uuid}"' in line}
    assert len(lines) == len(shown)
    for uuid, job in shown.items():
        assert ("hpc_job=" in found[uuid]) == (job is not None)
        assert job is None or f'hpc_job="{job}"' in found[uuid]


def test_help_and_type_match_dcgm_exporter() -> None:
    it = node()
    it.show(sample(gpu(energy_total_millijoules=1_500)))
    text = it.page().decode()
    name = "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION"
    assert f"# HELP {name} Total energy consumption since boot (in mJ).\n" in text
    assert f"# TYPE {name} counter\n" in text


@pytest.mark.parametrize(
    ("field", "values", "expected"),
    [
        ("DEV_SM_CLOCK", {"sm_clock_hertz": 1_980_000_000}, 1980),
        ("DEV_GPU_UTIL", {"utilization_ratio": 0.437}, 43.7),
        ("DEV_POWER_USAGE", {"power_milliwatts": 321_500}, 321.5),
        ("DEV_TOTAL_ENERGY_CONSUMPTION", {"energy_total_millijoules": 12_346}, 12_346),
        ("DEV_FB_USED", {"memory_used_bytes": 3 * MIB + 5}, 3),
        (
            "DEV_FB_FREE",
            {
                "memory_total_bytes": 100 * MIB,
                "memory_used_bytes": 30 * MIB,
                "memory_reserved_bytes": 5 * MIB,
            },
            65,
        ),
        ("DEV_POWER_VIOLATION", {"throttling": GpuThrottling(power_ns_total=1_500_000_000)}, 1.5e9),
        ("DEV_ROW_REMAP_FAILURE", {"health": GpuHealth(remapped_rows_failed=True)}, 1),
        ("DEV_GET_GPU_RECOVERY_ACTION", {"health": GpuHealth(recovery_action="reboot")}, 2),
        (
            "DEV_FABRIC_MANAGER_STATUS",
            {"health": GpuHealth(fabric_state="completed", fabric_status=0)},
            3,
        ),
        (
            "DEV_FABRIC_MANAGER_STATUS",
            {"health": GpuHealth(fabric_state="completed", fabric_status=9)},
            4,
        ),
        ("DEV_VGPU_LICENSE_STATUS", {"health": GpuHealth()}, 0),
        ("DEV_VGPU_LICENSE_STATUS", {"health": GpuHealth(vgpu_license_status=1)}, 1),
        ("DEV_FAN_SPEED", {"health": GpuHealth(fan_speed_ratio=1.07)}, 107),
        (
            "PROF_GR_ENGINE_ACTIVE",
            {"profiling": GpuProfiling(graphics_engine_active_ratio=0.25)},
            0.25,
        ),
        ("PROF_NVDEC1_ACTIVE", {"profiling": GpuProfiling(nvdec_active_ratios=[0.1, 0.2])}, 0.2),
    ],
)
def test_a_value_has_dcgms_unit(
    tmp_path: Path, field: str, values: dict[str, Any], expected: float
) -> None:
    it = node(settings_with(tmp_path, f"DCGM_FI_{field}, gauge, x"))
    it.show(sample(gpu(**values)))
    assert it.values(f"DCGM_FI_{field}", "gpu") == {("0",): pytest.approx(expected)}


def test_a_value_that_the_driver_does_not_give_has_no_series() -> None:
    it = node()
    it.show(sample(gpu(), gpu(1, profiling=GpuProfiling())))
    assert [line for line in it.page().decode().splitlines() if line.startswith("DCGM_")] == [
        *it.lines("DCGM_FI_DEV_XID_ERRORS")
    ]


@pytest.mark.parametrize(
    ("names", "shown"),
    [
        ("old", {"DCGM_FI_DEV_GPU_TEMP", "DCGM_FI_DEV_FB_USED"}),
        ("new", {"DCGM_FI_DEV_GPU_TEMP_CELSIUS", "DCGM_FI_DEV_FB_USED"}),
        (
            "both",
            {"DCGM_FI_DEV_GPU_TEMP", "DCGM_FI_DEV_GPU_TEMP_CELSIUS", "DCGM_FI_DEV_FB_USED"},
        ),
        ("none", set()),
    ],
)
def test_the_setting_selects_old_names_new_names_or_both(
    tmp_path: Path, names: str, shown: set[str]
) -> None:
    lines = ["DCGM_FI_DEV_GPU_TEMP, gauge, x", "DCGM_FI_DEV_FB_USED, gauge, x"]
    it = node(settings_with(tmp_path, *lines, dcgm_names=names))
    it.show(sample(gpu(temperature_celsius=41, memory_used_bytes=MIB)))
    found = {line.split("{")[0] for line in it.page().decode().splitlines() if "{" in line}
    assert {name for name in found if name.startswith("DCGM_")} == shown
    assert all(len(it.lines(name)) == 1 for name in shown)


def test_by_default_a_series_has_the_name_in_the_list(tmp_path: Path) -> None:
    lines = ["DCGM_FI_DEV_GPU_TEMP_CELSIUS, gauge, x", "DCGM_FI_DEV_BOARD_SERIAL, label, x"]
    it = node(settings_with(tmp_path, *lines))
    it.show(sample(gpu(temperature_celsius=41)), inventory=inventory(0))
    (line,) = it.lines("DCGM_FI_DEV_GPU_TEMP_CELSIUS")
    assert 'DCGM_FI_DEV_BOARD_SERIAL="1650"}' in line
    assert it.lines("DCGM_FI_DEV_GPU_TEMP") == []


def test_label_counters_use_the_same_kind_of_name_as_their_metric(tmp_path: Path) -> None:
    lines = [
        "DCGM_FI_DEV_GPU_TEMP, gauge, x",
        "DCGM_FI_DEV_SERIAL, label, x",
        "DCGM_FI_DEV_PSTATE, label, x",
    ]
    it = node(settings_with(tmp_path, *lines, dcgm_names="both"))
    it.show(sample(gpu(temperature_celsius=41, performance_state=2)), inventory=inventory(0))
    (old,), (new,) = it.lines("DCGM_FI_DEV_GPU_TEMP"), it.lines("DCGM_FI_DEV_GPU_TEMP_CELSIUS")
    assert 'DCGM_FI_DEV_SERIAL="1650",DCGM_FI_DEV_PSTATE="2"}' in old
    assert 'DCGM_FI_DEV_BOARD_SERIAL="1650",DCGM_FI_DEV_GPU_PSTATE="2"}' in new


@pytest.mark.parametrize(
    ("label", "shown"),
    [("hostname", 'hostname="node-1"'), ("Hostname", 'Hostname="node-1"'), ("none", 'HBM3"}')],
)
def test_the_hosts_label_is_a_setting(tmp_path: Path, label: str, shown: str) -> None:
    it = node(settings_with(tmp_path, "DCGM_FI_DEV_GPU_TEMP, gauge, x", host_label=label))
    it.show(sample(gpu(temperature_celsius=41)))
    (line,) = it.lines("DCGM_FI_DEV_GPU_TEMP")
    assert shown in line


def test_a_shared_gpu_has_its_own_series_and_on_request_one_per_container() -> None:
    it = node(PARTS, one="ml/a/main", two="ml/b/main")
    it.show(
        sample(
            gpu(
                utilization_ratio=0.8,
                memory_used_bytes=3 * GIB,
                temperature_celsius=41,
                profiling=GpuProfiling(graphics_engine_active_ratio=0.6),
            ),
            containers=["one", "two"],
            processes=[
                process(0, 0, pid=1, sm_utilization_ratio=0.5),
                process(0, 1, pid=2, sm_utilization_ratio=0.2),
                process(0, 1, pid=3, sm_utilization_ratio=0.1, memory_used_bytes=None),
            ],
            allocations=[
                allocation(0, "ml/a/main", replica="0"),
                allocation(0, "ml/b/main", replica="1"),
            ],
        )
    )
    labels = ("pod", "gpuledger_share")
    assert it.values("DCGM_FI_DEV_GPU_UTIL", *labels) == {
        ("", ""): 80.0,
        ("a", "pod"): 50.0,
        ("b", "pod"): pytest.approx(30.0),
    }
    assert it.values("DCGM_FI_DEV_FB_USED", *labels) == {
        ("", ""): 3072,
        ("a", "pod"): 1024,
        ("b", "pod"): 1024,
    }
    assert it.values("DCGM_FI_PROF_GR_ENGINE_ACTIVE", *labels) == {
        ("", ""): 0.6,
        ("a", "pod"): pytest.approx(0.375),
        ("b", "pod"): pytest.approx(0.225),
    }
    assert it.values("DCGM_FI_DEV_GPU_TEMP", *labels) == {("", ""): 41}


def test_by_default_pods_have_no_part_of_a_shared_gpu_under_dcgms_names() -> None:
    it = node(one=OWNER)
    shown = sample(gpu(memory_used_bytes=GIB), containers=["one"], processes=[process(0, 0)])
    it.show(shown)
    assert it.values("DCGM_FI_DEV_FB_USED", "pod") == {("",): 1024}
    assert it.values("gpuledger_container_gpu_memory_bytes", "pod") == {("train-0",): GIB}


@pytest.mark.parametrize(
    ("allocations", "holder"),
    [
        ([], ""),
        ([allocation(0, OWNER)], "train-0"),
        ([allocation(0, OWNER), allocation(0, OWNER)], "train-0"),
        ([allocation(0, OWNER), allocation(0, "ml/other/main")], ""),
        ([allocation(0, OWNER, replica="0")], ""),
        ([allocation(1, OWNER)], ""),
        ([allocation(0, OWNER, gpu_instance=1)], ""),
    ],
)
def test_a_gpu_belongs_to_a_pod_if_one_container_has_the_whole_gpu(
    allocations: list[DeviceAllocation], holder: str
) -> None:
    it = node()
    it.show(sample(gpu(power_milliwatts=1_000), allocations=allocations))
    assert it.values("DCGM_FI_DEV_POWER_USAGE", "pod") == {(holder,): 1.0}


def test_a_container_with_an_unknown_name_has_no_dcgm_series() -> None:
    it = node()
    shown = sample(gpu(memory_used_bytes=GIB), containers=["one"], processes=[process(0, 0)])
    it.show(shown)
    assert len(it.lines("DCGM_FI_DEV_FB_USED")) == 1


def test_an_instance_has_its_gpus_labels_its_profile_and_its_pod() -> None:
    it = node()
    it.show(
        sample(
            gpu(0, mig_enabled=True, memory_used_bytes=3 * GIB, power_milliwatts=300_000),
            instance(7, memory_used_bytes=GIB),
            instance(8, memory_used_bytes=2 * GIB),
            allocations=[allocation(0, OWNER, gpu_instance=8)],
        ),
        inventory=inventory(0),
    )
    labels = ("UUID", "GPU_I_ID", "GPU_I_PROFILE", "pci_bus_id", "pod")
    assert it.values("DCGM_FI_DEV_FB_USED", *labels) == {
        ("GPU-0", "7", "1g.10gb", "00000000:10:00.0", ""): 1024,
        ("GPU-0", "8", "1g.10gb", "00000000:10:00.0", "train-0"): 2048,
    }
    assert it.values("DCGM_FI_DEV_POWER_USAGE", "GPU_I_ID") == {("",): 300.0}


def split_instance(first: dict[str, Any], second: dict[str, Any]) -> list[Row]:
    """Return a GPU with one GPU instance that two compute instances share."""
    return [
        gpu(0, mig_enabled=True),
        instance(7, ci=0, memory_used_bytes=3 * GIB, **first),
        instance(7, ci=1, memory_used_bytes=3 * GIB, **second),
    ]


def test_compute_instances_of_one_gpu_instance_are_reported_separately() -> None:
    it = node()
    it.show(sample(*split_instance({"utilization_ratio": 0.5}, {"utilization_ratio": 0.25})))
    assert it.values("DCGM_FI_DEV_GPU_UTIL", "GPU_I_ID", "GPU_C_ID") == {
        ("7", "0"): 50.0,
        ("7", "1"): 25.0,
    }


def test_memory_shared_by_compute_instances_is_reported_once_and_in_part_per_pod() -> None:
    it = node(PARTS, one="ml/a/main", two="ml/b/main")
    it.show(
        sample(
            *split_instance({}, {}),
            containers=["one", "two"],
            processes=[
                process(1, 0, memory_used_bytes=GIB),
                process(2, 0, memory_used_bytes=GIB),
                process(2, 1, memory_used_bytes=GIB),
            ],
        )
    )
    assert it.values("DCGM_FI_DEV_FB_USED", "GPU_I_ID", "GPU_C_ID", "pod") == {
        ("7", "", ""): 3072.0,
        ("7", "", "a"): 2048.0,
        ("7", "", "b"): 1024.0,
    }
    assert len(it.lines("DCGM_FI_DEV_FB_USED")) == 3


def test_an_allocation_by_an_instances_uuid_belongs_only_to_that_instance() -> None:
    one, other = (f"MIG-{digit * 8}-1111-1111-1111-111111111111" for digit in "12")
    given = replace(allocation(0, OWNER, gpu_instance=7), device_id=other)
    whole, first, second = split_instance({"utilization_ratio": 0.5}, {"utilization_ratio": 0.25})
    it = node()
    named = [
        Row(replace(row.reading, uuid=uuid), replace(row.details, uuid=uuid))
        for row, uuid in ((first, one), (second, other))
    ]
    it.show(sample(whole, *named, allocations=[given]))
    assert it.values("DCGM_FI_DEV_GPU_UTIL", "GPU_C_ID", "pod").keys() == {
        ("0", ""),
        ("1", "train-0"),
    }
    assert it.values("DCGM_FI_DEV_FB_USED", "GPU_I_ID", "pod").keys() == {("7", "")}


@pytest.mark.parametrize(
    ("utilization", "parts"),
    [(0.5, {("",): 0.5, ("a",): 0.25}), (0.0, {("",): 0.5, ("a",): 0.0}), (None, {("",): 0.5})],
)
def test_a_value_that_cannot_be_divided_is_not_reported_for_a_pod(
    utilization: float | None, parts: dict[tuple[str, ...], float]
) -> None:
    it = node(PARTS, one="ml/a/main")
    it.show(
        sample(
            gpu(
                utilization_ratio=utilization,
                profiling=GpuProfiling(graphics_engine_active_ratio=0.5),
            ),
            containers=["one"],
            processes=[process(0, 0, sm_utilization_ratio=0.25)],
        )
    )
    assert it.values("DCGM_FI_PROF_GR_ENGINE_ACTIVE", "pod") == parts


def test_the_last_xid_is_shown_with_its_message() -> None:
    it = node()
    it.show(sample(gpu(0), gpu(1)), incidents=[incident(0, 79), incident(0, 13)])
    found = it.values("DCGM_FI_DEV_XID_ERRORS", "gpu", "err_code", "err_msg")
    assert found == {("0", "13", "Graphics Engine Exception"): 13, ("1", "0", "No Error"): 0}


def test_recent_xids_are_counted_over_the_window_and_zero_without_any(tmp_path: Path) -> None:
    it = node(settings_with(tmp_path, "DCGM_EXP_XID_ERRORS_COUNT, counter, x"))
    it.show(sample(gpu(0), gpu(1)), incidents=[incident(0, 31), incident(0, 31)])
    labels = ("gpu", "xid", "window_size_in_ms")
    assert it.values("DCGM_EXP_XID_ERRORS_COUNT", *labels) == {
        ("0", "31", "300000"): 2,
        ("1", "", "300000"): 0,
    }
    it.clock.advance(301)
    it.show(sample(gpu(0), gpu(1)))
    assert it.values("DCGM_EXP_XID_ERRORS_COUNT", "gpu", "xid") == {("0", ""): 0, ("1", ""): 0}
    assert it.values("gpuledger_node_gpu_xids_total", "gpu_index", "xid") == {("0", "31"): 2}


def test_a_clock_event_is_counted_when_a_reason_begins(tmp_path: Path) -> None:
    it = node(settings_with(tmp_path, "DCGM_EXP_CLOCK_EVENTS_COUNT, counter, x"))
    for reasons in (0x4, 0x4, 0x0, 0x44, 1 << 40):
        it.show(sample(gpu(throttling=GpuThrottling(reasons=reasons))))
    assert it.values("DCGM_EXP_CLOCK_EVENTS_COUNT", "clock_event") == {
        ("power_cap",): 2,
        ("hw_thermal",): 1,
    }


HEALTH = "DCGM_EXP_GPU_HEALTH_STATUS"


@pytest.mark.parametrize(
    ("values", "watch", "verdict"),
    [
        ({"health": GpuHealth(remapped_rows_failed=False)}, "MEM", ("DCGM_FR_OK", 0)),
        (
            {"health": GpuHealth(remapped_rows_failed=True)},
            "MEM",
            ("DCGM_FR_ROW_REMAP_FAILURE", 20),
        ),
        (
            {"health": GpuHealth(ecc_uncorrected_volatile_total=1)},
            "MEM",
            ("DCGM_FR_VOLATILE_DBE_DETECTED", 20),
        ),
        (
            {"health": GpuHealth(remapped_rows_failed=False, remapped_rows_pending=True)},
            "MEM",
            ("DCGM_FR_PENDING_ROW_REMAP", 10),
        ),
        (
            {"health": GpuHealth(nvlink_recoveries_total=0, nvlink_replays_total=3)},
            "NVLINK",
            ("DCGM_FR_NVLINK_ERROR_THRESHOLD", 10),
        ),
        (
            {"health": GpuHealth(nvlink_recoveries_total=1)},
            "NVLINK",
            ("DCGM_FR_NVLINK_ERROR_CRITICAL", 20),
        ),
        (
            {"health": GpuHealth(nvlink_link_recoveries_totals={"0": 0, "1": 1})},
            "NVLINK",
            ("DCGM_FR_NVLINK_ERROR_CRITICAL", 20),
        ),
        (
            {
                "health": GpuHealth(
                    nvlink_link_failed_recoveries_totals={"0": 0},
                    nvlink_link_successful_recoveries_totals={"0": 2},
                )
            },
            "NVLINK",
            ("DCGM_FR_NVLINK_ERROR_THRESHOLD", 10),
        ),
        (
            {"throttling": GpuThrottling(reasons=0x40)},
            "THERMAL",
            ("DCGM_FR_CLOCK_THROTTLE_THERMAL", 10),
        ),
        ({"throttling": GpuThrottling(reasons=0x4)}, "POWER", ("DCGM_FR_OK", 0)),
        (
            {"throttling": GpuThrottling(reasons=0x80)},
            "POWER",
            ("DCGM_FR_CLOCK_THROTTLE_POWER", 10),
        ),
    ],
)
def test_health_is_derived_from_the_readings(
    tmp_path: Path, values: dict[str, Any], watch: str, verdict: tuple[str, int]
) -> None:
    it = node(settings_with(tmp_path, f"{HEALTH}, counter, x"))
    it.show(sample(gpu(**values)))
    found = it.values(HEALTH, "health_watch", "health_error_code")
    assert found[watch, verdict[0]] == verdict[1]


def test_health_without_readings_has_no_verdict(tmp_path: Path) -> None:
    it = node(settings_with(tmp_path, f"{HEALTH}, counter, x"))
    it.show(sample(gpu(health=GpuHealth(), throttling=GpuThrottling())))
    assert not it.lines(HEALTH)


def test_peers_are_reported_with_the_state_of_their_link(tmp_path: Path) -> None:
    it = node(settings_with(tmp_path, "DCGM_EXP_P2P_STATUS, counter, x"))
    known = inventory(0, 1, 2)
    peers = {"GPU-1": "ok", "GPU-2": "topology_not_supported", "GPU-9": "ok"}
    known.gpus[0] = replace(known.gpus[0], nvlink_peers=peers)
    it.show(sample(gpu(0), gpu(1)), inventory=known)
    assert it.values("DCGM_EXP_P2P_STATUS", "gpu", "peer_gpu", "link_status") == {
        ("0", "1", "OK"): 0,
        ("0", "2", "TopologyNotSupported"): 3,
    }


MEGABYTE_OF_DCGMS = 1024 * 1000
NVLINKS = "DCGM_FI_DEV_NVLINK_BANDWIDTH_TOTAL"


def traffic(megabytes: float) -> GpuTraffic:
    """Return counters with this total; a quarter was sent."""
    total = round(megabytes * MEGABYTE_OF_DCGMS)
    return GpuTraffic(
        nvlink_sent_bytes_total=total // 4, nvlink_received_bytes_total=total - total // 4
    )


def test_dcgms_nvlink_bandwidth_is_a_rate_and_ours_is_the_counter() -> None:
    it = node()
    it.show(sample(gpu(0, traffic=traffic(100))))
    assert not it.lines(NVLINKS)
    it.clock.advance(2)
    it.show(sample(gpu(0, traffic=traffic(103))))
    assert it.values(NVLINKS, "gpu") == {("0",): 1.5}
    counter = it.values("gpuledger_node_gpu_link_bytes_total", "link", "direction")
    assert sum(counter.values()) == 103 * MEGABYTE_OF_DCGMS
    it.clock.advance(1)
    it.show(sample(gpu(0)))
    assert it.values(NVLINKS, "gpu") == {("0",): 1.5}


def test_no_nvlink_bandwidth_is_computed_across_a_counter_reset() -> None:
    it = node()
    for total in (100, 1):
        it.show(sample(gpu(0, traffic=traffic(total))))
        it.clock.advance(1)
    assert not it.lines(NVLINKS)
    it.show(sample(gpu(0, traffic=traffic(3))))
    assert it.values(NVLINKS, "gpu") == {("0",): 2.0}


def links(first: int) -> GpuHealth:
    sent, received = {"0": 0, "1": 1, "17": 0}, {"0": first, "17": 0}
    return GpuHealth(nvlink_link_sent_bytes_totals=sent, nvlink_link_received_bytes_totals=received)


def test_a_link_has_its_own_rate_if_both_directions_are_known(tmp_path: Path) -> None:
    names = [f"DCGM_FI_DEV_NVLINK_BANDWIDTH_L{link}" for link in (0, 1, 17)]
    lines = [f"{name}, counter, x" for name in names]
    it = node(settings_with(tmp_path, *lines, dcgm_names="both", profile="full"))
    it.show(sample(gpu(0, health=links(0)), gpu(1, health=GpuHealth()), gpu(2)))
    it.clock.advance(10)
    it.show(sample(gpu(0, health=links(20 * MEGABYTE_OF_DCGMS)), gpu(1, health=GpuHealth())))
    assert it.values("gpuledger_node_gpu_nvlink_bytes_total", "nvlink") == {
        ("0",): 20 * MEGABYTE_OF_DCGMS,
        ("17",): 0,
    }
    for old, value in zip(names, (2, None, 0), strict=True):
        expected = {} if value is None else {("0",): value}
        assert it.values(old, "gpu") == expected, old
        assert it.values(old.replace("BANDWIDTH", "THROUGHPUT"), "gpu") == expected, old


def test_labels_are_escaped_so_that_prometheus_can_read_them() -> None:
    it = node(PARTS, one='ml/a"b\\c\nd/main')
    shown = sample(gpu(memory_used_bytes=GIB), containers=["one"], processes=[process(0, 0)])
    it.show(shown)
    assert ('a"b\\c\nd',) in it.values("DCGM_FI_DEV_FB_USED", "pod")


PLACES = st.integers(0, 2)
PROCESSES = st.lists(
    st.builds(
        process,
        PLACES,
        st.none() | PLACES,
        pid=st.integers(1, 9),
        sm_utilization_ratio=st.none() | st.floats(0, 1),
        memory_used_bytes=st.none() | st.integers(0, GIB),
        ended=st.none() | st.just(value=True),
    ),
    max_size=12,
)
ALLOCATIONS = st.lists(
    st.builds(
        allocation,
        PLACES,
        st.sampled_from(["ml/a/main", "ml/b/main", "ml/c/main"]),
        replica=st.none() | st.sampled_from(["0", "1"]),
    ),
    max_size=6,
)


@generated(processes=PROCESSES, allocations=ALLOCATIONS, pod_series=st.booleans())
def test_no_series_occurs_twice_and_a_gpus_own_series_occurs_once(
    processes: list[GpuProcess], allocations: list[DeviceAllocation], *, pod_series: bool
) -> None:
    settings = ExpositionSettings(
        dcgm_names="both", profile="full", process_series=True, pod_series=pod_series
    )
    it = node(settings, one="ml/a/main", two="ml/b/main")
    gpus = [gpu(index, memory_used_bytes=GIB, utilization_ratio=0.5) for index in range(3)]
    it.show(
        sample(
            *gpus,
            containers=["one", "two", "unnamed"],
            processes=processes,
            allocations=allocations,
        )
    )
    lines = [line for line in it.page().decode().splitlines() if not line.startswith("#")]
    series = [line.rpartition(" ")[0] for line in lines]
    assert len(series) == len(set(series))
    for name in ("DCGM_FI_DEV_FB_USED", "DCGM_FI_DEV_GPU_UTIL"):
        own = [line for line in it.lines(name) if "gpuledger_share" not in line]
        assert len(own) == 3
        assert pod_series or it.lines(name) == own
