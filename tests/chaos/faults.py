"""The table of faults: how each is injected, what must be delivered, and which alert shows it.

docs/reference/alerts.md has a table for operators; `tests/lint/test_faults.py` compares the alerts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from tests.chaos import injecting as do

if TYPE_CHECKING:
    from tests.chaos.injecting import Act


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One fault of an installation that otherwise works."""

    name: str
    documented: str = ""
    """The fault's row in the table of docs/reference/alerts.md; empty if no alert is due."""
    inject: Act
    repair: Act = do.nothing
    """How the fault ends: by the operator's first action or a restart of the component."""
    seconds: float = 16.0
    """How long it lasts."""
    loses: bool = False
    """Whether time is lost. The store must then name it as a gap; otherwise it must have no gap."""
    may_lose_seconds: float = 0.0
    """How much time may be lost otherwise, named as a gap."""
    unknown_seconds: float = 0.0
    """The least GPU time whose allocation must be unknown."""
    alerts: frozenset[str] = frozenset()
    """The alerts that must fire if the fault lasts."""
    consequences: frozenset[str] = frozenset()
    """Alerts that may fire in addition, if the fault lasts."""
    at_once: frozenset[str] = frozenset()
    """The alerts that fire although the fault was repaired within seconds."""
    small_disk: str | None = None
    """The component whose disk is small, so that it can be filled."""


MISSING: Final = "podwatch, the join, a sink or reports is missing"
GONE: Final = frozenset({"GpuledgerComponentUnreachable"})
NO_KAFKA: Final = frozenset({"GpuledgerKafkaUnavailable"})
# An Alertmanager with the shipped configuration suppresses these.
WITHOUT_KAFKA: Final = frozenset(
    {
        "GpuledgerCheckFailing",
        "GpuledgerCriticalCheckFailing",
        "GpuledgerJoinLagging",
        "GpuledgerJoinWatermarkStalled",
        "GpuledgerPodwatchWatermarkStalled",
        "GpuledgerSamplesSpooled",
        "GpuledgerSinkLagging",
        "GpuledgerSinkWatermarkStalled",
    }
)

