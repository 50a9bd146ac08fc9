"""HTTP endpoints with TLS and login: as rendered, probed like a kubelet, scraped as documented."""

from __future__ import annotations

import re
import ssl
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import bcrypt
import pytest
import yaml

from tests.real.deployment.installation import OVERLAY, copy_of_k8s, eventually
from tests.real.deployment.rendering import Rendering, render
from tests.real.end_to_end.components import Component, refuse_stray_settings
from tests.real.services import web
from tests.real.services.certificates import Authority
from tests.unit.deployment.components import ROOT

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.real.deployment.rendering import Workload
    from tests.real.services.kustomize import Kustomize
    from tests.real.services.prometheus import Prometheus

PAGES: Final = "overlays/pages-tls"
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


def fill_in(folder: Path, authority: Authority) -> None:
    """Replace the placeholders of the three files, as the user of the overlay does."""
    pair = authority.issue("gpuledger")
    (folder / "tls.crt").write_bytes(pair.certificate.read_bytes())
    (folder / "tls.key").write_bytes(pair.key.read_bytes())
    hashed = bcrypt.hashpw(PASSWORD.encode(), bcrypt.gensalt(5)).decode()
    written = (folder / "web.yml").read_text()
    assert written.count('"PLACEHOLDER"') == 1
    (folder / "web.yml").write_text(written.replace('"PLACEHOLDER"', f'"{hashed}"'))


def start(workload: Workload, folder: Path) -> Component:
    laid_out = workload.lay_out(folder)
    environment = {
        name.removeprefix("GPULEDGER_"): value
        for name, value in laid_out.environment.items()
        if name.startswith("GPULEDGER_")
    }
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
def filled_in(tmp_path: Path, authority: Authority, kustomize: Kustomize) -> Rendering:
    refuse_stray_settings()
    overlay = copy_of_k8s(tmp_path) / PAGES
    fill_in(overlay, authority)
    return render(overlay)


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
    job, endpoint = documented("basic_auth"), documented("basicAuth")

    assert job["scheme"] == endpoint["scheme"] == "https"
    assert job["tls_config"]["server_name"] == endpoint["tlsConfig"]["serverName"]
    assert job["basic_auth"].keys() == {"username", "password_file"}
    assert endpoint["basicAuth"].keys() == {"username", "password"}


def test_a_leftover_placeholder_is_named(kustomize: Kustomize, tmp_path: Path) -> None:
    join = start(render(PAGES).workload("gpuledger-join"), tmp_path / "join")

    eventually(lambda: join.exit_status() is not None)
    assert join.exit_status() == 2
    assert re.search(r"(basic_auth_users|cert_file).*", join.log_tail())


def test_the_overlay_for_sasl_accepts_the_component_by_the_documented_lines(
    kustomize: Kustomize, tmp_path: Path
) -> None:
    k8s = copy_of_k8s(tmp_path)
    installation = k8s / OVERLAY / "installation"
    for name in ("web.yml", "tls.crt", "tls.key"):
        (installation / name).write_text((k8s / PAGES / name).read_text())
    file = installation / "kustomization.yaml"
    written, lines = yaml.safe_load(file.read_text()), documented("components")
    written["components"] = lines["components"]
    written["secretGenerator"] += lines["secretGenerator"]
    file.write_text(yaml.safe_dump(written))

    for workload in render(k8s / OVERLAY).services():
        assert workload.environment()["GPULEDGER_HTTP__WEB_CONFIG_FILE"] in workload.files()
        assert {workload.container[name]["httpGet"]["scheme"] for name in PROBES} == {"HTTPS"}
    assert render(k8s / OVERLAY / "topics").workload("gpuledger-topics").files()
