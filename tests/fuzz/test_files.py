"""The files that people write: settings, web configuration, lists of metrics, recordings."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuledger.errors import UserError
from gpuledger.runtime.http.web_config import read_web_config
from gpuledger.settings import load_settings
from gpuledger.settings.sources import settings_of
from gpuledger_agent.exposition.dcgm_fields import read_counters
from gpuledger_agent.recording.format import FORMAT
from gpuledger_agent.recording.replay import open_recording
from gpuledger_agent.settings import AgentSettings
from gpuledger_enricher.join.join_settings import JoinSettings
from gpuledger_enricher.podwatch.pod_settings import PodwatchSettings
from gpuledger_reports.settings import ReportsSettings
from gpuledger_simulator.scenario.load import load_scenario
from gpuledger_sinks.settings import SinkSettings
from tests.fuzz.mutations import changed_bytes, changed_json

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
HEADER = {
    "format": FORMAT,
    "time_ns": 1,
    "monotonic_ns": 1,
    "boottime_ns": 1,
    "tick_seconds": 1.0,
    "is_simulated": True,
    "is_redacted": False,
}
CALLS = [
    {"at_ns": 1, "call": "nvmlDeviceGetCount", "result": 1},
    {
        "at_ns": 2,
        "call": "nvmlDeviceGetMemoryInfo",
        "arguments": [{"handle": 0, "of": "struct_c_nvmlDevice_t"}],
        "result": {"struct": "c_nvmlMemory_t", "fields": {"total": 5, "free": {"bits": 2}}},
    },
    {"at_ns": 3, "call": "nvmlX", "filled": [{"byref": {"array": [{"float": "nan"}]}}], "error": 3},
    {"at_ns": 4, "read": "/proc/1/cgroup", "result": "0::/\n"},
]


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as made:
        yield Path(made)


def said(error: UserError) -> None:
    """Every mistake is one line that fits on a screen."""
    assert str(error)
    assert str(error).splitlines() == [str(error)]
    assert len(str(error)) <= SCREEN_CHARACTERS


@pytest.mark.parametrize(
    "model", [AgentSettings, JoinSettings, PodwatchSettings, ReportsSettings, SinkSettings]
)
@given(data=changed_bytes(SETTINGS))
def test_a_settings_file_is_taken_or_its_mistake_is_said(
    folder: Path, model: type, data: bytes
) -> None:
    file = folder / "settings.yaml"
    file.write_bytes(data)
    try:
        load_settings(model, prog="p", description="d", argv=["--config", str(file)], environ={})
    except UserError as error:
        said(error)


@given(data=changed_bytes([file.read_bytes() for file in (ROOT / "scenarios").glob("*.yaml")]))
def test_a_scenario_is_taken_or_its_mistake_is_said(folder: Path, data: bytes) -> None:
    file = folder / "scenario.yaml"
    file.write_bytes(data)
    try:
        load_scenario(file)
    except UserError as error:
        said(error)


VALUES = [b"5", b"a:1,b:2", b"{a: b}", b"[a, b]", b"1.5", b"true", b"2020-01-01"]
VARIABLES = [setting.variable for setting in settings_of(AgentSettings)]


@given(variable=st.sampled_from(VARIABLES), value=changed_bytes(VALUES))
def test_a_variable_is_taken_or_its_mistake_is_said(variable: str, value: bytes) -> None:
    environ = {variable: value.replace(b"\0", b"").decode(errors="surrogateescape")}
    try:
        load_settings(AgentSettings, prog="p", description="d", argv=[], environ=environ)
    except UserError as error:
        said(error)


@given(data=changed_bytes(WEB))
def test_a_web_configuration_is_taken_or_its_mistake_is_said(folder: Path, data: bytes) -> None:
    file = folder / "web.yaml"
    file.write_bytes(data)
    try:
        read_web_config(file)
    except UserError as error:
        said(error)


@given(data=changed_bytes(LISTS))
def test_a_list_of_metrics_is_taken_or_its_mistake_is_said(folder: Path, data: bytes) -> None:
    file = folder / "list.csv"
    file.write_bytes(data)
    try:
        read_counters(file)
    except UserError as error:
        said(error)


RECORDING = b"\n".join(map(orjson.dumps, [HEADER, *CALLS])) + b"\n"


@given(data=changed_bytes([RECORDING]))
def test_a_recording_is_opened_or_its_mistake_is_said(folder: Path, data: bytes) -> None:
    open_as_recording(folder, data)


@pytest.mark.parametrize("place", range(len(CALLS) + 1))
@given(line=changed_json([orjson.dumps(one) for one in (HEADER, *CALLS)]))
def test_a_line_of_a_recording_is_taken_or_its_mistake_is_said(
    folder: Path, place: int, line: bytes
) -> None:
    lines = [orjson.dumps(one) for one in (HEADER, *CALLS)]
    lines[place] = line
    open_as_recording(folder, b"\n".join(lines))


def open_as_recording(folder: Path, data: bytes) -> None:
    file = folder / "recording"
    file.write_bytes(data)
    try:
        open_recording(file)
    except UserError as error:
        said(error)
