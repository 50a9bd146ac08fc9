"""Connections to the Kafka brokers: addresses, TLS, login, deadlines, errors, topic look-ups.

Certificates, CA certificates and passwords are read again when their files change. aiokafka's
clients keep the arguments that they were opened with, so they receive objects that return the
current credentials whenever a connection is opened. Producing and consuming are in other modules.
"""

import asyncio
import math
import random
import re
import ssl
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from functools import cached_property
from typing import Any, Final, Self

import structlog
from aiokafka.client import AIOKafkaClient
from aiokafka.errors import KafkaConnectionError, KafkaError, TopicAuthorizationFailedError
from aiokafka.protocol.metadata import MetadataRequest
from typing_extensions import override

from gpuledger.bus.aiokafka_patches import logins
from gpuledger.bus.aiokafka_patches.connections import leave_hanging_brokers
from gpuledger.bus.aiokafka_patches.ending import close_left_connections
from gpuledger.bus.aiokafka_patches.requests import fetch_topic_ids
from gpuledger.bus.kafka_errors import (
    FAILURES,
    RefusedConnections,
    demote_logs,
    name_refusals,
    remembering,
    translate,
)
from gpuledger.bus.kafka_tokens import TokenFile, TokenProvider
from gpuledger.bus.protocol import TopicDescription
from gpuledger.certificates import Validity, load_own, trusting
from gpuledger.errors import BusUnavailableError, RefusedError, TopicsError
from gpuledger.runtime import Check, CheckSeverity, Readiness
from gpuledger.runtime.file_watch import FilesInForce, FileWatch
from gpuledger.runtime.http.credentials import NO_CREDENTIALS, BasicCredentials
from gpuledger.runtime.http.token_endpoint import DEADLINE_SECONDS, TokenEndpoint, post_form
from gpuledger.runtime.tokens import BearerToken, TokenSource
from gpuledger.settings import KafkaSettings, Secret
from gpuledger.settings.groups import OauthSettings
from gpuledger.settings.secret import MASK

_log = structlog.get_logger(__name__)
_MAX_RECENT: Final = 8
_BEARER: Final = re.compile(r"(\bBearer )[^\s'\"]+")


class KafkaCredentials:
    """The current certificates, passwords and tokens, which are read again if files change."""

    _context: ssl.SSLContext
    _token_context: ssl.SSLContext
    sent: BasicCredentials = NO_CREDENTIALS
    """Current and recent secrets, which are masked in broker messages."""

    def __init__(
        self,
        settings: KafkaSettings,
        *,
        check: Check,
        monotonic: Callable[[], float] = time.monotonic,
        time_seconds: Callable[[], float] = time.time,
    ) -> None:
        """Read the files; raise `SettingsError` with the setting of an unusable file."""
        self._settings = settings
        oauth = settings.oauth if settings.uses_tokens else OauthSettings()
        secrets = (
            settings.sasl_password,
            settings.ssl_key_password,
            oauth.token,
            oauth.client_secret,
        )
        files = (
            settings.ssl_ca_file,
            settings.ssl_cert_file,
            settings.ssl_key_file,
            oauth.ca_file,
        )
        named = (*files, *(secret.file for secret in secrets if secret))
        watch = FileWatch((file for file in named if file), monotonic=monotonic)
        self._files = FilesInForce(
            self._take,
            validities=self._take(),
            watch=watch,
            check=check,
            on_read=lambda files: _log.info("kafka_credentials_read", files=files),
            time_seconds=time_seconds,
        )

    def context(self) -> ssl.SSLContext:
        """Return the TLS context for a new connection to a broker."""
        self.look()
        return self._context

    def password(self) -> str:
        """Return the current password, or an empty text if there is none."""
        self.look()
        return self._password

    def token(self) -> str:
        """Return the token that is currently in its file, or an empty text if there is none."""
        self.look()
        return self._token

    def client_secret(self) -> str:
        """Return the secret for the token endpoint, or an empty text if there is none."""
        self.look()
        return self._client_secret

    def token_context(self) -> ssl.SSLContext:
        """Return the TLS context for a connection to the token endpoint."""
        self.look()
        return self._token_context

    def note_sent(self, secret: str) -> None:
        """Mask this secret in broker messages; only the newest eight secrets are masked."""
        recent = dict.fromkeys((secret, *self.sent.secrets))
        self.sent = BasicCredentials(tuple(filter(None, recent))[:_MAX_RECENT])

    def look(self) -> None:
        """Read the files again if they have changed; if one is invalid, keep the old ones."""
        self._files.look()

    def _take(self) -> list[Validity]:
        password = _current("sasl_password", self._settings.sasl_password)
        key_password = _current("ssl_key_password", self._settings.ssl_key_password)
        oauth = self._settings.oauth if self._settings.uses_tokens else OauthSettings()
        token = _current("oauth.token", oauth.token)
        client_secret = _current("oauth.client_secret", oauth.client_secret)
        validities: list[Validity] = []
        if self._settings.security_protocol.endswith("SSL"):
            self._context, validities = tls_context(self._settings)
        if oauth.token_url:
            self._token_context, found = trusting(setting="kafka.oauth.ca_file", file=oauth.ca_file)
            validities += found
        self._password, self._token, self._client_secret = password, token, client_secret
        # A connection that was opened with an earlier secret may still receive an error that quotes
        # it.
        for secret in (key_password, client_secret, token, password):
            self.note_sent(secret)
        return validities


