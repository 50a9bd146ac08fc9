"""One Alertmanager without a cluster."""

from __future__ import annotations

from typing import Any

from tests.real.services import web
from tests.real.services.web_part import SecuredWebPart, WebPart

CONFIG = """
route:
  receiver: nobody
  group_wait: 0s
receivers:
  - name: nobody
"""


class AlertmanagerApi:
    """An Alertmanager to send requests to, wherever it runs."""

    def __init__(self, *, url: str) -> None:
        self.url = url.rstrip("/")

    def alerts(self) -> list[Any]:
        """Return its alerts, including suppressed ones."""
        found: list[Any] = self.fetch("/api/v2/alerts").json()
        return found

    def fetch(self, path: str) -> web.Answer:
        """Fetch a page."""
        return web.fetch(self.url + path)

    def await_alerts(self, alertname: str, *, deadline_seconds: float = 30) -> list[Any]:
        """Fetch until there are alerts with this name; raises a TimeoutError that contains it."""

        def of_that_name() -> list[Any]:
            return [alert for alert in self.alerts() if alert["labels"]["alertname"] == alertname]

        return web.await_some(of_that_name, what=alertname, deadline_seconds=deadline_seconds)


class Alertmanager(WebPart, AlertmanagerApi):
    """An Alertmanager that the tests own."""

    name = "alertmanager"
    config = CONFIG
    storage_option = "--storage.path"
    # An empty address; otherwise it would look for peers on a fixed port.
    arguments = ("--cluster.listen-address=",)


class SecuredAlertmanager(SecuredWebPart, Alertmanager):
    """An Alertmanager with TLS that requires a user and a client certificate.

    All of these can be replaced while it runs.
    """

    name = "secured-alertmanager"
    certificate = "alertmanager"
    requires_client_certificates = True
