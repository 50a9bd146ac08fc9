"""What aiokafka raises, told as what a caller can do about it. No connection is made here."""

import re
from collections.abc import Callable, Sequence
from typing import Final

from aiokafka import errors as vendor

from gpuledger.bus.limits import TOPIC_MESSAGE_BYTES
from gpuledger.errors import (
    BusUnavailableError,
    FencedError,
    GpuledgerError,
    MessageTooLargeError,
    NotAssignedError,
    RefusedError,
    TimestampRefusedError,
    TopicsError,
)

# IllegalOperation and ConsumerStoppedError are no KafkaErrors; a lost connection is an OSError.
# What aiokafka takes for impossible it asserts; a topic that is gone makes some of it possible.
FAILURES: Final = (
    vendor.KafkaError,
    vendor.IllegalOperation,
    vendor.ConsumerStoppedError,
    AssertionError,
    OSError,
)
_SIGNS: Final = {
    "SaslAuthenticationFailed": "kafka.sasl_username, kafka.sasl_password",
    "UnsupportedSaslMechanism": "kafka.sasl_mechanism",
    "IllegalSaslState": "kafka.security_protocol",
    "doesn't match": "kafka.bootstrap_servers, kafka.ssl_check_hostname",
    "is not valid for": "kafka.bootstrap_servers, kafka.ssl_check_hostname",
    "CERTIFICATE_VERIFY_FAILED": "kafka.ssl_ca_file",
    "CERTIFICATE_REQUIRED": "kafka.ssl_cert_file",
    "UNKNOWN_CA": "kafka.ssl_cert_file",
    # What a port for TLS or a login says to plain requests, and the other way round.
    "bytes read on a total of": "kafka.security_protocol",
    "ConnectionResetError": "kafka.security_protocol",
    "WRONG_VERSION_NUMBER": "kafka.security_protocol",
}
"""What a connection that failed says, and the settings that it depends on; the first one counts."""
_CLIENT: Final = re.compile(r": <AIOKafkaConnection [^>]*>")
_MEANINGS: Final[dict[type[Exception], tuple[type[GpuledgerError], str]]] = {
    vendor.TopicAuthorizationFailedError: (
        RefusedError,
        "does not allow this user the topic; grant it Describe and Read, or Write, on that topic",
    ),
    vendor.GroupAuthorizationFailedError: (
        RefusedError,
        "does not allow this user the group; grant it Read on that group",
    ),
    vendor.ClusterAuthorizationFailedError: (
        RefusedError,
        "does not allow this user to write anything; grant it Write on the topics it writes to",
    ),
    vendor.TransactionalIdAuthorizationFailed: (
        RefusedError,
        (
            "does not allow this user the transactional id; grant it Describe and Write on the ids"
            " that begin with its group"
        ),
    ),
    vendor.InvalidTransactionTimeout: (
        RefusedError,
        "has a transaction.max.timeout.ms that is shorter than our transactions may take",
    ),
    AssertionError: (
        BusUnavailableError,
        "failed, as its client here is in a state that it does not expect",
    ),
    vendor.IllegalStateError: (NotAssignedError, "gave the partition to another member"),
    vendor.ProducerFenced: (FencedError, "let another writer take over"),
    vendor.InvalidProducerEpoch: (FencedError, "let another writer take over"),
    vendor.UnknownTopicOrPartitionError: (TopicsError, "has no such topic"),
    vendor.InvalidTopicError: (TopicsError, "takes no topic of this name"),
    vendor.MessageSizeTooLargeError: (
        MessageTooLargeError,
        (
            "refused it as larger than the topic's max.message.bytes; set that to"
            f" {TOPIC_MESSAGE_BYTES} at least"
        ),
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
    error: Exception,
    *,
    doing: str,
    servers: str,
    refusals: Sequence[str] = (),
    mask: Callable[[str], str] = str,
) -> GpuledgerError:
    """Return the error to raise instead, with what was being done.

    `mask` is what becomes of the brokers' own words, which may quote a password.
    """
    if isinstance(error, vendor.KafkaConnectionError) and refusals:
        return BusUnavailableError(f"no broker of {servers} can be used{name_refusals(refusals)}")
    kind, meaning = _MEANINGS.get(type(error), (BusUnavailableError, "failed"))
    refused = name_refusals(refusals) if kind is BusUnavailableError else ""
    said = f"{type(error).__name__}: {mask(str(error))}".removesuffix(": ")
    return kind(f"{doing}: {servers} {meaning} ({said}){refused}")


def name_refusals(refusals: Sequence[str]) -> str:
    """Return how a message ends that says why connections failed; empty where none did."""
    if not refusals:
        return ""
    return (
        ": it is unreachable, or refused the protocol, the certificate or the login "
        f"({'; '.join(_CLIENT.sub('', each) for each in refusals)}){_settings_of(refusals)}"
    )


def _settings_of(refusals: Sequence[str]) -> str:
    """Return which settings to look at; empty where nothing of ours explains it."""
    found = (
        next((settings for sign, settings in _SIGNS.items() if sign in each), None)
        for each in refusals
    )
    named = dict.fromkeys(settings for settings in found if settings)
    return f"; where it stays so, look at {', '.join(named)}" if named else ""
