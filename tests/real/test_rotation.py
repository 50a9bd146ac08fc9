"""Certificates and passwords of Kafka are replaced while the components run."""

from __future__ import annotations

import asyncio
import datetime as dt
import shutil
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Final

import orjson
import pytest
from typing_extensions import override

from gpuledger.bus.administration import create_topics
from gpuledger.bus.kafka import KafkaBus
from gpuledger.errors import BusUnavailableError
from gpuledger.runtime import Readiness
from gpuledger.settings import KafkaSettings
from tests.default_topics import ROWS, SAMPLES
from tests.real.bus.test_kafka_security import secured
from tests.real.end_to_end.components import Component
from tests.real.services.certificates import Authority
from tests.real.services.kafka import KafkaBroker
from tests.real.services.process import Process
from tests.real.services.secure_kafka import SecureKafka
from tests.real.services.starter import running
from tests.real.sinks.running_sinks import publish, ticks
from tests.real.test_agent import NODE, QUICKSTART
from tests.unit.sinks.builders import eventually

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
    from pathlib import Path

    from tests.real.services.kafka import KafkaDistribution
    from tests.real.services.kcat import Kcat

DEADLINE_SECONDS = 120.0
NEW_PASSWORD = "another-horse-another-battery"
SCRAM, PLAIN = "SCRAM-SHA-512", "PLAIN"
PLAIN_MODULE = "org.apache.kafka.common.security.plain.PlainLoginModule required"
CHECK: Final = "kafka.credentials"
REFUSED: Final = f"check_failed {CHECK}"
READ: Final = (f"check_recovered {CHECK}", "kafka_credentials_read")


class RotatedKafka(SecureKafka):
    """The secure broker, which requires client certificates and loads new ones at a restart."""

    def __init__(
        self, *, distribution: KafkaDistribution, folder: Path, mechanism: str, authority: Authority
    ) -> None:
        super().__init__(distribution=distribution, folder=folder)
        self.mechanism = mechanism
        self._requested_password = self.password
        self.take(authority)

    @override
    def listeners(self) -> dict[str, str]:
        """Return the listeners for SCRAM or PLAIN; the broker's settings have PLAIN's passwords."""
        listeners = {**super().listeners(), "listener.name.secure.ssl.client.auth": "required"}
        if self.mechanism == PLAIN:
            user = f'user_{self.username}="{self._requested_password}"'
            listeners |= {
                "sasl.enabled.mechanisms": PLAIN,
                "listener.name.secure.plain.sasl.jaas.config": f"{PLAIN_MODULE} {user};",
            }
        return listeners

    def take(self, authority: Authority) -> None:
        """Trust only another authority, and present a certificate of its own."""
        pair = authority.issue("127.0.0.1")
        shutil.copy(authority.certificate, self.ca_file)
        self._keystore.write_bytes(
            pair.key.read_bytes() + pair.certificate.read_bytes() + self.ca_file.read_bytes()
        )

    def set_password(self, password: str) -> None:
        """Set another password for the user; one for PLAIN takes effect at the next start."""
        self._requested_password = password
        if self.mechanism == PLAIN:
            self.write_settings()
            return
        argv = self._java("kafka.admin.ConfigCommand")
        argv += ["--bootstrap-server", self.plaintext_bootstrap_servers, "--alter"]
        argv += ["--entity-type", "users", "--entity-name", self.username]
        argv += ["--add-config", f"{SCRAM}=[password={password}]"]
        setting = Process(name="password", argv=argv, folder=self.folder)
        setting.start()
        setting.wait_until(lambda: setting.exit_status() == 0, deadline_seconds=120)


