"""How the fields of an incident are filled in."""

from typing import Any

import pytest

from gpuledger.keys import NodeId
from gpuledger.records import Incident, IncidentProcess, Severity
from gpuledger.records.incidents import INCIDENT_KINDS
from gpuledger_agent.core.incidents import KINDS, make_incident

GPU = "GPU-1"


def made(kind: str, **given: Any) -> Incident:  # noqa: ANN401  # an incident's fields
    return make_incident(
        kind=kind,
        node=NodeId("default", "node-a"),
        boot_id="boot-1",
        gpu_uuid=GPU,
        time_ns=5,
        **given,
    )


def test_an_xid_has_the_name_class_action_and_severity_of_the_catalogue() -> None:
    processes = [IncidentProcess(pid=7)]

    assert made("xid", xid=79, source="nvml", processes=processes) == Incident(
        cluster="default",
        node="node-a",
        boot_id="boot-1",
        gpu_uuid=GPU,
        time_ns=5,
        kind="xid",
        source="nvml",
        severity=Severity.CRITICAL,
        xid=79,
        mnemonic="ROBUST_CHANNEL_GPU_HAS_FALLEN_OFF_THE_BUS",
        category="node",
        action="RESTART_BM",
        message="GPU has fallen off the bus",
        processes=processes,
    )


def test_the_counters_start_with_exactly_the_kinds_that_can_be_reported() -> None:
    assert set(INCIDENT_KINDS) == KINDS


def test_an_xid_missing_from_the_catalogue_is_reported_with_its_code() -> None:
    incident = made("xid", xid=1234, detail="something")

    assert (incident.category, incident.severity) == ("unknown", Severity.WARNING)
    assert incident.message == "XID that is not in the catalogue: 1234: something"
    assert incident.action is None


@pytest.mark.parametrize("kind", sorted(KINDS - {"xid"}))
def test_every_kind_has_a_message_and_a_severity(kind: str) -> None:
    incident = made(kind)

    assert incident.kind == kind
    assert incident.message
    assert (incident.xid, incident.category, incident.mnemonic) == (None, None, None)
    assert incident.source == "agent"


def test_an_unknown_kind_is_rejected() -> None:
    with pytest.raises(KeyError):
        made("surprise")


@pytest.mark.parametrize(
    ("kind", "xid", "action", "severity"),
    [
        ("xid", 154, None, Severity.INFO),
        ("xid", 154, "NONE", Severity.INFO),
        ("xid", 154, "RESTART_BM", Severity.CRITICAL),
        ("recovery_action", None, None, Severity.WARNING),
        ("recovery_action", None, "NONE", Severity.INFO),
        ("recovery_action", None, "RESET_GPU", Severity.CRITICAL),
    ],
)
def test_the_action_that_the_driver_requests_overrides_the_catalogue(
    kind: str, xid: int | None, action: str | None, severity: Severity
) -> None:
    incident = made(kind, xid=xid, action=action)

    assert incident.severity is severity
    if action:
        assert incident.action == action


def test_the_severity_and_detail_of_the_source_override_the_catalogue() -> None:
    incident = made("xid", xid=149, severity=Severity.CRITICAL, detail="NETIR_LINK_EVT Fatal")

    assert incident.severity is Severity.CRITICAL
    assert incident.message == "NVLINK: NETIR Error: NETIR_LINK_EVT Fatal"
