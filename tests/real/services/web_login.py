"""TLS, login and client certificate of a part that reads Prometheus's web configuration."""

from __future__ import annotations

import base64
import ssl
from typing import TYPE_CHECKING

import bcrypt
import yaml

from tests.real.services import web

if TYPE_CHECKING:
    from pathlib import Path

    from tests.real.services.certificates import Authority

USERNAME = "gpuledger"


class WebLogin:
    """A web configuration that is replaced while its part runs, and a client that can log in."""

    def __init__(
        self, file: Path, *, certificate: str, requires_client_certificates: bool = False
    ) -> None:
        """Set the file, the certificate's host name, and whether clients present certificates."""
        self._file, self._certificate, self._requires_client_certificates = (
            file,
            certificate,
            requires_client_certificates,
        )

    def exchange(self, authority: Authority, *, password: str) -> None:
        """From now on present a certificate of this authority, and require this password."""
        pair = authority.issue(self._certificate)
        tls = {"cert_file": str(pair.certificate), "key_file": str(pair.key)}
        self._context = ssl.create_default_context(cafile=str(authority.certificate))
        if self._requires_client_certificates:
            tls["client_auth_type"] = "RequireAndVerifyClientCert"
            tls["client_ca_file"] = str(authority.certificate)
            client = authority.issue("tests")
            self._context.load_cert_chain(client.certificate, client.key)
        login = base64.b64encode(f"{USERNAME}:{password}".encode()).decode()
        self._headers = {"Authorization": f"Basic {login}"}
        hashed = bcrypt.hashpw(password.encode(), bcrypt.gensalt(4)).decode()
        config = {"tls_server_config": tls, "basic_auth_users": {USERNAME: hashed}}
        # It is read again for each connection and each request.
        new = self._file.with_suffix(".new")
        new.write_text(yaml.safe_dump(config))
        new.replace(self._file)

    def fetch(self, url: str) -> web.Answer:
        """Return the response for a page."""
        return web.fetch(url, headers=self._headers, context=self._context)
