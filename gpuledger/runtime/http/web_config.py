"""The web configuration file, in the format of Prometheus' exporter-toolkit: TLS, users, headers.

Here the file is read, every mistake in it named by file and field, and TLS set up as it says. Who
may see which page is decided in `auth`.
"""

import re
import ssl
from collections.abc import Mapping
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import msgspec
import yaml

from gpuledger.certificates import (
    Validity,
    authorities_of,
    load_own,
    naming,
    require_authorities,
)
from gpuledger.codec import explain_invalid
from gpuledger.errors import UserError
from gpuledger.settings.sources import explain_yaml
from gpuledger.small_files import read_small_file
from gpuledger.texts import shorten_middle

_HASH: Final = re.compile(r"\$2[abxy]\$(\d\d)\$[./A-Za-z0-9]{53}")
_MAX_COST: Final = 16
_MAX_BYTES: Final = 1024 * 1024
"""Of the file: users are some 80 bytes each."""
_HEADER_VALUE: Final = re.compile(r"([!-~]([ -~]*[!-~])?)?")
_UNOFFERED: Final = {
    "tls_server_config.curve_preferences": "Python cannot choose curves; leave it out",
    "tls_server_config.cert": "give the certificate in a file, cert_file",
    "tls_server_config.key": "give the key in a file, key_file",
    "tls_server_config.client_ca": "give the authorities in a file, client_ca_file",
    "rate_limit": "requests are not limited by rate; leave it out",
}
Version = Literal["TLS12", "TLS13"]
ClientAuth = Literal["", "NoClientCert", "VerifyClientCertIfGiven", "RequireAndVerifyClientCert"]


Header = Literal[
    "Content-Security-Policy",
    "Strict-Transport-Security",
    "X-Content-Type-Options",
    "X-Frame-Options",
    "X-XSS-Protection",
]


class TlsServerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How connections are protected; paths are relative to the file."""

    cert_file: str
    """The server's certificate with its chain, PEM."""
    key_file: str
    """Its key, PEM."""
    client_auth_type: ClientAuth = ""
    """Whether a client must show a certificate."""
    client_ca_file: str = ""
    """Authorities of the clients' certificates, PEM."""
    client_allowed_sans: list[str] = []
    """Names of which a client's certificate must hold one; empty means any name."""
    min_version: Version = "TLS12"
    """The oldest version that is spoken."""
    max_version: Version = "TLS13"
    """The newest version that is spoken."""
    cipher_suites: list[str] = []
    """Suites of TLS 1.2 by their IANA names; empty means OpenSSL's choice."""
    prefer_server_cipher_suites: bool = True
    """Whether the server's order of suites counts."""

    @property
    def requests_certificates(self) -> bool:
        """Whether clients' certificates are looked at."""
        return self.client_auth_type not in ("", "NoClientCert")

    @property
    def requires_clients(self) -> bool:
        """Whether a client without a certificate is refused."""
        return self.client_auth_type == "RequireAndVerifyClientCert"

    def check(self) -> None:
        """Raise `ValueError` naming the field where fields contradict each other."""
        if self.requests_certificates and not self.client_ca_file:
            raise ValueError(
                f"tls_server_config.client_auth_type {self.client_auth_type} needs client_ca_file"
            )
        if self.client_ca_file and not self.requests_certificates:
            raise ValueError(
                "tls_server_config.client_ca_file is without effect: client_auth_type"
                " RequireAndVerifyClientCert asks clients for a certificate"
            )
        if self.client_allowed_sans and not self.requests_certificates:
            raise ValueError(
                "tls_server_config.client_allowed_sans is without effect: client_auth_type"
                " RequireAndVerifyClientCert asks clients for a certificate"
            )
        if self.min_version > self.max_version:
            raise ValueError("tls_server_config.min_version is newer than max_version")

    def find_forbidden(self, certificate: Mapping[str, Any]) -> str | None:
        """Return why a client may not see a page; `None` where it may, by its certificate."""
        if not certificate:
            return "a client certificate is needed" if self.requires_clients else None
        # A name counts wherever a certificate is shown, also where none would be needed.
        names = {_comparable(kind, name) for kind, name in certificate.get("subjectAltName", ())}
        allowed = {_comparable("", name) for name in self.client_allowed_sans}
        is_allowed = not allowed or bool(names & allowed)
        return None if is_allowed else "the client certificate has none of the allowed names"


class HttpServerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How HTTP is spoken."""

    http2: bool = True
    """Accepted and without effect: only HTTP/1.1 is spoken."""
    headers: dict[Header, str] = {}
    """Headers of each answer."""


class WebConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The whole file."""

    tls_server_config: TlsServerConfig | None = None
    """Absent means plain HTTP."""
    http_server_config: HttpServerConfig = HttpServerConfig()
    """HTTP."""
    basic_auth_users: dict[Annotated[str, msgspec.Meta(pattern="^[^:]+$")], str] = {}
    """Names with the bcrypt hash of their passwords; empty means that nobody is asked."""

    @property
    def authenticates_everybody(self) -> bool:
        """Whether nobody sees the pages without a password or a certificate."""
        tls = self.tls_server_config
        return bool(self.basic_auth_users) or (tls is not None and tls.requires_clients)

    def with_whole_paths(self, folder: Path) -> "WebConfig":
        """Return the configuration with the paths of files that are relative to a folder."""
        tls = self.tls_server_config
        if tls is None:
            return self
        whole = {
            name: str(folder / getattr(tls, name)) if getattr(tls, name) else ""
            for name in ("cert_file", "key_file", "client_ca_file")
        }
        return msgspec.structs.replace(
            self, tls_server_config=msgspec.structs.replace(tls, **whole)
        )


def read_web_config(file: Path) -> WebConfig:
    """Return the configuration in the file; raises `UserError` naming file and field.

    One that protects nothing is a mistake, as is a file that is being written and still empty: no
    password may end by chance.
    """
    try:
        loaded: Any = yaml.safe_load(read_small_file(file, max_bytes=_MAX_BYTES).decode())
    except OSError as error:
        raise UserError(f"http.web_config_file: cannot read {file}: {error.strerror}") from error
    except yaml.YAMLError as error:
        mistake = explain_yaml(error)
        raise UserError(f"http.web_config_file: {file} is no YAML: {mistake}") from error
    except ValueError as error:  # not UTF-8, or a date that is none
        raise UserError(f"http.web_config_file: {file} is no YAML in UTF-8") from error
    except RecursionError as error:
        raise UserError(f"http.web_config_file: {file} is nested too deep") from error
    raw = {} if loaded is None else loaded
    for section, value in raw.items() if isinstance(raw, dict) else ():
        inner = value if isinstance(value, dict) else ()
        for field in (str(section), *(f"{section}.{name}" for name in inner)):
            # Said before msgspec does, which knows a field that it has not got as unknown alone.
            if field in _UNOFFERED:
                raise UserError(f"{file}: {field}: {_UNOFFERED[field]}")
    try:
        config = msgspec.convert(raw, WebConfig)
        _check(config)
    except msgspec.ValidationError as error:
        mistake = shorten_middle(explain_invalid(WebConfig, error))
        raise UserError(f"{file}: {mistake}") from error
    except ValueError as error:
        raise UserError(f"{file}: {shorten_middle(str(error))}") from error
    return config.with_whole_paths(file.parent)


def refuse_loss(before: WebConfig, after: WebConfig) -> None:
    """Raise `UserError` where a change would let everybody see the pages of whom each was asked.

    A file that is being written may for a moment lack what stands at its end.
    """
    if before.authenticates_everybody and not after.authenticates_everybody:
        raise UserError(
            "basic_auth_users: nobody would be asked for a password or a certificate any more,"
            " which needs a restart"
        )


