"""The metrics that every deployable has of its checks and certificates, and how counters start."""

from collections.abc import Iterable
from itertools import product
from typing import Final

from prometheus_client import Gauge
from prometheus_client.metrics import MetricWrapperBase

CHECK_OK: Final = Gauge(
    "gpuledger_check_ok",
    "1 while a check of /readyz holds, 0 while it fails; only severity `critical` makes unready.",
    ["check", "severity"],
)

CERTIFICATE_NOT_AFTER: Final = Gauge(
    "gpuledger_certificate_not_after_timestamp_seconds",
    "Time (Unix) at which the certificates in this file expire: of an own one with its "
    "chain the first, of authorities the last.",
    ["file"],
)


def count_from_zero(counter: MetricWrapperBase, **values: Iterable[str]) -> None:
    """Make a series at 0 for each combination of the known values of a counter's labels.

    Done at a process's start: Prometheus sees no increase where a series first appears at 1, so a
    rule over it would miss the first time. Raises `ValueError` where the labels are not all named.
    """
    for combination in product(*values.values()):
        counter.labels(**dict(zip(values, combination, strict=True)))
