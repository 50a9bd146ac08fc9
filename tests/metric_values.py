"""The current value of a metric in a scrape."""

from prometheus_client import Counter, Gauge


def value_of(metric: Counter | Gauge) -> float:
    """Return the value of a metric that has no labels, or whose labels are all set."""
    return next(iter(metric.collect())).samples[0].value
