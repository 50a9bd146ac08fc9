"""Counters that are there before there is anything to count."""

from collections.abc import Iterable
from itertools import product

from prometheus_client.metrics import MetricWrapperBase


def count_from_zero(counter: MetricWrapperBase, **values: Iterable[str]) -> None:
    """Make a series at 0 for each combination of the known values of a counter's labels.

    Done at a process's start: Prometheus sees no increase where a series first appears at 1, so a
    rule over it would miss the first time. Raises `ValueError` where the labels are not all named.
    """
    for combination in product(*values.values()):
        counter.labels(**dict(zip(values, combination, strict=True)))
