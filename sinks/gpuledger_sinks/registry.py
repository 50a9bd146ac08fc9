"""The kinds of sink: their names, topics and requirements, and how to open one.

The table `KINDS` serves the command line, the settings, the metrics and
`gpuledger_sinks.loop.run_sink`. To add a kind, add a row here, a section in
`gpuledger_sinks.settings`, and a module whose `open_sink` makes a `Sink`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Final

from gpuledger.topics import Topic, Topics
from gpuledger_sinks.protocol import OpenSink


@dataclass(frozen=True, kw_only=True)
class SinkKind:
    """One kind of sink."""

    name: str
    """The argument of `gpuledger sink`, the section of the settings, and the metrics' label."""
    group: str
    """Its consumer group."""
    module: str
    """The module with `open_sink`. Imported only when the sink runs, so that a sink that sends
    samples does not need Arrow, and one that stores rows does not need protobuf."""
    summary: str
    """Its output and destination, for `--help`."""
    has_incidents: bool = False
    """Whether it reads attributed incidents in addition to events."""
    has_readings: bool = False
    """Whether it reads the nodes' other readings in addition to events."""
    relays_watermarks: bool = False
    """Whether it publishes watermarks of the events that it has delivered."""
    drop_reasons: tuple[str, ...]
    """Reasons for which it may drop records that it has read."""
    takes_replays: bool = False
    """Whether it redelivers rejected events from the replay topic."""

    def topics(self, table: Topics) -> tuple[Topic, ...]:
        """Return the topics that the sink reads; `table` contains the installation's topics."""
        beside = [
            *([table.attributed_incidents] if self.has_incidents else []),
            *([table.readings] if self.has_readings else []),
        ]
        return (table.events, *beside)

    def load(self) -> OpenSink:
        """Import the kind's module and return its function `open_sink`."""
        open_sink: OpenSink = import_module(self.module).open_sink
        return open_sink


REMOTE_WRITE: Final = SinkKind(
    name="remote_write",
    group="gpuledger-remote-write",
    module="gpuledger_sinks.remote_write.remote_write_sink",
    takes_replays=True,
    summary="samples, to Prometheus, Mimir, VictoriaMetrics, … (remote-write 2.0, 1.0)",
    has_incidents=True,
    has_readings=True,
    drop_reasons=(
        "duplicate",
        "failing",
        "future",
        "invalid",
        "out_of_order",
        "partial",
        "rejected",
        "repeated",
        "too_large",
        "too_old",
    ),
)
ALERTS: Final = SinkKind(
    name="alerts",
    group="gpuledger-alerts",
    module="gpuledger_sinks.alerts.alerts_sink",
    summary="alerts, to every Alertmanager of a cluster",
    has_incidents=True,
    drop_reasons=("duplicate", "rejected", "superseded", "too_large", "too_many", "too_old"),
)
STORE: Final = SinkKind(
    name="store",
    group="gpuledger-store",
    module="gpuledger_sinks.store.store_sink",
    takes_replays=True,
    summary="sums by minute, to Delta Lake tables",
    relays_watermarks=True,
    drop_reasons=("duplicate", "future", "invalid", "too_large", "too_old"),
)
ROWS: Final = SinkKind(
    name="rows",
    group="gpuledger-rows",
    module="gpuledger_sinks.rows",
    takes_replays=True,
    summary="one flat JSON row per entry, to the topic gpuledger.rows.v1, for SQL engines",
    relays_watermarks=True,
    drop_reasons=("duplicate", "future", "invalid", "too_large"),
)
KINDS: Final[Mapping[str, SinkKind]] = {
    kind.name: kind for kind in (REMOTE_WRITE, ALERTS, STORE, ROWS)
}
SCALER: Final = "scaler"
"""The sink that answers KEDA. It is not in the table, because it reads without a group and commits
no offsets (`gpuledger_sinks.scaler`)."""
