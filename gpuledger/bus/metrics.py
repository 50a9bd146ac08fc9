"""What every consumer of a topic says of itself. Every metric of the bus is named here."""

from typing import Final

from prometheus_client import Counter, Gauge

from gpuledger.bus.protocol import UnreadableReason
from gpuledger.runtime.process_metrics import count_from_zero

RECORDS_MISSED_TOTAL: Final = Counter(
    "gpuledger_records_missed",
    "Offsets that a consumer group passed over because their records were removed before it read"
    " them, markers of transactions included.",
    ["topic", "consumer"],
)
GAPS_TOTAL: Final = Counter(
    "gpuledger_gaps",
    "Times that a consumer group could not go on where it was, by reason: `retention` (records were"
    " removed before it read them), `topic_recreated` (the topic was deleted and made anew),"
    " `truncated` (the partition lost records that had been read).",
    ["topic", "consumer", "reason"],
)
RECORDS_UNREADABLE_TOTAL: Final = Counter(
    "gpuledger_records_unreadable",
    "Offsets that were skipped because their batch could not be unpacked, by reason: `codec` (it is"
    " packed as none of gpuledger's is), `too_large` (more bytes, unpacked, than a batch may have),"
    " `too_many` (more records, or headers of one), `damaged`. The dead letters say of which"
    " topic.",
    ["reason"],
)
RECORDS_WITHHELD_SECONDS: Final = Gauge(
    "gpuledger_records_withheld_seconds",
    "Time for which a consumer group has been kept from records that are there, as a transaction"
    " before them is open: of a topic's partitions that this process reads, the longest.",
    ["topic", "consumer"],
)
count_from_zero(RECORDS_UNREADABLE_TOTAL, reason=UnreadableReason)