def _check(config: WebConfig) -> None:
    """Raise `ValueError` naming a field that has no effect, or another one than it seems."""
    for name, hashed in config.basic_auth_users.items():
        found = _HASH.fullmatch(hashed)
        if not found:
            raise ValueError(
                f"basic_auth_users.{name}: expected a bcrypt hash, as `htpasswd -nBC 10 {name}`"
                " writes it behind the colon"
            )
        if int(found[1]) > _MAX_COST:
            raise ValueError(
                f"basic_auth_users.{name}: cost {found[1]} would take minutes at each log-in;"
                f" the most is {_MAX_COST}"
            )
    if config.tls_server_config:
        config.tls_server_config.check()
    for name, value in config.http_server_config.headers.items():
        if not _HEADER_VALUE.fullmatch(value):
            raise ValueError(
                f"http_server_config.headers.{name}: {value!r} holds what no header may;"
                " leave out line ends, control characters and what is not ASCII"
            )
    if config.tls_server_config is None and not config.basic_auth_users:
        raise ValueError(
            "it protects nothing, as it has neither tls_server_config nor basic_auth_users; take"
            " http.web_config_file out of the settings where everybody may see the pages"
        )


def _comparable(kind: str, name: str) -> str:
    """Return a name as it is compared: OpenSSL writes an IPv6 address out, people do not."""
    if kind in ("IP Address", ""):
        with suppress(ValueError):
            return str(ip_address(name.strip()))
    return name


_VERSIONS: Final = {"TLS12": ssl.TLSVersion.TLSv1_2, "TLS13": ssl.TLSVersion.TLSv1_3}
_SUITE: Final = re.compile(r"TLS_(?:(ECDHE|DHE)_)?(RSA|ECDSA)_WITH_(\w+)")


def make_context(config: TlsServerConfig) -> tuple[ssl.SSLContext, list[Validity]]:
    """Return a server's context, and how long its certificates are valid.

    Raises `UserError` naming the field whose file cannot be used.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = _VERSIONS[config.min_version]
    context.maximum_version = _VERSIONS[config.max_version]
    context.options |= ssl.OP_NO_RENEGOTIATION
    if not config.prefer_server_cipher_suites:
        context.options &= ~ssl.OP_CIPHER_SERVER_PREFERENCE
    if config.cipher_suites:
        # Those of TLS 1.2; the suites of 1.3 are always on, as in Go.
        suites = filter(None, map(_openssl_name, config.cipher_suites))
        try:
            context.set_ciphers(":".join(suites) or "ECDHE")
        except ssl.SSLError as error:
            shown = shorten_middle(", ".join(config.cipher_suites))
            mistake = f"tls_server_config.cipher_suites: OpenSSL has none of {shown}"
            raise UserError(mistake) from error
    validities = load_own(
        context,
        prefix="tls_server_config.",
        cert_file=Path(config.cert_file),
        key_file=Path(config.key_file),
    )
    if config.requests_certificates:
        # A client without one is refused page by page: the kubelet has none to show for its probes.
        context.verify_mode = ssl.CERT_OPTIONAL
        setting, file = "tls_server_config.client_ca_file", Path(config.client_ca_file)
        require_authorities(setting=setting, file=file)
        with naming(setting, file):
            context.load_verify_locations(file)
        validities += authorities_of(context, setting=setting, file=file)
    return context, validities


def _openssl_name(name: str) -> str | None:
    """Return OpenSSL's name of a suite; `None` for one of TLS 1.3."""
    found = _SUITE.fullmatch(name)
    if found is None:
        if name.startswith("TLS_"):
            return None
        raise UserError(
            f"tls_server_config.cipher_suites: there is no suite {shorten_middle(repr(name))}"
        )
    exchange, signature, rest = found.groups()
    cipher = rest.replace("AES_", "AES").replace("_CBC", "").replace("_", "-")
    cipher = cipher.removesuffix("-SHA256") if "POLY1305" in cipher else cipher
    key = f"{exchange}-{signature}-" if exchange else ""
    return f"{key}{cipher}"
