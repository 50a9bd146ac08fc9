"""The sinks' own metrics, one family for all kinds, told apart by the label `sink`.

Here live names and help texts. Nothing is counted here.
"""

from typing import Final

from prometheus_client import Counter, Gauge

LAG_SECONDS: Final = Gauge(
    "gpuledger_sink_lag_seconds",
    "Age of the newest event that the receiver has acknowledged, at the time it did; it stands"
    " still while none is acknowledged.",
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
    " posts that an Alertmanager refused.",
    ["sink", "reason"],
)
