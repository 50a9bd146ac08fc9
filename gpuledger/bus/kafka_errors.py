"""What aiokafka raises and logs, as what a caller can do about it. No connection is made here.

aiokafka keeps the reason of a failed connection to its log; here it is taken from there
(`RefusedConnections`), so that our own error can name it: also where a background task of a client
connects, whose caller is only told that nobody answered. Its retries become debug lines.
"""

import logging
import math
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
    # What is said of a token names its setting and the remedy itself.
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
    # What a port for TLS or a login says to plain requests, and the other way round.
    "bytes read on a total of": "kafka.security_protocol",
    "ConnectionResetError": "kafka.security_protocol",
    "WRONG_VERSION_NUMBER": "kafka.security_protocol",
}
"""Text of an error of a connection, and the settings to check; the first match counts."""
_USUAL_SETTINGS: Final = "kafka.bootstrap_servers, kafka.security_protocol"
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
    vendor.InconsistentGroupProtocolError: (RefusedError, OTHER_STAGE),
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
    vendor.IncompatibleBrokerVersion: (
        RefusedError,
        "does not know a request; brokers must support transactions and idempotent producers",
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
    # aiokafka says only that it could not bootstrap; why stands in its log.
    if isinstance(error, vendor.KafkaConnectionError) and refusals:
        return BusUnavailableError(f"cannot connect to Kafka at {servers}{name_refusals(refusals)}")
    kind, meaning = _MEANINGS.get(type(error), (BusUnavailableError, "failed"))
    refused = name_refusals(refusals) if kind is BusUnavailableError else ""
    text = f"{type(error).__name__}: {mask(str(error))}".removesuffix(": ")
    return kind(f"{doing}: {servers} {meaning} ({text}){refused}")


def name_refusals(refusals: Sequence[str]) -> str:
    """Return the end of a message: why connections failed, and which settings to check.

    Empty without refusals.
    """
    if not refusals:
        return ""
    found = (
        next((settings for sign, settings in _SIGNS.items() if sign in refusal), None)
        for refusal in refusals
    )
    settings = ", ".join(dict.fromkeys(filter(None, found))) or _USUAL_SETTINGS
    return f": {'; '.join(_CLIENT.sub('', refusal) for refusal in refusals)}; check {settings}"


LIBRARY: Final = "aiokafka"
LOGGED: Final = (
    # Raised by a callback of ours, and seen by nobody else.
    "User provided subscription listener %s for group %s failed on_partitions_revoked",
    "User provided listener %s for group %s failed on partition assignment: %s",
    # For people who set it up; aiokafka says it for each connection.
    "Sending username and password in the clear",
)
"""What stays a warning or an error. All else is a retry of aiokafka's, or comes back to the caller
as an exception and so to a check: it is of use to who looks for a mistake in the client."""
REFUSED: Final = {
    'Unable connect to "%s:%s": %s': "%s:%s",
    'Unable to request metadata from "%s:%s": %s': "%s:%s",
    "Unable connect to node with id %s: %s": "node %s",
    "Unable to request metadata from node with id %s: %r": "node %s",
}
"""Lines whose last value is why a connection failed, and how those before name the broker."""
MAX_BROKERS: Final = 16
"""Of so many brokers the reason is remembered."""
QUIET_SECONDS: Final = 3600.0
"""How long a line that stays is not written again."""


class RefusedConnections:
    """Why each broker refused its last connection that failed, and when that was."""

    def __init__(
        self,
        *,
        seconds: Callable[[], float] = time.monotonic,
        mask: Callable[[str], str] = str,
    ) -> None:
        """Take what becomes of the brokers' words, which may quote a password."""
        self._seconds, self.mask = seconds, mask
        self._reasons: OrderedDict[str, tuple[float, str]] = OrderedDict()

    def note(self, broker: str, reason: str) -> None:
        """Record a connection that failed now."""
        # To the end of the order: what is dropped is what was heard longest ago.
        self._reasons.pop(broker, None)
        self._reasons[broker] = (self._seconds(), self.mask(reason))
        if len(self._reasons) > MAX_BROKERS:
            self._reasons.popitem(last=False)

    def of_last(self, seconds: float) -> list[str]:
        """Return the brokers, each with its reason, that refused within so many seconds."""
        since_seconds = self._seconds() - seconds
        return [
            f"{broker}: {reason}"
            for broker, (at_seconds, reason) in self._reasons.items()
            if at_seconds >= since_seconds
        ]


_refusals: ContextVar[RefusedConnections | None] = ContextVar("refusals", default=None)


@contextmanager
def remembering(refusals: RefusedConnections) -> Iterator[None]:
    """Collect why brokers refuse connections, instead of logging it.

    What a client begins meanwhile, as a task that goes on connecting, collects there from then on.
    """
    token = _refusals.set(refusals)
    try:
        yield
    finally:
        _refusals.reset(token)


class Demotion:
    """Makes a debug line of what is no news: a filter for the loggers of aiokafka."""

    def __init__(self, *, seconds: Callable[[], float] = time.monotonic) -> None:
        self._seconds = seconds
        self._logged_at: dict[str, float] = {}

    def __call__(self, record: logging.LogRecord) -> bool:
        """Return whether a line passes; it may have become a debug line."""
        if record.levelno >= logging.WARNING:
            if _is_remembered(record):
                return False
            if not self._is_news(record.msg):
                record.levelno = logging.DEBUG
                record.levelname = logging.getLevelName(logging.DEBUG)
        # Whatever the line is: a broker's words in it may quote the password.
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
    """Install the filter on every logger of aiokafka; again is as good as once."""
    for name in (LIBRARY, *logging.root.manager.loggerDict):
        if name.partition(".")[0] == LIBRARY:
            logging.getLogger(name).addFilter(_demotion)


def _is_remembered(record: logging.LogRecord) -> bool:
    refusals, name = _refusals.get(), REFUSED.get(record.msg)
    # No connection of ours, or a line that gives no reason: it is treated as any other.
    if refusals is None or name is None or not isinstance(record.args, tuple):
        return False
    *broker, error = record.args
    text = str(error) or type(error).__name__
    # Of a connection that was lost the reason is in what is behind the error.
    cause = getattr(error, "__cause__", None)
    refusals.note(name % tuple(broker), f"{text}: {cause}" if cause and str(cause) else text)
    return True
