"""The files and variables that users write: settings, web configuration, lists of metrics."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuledger.errors import UserError
from gpuledger.runtime.http.web_config import read_web_config
from gpuledger.settings import load_settings
from gpuledger.settings.sources import settings_of
from gpuledger_agent.exposition.dcgm_fields import read_counters
from gpuledger_agent.settings import AgentSettings
from gpuledger_enricher.join.join_settings import JoinSettings
from gpuledger_enricher.podwatch.pod_settings import PodwatchSettings
from gpuledger_reports.settings import ReportsSettings
from gpuledger_simulator.scenario.load import load_scenario
from gpuledger_sinks.settings import SinkSettings
from tests.fuzz.mutations import changed_bytes

ROOT = Path(__file__).parents[2]
SCREEN_CHARACTERS = 80 * 24
SETTINGS = [
    *(file.read_bytes() for file in sorted((ROOT / "k8s").rglob("settings/*.yaml"))),
    (ROOT / "deploy" / "compose" / "sinks.yaml").read_bytes(),
    b"kafka: {bootstrap_servers: 'a:1,b:2', sasl_password: x}\nlog: {level: debug}\n",
    b"a: &a [x, x]\nb: &b [*a, *a]\nc: [*b, *b]\nd: 2020-01-01\n? [1]\n: 2\n",
]
WEB = [
    b"tls_server_config: {cert_file: a, key_file: b, min_version: TLS12}\n",
    b"basic_auth_users:\n  a: $2b$04$abcdefghijklmnopqrstuuABCDEFGHIJKLMNOPQRSTUVWXYZ01234\n",
    b"http_server_config: {headers: {X-Frame-Options: deny}}\n",
]
LISTS = [
    b"# a list\nDCGM_FI_DEV_GPU_UTIL, gauge, GPU utilization (in %).\n",
    b'DCGM_FI_DEV_SM_CLOCK, gauge, "a, b"\nDCGM_FI_DRIVER_VERSION, label, d\n',
]


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as made:
        yield Path(made)


def message(error: UserError) -> None:
    """Return the message of an error: one line that fits on a screen."""
    assert str(error)
    assert str(error).splitlines() == [str(error)]
    assert len(str(error)) <= SCREEN_CHARACTERS


@pytest.mark.parametrize(
    "model", [AgentSettings, JoinSettings, PodwatchSettings, ReportsSettings, SinkSettings]
)
@given(data=changed_bytes(SETTINGS))
def test_a_settings_file_is_loaded_or_its_error_is_one_line(
    folder: Path, model: type, data: bytes
) -> None:
    file = folder / "settings.yaml"
    file.write_bytes(data)
    try:
        load_settings(model, prog="p", description="d", argv=["--config", str(file)], environ={})
    except UserError as error:
        message(error)


@given(data=changed_bytes([file.read_bytes() for file in (ROOT / "scenarios").glob("*.yaml")]))
def test_a_scenario_is_loaded_or_its_error_is_one_line(folder: Path, data: bytes) -> None:
    file = folder / "scenario.yaml"
    file.write_bytes(data)
    try:
        load_scenario(file)
    except UserError as error:
        message(error)


VALUES = [b"5", b"a:1,b:2", b"{a: b}", b"[a, b]", b"1.5", b"true", b"2020-01-01"]
VARIABLES = [setting.variable for setting in settings_of(AgentSettings)]


@given(variable=st.sampled_from(VARIABLES), value=changed_bytes(VALUES))
def test_a_variable_is_loaded_or_its_error_is_one_line(variable: str, value: bytes) -> None:
    environ = {variable: value.replace(b"\0", b"").decode(errors="surrogateescape")}
    try:
        load_settings(AgentSettings, prog="p", description="d", argv=[], environ=environ)
    except UserError as error:
        message(error)


@given(data=changed_bytes(WEB))
def test_a_web_configuration_is_loaded_or_its_error_is_one_line(folder: Path, data: bytes) -> None:
    file = folder / "web.yaml"
    file.write_bytes(data)
    try:
        read_web_config(file)
    except UserError as error:
        message(error)


@given(data=changed_bytes(LISTS))
def test_a_list_of_metrics_is_loaded_or_its_error_is_one_line(folder: Path, data: bytes) -> None:
    file = folder / "list.csv"
    file.write_bytes(data)
    try:
        read_counters(file)
    except UserError as error:
        message(error)
