"""Builders of incidents for the join's tests."""

from gpuledger.bus.protocol import Record
from gpuledger.records import Incident, IncidentProcess, Severity
from tests.default_topics import INCIDENTS
from tests.unit.enricher.join.ticks import CONTAINER_IDS, SECOND_NS, UIDS, record


def at(seconds: int) -> int:
    """Return the time this many seconds after the tests' pods were created."""
    return (1_789_999_000 + seconds) * SECOND_NS


def incident(**changes: object) -> Incident:
    """Return an incident of a GPU on which the first pod has a process."""
    values: dict[str, object] = {
        "cluster": "default",
        "node": "node-a",
        "boot_id": "boot",
        "gpu_uuid": "GPU-a",
        "time_ns": at(10),
        "kind": "xid",
        "source": "nvml",
        "severity": Severity.CRITICAL,
        "message": "The GPU has fallen off the bus.",
        "processes": [IncidentProcess(pid=1, pod_uid=UIDS[0], container_id=CONTAINER_IDS[0])],
    }
    return Incident(**(values | changes))  # type: ignore[arg-type]  # the names are an Incident's


def incident_record(value: object) -> Record:
    """Return an incident as it is read."""
    return record(value, topic=INCIDENTS.name)
