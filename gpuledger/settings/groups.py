"""The groups of settings that several deployables have, and what their addresses must look like.

A deployable's own settings stand beside it. No socket is opened here.
"""

import re
from pathlib import Path
from typing import Annotated, Final, Literal
from urllib.parse import SplitResult, urlsplit

import msgspec
from typing_extensions import override

from gpuledger.records.base import MAX_CLUSTER_NAME_LENGTH, ClusterName
from gpuledger.settings.secret import MASK, Secret, may_part_a_login, shown_brokers, shown_url
from gpuledger.texts import shorten

Seconds = Annotated[float, msgspec.Meta(gt=0)]
_LONGEST_HEARTBEAT_SECONDS: Final = 3.0
# Kafka's topics have at most 249 characters, of which ours append 24; metrics and logs show them.
_MAX_TOPIC_PREFIX: Final = 100
_TOPIC_PREFIX: Final = re.compile(r"[a-zA-Z0-9](?:[a-zA-Z0-9._-]{0,98}[a-zA-Z0-9])?")
# Transactional ids begin with it and keys of records have it; metrics, logs and commands show it.
_MAX_GROUP_NAME: Final = 200
_GROUP_NAME: Final = re.compile(rf"[a-zA-Z0-9._-]{{1,{_MAX_GROUP_NAME}}}")
_SHOWN_CHARACTERS: Final = 40


class ClientCredentialsSettings(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True
):
    """A token endpoint, and the login there (OAuth 2.0, client credentials)."""

    token_url: str = ""
    """Endpoint that gives tokens for client credentials (OAuth 2.0), `https://…`."""
    ca_file: Path | None = None
    """Authorities to trust for that endpoint, PEM; absent means those of the system."""
    client_id: str = ""
    """Name to log in at that endpoint with."""
    client_secret: Secret | None = None
    """Password to log in at that endpoint with."""
    scope: str = ""
    """What is asked for, separated by blanks; empty means what the endpoint gives by itself."""
    parameters: dict[str, str] = {}
    """Further parameters of the request, such as `audience`."""

    def __post_init__(self) -> None:
        """Raise `ValueError` where a token cannot be had by these."""
        if not self.token_url:
            given = ("ca_file", "client_id", "client_secret", "scope", "parameters")
            for name in given:
                if getattr(self, name):
                    raise ValueError(f"{name}: needs token_url too, the endpoint that it is for")
            return
        if not self.token_url.lower().startswith("https://"):
            # Of the value nothing is shown: it may hold a login.
            raise ValueError("token_url: expected https://…, as a secret is sent to it")
        try:
            require_http_url(self.token_url)
        except ValueError as error:
            raise ValueError(f"token_url: {error}") from error
        if may_part_a_login(self.token_url) or "#" in self.token_url:
            raise ValueError(
                "token_url: must have neither a login nor a fragment in it; the login is client_id"
                " and client_secret"
            )
        if not (self.client_id and self.client_secret):
            raise ValueError("token_url: needs client_id and client_secret_file too")
        for name in sorted(_OWN_PARAMETERS & self.parameters.keys()):
            raise ValueError(f"parameters: {name} is none of them; {_OWN_PARAMETERS_REMEDY}")


class OauthSettings(
    ClientCredentialsSettings, frozen=True, kw_only=True, forbid_unknown_fields=True
):
    """Where the token of a login by OAUTHBEARER comes from: a file, or a token endpoint."""

    token: Secret | None = None
    """The token itself, which something else renews in its file, as the kubelet does; the other
    settings are then left out."""

    @override
    def __post_init__(self) -> None:
        """Raise `ValueError` where a token cannot be had by these."""
        if self.token is None:
            super().__post_init__()
        elif self.token_url:
            raise ValueError("token_url: give it or token_file, not both")


_OWN_PARAMETERS: Final = frozenset(
    {"grant_type", "scope", "client_id", "client_secret", "client_assertion"}
)
_OWN_PARAMETERS_REMEDY: Final = "scope, client_id and client_secret_file are settings of their own"


class KafkaSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How to reach the brokers."""

    bootstrap_servers: Annotated[str, msgspec.Meta(min_length=1)] = "localhost:9092"
    """Brokers to ask first, `host:port`, separated by commas."""
    security_protocol: Literal["PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL"] = "PLAINTEXT"
    """How connections are protected."""
    sasl_mechanism: Literal["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512", "OAUTHBEARER"] = (
        "SCRAM-SHA-512"
    )
    """How to log in; only read where the protocol begins with SASL."""
    sasl_username: str = ""
    """Name to log in with."""
    sasl_password: Secret | None = None
    """Password to log in with."""
    oauth: OauthSettings = OauthSettings()
    """Token to log in with; only read where the mechanism is OAUTHBEARER."""
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
    topic_prefix: str = "gpuledger"
    """With what the names of all topics, consumer groups and transactional ids begin; installations
    that share brokers have one each, which all parts of one are given."""
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
        """How often a member sends its group a heartbeat, and how long news of the group takes.

        A third of the session, as Kafka's own clients have it, so that two may be lost on the way.
        """
        return min(_LONGEST_HEARTBEAT_SECONDS, self.session_timeout_seconds / 3)

    @property
    def uses_tokens(self) -> bool:
        """Whether the login is by OAUTHBEARER."""
        return self.security_protocol.startswith("SASL") and self.sasl_mechanism == "OAUTHBEARER"

    def __post_init__(self) -> None:
        """Raise `ValueError` where brokers are misnamed or a combination cannot work."""
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


# What is an address: one to listen on, and those of brokers and receivers.

_ADDRESS: Final = re.compile(
    r"(?:\[(?P<six>[0-9A-Fa-f:.]+)\]|(?P<host>[^\s:\[\]/]*)):(?P<port>\d{1,5})"
)
_BROKER: Final = re.compile(r"(?:\[[0-9A-Fa-f:.]+\]|[\w.-]+):(?P<port>\d{1,5})", re.ASCII)
_MAX_PORT: Final = 65535


def parse_listen(listen: str) -> tuple[str, int]:
    """Take `host:port` or `[ipv6]:port` apart; no host means all interfaces, 0 any free port.

    Raises `ValueError` naming the value where it is neither.
    """
    found = _ADDRESS.fullmatch(listen)
    if not found or int(found["port"]) > _MAX_PORT:
        raise ValueError(f"expected host:port such as 0.0.0.0:9820, got {listen!r}")
    return found["six"] or found["host"] or "0.0.0.0", int(found["port"])  # noqa: S104  # that is what an empty host asks for


def require_topic_prefix(prefix: str) -> None:
    """Raise `ValueError` where names would begin with it that Kafka refuses, or others have."""
    text = f"topic_prefix: {shorten(repr(prefix), _SHOWN_CHARACTERS)}"
    if not _TOPIC_PREFIX.fullmatch(prefix):
        raise ValueError(
            f"{text} cannot begin names of topics; give 1 to {_MAX_TOPIC_PREFIX} of the characters"
            " a-z, A-Z, 0-9, '.', '_' and '-', the first and the last a letter or a digit"
        )


def require_group_name(group: str) -> None:
    """Raise `ValueError` where a consumer group cannot be called so."""
    if not _GROUP_NAME.fullmatch(group):
        raise ValueError(
            f"group: {shorten(repr(group), _SHOWN_CHARACTERS)} is no name of a consumer group;"
            f" give 1 to {_MAX_GROUP_NAME} of the characters a-z, A-Z, 0-9, '.', '_' and '-'"
        )


def require_cluster_name(cluster: str) -> None:
    """Raise `ValueError` where a cluster cannot be called so: its name begins keys on Kafka."""
    try:
        msgspec.convert(cluster, ClusterName)
    except msgspec.ValidationError:
        raise ValueError(
            f"cluster: {shorten(repr(cluster), _SHOWN_CHARACTERS)} is no name of a cluster; give 1"
            f" to {MAX_CLUSTER_NAME_LENGTH} of the characters a-z, 0-9 and '-', the first and the"
            " last a letter or a digit (a DNS label)"
        ) from None


def require_brokers(servers: str) -> None:
    """Raise `ValueError` naming the value where it is not `host:port[,host:port…]`.

    An IPv6 address stands in brackets; blanks around a broker are allowed, the client strips them.
    """
    for server in servers.split(","):
        found = _BROKER.fullmatch(server.strip())
        if found and 0 < int(found["port"]) <= _MAX_PORT:
            continue
        remedy = "expected host:port[,host:port…]"
        if may_part_a_login(servers):
            remedy += "; user and password are kafka.sasl_username and kafka.sasl_password"
        elif "://" in servers:
            remedy += " without a scheme; TLS and login are kafka.security_protocol"
        raise ValueError(f"bootstrap_servers {shown_brokers(servers)!r}: {remedy}")


def require_http_url(url: str) -> None:
    """Raise `ValueError` naming the value where no request can be sent to it.

    Of the value only what cannot be secret is named, and the parser's own words are left out.
    """
    # Without scheme and port it may be a part of another one, such as of its password.
    shown = repr(shown_url(url) if ":" in url or not url else MASK)
    if not url.lower().startswith(("http://", "https://")):
        raise ValueError(f"{shown} must begin with http:// or https://")
    try:
        parts = urlsplit(url)
        has_host = bool(parts.hostname)
    except ValueError:
        remedy = ": an IPv6 address stands in brackets, http://[::1]:9090/path"
        if may_part_a_login(url):
            remedy = _REMEDY_OF_LOGIN
        raise ValueError(f"{shown} has a host that is none{remedy}") from None
    try:
        _ = parts.port  # the parser looks at it no earlier
    except ValueError:
        raise ValueError(f"{shown} has a port that is none{_remedy_of_port(parts)}") from None
    # Of all of it: the parser leaves line breaks and tabs out before it looks at the host.
    if not has_host or re.search(r"[\s\x00-\x1f\x7f]", url):
        raise ValueError(
            f"{shown} names no host, or has a blank in it: expected one such as http://host:9090/path"
        )
    # A colon without digits behind it is no port to the parser either.
    if parts.port == 0 or parts.netloc.endswith(":"):
        raise ValueError(f"{shown} has a port that is none: write one, or leave the colon out")
    if parts.fragment:
        raise ValueError(f"{shown} has a # in it, behind which nothing is sent: write it as %23")


_REMEDY_OF_LOGIN: Final = (
    ": in a user or password write / as %2F, # as %23, ? as %3F, @ as %40, and in a list , as %2C"
)


def _remedy_of_port(parts: SplitResult) -> str:
    """Return what to write where no port is: in its place, or where a password hides the host."""
    # With a user in it the parser has found the host behind it, so that the port is meant as one.
    before_path = "" if "@" in parts.netloc else parts.netloc
    if may_part_a_login(f"{before_path}{parts.path}{parts.query}{parts.fragment}"):
        return _REMEDY_OF_LOGIN
    return f": give one from 1 to {_MAX_PORT}"
