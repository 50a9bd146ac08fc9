"""`gpuledger-join`: joins ticks with pods into events. The only wiring of the join."""

from enricher.join.service import run_join
from enricher.join.settings import JoinSettings
from gpuledger.bus.kafka import KafkaBus
from gpuledger.runtime import Readiness, explain_user_errors, run_service
from gpuledger.settings import load_settings


@explain_user_errors
def main() -> int:
    """Run the join until it is told to stop; return the exit code."""
    settings = load_settings(
        JoinSettings,
        prog="gpuledger-join",
        description="Join nodes' ticks with their pods into events whose entries sum to the GPU.",
    )
    about = {
        "group": settings.join.group,
        "member": settings.kafka.group_instance_id or None,
        "guarantee": settings.join.processing_guarantee,
        "brokers": settings.kafka.bootstrap_servers,
    }
    return run_service(_join, settings=settings, about=about)


async def _join(settings: JoinSettings, readiness: Readiness) -> None:
    bus = KafkaBus(settings.kafka, readiness=readiness)
    await run_join(bus=bus, settings=settings, readiness=readiness)
