"""An incident is logged with its XID, GPU, pod and action; a storm is logged in a few lines."""

from msgspec.structs import replace
from structlog.testing import capture_logs

from gpuledger.keys import NodeId
from gpuledger.records import DeviceAllocation, Incident, IncidentProcess
from gpuledger.runtime.logs import Repeats
from gpuledger_agent.core.incidents import make_incident
from gpuledger_agent.monitor import IncidentLog

HELD = DeviceAllocation(
    gpu_uuid="GPU-0",
    device_id="GPU-0",
    resource_name="nvidia.com/gpu",
    namespace="research",
    pod="train-0",
    container="main",
)


def incident(kind: str = "xid", *, xid: int | None = None, allocated: bool = True) -> Incident:
    return make_incident(
        kind=kind,
        node=NodeId("default", "node-1"),
        boot_id="b",
        gpu_uuid="GPU-0",
        gpu_index=3,
        time_ns=1,
        source="nvml",
        xid=xid,
        processes=[IncidentProcess(pid=7, pod_uid="uid-7"), IncidentProcess(pid=8)],
        allocations=[HELD] if allocated else [],
    )


def test_an_xid_is_logged_with_gpu_pod_and_action() -> None:
    with capture_logs() as lines:
        IncidentLog().record(incident(xid=79))

    (line,) = lines
    assert line.pop("detail").startswith("GPU has fallen off the bus")
    assert line == {
        "event": "incident_seen",
        "log_level": "error",
        "kind": "xid",
        "xid": 79,
        "gpu": "GPU-0",
        "gpu_index": 3,
        "pods": ["research/train-0"],
        "action": "RESTART_BM",
        "source": "nvml",
        "count": 1,
    }


def test_without_the_kubelet_a_pod_is_logged_by_its_uid() -> None:
    with capture_logs() as lines:
        IncidentLog().record(incident("gpu_recovered", allocated=False))

    assert [(line["pods"], line["log_level"]) for line in lines] == [(["uid-7"], "info")]


def test_a_storm_is_logged_as_one_line_per_minute_with_a_count() -> None:
    now_seconds = 0.0
    log = IncidentLog(Repeats(seconds=lambda: now_seconds))
    with capture_logs() as lines:
        for tenth in range(1201):
            now_seconds = tenth / 10
            log.record(incident(xid=31))
            if tenth == 5:
                log.record(incident(xid=79))

    assert [(line["xid"], line["count"]) for line in lines] == [
        (31, 1),
        (79, 1),
        (31, 600),
        (31, 600),
    ]


def test_at_the_agents_start_only_states_that_are_not_well_are_logged() -> None:
    well = replace(incident("state_ended"), present_at_start=True, ended_kinds=["gpu_lost"])
    with capture_logs() as lines:
        IncidentLog().record(well)
        IncidentLog().record(replace(well, present_at_start=None))
        IncidentLog().record(replace(incident("row_remap_failed"), present_at_start=True))

    assert [line["kind"] for line in lines] == ["state_ended", "row_remap_failed"]
