"""`gpuledger-sink remote_write|alerts|store|rows`: the wiring of the sinks.

Here settings, bus and sink meet. No decision about any record.
"""

from typing import Final

from gpuledger.bus.kafka import KafkaBus
from gpuledger.runtime import Readiness, explain_user_errors, run_service
from gpuledger.settings import Option, load_settings
from gpuledger_sinks.loop import run_sink
from gpuledger_sinks.metrics import count_sink_from_zero
from gpuledger_sinks.registry import KINDS
from gpuledger_sinks.settings import SinkSettings

_KINDS_SHOWN: Final = "\n".join(f"  {kind.name:<14}{kind.summary}" for kind in KINDS.values())
_DESCRIPTION: Final = f"""Hand the booked events on to a receiver. KIND is one of

{_KINDS_SHOWN}

Each kind is a consumer group of its own; run several of one kind to share its partitions."""
_KIND: Final = Option(
    name="kind",
    setting="kind",
    help="which sink to run; before --help, whose settings are listed",
    choices=tuple(KINDS),
    chooses_section=True,
)


@explain_user_errors
def main() -> int:
    """Run the sink that the command line names; return the exit code."""
    settings = load_settings(
        SinkSettings,
        prog="gpuledger-sink",
        description=_DESCRIPTION,
        options=[_KIND],
    )
    about = {
        "sink": settings.kind,
        "group_instance_id": settings.kafka.group_instance_id or None,
        "brokers": settings.kafka.bootstrap_servers,
    }
    return run_service(run_kind, settings=settings, about=about)


async def run_kind(settings: SinkSettings, readiness: Readiness) -> None:
    """Run the sink that the settings name until cancelled."""
    kind = KINDS[settings.kind]
    bus = KafkaBus(settings.kafka, readiness=readiness)
    count_sink_from_zero(kind, bus.topics)
    await run_sink(
        kind,
        bus=bus,
        settings=getattr(settings, kind.name),
        readiness=readiness,
        group_instance_id=settings.kafka.group_instance_id or None,
        group=settings.group or None,
    )