class Mounted:
    """A mounted Secret, as components read it: links into a folder that is replaced."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self._folder, self._versions = folder, 0
        self.ca, self.certificate, self.key, self.password = (
            folder / name for name in ("ca.crt", "tls.crt", "tls.key", "password")
        )
        for file in (self.ca, self.certificate, self.key, self.password):
            file.symlink_to(f"..data/{file.name}")

    def write(self, authority: Authority, *, password: str) -> None:
        """Replace all files at once, as the kubelet does."""
        pair = authority.issue("client")
        self._versions += 1
        version = self._folder / f"..{self._versions}"
        version.mkdir()
        shutil.copy(authority.certificate, version / self.ca.name)
        shutil.copy(pair.certificate, version / self.certificate.name)
        shutil.copy(pair.key, version / self.key.name)
        (version / self.password.name).write_text(f"{password}\n")
        new = self._folder / "..data_tmp"
        new.symlink_to(version.name)
        new.replace(self._folder / "..data")

    def login(self, kafka: RotatedKafka) -> Mapping[str, str]:
        """Return the settings of a component that reads them."""
        return {
            "KAFKA__BOOTSTRAP_SERVERS": kafka.bootstrap_servers,
            "KAFKA__REQUEST_TIMEOUT_SECONDS": "5",
            "KAFKA__SESSION_TIMEOUT_SECONDS": "6",
            "KAFKA__SECURITY_PROTOCOL": "SASL_SSL",
            "KAFKA__SASL_MECHANISM": kafka.mechanism,
            "KAFKA__SASL_USERNAME": kafka.username,
            "KAFKA__SASL_PASSWORD_FILE": str(self.password),
            "KAFKA__SSL_CA_FILE": str(self.ca),
            "KAFKA__SSL_CERT_FILE": str(self.certificate),
            "KAFKA__SSL_KEY_FILE": str(self.key),
        }


class Working:
    """An agent and a sink that log in with the files, and whether they work."""

    def __init__(self, kafka: RotatedKafka, kcat: Kcat, mounted: Mounted, *, folder: Path) -> None:
        self._kafka, self._kcat = kafka, kcat
        self._plaintext = KafkaBroker(bootstrap_servers=kafka.plaintext_bootstrap_servers)
        self._next_tick = 0
        login = mounted.login(kafka)
        self.agent = Component(
            name="agent",
            command=["gpuledger", "agent", "--source", f"simulated:{QUICKSTART}"],
            folder=folder,
            environment={**login, "NODE_NAME": NODE},
        )
        self.sink = Component(
            name="sink", command=["gpuledger", "sink", "rows"], folder=folder, environment=login
        )
        self.both = (self.agent, self.sink)

    async def goes_on(self) -> None:
        """Wait for another sample of the agent, and for rows of another tick."""
        await self._more_on(SAMPLES.name)
        await self._more_on(ROWS.name, meanwhile=self._publish)

    def message(self) -> list[list[str]]:
        """Return the details of both credentials checks."""
        return [list(credential_messages(each)) for each in self.both]

    async def await_message(self, *expected: str) -> None:
        """Wait until both report this about their credentials, and nothing else."""
        await eventually(
            lambda: self.message() == [[*expected]] * 2, within_seconds=DEADLINE_SECONDS
        )

    async def await_reason(self, reason: str) -> None:
        """Wait until both logs contain the reason of the failure."""
        await eventually(
            lambda: all(reason in each.log.read_text() for each in self.both),
            within_seconds=2 * DEADLINE_SECONDS,
        )

    def stop(self) -> None:
        """End both; their exits must be clean."""
        assert [each.stop() for each in self.both] == [0, 0], self._tails()

    async def _more_on(
        self, topic: str, *, meanwhile: Callable[[], Awaitable[None]] | None = None
    ) -> None:
        before = self._count(topic)
        if meanwhile:
            await meanwhile()
        async with asyncio.timeout(DEADLINE_SECONDS):
            while self._count(topic) <= before:
                assert [each.exit_status() for each in self.both] == [None, None], self._tails()
                await asyncio.sleep(0.5)

    async def _publish(self) -> None:
        await publish(self._plaintext, ticks(1, first=self._next_tick))
        self._next_tick += 1

    def _count(self, topic: str) -> int:
        return len(self._kcat.consume(self._kafka.plaintext_bootstrap_servers, topic))

    def _tails(self) -> str:
        return "\n".join(each.log_tail() for each in self.both)


@asynccontextmanager
async def at_work(
    part: RotatedKafka, kcat: Kcat, mounted: Mounted, *, folder: Path
) -> AsyncIterator[tuple[RotatedKafka, Working]]:
    """Run the broker with an agent and a sink that work, and end them."""
    with running(part) as kafka:
        await create_topics(KafkaSettings(bootstrap_servers=kafka.plaintext_bootstrap_servers))
        working = Working(kafka, kcat, mounted, folder=folder)
        for each in working.both:
            each.start()
        try:
            await working.goes_on()
            yield kafka, working
        finally:
            working.stop()


@pytest.mark.parametrize("mechanism", [SCRAM, pytest.param(PLAIN, marks=pytest.mark.extended)])
async def test_agent_and_sink_continue_with_the_new_certificates_and_password_of_their_files(
    kafka_distribution: KafkaDistribution, kcat: Kcat, tmp_path: Path, mechanism: str
) -> None:
    first, second = (Authority(folder=tmp_path / name) for name in ("first", "second"))
    mounted = Mounted(tmp_path / "mounted")
    mounted.write(first, password=SecureKafka.password)
    part = RotatedKafka(
        distribution=kafka_distribution,
        folder=tmp_path / "kafka",
        mechanism=mechanism,
        authority=first,
    )
    async with at_work(part, kcat, mounted, folder=tmp_path) as (kafka, working):
        # An invalid file is reported although no client connects, and the old certificate, which
        # the broker still accepts, stays in use.
        mounted.key.write_text("no key")
        await working.await_message(REFUSED)
        await asyncio.to_thread(restart, kafka)
        await working.goes_on()

        kafka.set_password(NEW_PASSWORD)
        kafka.take(second)
        mounted.write(second, password=NEW_PASSWORD)
        await asyncio.to_thread(restart, kafka)
        await working.goes_on()
        await working.await_message(REFUSED, *READ)


@pytest.mark.extended
@pytest.mark.parametrize("mechanism", [SCRAM, PLAIN])
async def test_a_rejected_login_is_named_in_the_logs_of_agent_and_sink(
    kafka_distribution: KafkaDistribution, kcat: Kcat, tmp_path: Path, mechanism: str
) -> None:
    authority = Authority(folder=tmp_path / "first")
    mounted = Mounted(tmp_path / "mounted")
    mounted.write(authority, password=SecureKafka.password)
    part = RotatedKafka(
        distribution=kafka_distribution,
        folder=tmp_path / "kafka",
        mechanism=mechanism,
        authority=authority,
    )
    async with at_work(part, kcat, mounted, folder=tmp_path) as (kafka, working):
        kafka.set_password(NEW_PASSWORD)
        await asyncio.to_thread(restart, kafka)
        await working.await_reason("SaslAuthenticationFailed")


async def test_a_rejected_client_certificate_is_reported_with_the_message_of_tls(
    kafka_distribution: KafkaDistribution, tmp_path: Path
) -> None:
    authority = Authority(folder=tmp_path / "authority")
    expired = authority.issue("expired", lifetime=dt.timedelta(minutes=-5))
    part = RotatedKafka(
        distribution=kafka_distribution,
        folder=tmp_path / "kafka",
        mechanism=SCRAM,
        authority=authority,
    )
    with running(part) as kafka:
        for own in ({}, {"ssl_cert_file": expired.certificate, "ssl_key_file": expired.key}):
            readiness = Readiness()
            bus = KafkaBus(secured(kafka, **own), readiness=readiness)
            with pytest.raises(BusUnavailableError, match=r"\[SSL: \w*ALERT_\w*CERTIFICATE"):
                await bus.partitions("any")
            detail = readiness.check(CHECK).detail
            assert ("the certificate of 'expired'" in detail) == bool(own)
        # Connections that the client leaves open after a failed start end with a message to the
        # peer.
        await asyncio.sleep(0.2)


def restart(kafka: RotatedKafka) -> None:
    """Close every connection, and load the changed files."""
    kafka.stop()
    kafka.start()


def credential_messages(component: Component) -> Iterator[str]:
    for line in map(orjson.loads, component.log.read_bytes().splitlines()):
        if line["event"] in READ:
            yield line["event"]
        elif line.get("check") == CHECK:
            yield f"{line['event']} {CHECK}"
