"""The sinks' own metrics, one family for all kinds, told apart by the label `sink`.

Here live names and help texts. Nothing is counted here.
"""

from typing import Final

from prometheus_client import Counter, Gauge

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
    " rows), messages (otlp).",
    ["sink"],
)
RETRIES_TOTAL: Final = Counter(
    "gpuledger_sink_retries",
    "Attempts that the receiver did not answer, or answered with `later`; in rows and otlp"
    " transactions that were undone.",
    ["sink"],
)
DROPPED_TOTAL: Final = Counter(
    "gpuledger_sink_dropped",
    "What was not handed on, by reason (`duplicate`, `future`, `invalid`, `out_of_order`,"
    " `rejected`, `superseded`, `too_large`, `too_old`): events; in alerts also incidents, and"
    " alerts that an Alertmanager refused.",
    ["sink", "reason"],
)
ORPHANS_REMOVED_TOTAL: Final = Counter(
    "gpuledger_sink_orphan_files_removed",
    "Files of the store that no commit names and that were removed: what killed writers left.",
)
