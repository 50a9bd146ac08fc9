"""What aiokafka raises, told as what a caller can do about it. No connection is made here."""

from collections.abc import Sequence
from typing import Final

from aiokafka import errors as vendor

from gpuledger.errors import (
    BusUnavailableError,
    GpuledgerError,
    MessageTooLargeError,
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
_TOO_LARGE: Final = (vendor.MessageSizeTooLargeError, vendor.RecordListTooLargeError)
_ABSENT: Final = (vendor.UnknownTopicOrPartitionError, vendor.InvalidTopicError)
_FORBIDDEN: Final = (
    vendor.GroupAuthorizationFailedError,
    vendor.ClusterAuthorizationFailedError,
    vendor.TransactionalIdAuthorizationFailed,
)


def translate(
    error: Exception, *, doing: str, servers: str, refusals: Sequence[str] = ()
) -> GpuledgerError:
    """Give the error to raise instead, with what was being done."""
    if isinstance(error, vendor.KafkaConnectionError) and refusals:
        return BusUnavailableError(
            f"no broker of {servers} can be used: it is unreachable, or refused the protocol, "
            f"the certificate or the login ({'; '.join(refusals)})"
        )
    said = str(error) or type(error).__name__
    if isinstance(error, vendor.TopicAuthorizationFailedError):
        return TopicsError(f"{doing}: the brokers at {servers} do not allow it ({said})")
    if isinstance(error, _FORBIDDEN):
        return UserError(f"{doing}: the brokers at {servers} do not allow it ({said})")
    if isinstance(error, _ABSENT):
        return TopicsError(f"{doing}: there is no such topic on {servers} ({said})")
    if isinstance(error, _TOO_LARGE):
        return MessageTooLargeError(
            f"{doing}: larger than max.message.bytes of the topic on {servers} ({said})"
        )
    return BusUnavailableError(f"{doing}: {servers} failed: {type(error).__name__}: {said}")