class CurrentContext(ssl.SSLContext):
    """A TLS context that starts each new connection with the context that is current by then."""

    _current: Callable[[], ssl.SSLContext]

    def __new__(cls, current: Callable[[], ssl.SSLContext]) -> Self:
        """Create a context that uses the context returned by `current` for each connection.

        The new context's own TLS configuration is never used.
        """
        made = super().__new__(cls, ssl.PROTOCOL_TLS_CLIENT)
        made._current = current
        return made

    @override
    def wrap_bio(self, *arguments: Any, **named: Any) -> ssl.SSLObject:
        """Start TLS for a connection with the current context; asyncio calls this method."""
        return self._current().wrap_bio(*arguments, **named)


class CurrentPassword(str):
    """A string whose text is a mask, and whose `encode` returns the current password."""

    __slots__ = ("_current",)
    _current: Callable[[], str]

    def __new__(cls, current: Callable[[], str]) -> Self:
        """Create a string whose text is the mask."""
        made = super().__new__(cls, MASK)
        made._current = current
        return made

    @override
    def encode(self, encoding: str = "utf-8", errors: str = "strict") -> bytes:
        """Return the encoded current password; SCRAM calls this method at each login."""
        return self._current().encode(encoding, errors)


def tls_context(settings: KafkaSettings) -> tuple[ssl.SSLContext, list[Validity]]:
    """Return the TLS context, and how long its certificates are valid.

    Raises `SettingsError` with the setting of an unusable file.
    """
    context, validities = trusting(setting="kafka.ssl_ca_file", file=settings.ssl_ca_file)
    context.check_hostname = settings.ssl_check_hostname
    if settings.ssl_cert_file and settings.ssl_key_file:
        validities += load_own(
            context,
            prefix="kafka.ssl_",
            cert_file=settings.ssl_cert_file,
            key_file=settings.ssl_key_file,
            password=_current("ssl_key_password", settings.ssl_key_password),
        )
    return context, validities


def _current(name: str, secret: Secret | None) -> str:
    """Return a secret's current value, or an empty text; raise `SettingsError`."""
    return secret.read(name=f"kafka.{name}") if secret else ""


ABSENT_ANSWERS: Final = 2
"""Number of consecutive answers without a topic before it counts as absent; a broker that has just
started may not know it yet."""

_HIDDEN: Final = TopicAuthorizationFailedError.errno
_NO_BROKER_SECONDS: Final = 0.2
"""Pause before the metadata is requested again if it lists no brokers."""


