"""A Kafka broker that accepts bearer tokens, which it verifies with keys in a file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from typing_extensions import override

from tests.fakes.token_issuer import AUDIENCE, ISSUER, TokenKeys
from tests.real.services.certificates import Authority
from tests.real.services.secure_kafka import SecureKafka

if TYPE_CHECKING:
    from tests.real.services.kafka import KafkaDistribution

LOGIN_MODULE = "org.apache.kafka.common.security.oauthbearer.OAuthBearerLoginModule required;"
VALIDATOR = "org.apache.kafka.common.security.oauthbearer.OAuthBearerValidatorCallbackHandler"


class OauthKafka(SecureKafka):
    """A broker whose `bootstrap_servers` use SASL_SSL with OAUTHBEARER."""

    name = "oauth-kafka"

    def __init__(
        self,
        *,
        distribution: KafkaDistribution,
        folder: Path,
        longest_session_seconds: float | None = None,
    ) -> None:
        super().__init__(distribution=distribution, folder=folder)
        self.keys = TokenKeys()
        self.authority = Authority(folder=folder / "token-endpoint")
        self._longest_session_seconds = longest_session_seconds
        self._jwks = folder / "jwks.json"
        self.keys.publish(self._jwks)

    @override
    def listeners(self) -> dict[str, str]:
        lines = super().listeners()
        of_scram = "listener.name.secure.scram-sha-512.sasl.jaas.config"
        lines = {name: value for name, value in lines.items() if name != of_scram}
        of_tokens = "listener.name.secure.oauthbearer"
        lines |= {
            "sasl.enabled.mechanisms": "OAUTHBEARER",
            f"{of_tokens}.sasl.jaas.config": LOGIN_MODULE,
            f"{of_tokens}.sasl.server.callback.handler.class": VALIDATOR,
            "sasl.oauthbearer.jwks.endpoint.url": self._jwks.as_uri(),
            "sasl.oauthbearer.expected.audience": AUDIENCE,
            "sasl.oauthbearer.expected.issuer": ISSUER,
            "sasl.oauthbearer.clock.skew.seconds": "0",
            "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
            "allow.everyone.if.no.acl.found": "false",
            "super.users": "User:ANONYMOUS;User:gpuledger",
        }
        if self._longest_session_seconds is not None:
            longest_ms = str(int(self._longest_session_seconds * 1000))
            lines[f"{of_tokens}.connections.max.reauth.ms"] = longest_ms
        return lines

    @override
    def format_arguments(self) -> list[str]:
        return []

    @override
    def _java(self, main_class: str) -> list[str | Path]:
        # A broker reads keys only from addresses that are given when its process starts.
        java, *others = super()._java(main_class)
        allowed = f"-Dorg.apache.kafka.sasl.oauthbearer.allowed.urls={self._jwks.as_uri()}"
        return [java, allowed, *others]
