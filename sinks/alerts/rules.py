"""The table of rules: what about a GPU in a tick is worth an alert.

Here lives each rule's condition and words. When a condition has lasted long enough is
`sinks.alerts.engine`'s business. Pure.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from gpuledger.records import Account, GpuBooks, Severity
from sinks.settings import AlertsSettings

BUSY_WITHOUT_POD: Final = "GpuBusyWithoutPod"
_OUTSIDE_PODS: Final = (Account.HOST, Account.UNATTRIBUTED)


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One rule, held against each GPU in each tick."""

    name: str
    """The alert's name."""
    severity: Severity
    """How loud it is."""
    for_ns: int
    """How long the measure must reach the threshold, by the events' time, before it fires."""
    threshold: float
    """From which measure on the condition holds."""
    measure: Callable[[GpuBooks, float], float | None]
    """Measures a GPU's books of so many seconds; `None` where the tick does not say."""
    summary: str
    """One line for people, with `{gpu}` and `{node}`."""
    description: str
    """What it means and what to do, with `{gpu}`, `{node}`, `{measure}` and `{threshold}`."""


def rules_of(settings: AlertsSettings) -> tuple[Rule, ...]:
    """Return the table of rules with the thresholds that the settings name."""
    busy = settings.busy_without_pod
    return (
        Rule(
            name=BUSY_WITHOUT_POD,
            severity=Severity.WARNING,
            for_ns=round(busy.for_seconds * 1e9),
            threshold=busy.threshold_ratio,
            measure=busy_without_pod_ratio,
            summary="GPU {gpu} on node {node} works for no pod",
            description=(
                "GPU {gpu} on node {node} was busy for {measure:.0%} of the time with work of no "
                "pod (threshold {threshold:.0%}): a process outside Kubernetes, or one that "
                "outlived its pod. Look for it with `nvidia-smi` on the node."
            ),
        ),
    )


def busy_without_pod_ratio(books: GpuBooks, interval_seconds: float) -> float | None:
    """Return the share of the time booked on the host or on nobody; None where it is not known."""
    if interval_seconds <= 0 or not books.entries:
        return None
    outside = [entry.busy_seconds for entry in books.entries if entry.account in _OUTSIDE_PODS]
    known = [seconds for seconds in outside if seconds is not None]
    if len(known) < len(outside):
        return None
    return sum(known) / interval_seconds
