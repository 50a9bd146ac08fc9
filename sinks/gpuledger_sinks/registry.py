"""The kinds of sink: what each is called, reads and needs, and how one is opened.

One table, `KINDS`, for the command line, the settings, the metrics and
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
    """Where `open_sink` is. Imported when such a sink is run, so that one that sends samples needs
    no Arrow, and one that stores rows no protobuf."""
    summary: str
    """What it hands on and to whom, for `--help`."""
    has_incidents: bool = False
    """Whether it reads the attributed incidents beside the events."""
    has_readings: bool = False
    """Whether it reads what else the nodes read beside the events."""
    relays_watermarks: bool = False
    """Whether it says up to when what it has handed on is complete."""
    drop_reasons: tuple[str, ...]
    """Why it may not hand on what it read."""
    takes_replays: bool = False
    """Whether it takes events that it rejected once more, from the replay topic."""

    def topics(self, table: Topics) -> tuple[Topic, ...]:
        """Return the topics that it reads."""
        beside = [
            *([table.attributed_incidents] if self.has_incidents else []),
            *([table.readings] if self.has_readings else []),
        ]
        return (table.events, *beside)

    def load(self) -> OpenSink:
        """Import the kind's module; return what opens a sink."""
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
    summary="one flat JSON row an entry, to the topic gpuledger.rows.v1, for SQL engines",
    relays_watermarks=True,
    drop_reasons=("duplicate", "future", "invalid", "too_large"),
)
KINDS: Final[Mapping[str, SinkKind]] = {
    kind.name: kind for kind in (REMOTE_WRITE, ALERTS, STORE, ROWS)
}
