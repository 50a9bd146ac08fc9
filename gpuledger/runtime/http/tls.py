"""TLS for the health pages: a context from the web configuration.

Nothing here knows who may see which page.
"""

import re
import ssl
from pathlib import Path
from typing import Final

from gpuledger.certificates import (
    Validity,
    authorities_of,
    load_own,
    naming,
    require_authorities,
)
from gpuledger.decode_errors import shorten_middle
from gpuledger.errors import UserError
from gpuledger.runtime.http.web_config import TlsServerConfig

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
        _set_suites(context, config.cipher_suites)
    validities = load_own(
        context,
        prefix="tls_server_config.",
        cert_file=Path(config.cert_file),
        key_file=Path(config.key_file),
    )
    if config.asks_clients:
        # A client without one is refused page by page: the kubelet has none to show for its probes.
        context.verify_mode = ssl.CERT_OPTIONAL
        setting, file = "tls_server_config.client_ca_file", Path(config.client_ca_file)
        require_authorities(setting=setting, file=file)
        with naming(setting, file):
            context.load_verify_locations(file)
        validities += authorities_of(context, setting=setting, file=file)
    return context, validities


def _set_suites(context: ssl.SSLContext, names: list[str]) -> None:
    """Set the suites of TLS 1.2; those of 1.3 are always on, as in Go."""
    suites = [_openssl_name(name) for name in names]
    try:
        context.set_ciphers(":".join(suite for suite in suites if suite) or "ECDHE")
    except ssl.SSLError as error:
        shown = shorten_middle(", ".join(names))
        raise UserError(f"tls_server_config.cipher_suites: OpenSSL has none of {shown}") from error


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
