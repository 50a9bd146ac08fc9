"""A Kafka broker with TLS and SCRAM on one listener, and a plaintext one for the tests."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from typing_extensions import override

from tests.real.services.certificates import Authority
from tests.real.services.kafka import Kafka, KafkaDistribution
from tests.real.services.ports import free_ports

WORKLOADS = (
    "agent",
    "podwatch",
    "join",
    "sink-remote-write",
    "sink-alerts",
    "sink-store",
    "sink-rows",
    "sink-scaler",
    "topics",
)
"""The components that have their own users in the overlay for SASL over TLS."""
LOGIN_MODULE = "org.apache.kafka.common.security.scram.ScramLoginModule required;"


class SecureKafka(Kafka):
    """A broker whose `bootstrap_servers` use SASL_SSL with SCRAM-SHA-512."""

    name = "secure-kafka"
    username = "gpuledger"
    password = "correct-horse-battery-staple"
    users: Mapping[str, str] = {f"gpuledger-{name}": f"staple-of-{name}" for name in WORKLOADS}
    """Passwords of further users, by name."""

    def __init__(self, *, distribution: KafkaDistribution, folder: Path) -> None:
        super().__init__(distribution=distribution, folder=folder)
        self.plaintext_bootstrap_servers = self.bootstrap_servers
        self.bootstrap_servers = f"127.0.0.1:{free_ports(1)[0]}"
        authority = Authority(folder=folder / "certificates")
        self.ca_file = authority.certificate
        pair = authority.issue("127.0.0.1")
        self._keystore = folder / "certificates" / "server.pem"
        self._keystore.write_bytes(
            pair.key.read_bytes() + pair.certificate.read_bytes() + self.ca_file.read_bytes()
        )

    @override
    def listeners(self) -> dict[str, str]:
        plaintext = f"PLAINTEXT://{self.plaintext_bootstrap_servers}"
        secure = f"SECURE://{self.bootstrap_servers}"
        return {
            "listeners": f"{plaintext},{secure},{self._controller()}",
            "advertised.listeners": f"{plaintext},{secure}",
            "listener.security.protocol.map": (
                "PLAINTEXT:PLAINTEXT,SECURE:SASL_SSL,CONTROLLER:PLAINTEXT"
            ),
            "inter.broker.listener.name": "PLAINTEXT",
            "sasl.enabled.mechanisms": "SCRAM-SHA-512",
            "listener.name.secure.scram-sha-512.sasl.jaas.config": LOGIN_MODULE,
            "ssl.keystore.type": "PEM",
            "ssl.keystore.location": str(self._keystore),
            "ssl.truststore.type": "PEM",
            "ssl.truststore.location": str(self.ca_file),
        }

    @override
    def format_arguments(self) -> list[str]:
        return [
            word
            for name, password in {self.username: self.password, **self.users}.items()
            for word in ("--add-scram", f"SCRAM-SHA-512=[name={name},password={password}]")
        ]
