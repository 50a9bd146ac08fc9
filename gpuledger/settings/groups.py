"""Groups of settings that several components share, and checks of the addresses in them.

A component's own settings are in its package. Nothing here opens a socket.
"""

import re
from pathlib import Path
from typing import Annotated, Final, Literal
from urllib.parse import SplitResult, urlsplit

import msgspec
from typing_extensions import override

from gpuledger.records.base import MAX_CLUSTER_NAME_LENGTH, ClusterName
from gpuledger.settings.secret import (
    MASK,
    Secret,
    may_contain_credentials,
    shown_brokers,
    shown_url,
)
from gpuledger.texts import shorten

Seconds = Annotated[float, msgspec.Meta(gt=0)]
_LONGEST_HEARTBEAT_SECONDS: Final = 3.0
# Kafka allows topic names of 249 characters. Our names append 24, and metrics and logs show them.
_MAX_TOPIC_PREFIX: Final = 100
_TOPIC_PREFIX: Final = re.compile(r"[a-zA-Z0-9](?:[a-zA-Z0-9._-]{0,98}[a-zA-Z0-9])?")
# The name of a consumer group is part of transactional ids and record keys. Metrics, logs and
# commands show it.
_MAX_GROUP_NAME: Final = 200
_GROUP_NAME: Final = re.compile(rf"[a-zA-Z0-9._-]{{1,{_MAX_GROUP_NAME}}}")
_SHOWN_CHARACTERS: Final = 40


class ClientCredentialsSettings(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True
):
    """A token endpoint with its credentials (OAuth 2.0, client credentials)."""

    token_url: str = ""
    """Token endpoint for client credentials (OAuth 2.0), `https://…`."""
    ca_file: Path | None = None
    """CA certificates for the token endpoint, PEM file. Empty: the system's."""
    client_id: str = ""
    """Client id for the token endpoint."""
    client_secret: Secret | None = None
    """Client secret for the token endpoint."""
    scope: str = ""
    """Scopes to request, separated by blanks. Empty: the endpoint's default."""
    parameters: dict[str, str] = {}
    """Additional parameters of the token request, such as `audience`."""

    def __post_init__(self) -> None:
        """Raise `ValueError` if these settings cannot yield a token."""
        if not self.token_url:
            given = ("ca_file", "client_id", "client_secret", "scope", "parameters")
            for name in given:
                if getattr(self, name):
                    raise ValueError(f"{name}: needs token_url too")
            return
        if not self.token_url.lower().startswith("https://"):
            # The message does not show the value, which may contain credentials.
            raise ValueError("token_url: expected https://…, because a secret is sent to it")
        try:
            require_http_url(self.token_url)
        except ValueError as error:
            raise ValueError(f"token_url: {error}") from error
        if may_contain_credentials(self.token_url) or "#" in self.token_url:
            raise ValueError(
                "token_url: must not contain a login or a fragment; set client_id and client_secret"
            )
        if not (self.client_id and self.client_secret):
            raise ValueError("token_url: needs client_id and client_secret_file too")
        for name in sorted(_OWN_PARAMETERS & self.parameters.keys()):
            raise ValueError(f"parameters: reserved name {name}; {_OWN_PARAMETERS_REMEDY}")


class OauthSettings(
    ClientCredentialsSettings, frozen=True, kw_only=True, forbid_unknown_fields=True
):
    """Source of the token for OAUTHBEARER: a file, or a token endpoint."""

    token: Secret | None = None
    """The token itself, if something such as the kubelet renews its file. Set only one of
    `token_file` and `token_url`."""

    @override
    def __post_init__(self) -> None:
        """Raise `ValueError` if these settings cannot yield a token."""
        if self.token is None:
            super().__post_init__()
        elif self.token_url:
            raise ValueError("token_url: conflicts with token_file; set only one")


_OWN_PARAMETERS: Final = frozenset(
    {"grant_type", "scope", "client_id", "client_secret", "client_assertion"}
)
_OWN_PARAMETERS_REMEDY: Final = "use the settings scope, client_id and client_secret_file"


class KafkaSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Connection to the Kafka brokers."""

    bootstrap_servers: Annotated[str, msgspec.Meta(min_length=1)] = "localhost:9092"
    """Brokers for the first connection, `host:port`, separated by commas."""
    security_protocol: Literal["PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL"] = "PLAINTEXT"
    """Protection of connections: TLS (SSL), authentication (SASL), both or none."""
    sasl_mechanism: Literal["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512", "OAUTHBEARER"] = (
        "SCRAM-SHA-512"
    )
    """Authentication mechanism; applies only if the protocol begins with SASL."""
    sasl_username: str = ""
    """User name for authentication."""
    sasl_password: Secret | None = None
    """Password for authentication."""
    oauth: OauthSettings = OauthSettings()
    """Token for authentication; applies only to the mechanism OAUTHBEARER."""
    ssl_ca_file: Path | None = None
    """CA certificates for the brokers, PEM file. Empty: the system's."""
    ssl_cert_file: Path | None = None
    """Client certificate, PEM file, if the brokers require one."""
    ssl_key_file: Path | None = None
    """Private key of the client certificate, PEM file."""
    ssl_key_password: Secret | None = None
    """Password of the private key, if it has one."""
    ssl_check_hostname: bool = True
    """Whether a broker's certificate must match its host name."""
    topic_prefix: str = "gpuledger"
    """Prefix of all topics, consumer groups and transactional ids. Installations that share brokers
    need different ones; all components of an installation need the same."""
    client_id: str = "gpuledger"
    """Client name for the brokers' logs and quotas."""
    group_instance_id: str = ""
    """Own name in the consumer group (static membership), such as the pod's. Empty: none."""
    request_timeout_seconds: Seconds = 30.0
    """Timeout of a request to a broker, in seconds."""
    session_timeout_seconds: Seconds = 30.0
    """Time without heartbeats, in seconds, after which a member's partitions go to others."""
    max_poll_interval_seconds: Seconds = 300.0
    """Time between two polls, in seconds, after which a member's partitions go to others."""

    @property
    def heartbeat_seconds(self) -> float:
        """Return the heartbeat interval, which is the longest time until a rebalance is noticed.

        The interval is at most 3 seconds, and at most a third of the session timeout, as in Kafka's
        own clients, so that two heartbeats may be lost.
        """
        return min(_LONGEST_HEARTBEAT_SECONDS, self.session_timeout_seconds / 3)

    @property
    def uses_tokens(self) -> bool:
        """Whether authentication uses OAUTHBEARER."""
        return self.security_protocol.startswith("SASL") and self.sasl_mechanism == "OAUTHBEARER"

    def __post_init__(self) -> None:
        """Raise `ValueError` if an address is invalid or a combination cannot work."""
        require_brokers(self.bootstrap_servers)
        require_topic_prefix(self.topic_prefix)
        login = self.sasl_username and self.sasl_password
        if self.uses_tokens:
            if not (self.oauth.token or self.oauth.token_url):
                raise ValueError(
                    "sasl_mechanism OAUTHBEARER needs oauth.token_file, or oauth.token_url with"
                    " oauth.client_id and oauth.client_secret_file"
                )
        elif self.security_protocol.startswith("SASL") and not login:
            raise ValueError(
                f"security_protocol {self.security_protocol} needs sasl_username and sasl_password"
            )
        if bool(self.ssl_cert_file) != bool(self.ssl_key_file):
            given, other = "ssl_cert_file", "ssl_key_file"
            if self.ssl_key_file:
                given, other = other, given
            raise ValueError(f"{given}: needs {other} too")


class HttpSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """HTTP server for health and metrics."""

    listen: str = "0.0.0.0:9820"
    """Address of `/livez`, `/readyz` and `/metrics`, `host:port`. Port 0: any free port."""
    web_config_file: Path | None = None
    """TLS and users of these endpoints, in the format of Prometheus exporters (`web.yml`). Empty:
    plain HTTP without authentication."""

    def __post_init__(self) -> None:
        """Raise `ValueError` if `listen` is not an address."""
        try:
            parse_listen(self.listen)
        except ValueError as error:
            raise ValueError(f"listen: {error}") from error


class LogSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Log output on standard error."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    """Minimum level of log lines. Libraries log from `warning` on, unless it is `debug`."""
    format: Literal["json", "text"] = "json"
    """Format of log lines: JSON objects for machines, or text for people."""


# Addresses: one to listen on, and those of brokers and receivers.

_ADDRESS: Final = re.compile(
    r"(?:\[(?P<six>[0-9A-Fa-f:.]+)\]|(?P<host>[^\s:\[\]/]*)):(?P<port>\d{1,5})"
)
_BROKER: Final = re.compile(r"(?:\[[0-9A-Fa-f:.]+\]|[\w.-]+):(?P<port>\d{1,5})", re.ASCII)
_MAX_PORT: Final = 65535


def parse_listen(listen: str) -> tuple[str, int]:
    """Split `host:port` or `[ipv6]:port`; no host means all interfaces, port 0 any free port.

    Raises `ValueError` with the value if it has another form.
    """
    found = _ADDRESS.fullmatch(listen)
    if not found or int(found["port"]) > _MAX_PORT:
        raise ValueError(f"expected host:port such as 0.0.0.0:9820, got {listen!r}")
    return found["six"] or found["host"] or "0.0.0.0", int(found["port"])  # noqa: S104  # that is what an empty host asks for


def require_topic_prefix(prefix: str) -> None:
    """Raise `ValueError` if names with this prefix would be invalid in Kafka or ambiguous."""
    text = f"topic_prefix: invalid prefix: {shorten(repr(prefix), _SHOWN_CHARACTERS)}"
    if not _TOPIC_PREFIX.fullmatch(prefix):
        raise ValueError(
            f"{text}; use 1 to {_MAX_TOPIC_PREFIX} of the characters"
            " a-z, A-Z, 0-9, '.', '_' and '-', first and last a letter or digit"
        )


def require_group_name(group: str) -> None:
    """Raise `ValueError` if this is not a valid name of a consumer group."""
    if not _GROUP_NAME.fullmatch(group):
        raise ValueError(
            f"group: invalid consumer group: {shorten(repr(group), _SHOWN_CHARACTERS)};"
            f" use 1 to {_MAX_GROUP_NAME} of the characters a-z, A-Z, 0-9, '.', '_' and '-'"
        )


def require_cluster_name(cluster: str) -> None:
    """Raise `ValueError` if this is not a valid cluster name; keys on Kafka begin with it."""
    try:
        msgspec.convert(cluster, ClusterName)
    except msgspec.ValidationError:
        raise ValueError(
            f"cluster: invalid name: {shorten(repr(cluster), _SHOWN_CHARACTERS)}; use 1"
            f" to {MAX_CLUSTER_NAME_LENGTH} of the characters a-z, 0-9 and '-', first and last"
            " a letter or digit (a DNS label)"
        ) from None


def require_brokers(servers: str) -> None:
    """Raise `ValueError`, with the value, if `servers` is not `host:port[,host:port…]`.

    An IPv6 address must be in brackets. Blanks around a broker are allowed; the client strips them.
    """
    for server in servers.split(","):
        found = _BROKER.fullmatch(server.strip())
        if found and 0 < int(found["port"]) <= _MAX_PORT:
            continue
        remedy = "expected host:port[,host:port…]"
        if may_contain_credentials(servers):
            remedy += "; set user and password in kafka.sasl_username and kafka.sasl_password"
        elif "://" in servers:
            remedy += " without a scheme; set TLS and login in kafka.security_protocol"
        raise ValueError(f"bootstrap_servers {shown_brokers(servers)!r}: {remedy}")


def require_http_url(url: str) -> None:
    """Raise `ValueError`, with the address, if `url` is not a usable HTTP address.

    The message shows only parts that cannot be secret, and not the parser's own message.
    """
    # A text without scheme and port may be something else, such as a part of a password.
    shown = repr(shown_url(url) if ":" in url or not url else MASK)
    if not url.lower().startswith(("http://", "https://")):
        raise ValueError(f"{shown} must begin with http:// or https://")
    try:
        parts = urlsplit(url)
        has_host = bool(parts.hostname)
    except ValueError:
        remedy = "; put an IPv6 address in brackets, http://[::1]:9090/path"
        if may_contain_credentials(url):
            remedy = _REMEDY_OF_LOGIN
        raise ValueError(f"{shown}: invalid host{remedy}") from None
    try:
        _ = parts.port  # the parser checks the port only when it is read
    except ValueError:
        raise ValueError(f"{shown}: invalid port{_remedy_of_port(parts)}") from None
    # Checked in the whole address, because the parser removes line breaks and tabs from the host.
    if not has_host or re.search(r"[\s\x00-\x1f\x7f]", url):
        raise ValueError(
            f"{shown}: missing host, or blank in the address; expected http://host:9090/path"
        )
    # The parser also accepts a colon without digits.
    if parts.port == 0 or parts.netloc.endswith(":"):
        raise ValueError(f"{shown}: invalid port; add one, or remove the colon")
    if parts.fragment:
        raise ValueError(f"{shown}: fragments are not sent; write # as %23")


_REMEDY_OF_LOGIN: Final = (
    "; in a user or password write / as %2F, # as %23, ? as %3F, @ as %40, and in a list , as %2C"
)


def _remedy_of_port(parts: SplitResult) -> str:
    """Return the remedy for an invalid port: use a valid port, or percent-encode a password.

    The parser takes a part of a password for the port if the password is not encoded.
    """
    # If there is a user, the parser has found the host after the user, so the text after the colon
    # really is a port.
    before_path = "" if "@" in parts.netloc else parts.netloc
    if may_contain_credentials(f"{before_path}{parts.path}{parts.query}{parts.fragment}"):
        return _REMEDY_OF_LOGIN
    return f"; use a port from 1 to {_MAX_PORT}"
