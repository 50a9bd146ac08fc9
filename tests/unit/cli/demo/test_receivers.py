"""The built-in receivers, and what is read of an alert that was posted to them."""

from datetime import UTC, datetime, timedelta

import aiohttp

from cli.demo.alert_lines import as_line, describe
from cli.demo.presence import GpuPresence
from cli.demo.receivers import Alert, serve_receivers
from tests.unit.cli.demo.events import event, uuid_of

NOW = datetime(2026, 1, 1, tzinfo=UTC)
INCIDENT = {
    "alertname": "GpuIncident",
    "severity": "critical",
    "node": "node-a",
    "gpu_uuid": uuid_of(1),
    "kind": "xid",
    "xid": "79",
}


def posted(labels: dict[str, str], *, ends_seconds: float, **annotations: str) -> dict[str, object]:
    return {
        "labels": labels,
        "annotations": annotations,
        "startsAt": (NOW - timedelta(seconds=60)).isoformat(),
        "endsAt": (NOW + timedelta(seconds=ends_seconds)).isoformat(),
    }


async def test_an_alert_fires_until_the_end_that_was_told_last() -> None:
    async with serve_receivers() as received, aiohttp.ClientSession() as session:
        for ends_seconds, firing in ((240, 1), (-1, 0)):
            url = f"{received.url}/api/v2/alerts"
            async with session.post(
                url, json=[posted(INCIDENT, ends_seconds=ends_seconds)]
            ) as answer:
                assert answer.status == 200
            assert len(received.firing(NOW)) == firing
            assert len(received.alerts) == 1


def alert(labels: dict[str, str], **annotations: str) -> Alert:
    return Alert(starts_at=NOW, ends_at=NOW, labels=labels, annotations=annotations)


def test_an_incident_is_told_with_the_gpu_as_people_number_it_and_its_pods() -> None:
    presence = GpuPresence()
    told = alert(INCIDENT, description="It fell off the bus", pods="research/train-0")
    said = "GpuIncident critical  {}: XID 79, It fell off the bus (research/train-0)"
    assert as_line(describe(told, presence)) == said.format("node-a")
    presence.add(event(gpus=[0, 1]))
    assert as_line(describe(told, presence)) == said.format("GPU 1 on node-a")


def test_any_other_alert_is_told_in_its_own_words() -> None:
    other = alert({"alertname": "GpuBusyWithoutPod", "severity": "warning"}, summary="GPU 2 works")
    assert as_line(describe(other, GpuPresence())) == "GpuBusyWithoutPod warning  GPU 2 works"
