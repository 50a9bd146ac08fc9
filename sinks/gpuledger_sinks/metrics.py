"""The sinks' own metrics, one family for all kinds, told apart by the label `sink`.

Here live names and help texts, and the few ways to count that all kinds share.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Final

from prometheus_client import Counter, Gauge, Histogram

from gpuledger import dead_letter_queue
from gpuledger.runtime.process_metrics import count_from_zero
from gpuledger.topics import Topics
from gpuledger_sinks.registry import KINDS, REMOTE_WRITE, SinkKind

LAG_SECONDS: Final = Gauge(
    "gpuledger_sink_lag_seconds",
    "Age of the oldest event that was read and that the receiver has not acknowledged, as of the"
    " scrape: it grows while a receiver is away, and is 0 while there is nothing to send.",
    ["sink"],
)
ACKNOWLEDGED_TIMESTAMP_SECONDS: Final = Gauge(
    "gpuledger_sink_acknowledged_timestamp_seconds",
    "Time of the newest event that the receiver has acknowledged, since the epoch; 0 before the"
    " first. It stands still while nodes send nothing.",
    ["sink"],
)
SENT_TOTAL: Final = Counter(
    "gpuledger_sink_sent",
    "What the receiver has acknowledged: samples (remote_write), alerts (alerts), rows (store,"
    " rows).",
    ["sink"],
)
RETRIES_TOTAL: Final = Counter(
    "gpuledger_sink_retries",
    "Attempts that the receiver did not answer, or answered with `later`; in rows"
    " transactions that were undone.",
    ["sink"],
)
DROPPED_TOTAL: Final = Counter(
    "gpuledger_sink_dropped",
    "What was not handed on, by reason (`duplicate`, `failing`, `future`, `invalid`,"
    " `out_of_order`, `partial`, `rejected`, `repeated`, `superseded`, `too_large`, `too_many`,"
    " `too_old`):"
    " events; in alerts also incidents, and alerts that an Alertmanager refused; of a page that is"
    " scraped samples.",
    ["sink", "reason"],
)
ALERTMANAGER_ANSWERS_TOTAL: Final = Counter(
    "gpuledger_sink_alertmanager_answers",
    "Requests to each Alertmanager, by what it answered: `2xx` (taken), `3xx`, `4xx` or `5xx` by"
    " its status, `page` (a success with a page for people, as a proxy's) or `none`. Only `2xx` is"
    " a delivery. Only in alerts.",
    ["alertmanager", "status"],
)
ALERTMANAGER_STATUSES: Final = ("2xx", "3xx", "4xx", "5xx", "page", "none")
WAITING_BYTES: Final = Gauge(
    "gpuledger_sink_waiting_bytes",
    "Events that were read and wait to be sent, in bytes as they lie in Kafka. Only in"
    " remote_write.",
    ["sink"],
)
REQUESTS_IN_FLIGHT: Final = Gauge(
    "gpuledger_sink_requests_in_flight",
    "Requests that the receiver has not answered yet. Only in remote_write.",
    ["sink"],
)
REQUEST_SECONDS: Final = Histogram(
    "gpuledger_sink_request_seconds",
    "Time that the receiver took to answer a request, be it with a refusal. Only in remote_write.",
    ["sink"],
    buckets=(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30),
)
REQUEST_BYTES_TOTAL: Final = Counter(
    "gpuledger_sink_request_bytes",
    "Bytes of the requests before they were compressed, repetitions included. Only in"
    " remote_write.",
    ["sink"],
)
UNWRITTEN_SAMPLES_TOTAL: Final = Counter(
    "gpuledger_sink_remote_write_unwritten_samples",
    "Samples that the receiver did not write of requests that it took or wrote in part, as its"
    " answers say in remote-write 2.0. Only in remote_write.",
    ["sink"],
)
PROTOCOL_INFO: Final = Gauge(
    "gpuledger_sink_protocol_info",
    "1 for the version of remote-write that is spoken with the receiver, 0 for the other. Only in"
    " remote_write.",
    ["sink", "version"],
)
MAINTENANCE_LAG_SECONDS: Final = Gauge(
    "gpuledger_sink_maintenance_lag_seconds",
    "Time from the newest rows that `gpuledger store maintain` has summed up to the newest in the"
    " store. Only in store.",
)
SERIES_FORGOTTEN_TOTAL: Final = Counter(
    "gpuledger_sink_nodes_forgotten",
    "Nodes whose series were forgotten without an end, as those of all nodes took more memory than"
    " `remote_write.max_series_bytes`: a receiver lets them end by itself, after five minutes.",
)
COUNTERS_ENDED_TOTAL: Final = Counter(
    "gpuledger_sink_counters_ended_early",
    "Counters that were ended before their time, as a node had more than a record of `counters.v1`"
    " holds: they begin anew with their next use. Only in remote_write.",
)
OVER_LIMIT_TOTAL: Final = Counter(
    "gpuledger_sink_remote_write_samples_over_limit",
    "Total number of samples of pods and jobs that were not sent, because their node has"
    " `remote_write.max_series_per_node` series. Only in remote_write.",
)
WATERMARK_TIMESTAMP: Final = Gauge(
    "gpuledger_sink_watermark_timestamp_seconds",
    "Event time up to which what this sink has done of its partitions is complete, by the join's"
    " watermarks: the earliest of them; 0 where it is not known of one, or none is held. Only in"
    " store and rows.",
    ["sink"],
)
_NO_DEAD_LETTER: Final = {"duplicate", "repeated", "superseded", "too_many"}
_UNREAD_INCIDENTS: Final = {"too_old"}
"""What in alerts has no dead letter: incidents that nobody needs to hear of any more."""


def count_dropped(sink: str, reason: str, count: int = 1) -> None:
    """Count what was not handed on; what is put aside is counted once its letter is published.

    What did not decode is a dead letter alone: it was no event.
    """
    if sink in KINDS and reason in KINDS[sink].drop_reasons:
        DROPPED_TOTAL.labels(sink=sink, reason=reason).inc(count)


@contextmanager
def measure_request(sink: str, size_bytes: int) -> Iterator[None]:
    """Measure a request of so many bytes while the context is open."""
    REQUEST_BYTES_TOTAL.labels(sink=sink).inc(size_bytes)
    with (
        REQUESTS_IN_FLIGHT.labels(sink=sink).track_inprogress(),
        REQUEST_SECONDS.labels(sink=sink).time(),
    ):
        yield


def show_protocol(sink: str, version: str, *, versions: Iterable[str]) -> None:
    """Show which of the versions of remote-write is in force."""
    for one in versions:
        PROTOCOL_INFO.labels(sink=sink, version=one).set(one == version)


def count_sink_from_zero(kind: SinkKind, topics: Topics) -> None:
    """Show the counters of the sink that this process runs, before there is anything to count."""
    if kind.relays_watermarks:
        count_from_zero(WATERMARK_TIMESTAMP, sink=[kind.name])
    if kind is REMOTE_WRITE:
        for family in (WAITING_BYTES, REQUESTS_IN_FLIGHT, REQUEST_SECONDS, REQUEST_BYTES_TOTAL):
            family.labels(sink=kind.name)
        count_from_zero(UNWRITTEN_SAMPLES_TOTAL, sink=[kind.name])
    for counter in (SENT_TOTAL, RETRIES_TOTAL):
        count_from_zero(counter, sink=[kind.name])
    count_from_zero(DROPPED_TOTAL, sink=[kind.name], reason=kind.drop_reasons)
    rejected = {"undecodable", "unreadable", *kind.drop_reasons} - _NO_DEAD_LETTER
    if kind.name == "alerts":
        rejected -= _UNREAD_INCIDENTS
    names = [topic.name for topic in kind.topics(topics)]
    count_from_zero(dead_letter_queue.DEAD_LETTERS_TOTAL, topic=names, reason=rejected)
