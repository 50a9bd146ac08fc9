"""Incidents as the join publishes them, for the tests of the remote-write sink."""

from typing import Any

from gpuledger.bus.memory import MemoryBus
from gpuledger.bus.protocol import Message
from gpuledger.codec import encode
from gpuledger.keys import node_key
from gpuledger.records import AttributedIncident, Incident, Severity
from tests.default_topics import ATTRIBUTED_INCIDENTS
from tests.unit.sinks.builders import GPU, NODE, START_NS, place_of


def incident(
    number: int = 0,
    *,
    kind: str = "xid",
    xid: int | None = 79,
    **changes: Any,  # noqa: ANN401  # any field
) -> Incident:
    """Return an incident, `number` milliseconds after the first tick."""
    values: dict[str, Any] = {
        "cluster": "default",
        "node": NODE,
        "boot_id": "boot-1",
        "gpu_uuid": GPU,
        "time_ns": START_NS + number * 1_000_000,
        "kind": kind,
        "source": "nvml",
        "severity": Severity.CRITICAL,
        "xid": xid if kind == "xid" else None,
        "message": "GPU has fallen off the bus",
        "processes": [],
    }
    return Incident(**values | changes)


def attributed(of: Incident) -> AttributedIncident:
    """Return the incident as the join publishes it for an idle GPU."""
    return AttributedIncident(incident=of, pods=[])


async def publish_incidents(on: MemoryBus, *incidents: Incident) -> None:
    async with on.producer() as producer:
        for one in incidents:
            at = place_of(one.node, ATTRIBUTED_INCIDENTS.name)
            value = encode(attributed(one))
            await producer.publish(
                *at, [Message(key=node_key(one).encode(), value=value, timestamp_ms=0)]
            )