class KafkaConnection:
    """Connection settings shared by all clients of the brokers."""

    def __init__(self, settings: KafkaSettings, *, readiness: Readiness | None = None) -> None:
        """Store the settings; if `readiness` is given, read the credentials and add their checks.

        Raises `SettingsError`, which names the setting, if a credentials file is unusable.
        """
        self.settings = settings
        self.servers = settings.bootstrap_servers
        self.topic_ids: dict[str, Mapping[str, str | None]] = {}
        """Topic ids by consumer group and topic; each commit of an offset contains its topic's
        id."""
        self.partition_counts: dict[str, Mapping[str, int]] = {}
        """Numbers of partitions by consumer group and topic; each commit contains its topic's
        number."""
        self._refusals = RefusedConnections(mask=self._mask)
        # Must precede the first client, because a client logs as soon as it connects.
        demote_logs()
        close_left_connections()
        leave_hanging_brokers()
        if readiness and settings.security_protocol != "PLAINTEXT":
            check = _check_of(readiness)
            self._credentials = KafkaCredentials(settings, check=check)
            # Checked even if nothing connects, so that an invalid new file shows before its use.
            readiness.add_periodic(self._credentials.look, check=check)
            if settings.uses_tokens:
                self._token_check = _token_check_of(readiness)

    @cached_property
    def _credentials(self) -> KafkaCredentials:
        return KafkaCredentials(self.settings, check=_check_of(Readiness()))

    @cached_property
    def _token_check(self) -> Check:
        return _token_check_of(Readiness())

    @cached_property
    def arguments(self) -> dict[str, Any]:
        """The arguments of every aiokafka client; raises `SettingsError` for unusable files."""
        settings = self.settings
        made: dict[str, Any] = {
            "bootstrap_servers": self.servers,
            "client_id": settings.client_id,
            "request_timeout_ms": int(settings.request_timeout_seconds * 1000),
            "security_protocol": settings.security_protocol,
        }
        if settings.security_protocol == "PLAINTEXT":
            return made
        credentials = self._credentials
        if settings.security_protocol.endswith("SSL"):
            made["ssl_context"] = CurrentContext(credentials.context)
        if settings.uses_tokens:
            logins.hand_logins_to_providers()
            made |= {
                "sasl_mechanism": settings.sasl_mechanism,
                "sasl_oauth_token_provider": self._tokens(credentials),
            }
        elif settings.security_protocol.startswith("SASL"):
            # Before the first login: PLAIN would send the mask instead of the password.
            logins.encode_password_at_login()
            made |= {
                "sasl_mechanism": settings.sasl_mechanism,
                "sasl_plain_username": settings.sasl_username,
                "sasl_plain_password": CurrentPassword(credentials.password),
            }
        return made

    def _tokens(self, credentials: KafkaCredentials) -> TokenProvider:
        """Return a provider of the current token, from the token endpoint or a file."""
        oauth = self.settings.oauth
        if not oauth.token_url:
            source: TokenSource[BearerToken] = TokenFile(credentials.token)
        else:
            source = TokenEndpoint(
                oauth,
                group="kafka.oauth",
                secret=credentials.client_secret,
                post=lambda url, form, headers: post_form(
                    url, form, headers, context=credentials.token_context()
                ),
                # Shorter than the timeout of the request that needs the login, so that the
                # request's error names the cause.
                deadline_seconds=min(DEADLINE_SECONDS, self.settings.request_timeout_seconds / 2),
            )
        return TokenProvider(source, check=self._token_check, on_token=credentials.note_sent)

    @asynccontextmanager
    async def requesting(
        self, doing: str, *, at_most_seconds: float = math.inf
    ) -> AsyncIterator[None]:
        """Limit a request to `request_timeout_seconds` and translate aiokafka's errors.

        The limit is necessary, because aiokafka retries an idempotent producer's batches and a
        consumer's commits without end.
        """
        limit_seconds = min(self.settings.request_timeout_seconds, at_most_seconds)
        with remembering(self._refusals), self.translating(doing):
            try:
                async with asyncio.timeout(limit_seconds):
                    yield
            except TimeoutError as error:
                raise BusUnavailableError(
                    f"{doing}: {self.servers} did not answer within {limit_seconds:g} s"
                    f"{self.refused_within(limit_seconds)}"
                ) from error

    @contextmanager
    def translating(self, doing: str) -> Iterator[None]:
        """Convert aiokafka's errors to gpuledger's; their messages begin with `doing`."""
        # Refusals before this call belong to another outage and may concern another setting.
        begin_seconds = time.monotonic()
        try:
            yield
        except FAILURES as error:
            refusals = self._refusals.of_last(time.monotonic() - begin_seconds)
            raise translate(
                error,
                doing=doing,
                servers=self.servers,
                refusals=refusals,
                mask=self._mask,
            ) from error

    def _mask(self, message: str) -> str:
        """Return a broker's message with the credentials masked."""
        if not self.settings.security_protocol.startswith("SASL"):
            return message
        # A logged request contains a truncated token, which `sent.mask` would not find.
        return _BEARER.sub(rf"\1{MASK}", self._credentials.sent.mask(message))

    def refused_within(self, seconds: float) -> str:
        """Return the reasons of failed connections in the last `seconds`, to end an error message.

        The text is empty if no connection failed.
        """
        return name_refusals(self._refusals.of_last(seconds))

    async def describe(self, topic: str) -> TopicDescription:
        """Return a topic's description; raise `TopicsError` if the topic does not exist."""
        # With a new client, because a client that has joined a group has older metadata.
        client = AIOKafkaClient(**self.arguments)
        async with self.requesting(f"looking up the topic {topic}"):
            try:
                await client.bootstrap()
                counts = await count_partitions(client, [topic], servers=self.servers)
                topic_ids = await fetch_topic_ids(client, [topic]) or {}
            finally:
                await client.close()
        return TopicDescription(counts[topic], topic_ids.get(topic))