FAULTS: Final = (
    Fault(
        name="killed-join",
        documented=MISSING,
        inject=do.kill("join"),
        repair=do.bring("join"),
        alerts=GONE,
        consequences=frozenset({"GpuledgerSinkWatermarkStalled"}),
    ),
    Fault(
        name="join-killed-midway",
        documented=MISSING,
        inject=do.kill_midway,
        repair=do.bring("join"),
        alerts=GONE,
        consequences=frozenset({"GpuledgerSinkWatermarkStalled"}),
    ),
    Fault(
        name="hanging-join",
        documented=MISSING,
        inject=do.pause("join"),
        repair=do.resume("join"),
        alerts=GONE,
        consequences=frozenset({"GpuledgerSinkWatermarkStalled"}),
    ),
    Fault(
        name="killed-podwatch",
        documented=MISSING,
        inject=do.kill("podwatch"),
        repair=do.bring("podwatch"),
        alerts=GONE,
    ),
    Fault(
        name="hanging-podwatch",
        documented=MISSING,
        inject=do.pause("podwatch"),
        repair=do.resume("podwatch"),
        alerts=GONE,
    ),
    Fault(
        name="killed-store",
        documented=MISSING,
        inject=do.kill("store"),
        repair=do.bring("store"),
        alerts=GONE,
    ),
    Fault(
        name="killed-agent",
        documented="an agent is missing or a node is down",
        inject=do.kill("agent"),
        repair=do.bring("agent"),
        loses=True,
        alerts=GONE,
        at_once=frozenset({"GpuledgerGapsSeen"}),
        consequences=frozenset({"GpuledgerNodeUnresponsive"}),
    ),
    Fault(
        name="no-broker",
        documented="Kafka is unavailable",
        inject=do.stop_broker,
        repair=do.start_broker,
        alerts=NO_KAFKA,
        consequences=WITHOUT_KAFKA,
    ),
    Fault(
        name="no-api-server",
        documented="the API server is unavailable",
        inject=do.stop_api_server,
        repair=do.start_api_server,
        alerts=frozenset({"GpuledgerPodwatchWatermarkStalled"}),
        consequences=frozenset({"GpuledgerCriticalCheckFailing"}),
    ),
    Fault(
        name="second-writer",
        documented="two agents publish as one node",
        inject=do.start_second_writer,
        repair=do.stop_second_writer,
        # Up to an interval whenever an agent starts or ends (ADR 068).
        may_lose_seconds=2.0,
        alerts=frozenset({"GpuledgerSamplesOverlapping"}),
    ),
    Fault(
        name="moved-join-offsets",
        documented="another program moved offsets",
        inject=do.move_join_offsets,
        seconds=30.0,
        loses=True,
        alerts=frozenset({"GpuledgerRecordsMissed"}),
        at_once=frozenset({"GpuledgerRecordsMissed", "GpuledgerGapsSeen"}),
        consequences=frozenset({"GpuledgerGapsSeen"}),
    ),
    Fault(
        # The store reads from the offsets in its tables.
        name="moved-store-offsets",
        inject=do.move_store_offsets,
        seconds=30.0,
    ),
    Fault(
        name="grown-partitions",
        documented="partitions were added, or their numbers differ",
        inject=do.grow_partitions,
        repair=do.recreate_topics,
        loses=True,
        alerts=frozenset({"GpuledgerCriticalCheckFailing"}),
        at_once=frozenset({"GpuledgerRecordsMissed"}),
        consequences=WITHOUT_KAFKA,
    ),
    Fault(
        name="wiped-broker",
        documented="Kafka lost records, or its topics were recreated",
        inject=do.wipe_broker,
        repair=do.renew_store,
        seconds=30.0,
        loses=True,
        alerts=GONE | {"GpuledgerRecordsMissed"},
        at_once=frozenset({"GpuledgerRecordsMissed"}),
        consequences=WITHOUT_KAFKA,
    ),
    Fault(
        name="lost-inventory",
        inject=do.lose_inventory,
        repair=do.await_inventory,
        seconds=2.0,
    ),
    Fault(
        name="silent-kubelet",
        documented="a kubelet does not respond",
        inject=do.silence_kubelet,
        repair=do.resume_kubelet,
        seconds=24.0,
        unknown_seconds=24.0,
        alerts=frozenset({"GpuledgerKubeletErrors"}),
        consequences=frozenset({"GpuledgerCheckFailing"}),
    ),
    Fault(
        name="full-broker-disk",
        documented="a broker's disk is full",
        inject=do.fill("kafka"),
        repair=do.each(do.free("kafka"), do.stop_broker, do.start_broker),
        alerts=NO_KAFKA,
        consequences=WITHOUT_KAFKA,
        small_disk="kafka",
    ),
    Fault(
        name="full-spool-disk",
        documented="a node's disk is full",
        inject=do.each(do.fill("spool"), do.stop_broker),
        repair=do.each(do.start_broker, do.free("spool")),
        alerts=frozenset({"GpuledgerSpoolDiskFull"}),
        at_once=frozenset({"GpuledgerSpoolDiskFull"}),
        consequences=NO_KAFKA
        | WITHOUT_KAFKA
        | {"GpuledgerSamplesQueued", "GpuledgerSpoolUnusable"},
        small_disk="spool",
    ),
    Fault(
        name="full-store-disk",
        documented="the store's disk is full",
        inject=do.fill("store"),
        repair=do.free("store"),
        alerts=frozenset({"GpuledgerCriticalCheckFailing"}),
        consequences=frozenset(
            {"GpuledgerCheckFailing", "GpuledgerSinkLagging", "GpuledgerSinkWatermarkStalled"}
        ),
        small_disk="store",
    ),
)

BY_NAME: Final = {fault.name: fault for fault in FAULTS}
