"""The sinks' metrics, and the functions for counting that all kinds share.

All kinds use the same metrics and are distinguished by the label `sink`.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Final

from prometheus_client import Counter, Gauge, Histogram

from gpuledger import dead_letter_queue
from gpuledger.runtime.process_metrics import count_from_zero
from gpuledger.topics import Topics
from gpuledger_sinks.registry import KINDS, REMOTE_WRITE, SCALER, SinkKind

LAG_SECONDS: Final = Gauge(
    "gpuledger_sink_lag_seconds",
    "Age of the oldest event that the receiver has not acknowledged, in seconds; 0 if none waits."
    " Without Kafka, the time since its last answer.",
    ["sink"],
)
ACKNOWLEDGED_TIMESTAMP_SECONDS: Final = Gauge(
    "gpuledger_sink_acknowledged_timestamp_seconds",
    "Time of the newest event acknowledged by the receiver, in seconds since the epoch; 0 before"
    " the first.",
    ["sink"],
)
SENT_TOTAL: Final = Counter(
    "gpuledger_sink_sent",
    "Total number of items acknowledged by the receiver: samples (remote_write), alerts (alerts)"
    " or rows (store, rows).",
    ["sink"],
)
RETRIES_TOTAL: Final = Counter(
    "gpuledger_sink_retries",
    "Total number of attempts that the receiver did not answer or answered with a temporary"
    " failure; for rows, transactions that were aborted.",
    ["sink"],
)
DROPPED_TOTAL: Final = Counter(
    "gpuledger_sink_dropped",
    "Total number of events, incidents and alerts not delivered, by reason: `duplicate`, `failing`,"
    " `future`, `invalid`, `out_of_order`, `partial`, `rejected`, `repeated`, `superseded`,"
    " `too_large`, `too_many`, `too_old`.",
    ["sink", "reason"],
)
ALERTMANAGER_ANSWERS_TOTAL: Final = Counter(
    "gpuledger_sink_alertmanager_answers",
    "Total number of requests to each Alertmanager, by response: `2xx` (delivered), `3xx`, `4xx`,"
    " `5xx`, `page` (HTML of a proxy) or `none`. Only for alerts.",
    ["alertmanager", "status"],
)
ALERTMANAGER_STATUSES: Final = ("2xx", "3xx", "4xx", "5xx", "page", "none")
WAITING_BYTES: Final = Gauge(
    "gpuledger_sink_waiting_bytes",
    "Size of the events that were read and wait to be sent, in bytes as stored in Kafka. Only for"
    " remote_write.",
    ["sink"],
)
REQUESTS_IN_FLIGHT: Final = Gauge(
    "gpuledger_sink_requests_in_flight",
    "Number of requests that the receiver has not answered yet. Only for remote_write.",
    ["sink"],
)
REQUEST_SECONDS: Final = Histogram(
    "gpuledger_sink_request_seconds",
    "Time that the receiver took to answer a request, including rejections, in seconds. Only for"
    " remote_write.",
    ["sink"],
    buckets=(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30),
)
REQUEST_BYTES_TOTAL: Final = Counter(
    "gpuledger_sink_request_bytes",
    "Total size of requests before compression, including repeated ones, in bytes. Only for"
    " remote_write.",
    ["sink"],
)
UNWRITTEN_SAMPLES_TOTAL: Final = Counter(
    "gpuledger_sink_remote_write_unwritten_samples",
    "Total number of samples that the receiver did not write from requests accepted at least in"
    " part, according to its remote-write 2.0 responses. Only for remote_write.",
    ["sink"],
)
PROTOCOL_INFO: Final = Gauge(
    "gpuledger_sink_protocol_info",
    "Whether this version of remote-write is in use with the receiver (1 = yes, 0 = no). Only for"
    " remote_write.",
    ["sink", "version"],
)
MAINTENANCE_LAG_SECONDS: Final = Gauge(
    "gpuledger_sink_maintenance_lag_seconds",
    "Time from the newest rows summed up by `gpuledger store maintain` to the newest rows in the"
    " store, in seconds. Only for store.",
)
SERIES_FORGOTTEN_TOTAL: Final = Counter(
    "gpuledger_sink_nodes_forgotten",
    "Total number of nodes whose series were forgotten without stale markers, because all series"
    " exceeded `remote_write.max_series_bytes`; receivers end them after five minutes.",
)
COUNTERS_ENDED_TOTAL: Final = Counter(
    "gpuledger_sink_counters_ended_early",
    "Total number of counters ended early because their node had too many for `counters.v1`; they"
    " restart on next use. Only for remote_write.",
)
OVER_LIMIT_TOTAL: Final = Counter(
    "gpuledger_sink_remote_write_samples_over_limit",
    "Total number of samples of pods and jobs that were not sent, because their node has"
    " `remote_write.max_series_per_node` series. Only for remote_write.",
)
WATERMARK_TIMESTAMP: Final = Gauge(
    "gpuledger_sink_watermark_timestamp_seconds",
    "Event time up to which all partitions are complete, by the join's watermarks, in seconds since"
    " the epoch; 0 if unknown. Only for store and rows.",
    ["sink"],
)
SCALER_REQUESTS_TOTAL: Final = Counter(
    "gpuledger_sink_scaler_requests",
    "Total number of KEDA's requests, by answer: `ok`, `absent` (no pods), `unknown` (unknown use)"
    " or `invalid` (trigger). Only for scaler.",
    ["status"],
)
_NO_DEAD_LETTER: Final = {"duplicate", "repeated", "superseded", "too_many"}
_UNREAD_INCIDENTS: Final = {"too_old"}
"""Reasons for which the alerts sink writes no dead letter, although other sinks do."""


def count_dropped(sink: str, reason: str, count: int = 1) -> None:
    """Count events that were not delivered.

    For an event with a dead letter, call this once the dead letter is published. Reasons that the
    kind does not have are ignored, because records that could not be decoded or are misplaced are
    counted only as dead letters.
    """
    if sink in KINDS and reason in KINDS[sink].drop_reasons:
        DROPPED_TOTAL.labels(sink=sink, reason=reason).inc(count)


@contextmanager
def measure_request(sink: str, size_bytes: int) -> Iterator[None]:
    """Count a request of `size_bytes`, and measure its time while the context is open."""
    REQUEST_BYTES_TOTAL.labels(sink=sink).inc(size_bytes)
    with (
        REQUESTS_IN_FLIGHT.labels(sink=sink).track_inprogress(),
        REQUEST_SECONDS.labels(sink=sink).time(),
    ):
        yield


def show_protocol(sink: str, version: str, *, versions: Iterable[str]) -> None:
    """Set the metric that shows which of these versions of remote-write is in use."""
    for one in versions:
        PROTOCOL_INFO.labels(sink=sink, version=one).set(one == version)


def count_sink_from_zero(kind: SinkKind, topics: Topics) -> None:
    """Export the metrics of this process's sink as 0 before anything is counted."""
    if kind.relays_watermarks:
        count_from_zero(WATERMARK_TIMESTAMP, sink=[kind.name])
    if kind is REMOTE_WRITE:
        for family in (WAITING_BYTES, REQUESTS_IN_FLIGHT, REQUEST_SECONDS, REQUEST_BYTES_TOTAL):
            family.labels(sink=kind.name)
        count_from_zero(UNWRITTEN_SAMPLES_TOTAL, sink=[kind.name])
    for counter in (SENT_TOTAL, RETRIES_TOTAL):
        count_from_zero(counter, sink=[kind.name])
    count_from_zero(DROPPED_TOTAL, sink=[kind.name], reason=kind.drop_reasons)
    rejected = {"undecodable", "unreadable", "misplaced", *kind.drop_reasons} - _NO_DEAD_LETTER
    if kind.name == "alerts":
        rejected -= _UNREAD_INCIDENTS
    names = [topic.name for topic in kind.topics(topics)]
    count_from_zero(dead_letter_queue.DEAD_LETTERS_TOTAL, topic=names, reason=rejected)


def count_scaler_from_zero() -> None:
    """Export the metrics of the scaler as 0 before anything is counted."""
    count_from_zero(SCALER_REQUESTS_TOTAL, status=("ok", "absent", "unknown", "invalid"))
    count_from_zero(DROPPED_TOTAL, sink=[SCALER], reason=("invalid", "too_many"))
