"""Alertmanager, alone and without a cluster."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from tests.real.services import web
from tests.real.services.ports import free_ports
from tests.real.services.process import Part
from tests.real.services.web_login import USERNAME, WebLogin

if TYPE_CHECKING:
    from tests.real.services.certificates import Authority

CONFIG = """
route:
  receiver: nobody
  group_wait: 0s
receivers:
  - name: nobody
"""


class AlertmanagerApi:
    """An Alertmanager to talk to, wherever it runs."""

    def __init__(self, *, url: str) -> None:
        self.url = url.rstrip("/")

    def alerts(self) -> list[Any]:
        """Return the alerts that it holds, suppressed ones included."""
        found: list[Any] = self.fetch("/api/v2/alerts").json()
        return found

    def fetch(self, path: str) -> web.Answer:
        """Ask for a page."""
        return web.fetch(self.url + path)

    def await_alerts(self, alertname: str, *, deadline_seconds: float = 10) -> list[Any]:
        """Ask until there are alerts of that name; raises TimeoutError that names it."""

        def of_that_name() -> list[Any]:
            return [alert for alert in self.alerts() if alert["labels"]["alertname"] == alertname]

        return web.await_some(of_that_name, what=alertname, deadline_seconds=deadline_seconds)


class Alertmanager(Part, AlertmanagerApi):
    """An Alertmanager that the tests own."""

    name = "alertmanager"

    def __init__(
        self, *, binary: Path, folder: Path, config: str = CONFIG, arguments: Sequence[str] = ()
    ) -> None:
        Part.__init__(self, folder=folder)
        self._binary, self._arguments = binary, arguments
        self.port = free_ports(1)[0]
        self.config_file = folder / "alertmanager.yml"
        folder.mkdir(parents=True, exist_ok=True)
        self.config_file.write_text(config)
        AlertmanagerApi.__init__(self, url=f"http://127.0.0.1:{self.port}")

    @override
    def argv(self) -> list[str | Path]:
        return [
            self._binary,
            f"--config.file={self.config_file}",
            f"--storage.path={self.folder / 'data'}",
            f"--web.listen-address=127.0.0.1:{self.port}",
            # An empty address: it would else look for peers on a fixed port.
            "--cluster.listen-address=",
            *self._arguments,
        ]

    @override
    def is_ready(self) -> bool:
        return self.fetch("/-/ready").status == 200


class SecuredAlertmanager(Alertmanager):
    """An Alertmanager with TLS that asks for a user and a client's certificate.

    All of it is exchanged while it runs.
    """

    name = "secured-alertmanager"
    username = USERNAME

    def __init__(self, *, binary: Path, folder: Path, authority: Authority, password: str) -> None:
        web_config = folder / "web.yml"
        super().__init__(
            binary=binary, folder=folder, arguments=[f"--web.config.file={web_config}"]
        )
        self.url = f"https://127.0.0.1:{self.port}"
        self._login = WebLogin(web_config, certificate="alertmanager", asks_clients=True)
        self.exchange(authority, password=password)

    def exchange(self, authority: Authority, *, password: str) -> None:
        """Show a certificate of this authority from now on, and ask for this password."""
        self._login.exchange(authority, password=password)

    @override
    def fetch(self, path: str) -> web.Answer:
        return self._login.fetch(self.url + path)
