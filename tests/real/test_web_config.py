"""A component behind TLS and a password, scraped by a real Prometheus."""

from __future__ import annotations

import json
import socket
import ssl
from typing import TYPE_CHECKING

import bcrypt

from tests.real.end_to_end.components import Component
from tests.real.services.certificates import Authority
from tests.real.services.web import await_some

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.real.services.prometheus import Prometheus

WEB_CONFIG = """
tls_server_config:
  cert_file: server.pem
  key_file: server-key.pem
  client_auth_type: RequireAndVerifyClientCert
  client_ca_file: ca.pem
  min_version: TLS13
basic_auth_users: {{prometheus: "{hashed}"}}
"""
JOB = """
  - job_name: {name}
    scheme: https
    scrape_interval: 1s
    static_configs: [{{targets: ["{target}"]}}]
    basic_auth: {{username: prometheus, password: {password}}}
    tls_config:
      ca_file: {folder}/ca.pem
{client}
"""
CLIENT = "      cert_file: {folder}/prometheus.pem\n      key_file: {folder}/prometheus-key.pem"


def test_prometheus_scrapes_with_certificate_and_password_and_not_without_either(
    start_prometheus: Callable[..., Prometheus], tmp_path: Path
) -> None:
    authority = Authority(folder=tmp_path)
    authority.issue("server")
    authority.issue("prometheus")
    hashed = bcrypt.hashpw(b"right", bcrypt.gensalt(5)).decode()
    (tmp_path / "web.yml").write_text(WEB_CONFIG.format(hashed=hashed))
    agent = Component(
        name="agent",
        command=["gpuledger", "agent", "--no-kafka", "--source", "simulated"],
        folder=tmp_path,
        environment={"HTTP__WEB_CONFIG_FILE": str(tmp_path / "web.yml")},
    )
    target = agent.health.removeprefix("http://")
    client = CLIENT.format(folder=tmp_path)
    jobs = [
        JOB.format(name=name, target=target, password=password, folder=tmp_path, client=shown)
        for name, password, shown in (
            ("let-in", "right", client),
            ("wrong-password", "wrong", client),
            ("no-certificate", "right", ""),
        )
    ]
    agent.start()
    try:
        await_some(lambda: [1] if _listens(target) else [], what="agent", deadline_seconds=120)
        prometheus = start_prometheus(config="scrape_configs:" + "".join(jobs))
        prometheus.await_query('up{job="let-in"} == 1', deadline_seconds=120)
        prometheus.await_query("DCGM_FI_DEV_GPU_TEMP", deadline_seconds=120)
        refused = prometheus.await_query("count(up == 0) == 2", deadline_seconds=120)
        assert refused[0]["value"][1] == "2"
        assert not prometheus.query('up{job!="let-in"} == 1')
    finally:
        assert agent.stop() == 0, agent.log_tail()
    # Prometheus stayed connected to the end: neither the end nor a rejected client is an error.
    lines = map(json.loads, agent.log.read_text().splitlines())
    # A simulated GPU that answers late on a busy machine has lines of its own.
    loud = [line for line in lines if line["level"] != "info"]
    assert [line for line in loud if not line["logger"].startswith("gpuledger_agent.gpu.")] == []


def _listens(target: str) -> bool:
    """Return whether a TLS handshake succeeds, with any client."""
    host, _, port = target.partition(":")
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        with socket.create_connection((host, int(port)), 5) as plain:
            context.wrap_socket(plain).close()
    except OSError:
        return False
    return True
