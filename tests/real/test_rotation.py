"""Certificates and passwords of Kafka are exchanged while the deployables run."""

from __future__ import annotations

import asyncio
import shutil
from typing import TYPE_CHECKING

import orjson
from typing_extensions import override

from gpuledger.bus.administration import create_topics
from gpuledger.settings import KafkaSettings
from gpuledger.topics import SAMPLES
from tests.real.end_to_end.deployables import Deployable
from tests.real.parts.certificates import Authority
from tests.real.parts.process import Process
from tests.real.parts.secure_kafka import SecureKafka
from tests.real.parts.starter import running
from tests.real.test_agent import NODE, QUICKSTART

if TYPE_CHECKING:
    from pathlib import Path

    from tests.real.parts.kafka import KafkaDistribution
    from tests.real.parts.kcat import Kcat

DEADLINE_SECONDS = 60.0
NEW_PASSWORD = "another-horse-another-battery"


class RotatedKafka(SecureKafka):
    """The secure broker, which asks clients for a certificate and takes new ones by a restart."""

    @override
    def listeners(self) -> dict[str, str]:
        return {**super().listeners(), "listener.name.secure.ssl.client.auth": "required"}

    def take(self, authority: Authority) -> None:
        """Trust another authority alone, and show a certificate of its own."""
        pair = authority.issue("127.0.0.1")
        shutil.copy(authority.certificate, self.ca_file)
        self._keystore.write_bytes(
            pair.key.read_bytes() + pair.certificate.read_bytes() + self.ca_file.read_bytes()
        )

    def set_password(self, password: str) -> None:
        """Give the user another password."""
        argv = self._java("kafka.admin.ConfigCommand")
        argv += ["--bootstrap-server", self.plaintext_bootstrap_servers, "--alter"]
        argv += ["--entity-type", "users", "--entity-name", self.username]
        argv += ["--add-config", f"SCRAM-SHA-512=[password={password}]"]
        setting = Process(name="password", argv=argv, folder=self.folder)
        setting.start()
        setting.wait_until(lambda: setting.exit_status() == 0, deadline_seconds=30)


class Mounted:
    """The files of a Secret that is mounted, as the agent reads them."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.ca, self.certificate, self.key, self.password = (
            folder / name for name in ("ca.crt", "tls.crt", "tls.key", "password")
        )

    def write(self, authority: Authority, *, password: str) -> None:
        """Exchange them, each at once, as the kubelet does."""
        pair = authority.issue("agent")
        exchanged = {
            self.ca: authority.certificate,
            self.certificate: pair.certificate,
            self.key: pair.key,
        }
        for target, source in exchanged.items():
            new = target.with_suffix(".new")
            shutil.copy(source, new)
            new.replace(target)
        self.password.write_text(f"{password}\n")

    def agent(self, kafka: RotatedKafka, *, folder: Path) -> Deployable:
        """Give an agent that reads them."""
        return Deployable(
            name="agent",
            command=["gpuledger-agent", "--source", f"simulated:{QUICKSTART}"],
            folder=folder,
            environment={
                "KAFKA__BOOTSTRAP_SERVERS": kafka.bootstrap_servers,
                "KAFKA__REQUEST_TIMEOUT_SECONDS": "5",
                "KAFKA__SECURITY_PROTOCOL": "SASL_SSL",
                "KAFKA__SASL_USERNAME": SecureKafka.username,
                "KAFKA__SASL_PASSWORD_FILE": str(self.password),
                "KAFKA__SSL_CA_FILE": str(self.ca),
                "KAFKA__SSL_CERT_FILE": str(self.certificate),
                "KAFKA__SSL_KEY_FILE": str(self.key),
                "NODE_NAME": NODE,
            },
        )


async def test_an_agent_goes_on_with_the_certificates_and_the_password_that_its_files_have_now(
    kafka_distribution: KafkaDistribution, kcat: Kcat, tmp_path: Path
) -> None:
    first, second = (Authority(folder=tmp_path / name) for name in ("first", "second"))
    mounted = Mounted(tmp_path / "mounted")
    mounted.write(first, password=SecureKafka.password)
    part = RotatedKafka(distribution=kafka_distribution, folder=tmp_path / "kafka")
    part.take(first)
    with running(part) as kafka:
        await create_topics(KafkaSettings(bootstrap_servers=kafka.plaintext_bootstrap_servers))
        agent = mounted.agent(kafka, folder=tmp_path)
        agent.start()
        try:
            await goes_on(kafka, kcat, agent)

            # Damaged files leave the old certificate in force, which the broker still takes.
            mounted.key.write_text("no key")
            await asyncio.to_thread(restart, kafka)
            await goes_on(kafka, kcat, agent)
            assert events(agent) == ["kafka_credentials_refused"]

            kafka.set_password(NEW_PASSWORD)
            kafka.take(second)
            mounted.write(second, password=NEW_PASSWORD)
            await asyncio.to_thread(restart, kafka)
            await goes_on(kafka, kcat, agent)
            assert events(agent) == ["kafka_credentials_refused", "kafka_credentials_read"]
        finally:
            assert agent.stop() == 0, agent.log_tail()


def restart(kafka: RotatedKafka) -> None:
    kafka.stop()
    kafka.start()


def events(agent: Deployable) -> list[str]:
    """Give what it has said of its credentials."""
    lines = map(orjson.loads, agent.log.read_bytes().splitlines())
    return [line["event"] for line in lines if "kafka_credentials" in line["event"]]


async def goes_on(kafka: RotatedKafka, kcat: Kcat, agent: Deployable) -> None:
    """Wait for a further sample."""
    before = count_samples(kafka, kcat)
    async with asyncio.timeout(DEADLINE_SECONDS):
        while count_samples(kafka, kcat) <= before:
            assert agent.exit_status() is None, agent.log_tail()
            await asyncio.sleep(0.5)


def count_samples(kafka: RotatedKafka, kcat: Kcat) -> int:
    return len(kcat.consume(kafka.plaintext_bootstrap_servers, SAMPLES.name))
