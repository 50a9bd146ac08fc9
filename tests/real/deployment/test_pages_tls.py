"""HTTP endpoints with TLS and login: as rendered, probed like a kubelet, scraped as documented."""

from __future__ import annotations

import base64
import re
import ssl
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import bcrypt
import pytest
import yaml

from tests.real.deployment.chart import BROKERS, REPORTS, ROWS, WEB, render, with_secrets
from tests.real.deployment.installation import eventually
from tests.real.deployment.rendering import Rendering
from tests.real.end_to_end.components import Component, refuse_stray_settings
from tests.real.services import web
from tests.real.services.certificates import Authority
from tests.unit.deployment.components import ROOT

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.real.deployment.rendering import Workload
    from tests.real.services.cluster_tools import Helm
    from tests.real.services.prometheus import Prometheus

PASSWORD: Final = "right"
PROBES: Final = ("startupProbe", "livenessProbe", "readinessProbe")
OF_NO_CLUSTER: Final = {
    "gpuledger-agent": {"NODE_NAME": "node-1", "SOURCE": "simulated"},
    "gpuledger-podwatch": {"KUBERNETES__URL": "http://127.0.0.1:1", "LEASE__ENABLED": "false"},
}
"""Settings of the components that cannot start without a node or an API server."""


def documented(key: str) -> Any:  # noqa: ANN401  # any YAML
    """Return the block of docs/guides/kubernetes.md on TLS that has a key."""
    page = (ROOT / "docs" / "guides" / "kubernetes.md").read_text()
    section = page.partition("### Scrape over TLS with a password\n")[2].partition("\n### ")[0]
    blocks = map(yaml.safe_load, re.findall(r"```yaml\n(.*?)```", section, re.DOTALL))
    (found,) = [block for block in blocks if key in block]
    return found


def filled_in_by(authority: Authority) -> dict[str, str]:
    """Return the content of the Secret, as its user creates it."""
    pair = authority.issue("gpuledger")
    hashed = bcrypt.hashpw(PASSWORD.encode(), bcrypt.gensalt(5)).decode()
    web = documented("tls_server_config")
    web["basic_auth_users"] = dict.fromkeys(web["basic_auth_users"], hashed)
    files = {
        "tls.crt": pair.certificate.read_bytes(),
        "tls.key": pair.key.read_bytes(),
        "web.yml": yaml.safe_dump(web).encode(),
    }
    return {name: base64.b64encode(content).decode() for name, content in files.items()}


def start(workload: Workload, folder: Path) -> Component:
    laid_out = workload.lay_out(folder)
    environment = {
        name.removeprefix("GPULEDGER_"): value
        for name, value in laid_out.environment.items()
        if name.startswith("GPULEDGER_")
    }
    if workload.command[1] != "reports":  # it has no such setting
        environment["KAFKA__BOOTSTRAP_SERVERS"] = "127.0.0.1:1"
    made = Component(
        name=workload.name,
        command=laid_out.argv,
        folder=folder,
        environment={**environment, **OF_NO_CLUSTER.get(workload.name, {})},
    )
    made.health = made.health.replace("http://", "https://")
    made.start()
    return made


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(folder=tmp_path / "certificates")


def is_answered(url: str, authority: Authority, wanted: set[int]) -> bool:
    return status(url, authority) in wanted


@pytest.fixture
def filled_in(authority: Authority, helm: Helm) -> Rendering:
    refuse_stray_settings()
    rendering = with_secrets(render(BROKERS, WEB, REPORTS, ROWS))
    content = filled_in_by(authority)
    secrets = [
        {**made, "data": content} if made["metadata"]["name"] == "gpuledger-web" else made
        for made in rendering.objects
    ]
    return Rendering(objects=secrets)


def status(url: str, authority: Authority, **headers: str) -> int:
    """Return the status of a page, 0 if there is none yet."""
    context = ssl.create_default_context(cafile=str(authority.certificate))
    try:
        return web.fetch(url, headers=headers, context=context).status
    except OSError:
        return 0


def test_every_workload_answers_its_probes_over_tls_and_metrics_only_after_a_login(
    filled_in: Rendering, authority: Authority, tmp_path: Path
) -> None:
    started: dict[str, Component] = {}
    login = {"Authorization": "Basic cHJvbWV0aGV1czpyaWdodA=="}
    try:
        for workload in filled_in.services():
            started[workload.name] = at_work = start(workload, tmp_path / workload.name)
            for name in PROBES:
                requested = workload.container[name]["httpGet"]
                url = f"{requested['scheme'].lower()}{at_work.health.removeprefix('https')}"
                wanted = {200, 503} if requested["path"] == "/readyz" else {200}
                eventually(partial(is_answered, f"{url}{requested['path']}", authority, wanted))
            assert status(f"{at_work.health}/metrics", authority) == 401
            assert status(f"{at_work.health}/metrics", authority, **login) == 200
    finally:
        statuses = {name: component.stop() for name, component in started.items()}

    assert statuses == dict.fromkeys(statuses, 0)


def test_prometheus_scrapes_with_the_documented_configuration(
    filled_in: Rendering,
    authority: Authority,
    tmp_path: Path,
    start_prometheus: Callable[..., Prometheus],
) -> None:
    agent = start(filled_in.workload("gpuledger-agent"), tmp_path / "agent")
    (tmp_path / "password").write_text(PASSWORD)
    lines = yaml.safe_dump(documented("basic_auth"))
    # The tests' authority signs for only one name.
    lines = lines.replace("server_name: gpuledger", "server_name: localhost")
    lines = lines.replace("/etc/prometheus/gpuledger/ca.crt", str(authority.certificate))
    lines = lines.replace("/etc/prometheus/gpuledger/password", str(tmp_path / "password"))
    job = {
        "job_name": "gpuledger",
        "scrape_interval": "1s",
        "static_configs": [{"targets": [agent.health.removeprefix("https://")]}],
        **yaml.safe_load(lines),
    }
    try:
        eventually(lambda: status(f"{agent.health}/livez", authority) == 200)
        prometheus = start_prometheus(config=yaml.safe_dump({"scrape_configs": [job]}))
        prometheus.await_query("up == 1", deadline_seconds=120)
    finally:
        assert agent.stop() == 0, agent.log_tail()


def test_the_pod_monitor_and_the_scrape_job_agree() -> None:
    job, endpoint = documented("basic_auth"), documented("podMonitor")["podMonitor"]["endpoint"]

    assert job["scheme"] == "https"
    assert job["tls_config"]["server_name"] == endpoint["tlsConfig"]["serverName"]
    assert job["basic_auth"].keys() == {"username", "password_file"}
    assert endpoint["basicAuth"].keys() == {"username", "password"}


def test_a_broken_configuration_is_named(helm: Helm, tmp_path: Path) -> None:
    broken = with_secrets(render(BROKERS, WEB)).workload("gpuledger-join")
    join = start(broken, tmp_path / "join")

    eventually(lambda: join.exit_status() is not None)
    assert join.exit_status() == 2
    assert "web.yml" in join.log_tail()
