"""The groups of settings that several deployables have. A deployable's own stand beside it."""

from pathlib import Path
from typing import Annotated, Final, Literal

import msgspec

from gpuledger.settings.address import parse_listen, require_brokers
from gpuledger.settings.secret import Secret

Seconds = Annotated[float, msgspec.Meta(gt=0)]
_LONGEST_HEARTBEAT_SECONDS: Final = 3.0


class KafkaSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How to reach the brokers."""

    bootstrap_servers: Annotated[str, msgspec.Meta(min_length=1)] = "localhost:9092"
    """Brokers to ask first, `host:port`, separated by commas."""
    security_protocol: Literal["PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL"] = "PLAINTEXT"
    """How connections are protected."""
    sasl_mechanism: Literal["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"] = "SCRAM-SHA-512"
    """How to log in; only read where the protocol begins with SASL."""
    sasl_username: str | None = None
    """Name to log in with."""
    sasl_password: Secret | None = None
    """Password to log in with."""
    ssl_ca_file: Path | None = None
    """Authorities to trust, PEM; absent means those of the system."""
    ssl_cert_file: Path | None = None
    """Own certificate, PEM, where the brokers ask for one."""
    ssl_key_file: Path | None = None
    """Key of the own certificate, PEM."""
    ssl_key_password: Secret | None = None
    """Password of that key, where it has one."""
    ssl_check_hostname: bool = True
    """Whether a broker's certificate must name the host that was asked."""
    client_id: str = "gpuledger"
    """Name under which the brokers log and limit this client."""
    group_instance_id: str = ""
    """Own name in the consumer group (static membership), such as the pod's; empty means none."""
    request_timeout_seconds: Seconds = 30.0
    """How long to wait for a broker's answer."""
    session_timeout_seconds: Seconds = 30.0
    """How long a member may be silent before its partitions go to others."""
    max_poll_interval_seconds: Seconds = 300.0
    """How long a member may take between two polls before its partitions go to others."""

    @property
    def heartbeat_seconds(self) -> float:
        """How often a member tells its group that it lives, and how long news of the group takes.

        A third of the session, as Kafka's own clients have it, so that two may be lost on the way.
        """
        return min(_LONGEST_HEARTBEAT_SECONDS, self.session_timeout_seconds / 3)

    def __post_init__(self) -> None:
        """Raise `ValueError` where brokers are misnamed or a combination cannot work."""
        require_brokers(self.bootstrap_servers)
        login = self.sasl_username and self.sasl_password
        if self.security_protocol.startswith("SASL") and not login:
            raise ValueError(
                f"security_protocol {self.security_protocol} needs sasl_username and sasl_password"
            )
        if bool(self.ssl_cert_file) != bool(self.ssl_key_file):
            raise ValueError("ssl_cert_file and ssl_key_file go together: give both or neither")


class HttpSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where health and metrics are served."""

    listen: str = "0.0.0.0:9820"
    """Address of `/livez`, `/readyz` and `/metrics`, `host:port`; port 0 means any free one."""
    web_config_file: Path | None = None
    """TLS and users of these pages, a file in the format of Prometheus' exporters (`web.yml`) that
    has one of both; absent means plain HTTP for everybody."""

    def __post_init__(self) -> None:
        """Refuse what is no address; raises `ValueError`."""
        try:
            parse_listen(self.listen)
        except ValueError as error:
            raise ValueError(f"listen: {error}") from error


class LogSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is written to standard error."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    """The least level that is written; libraries speak from `warning` up unless it is `debug`."""
    format: Literal["json", "text"] = "json"
    """One JSON object a line for machines, or text for people."""
