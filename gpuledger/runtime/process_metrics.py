"""Metrics of every component's checks and certificates, and `count_from_zero` for counters."""

from collections.abc import Iterable
from itertools import product
from typing import Final

from prometheus_client import Gauge
from prometheus_client.metrics import MetricWrapperBase

CHECK_OK: Final = Gauge(
    "gpuledger_check_ok",
    "Whether a check of /readyz passes (1 = yes, 0 = no). Only severity `critical` affects"
    " readiness.",
    ["check", "severity"],
)

CERTIFICATE_NOT_AFTER: Final = Gauge(
    "gpuledger_certificate_not_after_timestamp_seconds",
    "Unix time at which the file's certificates expire, in seconds: the earliest of a certificate"
    " and its chain, the latest of CA certificates.",
    ["file"],
)


def count_from_zero(counter: MetricWrapperBase, **values: Iterable[str]) -> None:
    """Create a series at 0 for each combination of a counter's known label values.

    Call it when the process starts: Prometheus sees no increase in a series that first appears at
    1, so an alert rule would miss the first event. Raises `ValueError` if a label is missing.
    """
    for combination in product(*values.values()):
        counter.labels(**dict(zip(values, combination, strict=True)))