def _check_of(readiness: Readiness) -> Check:
    return readiness.check("kafka.credentials", severity=CheckSeverity.WARNING)


def _token_check_of(readiness: Readiness) -> Check:
    check = readiness.check("kafka.token", severity=CheckSeverity.WARNING)
    check.ok("no login yet")  # a standby may never need one
    return check


async def count_partitions(
    client: AIOKafkaClient,
    topics: Iterable[str],
    *,
    servers: str,
    rights: str = "Read to consume it, Write to publish to it",
) -> dict[str, int]:
    """Return each topic's number of partitions; raise an error if a topic cannot be used.

    Without this check, a missing topic would only cause a timeout later. Waits while the cluster
    has no broker; the caller sets the deadline. `rights` names the permissions that the user needs
    on the topics. Raises `RefusedError` if the user may not see a topic, `TopicsError` if a topic
    does not exist, and aiokafka's errors.
    """
    wanted = sorted(topics)
    answer = await _request_topics(client, wanted)
    found = {name: (code, len(partitions)) for code, name, _, partitions in answer.topics}
    hidden = [topic for topic, (code, _) in found.items() if code == _HIDDEN]
    if hidden:
        raise RefusedError(
            f"looking up topics: {servers} denies this user access to the topic"
            f" {', '.join(sorted(hidden))}; grant it {rights}"
        )
    counts = {topic: found[topic][1] if topic in found else 0 for topic in wanted}
    absent = [topic for topic, count in counts.items() if count == 0]
    if absent:
        raise TopicsError(
            f"there is no topic {', '.join(absent)} on {servers}; "
            f"run `gpuledger topics create` to create missing topics"
        )
    return counts


async def _request_topics(client: AIOKafkaClient, topics: list[str]) -> Any:  # noqa: ANN401  # aiokafka is untyped
    """Return these topics' metadata from the first broker that answers.

    Topics are requested by name, because a list of all topics omits topics that the user may not
    see, as if they were absent.
    """
    while not (nodes := [broker.nodeId for broker in client.cluster.brokers()]):
        # The metadata of a broker that has just started does not list the broker itself yet.
        await client.force_metadata_update()
        await asyncio.sleep(_NO_BROKER_SECONDS)
    failure: Exception = KafkaConnectionError("no broker answered")
    # In random order, so that not every process tries an unavailable broker first.
    for node in random.sample(nodes, len(nodes)):
        try:
            return await client.send(node, MetadataRequest(topics, allow_auto_topic_creation=False))
        except (KafkaError, OSError) as error:
            failure = error
    raise failure
