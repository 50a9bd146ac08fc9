"""A server of Prometheus's family: a configuration file, an address, and a web configuration.

This module starts Prometheus and Alertmanager in the same way; their own modules send requests.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from typing_extensions import override

from tests.real.services import web
from tests.real.services.ports import free_ports
from tests.real.services.process import Part
from tests.real.services.web_login import USERNAME, WebLogin

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from tests.real.services.certificates import Authority


class WebPart(Part):
    """A server that the tests own, with its own configuration file and port."""

    config: ClassVar[str]
    """The content of the file if the test gives none."""
    storage_option: ClassVar[str]
    """The option for its data folder."""
    arguments: ClassVar[Sequence[str]] = ()
    """Further arguments."""

    def __init__(
        self,
        *,
        binary: Path,
        folder: Path,
        config: str | None = None,
        arguments: Sequence[str] = (),
    ) -> None:
        super().__init__(folder=folder)
        self._binary, self._arguments = binary, arguments
        self.port = free_ports(1)[0]
        self.url = f"http://127.0.0.1:{self.port}"
        self.config_file = folder / f"{self.name}.yml"
        folder.mkdir(parents=True, exist_ok=True)
        self.config_file.write_text(self.config if config is None else config)

    @override
    def argv(self) -> list[str | Path]:
        return [
            self._binary,
            f"--config.file={self.config_file}",
            f"{self.storage_option}={self.folder / 'data'}",
            f"--web.listen-address=127.0.0.1:{self.port}",
            *self.arguments,
            *self._arguments,
        ]

    def fetch(self, path: str) -> web.Answer:
        """Fetch one of its paths."""
        return web.fetch(self.url + path)

    @override
    def is_ready(self) -> bool:
        return self.fetch("/-/ready").status == 200


class SecuredWebPart(WebPart):
    """A server with TLS that requires a user; all of this can be replaced while it runs."""

    username = USERNAME
    certificate: ClassVar[str]
    """The name in its certificate."""
    requires_client_certificates: ClassVar[bool] = False
    """Whether clients present a certificate as well."""

    def __init__(self, *, binary: Path, folder: Path, authority: Authority, password: str) -> None:
        web_config = folder / "web.yml"
        super().__init__(
            binary=binary, folder=folder, arguments=[f"--web.config.file={web_config}"]
        )
        self.url = f"https://127.0.0.1:{self.port}"
        self._login = WebLogin(
            web_config,
            certificate=self.certificate,
            requires_client_certificates=self.requires_client_certificates,
        )
        self.exchange(authority, password=password)

    def exchange(self, authority: Authority, *, password: str) -> None:
        """From now on present a certificate of this authority, and require this password."""
        self._login.exchange(authority, password=password)

    @override
    def fetch(self, path: str) -> web.Answer:
        return self._login.fetch(self.url + path)
