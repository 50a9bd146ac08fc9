"""The reasons for which a record becomes a dead-letter record, for users who must act on one.

Code that rejects records names the reasons; this module describes them and imports nothing.
"""

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, kw_only=True)
class DeadLetterReason:
    """A reason for rejecting records, as used in dead-letter records (`reason`) and in metrics."""

    name: str
    meaning: str
    cause: str
    """The usual causes."""
    action: str
    """The steps that an operator takes."""


DEAD_LETTER_REASONS: Final = (
    DeadLetterReason(
        name="undecodable",
        meaning="Invalid JSON, a missing field, a wrong type, or a value outside its limits;"
        " `detail` names field and value.",
        cause="A program that is not part of gpuledger; an agent of another version; a faulty"
        " agent.",
        action="Fix or upgrade the agent that key and node name. If the node is not yours, restrict"
        " who may write to the topic.",
    ),
    DeadLetterReason(
        name="unreadable",
        meaning="A batch that cannot be unpacked; the record has `last_offset` and no bytes.",
        cause="A client with an unsupported or custom codec; a topic that recompresses; a broker's"
        " disk.",
        action="Read the batch with a client that has its codec, and fix the writer or the topic.",
    ),
    DeadLetterReason(
        name="invalid",
        meaning="A record that contradicts itself: an invalid interval, a position that is not in"
        " its list, or a GPU or container that is listed twice. The whole sample is rejected,"
        " because either copy may be wrong.",
        cause="As for `undecodable`; an internal error if the record is an event of the join.",
        action="As for `undecodable`; report it if the record is an event.",
    ),
    DeadLetterReason(
        name="too_large",
        meaning="The result (event, attributed incident, row or request) exceeds the maximum"
        " message size of 999,872 bytes; `detail` names the key. For `store`, also an event of more"
        " than 200,000 rows.",
        cause="A node with thousands of containers or processes on its GPUs; a writer of oversized"
        " records.",
        action="Inspect the record in its topic. Drain the workload that starts so many, or"
        " restrict who may write to the topic.",
    ),
    DeadLetterReason(
        name="misplaced",
        meaning="A record with another key or partition than its node or pod should have.",
        cause="A writer with another partitioner; a topic with a changed number of partitions; a"
        " writer that impersonates another node.",
        action="Write with Kafka's default partitioner (murmur2) and the key `<cluster>/<node>`."
        " Recreate a changed topic. Otherwise restrict who may write to the topic.",
    ),
    DeadLetterReason(
        name="seq_ahead",
        meaning="A sample that claims to be days further in its boot than possible.",
        cause="A faulty agent; forged samples.",
        action="Find out who writes as that node. Its user can suppress the node's samples.",
    ),
    DeadLetterReason(
        name="future",
        meaning="An event more than `max_future_seconds` (300) ahead of the clock of `remote_write`"
        " or `rows`. The store accepts it, unless it is further ahead than"
        " `store.max_future_seconds` (a day).",
        cause="A node's clock that is ahead; forged samples.",
        action="Set the node's clock (NTP).",
    ),
    DeadLetterReason(
        name="too_old",
        meaning="For `store`, an event of a day older than `store.max_age_seconds` (31 days). For"
        " `remote_write`, a sample older than `remote_write.max_age_seconds`.",
        cause="A node's clock that is years behind, such as 1970 after a reboot; a topic with a"
        " longer retention; forged samples.",
        action="Set the node's clock (NTP). To store older days, raise `store.max_age_seconds`.",
    ),
    DeadLetterReason(
        name="out_of_order",
        meaning="Values that the receiver of `remote_write` rejected as too old. The store has the"
        " event.",
        cause="A node's clock that was set back; a receiver without an out-of-order window; a"
        " backlog older than the window.",
        action="Configure the receiver's out-of-order window.",
    ),
    DeadLetterReason(
        name="rejected",
        meaning="Values of one sample that the receiver of `remote_write` permanently rejected;"
        " `detail` is its response.",
        cause="The receiver's limits on series, labels or their length.",
        action="Raise the limit that the response names.",
    ),
    DeadLetterReason(
        name="partial",
        meaning="A sample of a request that the receiver of `remote_write` wrote in part and"
        " permanently rejected in part, without naming the samples. `detail` has the number of"
        " written values and its response.",
        cause="As for `rejected` and `out_of_order`.",
        action="As for `rejected` and `out_of_order`. Written values are not sent again.",
    ),
    DeadLetterReason(
        name="failing",
        meaning="Values of one sample for which the receiver of `remote_write` failed (5xx) for"
        " `remote_write.poison_seconds` while it accepted others; `detail` is its response.",
        cause="A receiver that fails instead of rejecting, for example values older than its"
        " window.",
        action="Set `remote_write.max_age_seconds` to the receiver's window.",
    ),
)
