"""How the Kafka bus reaches its brokers: addresses, TLS, login, deadlines, errors, topics.

Producing and consuming stand in modules of their own.
"""

import asyncio
import math
import random
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from functools import cached_property
from typing import Any, Final

from aiokafka.client import AIOKafkaClient
from aiokafka.errors import KafkaConnectionError, KafkaError, TopicAuthorizationFailedError
from aiokafka.protocol.metadata import MetadataRequest

from gpuledger.bus import kafka_internals
from gpuledger.bus.kafka_credentials import CurrentContext, CurrentPassword, KafkaCredentials
from gpuledger.bus.kafka_errors import FAILURES, name_refusals, translate
from gpuledger.bus.kafka_logs import RefusedConnections, demote_logs, remembering
from gpuledger.bus.kafka_topic_ids import fetch_topic_ids
from gpuledger.bus.protocol import TopicDescription
from gpuledger.errors import BusUnavailableError, RefusedError, TopicsError
from gpuledger.runtime import Check, CheckSeverity, Readiness
from gpuledger.settings import KafkaSettings

ABSENT_ANSWERS: Final = 2
"""So many answers in a row that a topic does not exist are believed; a broker that has just started
may not have heard of it yet."""

_NOT_TO_BE_SEEN: Final = TopicAuthorizationFailedError.errno


class KafkaConnection:
    """The settings of the brokers, as each client of them needs them."""

    def __init__(self, settings: KafkaSettings, *, readiness: Readiness | None = None) -> None:
        """Take the settings; where there are checks to report to, read the credentials at once.

        Raises `SettingsError` naming a file of them that cannot be used.
        """
        self.settings = settings
        self.servers = settings.bootstrap_servers
        self.topic_ids: dict[str, Mapping[str, str | None]] = {}
        """For each group that is read here, the identities of its topics: what commits carry."""
        self._refusals = RefusedConnections(mask=self._mask)
        demote_logs()
        if readiness and settings.security_protocol != "PLAINTEXT":
            self._credentials = KafkaCredentials(settings, check=_check_of(readiness))
            readiness.look_each_second(self._credentials.look)

    @cached_property
    def _credentials(self) -> KafkaCredentials:
        return KafkaCredentials(self.settings, check=_check_of(Readiness()))

    @cached_property
    def arguments(self) -> dict[str, Any]:
        """What every aiokafka client takes; `SettingsError` where a certificate is unreadable."""
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
        if settings.security_protocol.startswith("SASL"):
            kafka_internals.encode_password_at_login()
            made |= {
                "sasl_mechanism": settings.sasl_mechanism,
                "sasl_plain_username": settings.sasl_username,
                "sasl_plain_password": CurrentPassword(credentials.password),
            }
        return made

    @asynccontextmanager
    async def asking(self, doing: str, *, at_most_seconds: float = math.inf) -> AsyncIterator[None]:
        """Do something with the brokers within `request_timeout_seconds`, with our own errors.

        An idempotent producer and a consumer's commit retry for ever by themselves.
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
        """Raise our own errors in the place of aiokafka's."""
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

    def _mask(self, said: str) -> str:
        """Return what a broker says with the login that it was sent masked."""
        if not self.settings.security_protocol.startswith("SASL"):
            return said
        return self._credentials.sent.mask(said)

    def refused_within(self, seconds: float) -> str:
        """Return why connections failed in so many seconds, as a message's end; empty for none."""
        return name_refusals(self._refusals.of_last(seconds))

    async def describe(self, topic: str) -> TopicDescription:
        """Ask for a topic over a connection of its own; `TopicsError` where it does not exist."""
        client = AIOKafkaClient(**self.arguments)
        async with self.asking(f"looking up the topic {topic}"):
            try:
                await client.bootstrap()
                counts = await count_partitions(client, [topic], servers=self.servers)
                topic_ids = await fetch_topic_ids(client, [topic]) or {}
            finally:
                await client.close()
        return TopicDescription(counts[topic], topic_ids.get(topic))


def _check_of(readiness: Readiness) -> Check:
    return readiness.check("kafka.credentials", severity=CheckSeverity.WARNING)


async def count_partitions(
    client: AIOKafkaClient,
    topics: Iterable[str],
    *,
    servers: str,
    rights: str = "Read where it reads it, Write where it writes to it",
) -> dict[str, int]:
    """Ask over an open client, so that an absent topic is known now and not after a time-out.

    `rights` are those that the user needs on the topics. Raises `RefusedError` where they may not
    be seen, `TopicsError` where one is absent, and aiokafka's errors.
    """
    wanted = sorted(topics)
    answer = await _ask_of_topics(client, wanted)
    found = {name: (code, len(partitions)) for code, name, _, partitions in answer.topics}
    hidden = [topic for topic, (code, _) in found.items() if code == _NOT_TO_BE_SEEN]
    if hidden:
        raise RefusedError(
            f"looking up topics: {servers} does not allow this user the topic"
            f" {', '.join(sorted(hidden))}; grant it {rights}"
        )
    counts = {topic: found[topic][1] if topic in found else 0 for topic in wanted}
    absent = [topic for topic, count in counts.items() if count == 0]
    if absent:
        raise TopicsError(
            f"there is no topic {', '.join(absent)} on {servers}; "
            f"`gpuledger topics create` makes what is missing"
        )
    return counts


async def _ask_of_topics(client: AIOKafkaClient, topics: list[str]) -> Any:  # noqa: ANN401  # aiokafka is untyped
    """Return what the first broker that answers says of these topics.

    By their names: of all topics the brokers list those that a user may see, so that one that is
    hidden looks like one that is absent.
    """
    nodes = [broker.nodeId for broker in client.cluster.brokers()]
    failure: Exception = KafkaConnectionError("no broker is known")
    for node in random.sample(nodes, len(nodes)):
        try:
            return await client.send(node, MetadataRequest(topics, allow_auto_topic_creation=False))
        except (KafkaError, OSError) as error:
            failure = error
    raise failure
