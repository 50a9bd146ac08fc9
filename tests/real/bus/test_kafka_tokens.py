"""Logins by OAUTHBEARER on a real broker, with tokens from a file and from an endpoint."""

from __future__ import annotations

import asyncio
import logging
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING
from uuid import uuid4

import pytest

from gpuledger.bus.administration import create_topics
from gpuledger.bus.kafka import KafkaBus
from gpuledger.bus.protocol import Subscription, TopicPartition
from gpuledger.errors import BusUnavailableError
from gpuledger.records import PodRecord
from gpuledger.runtime import Readiness
from gpuledger.settings import KafkaSettings, Secret
from gpuledger.settings.groups import OauthSettings
from gpuledger.topics import Topic
from tests.bus_contract.harness import poll_until, texts
from tests.fakes.token_issuer import CLIENT_SECRET, TokenIssuer
from tests.real.bus.builders import numbered, settings_of
from tests.real.services.oauth_kafka import OauthKafka
from tests.real.services.starter import running

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator
    from pathlib import Path

    from tests.real.services.kafka import KafkaDistribution

LONG_SECONDS = 3600.0
TOKEN_SECONDS = 6.0


@pytest.fixture(autouse=True)
async def _let_connections_end() -> AsyncIterator[None]:
    yield
    await asyncio.sleep(0.2)  # as in test_kafka_security


