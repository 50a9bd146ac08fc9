"""The guides name existing ports, variables, metrics and topics."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Final

import msgspec
import pytest
import yaml
from prometheus_client.metrics import MetricWrapperBase

import gpuledger.bus.gaps
import gpuledger.dead_letter_queue
import gpuledger.runtime.process_metrics
import gpuledger_agent.metrics
import gpuledger_enricher.join.join_metrics
import gpuledger_enricher.podwatch.pod_metrics
import gpuledger_reports.api.metrics
import gpuledger_sinks.metrics
from gpuledger.programs import COMPONENTS
from gpuledger.settings.sources import settings_of, variable_of
from gpuledger_agent.settings import AgentSettings
from gpuledger_cli.standalone.standalone_settings import StandaloneSettings
from gpuledger_enricher.join.join_settings import JoinSettings
from gpuledger_enricher.podwatch.pod_settings import PodwatchSettings
from gpuledger_reports.settings import ReportsSettings
from gpuledger_sinks.settings import SinkSettings
from tests.default_topics import BY_NAME
from tests.tables import for_each
from tests.unit.deployment import components, manifests
from tests.unit.deployment.components import ROOT

GUIDES: Final = ROOT / "docs" / "guides"
INSTALL: Final = (GUIDES / "install.md").read_text()
MONITORING: Final = (GUIDES / "monitoring.md").read_text()
REFERENCE: Final = [ROOT / "docs" / "reference" / f"{name}.md" for name in ("checks", "log-events")]
PAGES: Final = [page for page in (ROOT / "docs").rglob("*.md") if page.parent.name != "adr"]
EVERY_PAGE: Final = "\n".join(page.read_text() for page in PAGES)
TEXT: Final = "\n".join(page.read_text() for page in (*GUIDES.glob("*.md"), *REFERENCE))
MODELS: Final[tuple[type[msgspec.Struct], ...]] = (
    AgentSettings,
    PodwatchSettings,
    JoinSettings,
    SinkSettings,
    StandaloneSettings,
)
WITHOUT_KAFKA: Final[tuple[type[msgspec.Struct], ...]] = (ReportsSettings,)
METRICS: Final = (
    gpuledger_agent.metrics,
    gpuledger_enricher.podwatch.pod_metrics,
    gpuledger_enricher.join.join_metrics,
    gpuledger_sinks.metrics,
    gpuledger_reports.api.metrics,
    gpuledger.bus.gaps,
    gpuledger.dead_letter_queue,
    gpuledger.runtime.process_metrics,
)


GPU_METRICS: Final = {
    name
    for page in ("series", "agent-metrics")
    for name in re.findall(
        r"\bgpuledger_[a-z_]+", (ROOT / "docs" / "reference" / f"{page}.md").read_text()
    )
}
"""Generated from the series of the remote-write sink and the agent's metrics."""
with (ROOT / "pyproject.toml").open("rb") as _file:
    PACKAGES: Final = {*tomllib.load(_file)["tool"]["importlinter"]["root_packages"]}


def variables(model: type[msgspec.Struct]) -> set[str]:
    """Return every variable that a component accepts."""
    found = settings_of(model)
    files = {variable_of(setting.file_path) for setting in found if setting.is_secret}
    return files | {setting.variable for setting in found}


@for_each("variable", sorted(set(re.findall(r"\bGPULEDGER_\w+", EVERY_PAGE))))
def test_every_documented_variable_is_accepted_and_a_shared_one_by_all_components(
    variable: str,
) -> None:
    has_kafka = "GPULEDGER_KAFKA__" in variable
    models = MODELS if has_kafka else (*MODELS, *WITHOUT_KAFKA)
    takes = [variable in variables(model) for model in models]
    is_shared = re.match(r"GPULEDGER_(KAFKA|HTTP|LOG)__", variable)

    assert all(takes) if is_shared else any(takes)


@for_each("metric", sorted(set(re.findall(r"(?<![\w:])gpuledger_[a-z_]*[a-z]\b", TEXT)) - PACKAGES))
def test_every_documented_metric_is_exposed(metric: str) -> None:
    found = [value for module in METRICS for value in vars(module).values()]
    exposed = {
        family.name
        for value in found
        if isinstance(value, MetricWrapperBase)
        for family in value.collect()
    }

    assert metric.removesuffix("_total") in exposed or metric in GPU_METRICS


@for_each("record", sorted(set(re.findall(r"\b\w+:gpuledger_\w+:\w+", TEXT))))
def test_every_documented_recorded_series_is_recorded(record: str) -> None:
    files = (ROOT / "k8s" / "chart" / "rules").glob("*.rules.yaml")
    groups = [group for file in files for group in yaml.safe_load(file.read_text())["groups"]]

    assert record in {rule.get("record") for group in groups for rule in group["rules"]}


def test_every_documented_topic_is_in_the_table() -> None:
    assert set(re.findall(r"gpuledger\.[a-z-]+\.v\d", TEXT)) <= set(BY_NAME)


def test_the_documented_ports_are_those_on_which_the_components_listen() -> None:
    written = dict(re.findall(r"^\| (\w+) \| (\d{4}) \|$", MONITORING, flags=re.MULTILINE))
    assert written == {name: str(components.port_of(name)) for name in COMPONENTS}


def test_every_extra_for_users_is_in_the_table_of_extras() -> None:
    with (ROOT / "pyproject.toml").open("rb") as file:
        extras = set(tomllib.load(file)["project"]["optional-dependencies"])
    section = INSTALL.partition("| extra | what for |")[2].partition("\n\n")[0]

    assert set(re.findall(r"^\| `(\w+)`", section, re.MULTILINE)) == extras - {
        "dev",
        "bench",
        "docs",
    }


@pytest.mark.parametrize(
    "page", ["guides/kubernetes.md", "guides/security-hardening.md", "reference/permissions.md"]
)
def test_every_workload_is_documented(page: str) -> None:
    text = (ROOT / "docs" / page).read_text()
    tables = re.findall(r"^\| workload \|.*?\n\n", text, re.MULTILINE | re.DOTALL)
    reported = {word for table in tables for word in re.findall(r"^\|[^|]*", table, re.MULTILINE)}
    kinds = ("Deployment", "DaemonSet", "Job", "CronJob")
    names = {
        made["metadata"]["name"].removeprefix("gpuledger-").partition("-")[0]
        for made in manifests.load()
        if made["kind"] in kinds
    }

    assert {name for name in names if not any(name in one for one in reported)} == set()


def test_every_page_installs_a_local_wheel_because_no_registry_has_one() -> None:
    pages = [ROOT / "README.md", *PAGES]
    assert [
        page.name
        for page in pages
        for code in re.findall(r"```.*?```|`[^`]+`", page.read_text(), re.DOTALL)
        if re.search(r"install '?gpuledger\b", code)
    ] == []


PROCESSES: Final = INSTALL.partition("## Run plain processes")[2].partition("```console\n")[2]
STARTED: Final = re.findall(
    rf"^(.*gpuledger (?:{'|'.join(COMPONENTS)})\b.*) &$",
    PROCESSES.partition("```")[0],
    re.MULTILINE,
)


@pytest.mark.parametrize("command", STARTED)
def test_each_plain_process_accepts_the_settings_that_it_is_started_with(command: str) -> None:
    """Those of its line, and those that the first line exports to all."""
    exported = PROCESSES.partition("\n")[0]
    folder = Path(sys.executable).parent
    environ = {"PATH": f"{folder}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["/bin/bash", "-c", f"{exported}; {command} --print-config"],
        cwd=ROOT,
        env=environ,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert len(STARTED) == 5
