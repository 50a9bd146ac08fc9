"""What aiokafka raises, told as what a caller can do about it. No connection is made here."""

from collections.abc import Sequence
from typing import Final

from aiokafka import errors as vendor

from gpuledger.errors import (
    BusUnavailableError,
    FencedError,
    GpuledgerError,
    MessageTooLargeError,
    TimestampRefusedError,
    TopicsError,
    UserError,
)

# IllegalOperation and ConsumerStoppedError are no KafkaErrors; a lost connection is an OSError.
FAILURES: Final = (
    vendor.KafkaError,
    vendor.IllegalOperation,
    vendor.ConsumerStoppedError,
    OSError,
)
_MEANINGS: Final[dict[type[Exception], tuple[type[GpuledgerError], str]]] = {
    vendor.TopicAuthorizationFailedError: (TopicsError, "does not allow it"),
    vendor.GroupAuthorizationFailedError: (UserError, "does not allow it"),
    vendor.ClusterAuthorizationFailedError: (UserError, "does not allow it"),
    vendor.TransactionalIdAuthorizationFailed: (UserError, "does not allow it"),
    vendor.InvalidTransactionTimeout: (
        UserError,
        "has a transaction.max.timeout.ms that is shorter than our transactions may take",
    ),
    vendor.ProducerFenced: (FencedError, "let another writer take over"),
    vendor.InvalidProducerEpoch: (FencedError, "let another writer take over"),
    vendor.UnknownTopicOrPartitionError: (TopicsError, "has no such topic"),
    vendor.InvalidTopicError: (TopicsError, "takes no topic of this name"),
    vendor.MessageSizeTooLargeError: (
        MessageTooLargeError,
        "refused it as larger than the topic's max.message.bytes",
    ),
    vendor.RecordListTooLargeError: (
        MessageTooLargeError,
        "refused it as larger than the topic's segment.bytes",
    ),
    vendor.InvalidTimestampError: (
        TimestampRefusedError,
        (
            "refused a record as too far ahead of its own clock; set this machine's clock, "
            "or the topic's message.timestamp.after.max.ms"
        ),
    ),
}


def translate(
    error: Exception, *, doing: str, servers: str, refusals: Sequence[str] = ()
) -> GpuledgerError:
    """Give the error to raise instead, with what was being done."""
    if isinstance(error, vendor.KafkaConnectionError) and refusals:
        return BusUnavailableError(
            f"no broker of {servers} can be used: it is unreachable, or refused the protocol, "
            f"the certificate or the login ({'; '.join(refusals)})"
        )
    kind, meaning = _MEANINGS.get(type(error), (BusUnavailableError, "failed"))
    return kind(f"{doing}: {servers} {meaning} ({type(error).__name__}: {error})")