@pytest.fixture(scope="module")
def oauth_kafka(
    kafka_distribution: KafkaDistribution, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[OauthKafka]:
    folder = tmp_path_factory.mktemp("oauth-kafka")
    with running(OauthKafka(distribution=kafka_distribution, folder=folder)) as part:
        yield part


@pytest.fixture(scope="module")
def short_sessions(
    kafka_distribution: KafkaDistribution, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[OauthKafka]:
    """Yield brokers that close a connection after six seconds, whatever lifetime its token has."""
    folder = tmp_path_factory.mktemp("oauth-kafka")
    made = OauthKafka(
        distribution=kafka_distribution, folder=folder, longest_session_seconds=TOKEN_SECONDS
    )
    with running(made) as part:
        yield part


def of_oauth(kafka: OauthKafka, oauth: OauthSettings, **others: object) -> KafkaSettings:
    return settings_of(
        kafka.bootstrap_servers,
        security_protocol="SASL_SSL",
        sasl_mechanism="OAUTHBEARER",
        oauth=oauth,
        ssl_ca_file=kafka.ca_file,
        request_timeout_seconds=4.0,
        **others,
    )


def of_file(file: Path, text: str) -> OauthSettings:
    file.write_text(text)
    return OauthSettings(token=Secret.load(file, name="kafka.oauth.token_file"))


def of_endpoint(kafka: OauthKafka, url: str) -> OauthSettings:
    return OauthSettings(
        token_url=url,
        ca_file=kafka.authority.certificate,
        client_id="gpuledger",
        client_secret=Secret(CLIENT_SECRET),
        scope="kafka",
        parameters={"audience": "kafka"},
    )


async def new_topic(kafka: OauthKafka) -> Topic:
    topic = Topic(name=f"tokens-{uuid4().hex[:8]}", record=PodRecord, key="uid", partitions=1)
    await create_topics(settings_of(kafka.plaintext_bootstrap_servers), [topic])
    return topic


async def test_records_are_sent_and_read_with_a_token_from_a_file(
    oauth_kafka: OauthKafka, tmp_path: Path
) -> None:
    token = oauth_kafka.keys.sign("gpuledger", for_seconds=LONG_SECONDS)
    settings = of_oauth(oauth_kafka, of_file(tmp_path / "token", f"{token}\n"))
    topic = Topic(name=f"tokens-{uuid4().hex[:8]}", record=PodRecord, key="uid", partitions=1)
    await create_topics(settings, [topic])
    bus = KafkaBus(settings)
    async with (
        bus.producer() as producer,
        bus.transactions(f"tokens-{uuid4().hex[:8]}") as transactions,
        bus.consumer(Subscription(group="g", topics=[topic.name])) as consumer,
    ):
        assert transactions is not None
        await producer.publish(topic.name, 0, [numbered(1)])
        records = await poll_until(bool, consumer)
        await consumer.commit({TopicPartition(topic.name, 0): 1})
    assert texts(records) == ["1"]


async def test_an_endpoint_is_queried_once_for_all_connections_and_before_its_token_expires(
    oauth_kafka: OauthKafka,
) -> None:
    issuer = TokenIssuer(oauth_kafka.keys, for_seconds=LONG_SECONDS)
    topic = await new_topic(oauth_kafka)
    async with issuer.serve(oauth_kafka.authority) as url:
        bus = KafkaBus(of_oauth(oauth_kafka, of_endpoint(oauth_kafka, url)))
        async with bus.producer() as producer:
            for number in range(3):
                await producer.publish(topic.name, 0, [numbered(number)])
            assert await bus.partitions(topic.name) == 1
    assert len(issuer.requests) == 1
    ((headers, form),) = issuer.requests
    assert headers["authorization"].startswith("Basic ")
    assert form == "grant_type=client_credentials&audience=kafka&scope=kafka"


@pytest.mark.extended  # a token lives six seconds: a busy machine is late
@pytest.mark.parametrize("by", ["file", "endpoint", "session"])
async def test_a_connection_outlives_its_token_and_its_session(
    oauth_kafka: OauthKafka,
    short_sessions: OauthKafka,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    by: str,
) -> None:
    """For 14 seconds, with tokens or sessions of six, no connection is opened a second time."""
    caplog.set_level(logging.DEBUG, logger="aiokafka")
    kafka = short_sessions if by == "session" else oauth_kafka
    lifetime_seconds = LONG_SECONDS if by == "session" else TOKEN_SECONDS
    issuer = TokenIssuer(kafka.keys, for_seconds=lifetime_seconds)
    file = tmp_path / "token"
    topic = await new_topic(kafka)

    async def renew_file() -> None:
        while True:
            await asyncio.sleep(TOKEN_SECONDS / 2)
            new = tmp_path / "new"
            new.write_text(kafka.keys.sign("gpuledger", for_seconds=lifetime_seconds))
            new.replace(file)

    async with AsyncExitStack() as stack:
        if by == "endpoint":
            oauth = of_endpoint(
                kafka, await stack.enter_async_context(issuer.serve(kafka.authority))
            )
        else:
            oauth = of_file(file, kafka.keys.sign("gpuledger", for_seconds=lifetime_seconds))
            if by == "file":
                renewing = asyncio.create_task(renew_file())
                stack.callback(renewing.cancel)
        bus = KafkaBus(of_oauth(kafka, oauth))
        producer = await stack.enter_async_context(bus.producer())
        consumer = await stack.enter_async_context(
            bus.consumer(Subscription(group=f"g-{uuid4().hex[:8]}", topics=[topic.name]))
        )
        found: list[str] = []

        def count(what: str) -> int:
            return sum(what in record.getMessage() for record in caplog.records)

        async def publish(number: int) -> None:
            await producer.publish(topic.name, 0, [numbered(number)])
            found.extend(texts(await poll_until(bool, consumer)))

        await publish(0)
        logins = count("Authenticated via OAUTHBEARER")
        for number in range(1, 28):
            await publish(number)
            await asyncio.sleep(0.5)
        assert found == [str(number) for number in range(28)]
        assert (
            count("Authenticated via OAUTHBEARER") - logins <= 1
        )  # the group's connection is opened late
        assert count("SaslHandShakeRequest") > logins
    assert "Bearer ********" in caplog.text
    assert "Bearer ey" not in caplog.text


async def test_a_session_that_ended_is_reopened_if_no_token_came_in_time(
    oauth_kafka: OauthKafka, tmp_path: Path
) -> None:
    """Without a new token operations fail with the reason; they work again once one is there."""
    file = tmp_path / "token"
    oauth = of_file(file, oauth_kafka.keys.sign("gpuledger", for_seconds=TOKEN_SECONDS))
    topic = await new_topic(oauth_kafka)
    readiness = Readiness()
    bus = KafkaBus(of_oauth(oauth_kafka, oauth), readiness=readiness)
    check = readiness.check("kafka.token")
    async with bus.producer() as producer:
        await producer.publish(topic.name, 0, [numbered(0)])
        assert check.is_ok
        await asyncio.sleep(TOKEN_SECONDS + 0.5)
        with pytest.raises(
            BusUnavailableError, match=r"kafka\.oauth\.token_file.*it expired on 20"
        ):
            await bus.partitions(topic.name)
        assert "it expired on 20" in check.detail
        file.write_text(oauth_kafka.keys.sign("gpuledger", for_seconds=LONG_SECONDS))
        async with asyncio.timeout(120):
            while not await publishes(bus, topic):  # noqa: ASYNC110  # brokers send no event
                await asyncio.sleep(0.2)
        assert check.is_ok


async def publishes(bus: KafkaBus, topic: Topic) -> bool:
    try:
        async with bus.producer() as producer:
            await producer.publish(topic.name, 0, [numbered(1)])
    except BusUnavailableError:
        return False
    return True


REFUSED: dict[str, Callable[[OauthKafka], str]] = {
    "another audience": lambda kafka: kafka.keys.sign("gpuledger", for_seconds=99, audience="x"),
    "another signature": lambda kafka: (
        kafka.keys.sign("gpuledger", for_seconds=99)[:-8] + "AAAAAAAA"
    ),
    "no JWT": lambda _kafka: "opaque-token-of-somebody",
}


@pytest.mark.parametrize("made", REFUSED)
async def test_a_token_that_the_broker_rejects_is_reported_with_its_settings_and_not_shown(
    oauth_kafka: OauthKafka, tmp_path: Path, made: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    token = REFUSED[made](oauth_kafka)
    bus = KafkaBus(of_oauth(oauth_kafka, of_file(tmp_path / "token", token)))
    with pytest.raises(BusUnavailableError, match=r"OAUTHBEARER.*check kafka\.oauth$") as raised:
        await bus.partitions("any")
    assert token[:20] not in f"{raised.value} {caplog.text}"


@pytest.mark.parametrize(
    ("set_up", "message"),
    [
        ({"hangs": True}, "no answer within 2 s"),
        ({"raw": b"\x00\xff no HTTP at all\r\n\r\n"}, "illegal status line"),
        ({"raw": b""}, "closed the connection without an answer"),
        ({"answer": ["no object"]}, 'with a string "access_token"'),
        ({"answer": {"access_token": "two words"}}, "spaces or other invalid characters"),
        ({"status": 401, "answer": {"error": "invalid_client"}}, r"401: .*kafka\.oauth\.client_id"),
        ({"status": 302, "answer": {}}, r"302: .*check kafka\.oauth\.token_url"),
        ({"for_seconds": -60.0}, "it expired on 20"),
        ({"status": 500, "answer": {"quoted": CLIENT_SECRET}}, r"500: .*\*{8}"),
    ],
)
async def test_an_endpoint_that_gives_no_token_is_reported_as_the_reason_in_time(
    oauth_kafka: OauthKafka,
    set_up: dict[str, object],
    message: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG)
    issuer = TokenIssuer(oauth_kafka.keys)
    for name, value in set_up.items():
        setattr(issuer, name, value)
    async with issuer.serve(oauth_kafka.authority) as url:
        bus = KafkaBus(of_oauth(oauth_kafka, of_endpoint(oauth_kafka, url)))
        with pytest.raises(BusUnavailableError, match=message) as raised:
            await bus.partitions("any")
        with pytest.raises(BusUnavailableError, match=message):
            await bus.partitions("any")
    assert url in str(raised.value)
    assert CLIENT_SECRET not in f"{raised.value} {caplog.text}"
    assert len(issuer.requests) == 1  # the second login in the pause gets the first one's answer
