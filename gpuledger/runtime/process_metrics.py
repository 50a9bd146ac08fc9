"""The metrics that every deployable has of its checks and health pages, and how counters start."""

from collections.abc import Iterable
from enum import StrEnum
from itertools import product
from typing import Final

from prometheus_client import Counter, Gauge
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


class Dropped(StrEnum):
    """Why a connection to the health pages was ended before its client had what it came for."""

    NO_PLACE = "no_place"
    """All places were taken by connections that are being answered."""
    DISPLACED = "displaced"
    """It waited on its client longest when another one needed its place."""
    HANDSHAKE = "handshake"
    """No TLS was agreed on, or not in time."""
    LATE = "late"
    """A request did not come to its end in time, or an answer was not taken."""


CONNECTIONS_DROPPED_TOTAL: Final = Counter(
    "gpuledger_http_connections_dropped_total",
    "Connections to the health pages that were ended: `displaced` by a newcomer, `no_place`, "
    "`handshake` failed, `late`.",
    ["reason"],
)
for _reason in Dropped:
    CONNECTIONS_DROPPED_TOTAL.labels(reason=_reason.value)


def count_from_zero(counter: MetricWrapperBase, **values: Iterable[str]) -> None:
    """Make a series at 0 for each combination of the known values of a counter's labels.

    Done at a process's start: Prometheus sees no increase where a series first appears at 1, so a
    rule over it would miss the first time. Raises `ValueError` where the labels are not all named.
    """
    for combination in product(*values.values()):
        counter.labels(**dict(zip(values, combination, strict=True)))


def count_dropped(why: Dropped) -> None:
    """Count a connection to the health pages that was ended."""
    CONNECTIONS_DROPPED_TOTAL.labels(reason=why.value).inc()
