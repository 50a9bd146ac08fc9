"""`gpuledger-podwatch`: settings, bus and API server are made, and `pod_watch` is run with them."""

from enricher.podwatch.api import open_api
from enricher.podwatch.pod_settings import PodwatchSettings
from enricher.podwatch.pod_watch import run_podwatch
from gpuledger.bus.kafka import KafkaBus
from gpuledger.clock import SystemClock
from gpuledger.runtime import CheckSeverity, Readiness, explain_user_errors, run_service
from gpuledger.settings import load_settings
from gpuledger.settings.secret import shown_url


@explain_user_errors
def main() -> int:
    """Run podwatch until a signal; return the exit code."""
    settings = load_settings(
        PodwatchSettings,
        prog="gpuledger-podwatch",
        description="Watches the Kubernetes API server and publishes slim pod records to Kafka.",
    )
    kubernetes = settings.kubernetes
    about = {
        "url": shown_url(kubernetes.url) or None,
        "kubeconfig": kubernetes.kubeconfig or None,
        "lease": settings.lease.name if settings.lease.enabled else None,
        "brokers": settings.kafka.bootstrap_servers,
    }

    async def watch(settings: PodwatchSettings, readiness: Readiness) -> None:
        # Without a critical check it would be ready as soon as its credentials are read.
        readiness.check("api").waits("starting")
        credentials = readiness.check("credentials", severity=CheckSeverity.WARNING)
        async with open_api(settings.kubernetes, check=credentials) as api:
            await run_podwatch(
                api=api,
                bus=KafkaBus(settings.kafka, readiness=readiness),
                settings=settings,
                readiness=readiness,
                clock=SystemClock(),
            )

    return run_service(watch, settings=settings, about=about)
