"""Prometheus 3 with its remote-write receiver, and VictoriaMetrics, which answers PromQL too."""

from __future__ import annotations

import urllib.parse
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from typing_extensions import override

from tests.real.services import web
from tests.real.services.ports import free_ports
from tests.real.services.process import Part
from tests.real.services.web_part import SecuredWebPart, WebPart

if TYPE_CHECKING:
    from collections.abc import Sequence

CONFIG = """
global:
  scrape_interval: 1s
  evaluation_interval: 1s
"""


class PrometheusApi:
    """A server that answers PromQL, wherever it runs."""

    remote_write_path = "/api/v1/write"

    def __init__(self, *, url: str) -> None:
        self.url = url.rstrip("/")

    @property
    def remote_write_url(self) -> str:
        """The address for remote-write senders."""
        return self.url + self.remote_write_path

    def fetch(self, path: str) -> web.Answer:
        """Fetch one of its paths."""
        return web.fetch(self.url + path)

    def query(self, promql: str) -> list[Any]:
        """Return the result of an instant query: a list of metric and value."""
        answer = self.fetch(f"/api/v1/query?{urllib.parse.urlencode({'query': promql})}")
        reported = answer.json()
        assert reported["status"] == "success", reported
        found: list[Any] = reported["data"]["result"]
        return found

    def await_query(self, promql: str, *, deadline_seconds: float = 30) -> list[Any]:
        """Query until the result is not empty; raises TimeoutError that contains the query."""
        return web.await_some(
            lambda: self.query(promql), what=promql, deadline_seconds=deadline_seconds
        )


class VictoriaMetricsApi(PrometheusApi):
    """A VictoriaMetrics to send requests to, wherever it runs."""

    @override
    def query(self, promql: str) -> list[Any]:
        # It remembers for ten seconds that a series was missing; a flush makes it forget.
        web.fetch(f"{self.url}/internal/force_flush")
        return super().query(promql)


class Prometheus(WebPart, PrometheusApi):
    """A Prometheus that the tests own."""

    name = "prometheus"
    config = CONFIG
    storage_option = "--storage.tsdb.path"
    arguments: ClassVar[Sequence[str]] = (
        "--web.enable-remote-write-receiver",
        "--web.enable-lifecycle",
        "--enable-feature=created-timestamp-zero-ingestion,metadata-wal-records",
    )


class Prometheus2(Prometheus):
    """A Prometheus without remote-write 2.0."""

    name = "prometheus-2"
    arguments = ("--web.enable-remote-write-receiver",)


class SecuredPrometheus(SecuredWebPart, Prometheus):
    """A Prometheus with TLS that requires a user; both can be replaced while it runs."""

    name = "secured-prometheus"
    certificate = "prometheus"


class VictoriaMetrics(Part, VictoriaMetricsApi):
    """A single-node VictoriaMetrics that the tests own."""

    name = "victoria-metrics"

    def __init__(self, *, binary: Path, folder: Path, arguments: Sequence[str] = ()) -> None:
        Part.__init__(self, folder=folder)
        self._binary = binary
        self._arguments = arguments
        self.port = free_ports(1)[0]
        VictoriaMetricsApi.__init__(self, url=f"http://127.0.0.1:{self.port}")

    @override
    def argv(self) -> list[str | Path]:
        return [
            self._binary,
            f"-httpListenAddr=127.0.0.1:{self.port}",
            f"-storageDataPath={self.folder / 'data'}",
            # Otherwise queries would hide the last 30 s.
            "-search.latencyOffset=0s",
            "-memory.allowedPercent=5",
            *self._arguments,
        ]

    @override
    def is_ready(self) -> bool:
        return web.fetch(f"{self.url}/health").status == 200
