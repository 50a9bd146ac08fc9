"""Translates aiokafka's errors and log lines into gpuledger's errors. Opens no connections.

aiokafka reports why a connection failed only in its log. `RefusedConnections` takes the reason from
there, so that our error can name it, even if a background task opened the connection and the caller
only learns that no broker answered. aiokafka's log lines about retries become debug lines.
"""

import logging
import math
import os
import re
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final

from aiokafka import errors as vendor

from gpuledger.bus.limits import TOPIC_MESSAGE_BYTES
from gpuledger.bus.protocol import OTHER_STAGE
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

# IllegalOperation and ConsumerStoppedError are not KafkaErrors; a lost connection is an OSError.
# aiokafka asserts conditions that it considers impossible; a deleted topic can violate them.
FAILURES: Final = (
    vendor.KafkaError,
    vendor.IllegalOperation,
    vendor.ConsumerStoppedError,
    AssertionError,
    OSError,
)
_SIGNS: Final = {
    # This error's message already names the setting and the fix.
    "TokenUnavailableError": "kafka.oauth",
    "UnsupportedSaslMechanism": "kafka.sasl_mechanism",
    "OAUTHBEARER": "kafka.oauth",
    "SaslAuthenticationFailed": "kafka.sasl_username, kafka.sasl_password",
    "IllegalSaslState": "kafka.security_protocol",
    "doesn't match": "kafka.bootstrap_servers, kafka.ssl_check_hostname",
    "is not valid for": "kafka.bootstrap_servers, kafka.ssl_check_hostname",
    "CERTIFICATE_VERIFY_FAILED": "kafka.ssl_ca_file",
    "CERTIFICATE_REQUIRED": "kafka.ssl_cert_file",
    "UNKNOWN_CA": "kafka.ssl_cert_file",
    # Typical errors of a TLS or SASL port that receives plain requests, and vice versa.
    "bytes read on a total of": "kafka.security_protocol",
    "ConnectionResetError": "kafka.security_protocol",
    "WRONG_VERSION_NUMBER": "kafka.security_protocol",
}
"""Text found in connection errors, and the settings to check; the first match counts."""
_USUAL_SETTINGS: Final = "kafka.bootstrap_servers, kafka.security_protocol"
_CLIENT: Final = re.compile(r": <AIOKafkaConnection [^>]*>")
_CONNECT: Final = re.compile(r"\[Errno (\d+)\] Connect call failed \([^)]*\)")
_MEANINGS: Final[dict[type[Exception], tuple[type[GpuledgerError], str]]] = {
    vendor.TopicAuthorizationFailedError: (
        RefusedError,
        (
            "denies this user access to the topic; grant it Describe and Read, or Write, on that"
            " topic"
        ),
    ),
    vendor.GroupAuthorizationFailedError: (
        RefusedError,
        "denies this user access to the group; grant it Read on that group",
    ),
    vendor.InconsistentGroupProtocolError: (RefusedError, OTHER_STAGE),
    vendor.ClusterAuthorizationFailedError: (
        RefusedError,
        "denies this user all writes; grant it Write on the topics it writes to",
    ),
    vendor.TransactionalIdAuthorizationFailed: (
        RefusedError,
        (
            "denies this user access to the transactional id; grant it Describe and Write on the"
            " ids that begin with its group"
        ),
    ),
    vendor.IncompatibleBrokerVersion: (
        RefusedError,
        ("does not support a request; brokers must support transactions and idempotent producers"),
    ),
    vendor.InvalidTransactionTimeout: (
        RefusedError,
        "has a transaction.max.timeout.ms below gpuledger's transaction timeout; raise it",
    ),
    AssertionError: (
        BusUnavailableError,
        "failed: the Kafka client is in an unexpected state",
    ),
    vendor.IllegalStateError: (NotAssignedError, "assigned the partition to another member"),
    vendor.ProducerFenced: (FencedError, "let another writer take over"),
    vendor.InvalidProducerEpoch: (FencedError, "let another writer take over"),
    vendor.UnknownTopicOrPartitionError: (TopicsError, "has no such topic"),
    vendor.InvalidTopicError: (TopicsError, "rejects the topic's name as invalid"),
    vendor.MessageSizeTooLargeError: (
        MessageTooLargeError,
        (
            "rejected it because it exceeds the topic's max.message.bytes; set that to at least"
            f" {TOPIC_MESSAGE_BYTES}"
        ),
    ),
    vendor.RecordListTooLargeError: (
        MessageTooLargeError,
        "rejected it because it exceeds the topic's segment.bytes",
    ),
    vendor.InvalidTimestampError: (
        TimestampRefusedError,
        (
            "rejected a record because it is too far ahead of the broker's clock; correct this "
            "machine's clock, or the topic's message.timestamp.after.max.ms"
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
    """Return gpuledger's error for an aiokafka error; its message begins with `doing`.

    `mask` is applied to the brokers' own text, which may quote a password.
    """
    # The error only reports that the bootstrap failed; the reason is in aiokafka's log.
    if isinstance(error, vendor.KafkaConnectionError) and refusals:
        reasons = [refusal.removeprefix(f"{servers}: ") for refusal in refusals]
        return BusUnavailableError(f"cannot connect to Kafka at {servers}{name_refusals(reasons)}")
    kind, meaning = _MEANINGS.get(type(error), (BusUnavailableError, "failed"))
    refused = name_refusals(refusals) if kind is BusUnavailableError else ""
    text = f"{type(error).__name__}: {mask(str(error))}".removesuffix(": ")
    return kind(f"{doing}: {servers} {meaning} ({text}){refused}")


def name_refusals(refusals: Sequence[str]) -> str:
    """Return text to end an error message: why connections failed, and which settings to check.

    The text is empty if there are no refusals.
    """
    if not refusals:
        return ""
    found = (
        next((settings for sign, settings in _SIGNS.items() if sign in refusal), None)
        for refusal in refusals
    )
    settings = ", ".join(dict.fromkeys(filter(None, found))) or _USUAL_SETTINGS
    return f": {'; '.join(map(_readable, refusals))}; check {settings}"


def _readable(refusal: str) -> str:
    refusal = _CLIENT.sub("", refusal)
    return _CONNECT.sub(lambda found: os.strerror(int(found[1])), refusal)


LIBRARY: Final = "aiokafka"
LOGGED: Final = (
    # An error in one of gpuledger's callbacks, which no caller receives.
    "User provided subscription listener %s for group %s failed on_partitions_revoked",
    "User provided listener %s for group %s failed on partition assignment: %s",
    # A hint for operators; aiokafka logs it for each connection.
    "Sending username and password in the clear",
)
"""Log lines that stay warnings or errors. All others report a retry by aiokafka, or repeat an
exception that the caller receives and reports by a check; they only help to debug the client."""
REFUSED: Final = {
    'Unable connect to "%s:%s": %s': "%s:%s",
    'Unable to request metadata from "%s:%s": %s': "%s:%s",
    "Unable connect to node with id %s: %s": "node %s",
    "Unable to request metadata from node with id %s: %r": "node %s",
}
"""Log lines about failed connections, each with a format for the broker's name. A line's last
argument is the reason; the arguments before it name the broker."""
MAX_BROKERS: Final = 16
"""Maximum number of brokers for which the last failed connection is remembered."""
QUIET_SECONDS: Final = 3600.0
"""Minimum time before the same line in `LOGGED` is logged again."""


class RefusedConnections:
    """The time and reason of each broker's last failed connection."""

    def __init__(
        self,
        *,
        seconds: Callable[[], float] = time.monotonic,
        mask: Callable[[str], str] = str,
    ) -> None:
        """Start empty; `mask` is applied to the brokers' text, which may quote a password."""
        self._seconds, self.mask = seconds, mask
        self._reasons: OrderedDict[str, tuple[float, str]] = OrderedDict()

    def note(self, broker: str, reason: str) -> None:
        """Record that a connection has just failed."""
        # Moved to the end of the order: the oldest reason is dropped first.
        self._reasons.pop(broker, None)
        self._reasons[broker] = (self._seconds(), self.mask(reason))
        if len(self._reasons) > MAX_BROKERS:
            self._reasons.popitem(last=False)

    def of_last(self, seconds: float) -> list[str]:
        """Return `broker: reason` for each broker whose connection failed in the last `seconds`."""
        since_seconds = self._seconds() - seconds
        return [
            f"{broker}: {reason}"
            for broker, (at_seconds, reason) in self._reasons.items()
            if at_seconds >= since_seconds
        ]


_refusals: ContextVar[RefusedConnections | None] = ContextVar("refusals", default=None)


@contextmanager
def remembering(refusals: RefusedConnections) -> Iterator[None]:
    """Record in `refusals` why connections fail, instead of logging the reasons.

    Tasks that a client starts in this context record failures even after the context has ended.
    """
    token = _refusals.set(refusals)
    try:
        yield
    finally:
        _refusals.reset(token)


class Demotion:
    """A filter for aiokafka's loggers that demotes unimportant lines to debug level."""

    def __init__(self, *, seconds: Callable[[], float] = time.monotonic) -> None:
        self._seconds = seconds
        self._logged_at: dict[str, float] = {}

    def __call__(self, record: logging.LogRecord) -> bool:
        """Return whether to log the line, possibly demoted to debug level."""
        if record.levelno >= logging.WARNING:
            if _is_remembered(record):
                return False
            if not self._is_news(record.msg):
                record.levelno = logging.DEBUG
                record.levelname = logging.getLevelName(logging.DEBUG)
        # Any log line may contain text from a broker that quotes the password.
        if refusals := _refusals.get():
            record.msg, record.args = refusals.mask(record.getMessage()), None
        return True

    def _is_news(self, template: str) -> bool:
        now_seconds = self._seconds()
        logged_at_seconds = self._logged_at.get(template, -math.inf)
        if template not in LOGGED or now_seconds - logged_at_seconds < QUIET_SECONDS:
            return False
        self._logged_at[template] = now_seconds
        return True


_demotion: Final = Demotion()


def demote_logs() -> None:
    """Install the filter on every logger of aiokafka; repeated calls have no effect."""
    for name in (LIBRARY, *logging.root.manager.loggerDict):
        if name.partition(".")[0] == LIBRARY:
            logging.getLogger(name).addFilter(_demotion)


def _is_remembered(record: logging.LogRecord) -> bool:
    refusals, name = _refusals.get(), REFUSED.get(record.msg)
    # Outside of `remembering`, or a line without a reason: treat it like any other line.
    if refusals is None or name is None or not isinstance(record.args, tuple):
        return False
    *broker, error = record.args
    text = str(error) or type(error).__name__
    # For a lost connection, the error's cause contains the reason.
    cause = getattr(error, "__cause__", None)
    refusals.note(name % tuple(broker), f"{text}: {cause}" if cause and str(cause) else text)
    return True
