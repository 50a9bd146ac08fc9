"""`gpuledger-podwatch`: the wiring of the pod watch, and nothing else."""

from enricher.podwatch.api import open_api
from enricher.podwatch.service import run_podwatch
from enricher.podwatch.settings import PodwatchSettings
from gpuledger.bus.kafka import KafkaBus
from gpuledger.clock import SystemClock
from gpuledger.service import Readiness, explain_user_errors, run_service
from gpuledger.settings import load_settings


@explain_user_errors
def main() -> int:
    """Run podwatch until a signal; give the exit code."""
    settings = load_settings(
        PodwatchSettings,
        prog="gpuledger-podwatch",
        description="Watches the Kubernetes API server and publishes slim pod records to Kafka.",
    )
    return run_service(_watch, settings=settings)


async def _watch(settings: PodwatchSettings, readiness: Readiness) -> None:
    async with open_api(settings.kubernetes) as api:
        await run_podwatch(
            api=api,
            bus=KafkaBus(settings.kafka),
            settings=settings,
            readiness=readiness,
            clock=SystemClock(),
        )
