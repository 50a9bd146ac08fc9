"""An error in a file that people write fits on a screen, whatever the file contains."""

from collections.abc import Callable
from pathlib import Path

import pytest

from gpuledger.errors import UserError
from gpuledger.runtime.http.web_config import WebGuard
from gpuledger.runtime.readiness import Check
from gpuledger.settings import load_settings
from gpuledger_agent.exposition.dcgm_fields import read_counters
from gpuledger_agent.recording.replay import open_recording
from gpuledger_simulator.scenario.load import load_scenario
from gpuledger_sinks.settings import SinkSettings

LONG = "x" * 30_000
HASH = "$2y$10$KakQXgis27HqBQrOjKgWReS8eFjYfvy6bEz79sFSOTnCMcrX8eN6O"
TLS = f"basic_auth_users: {{a: {HASH}}}\ntls_server_config: {{cert_file: a, key_file: b, "


def read_settings(file: Path) -> object:
    argv = ["--config", str(file)]
    return load_settings(SinkSettings, prog="p", description="d", argv=argv, environ={})


def guard(file: Path) -> WebGuard:
    return WebGuard(file, check=Check())


Read = Callable[[Path], object]
MISTAKES: list[tuple[Read, str]] = [
    (read_counters, f"{LONG}, gauge, help\n"),
    (read_counters, f"DCGM_FI_DEV_GPU_UTIL, {LONG}, help\n"),
    (read_counters, "a," * 30_000),
    (guard, f"{LONG}: 1\n"),
    (guard, f"basic_auth_users: {{{LONG}: wrong}}\n"),
    (guard, f"{TLS}min_version: {LONG}}}\n"),
    (guard, f"tls_server_config: {{cert_file: {LONG}, key_file: b}}\n"),
    (guard, f"a: !{LONG} 1\n"),
    (read_settings, f"{LONG}: 1\n"),
    (read_settings, f"kafka: {{{LONG}: 1}}\n"),
    (read_settings, f"{LONG}: 1\n{LONG}: 1\n"),
    (read_settings, f"log: {{level: {LONG}}}\n"),
    (read_settings, f"http: {{listen: {LONG}}}\n"),
    (read_settings, f"kafka: {{bootstrap_servers: {LONG}}}\n"),
    (read_settings, f"remote_write: {{url: {LONG}}}\n"),
    (read_settings, f"remote_write: {{headers: {{{LONG}: [1]}}}}\n"),
    (read_settings, f"alerts: {{urls: [{LONG}]}}\n"),
    (load_scenario, f"{LONG}: 1\n"),
    (load_scenario, f"nodes: [{{name: a, gpus: [{{accounting: {LONG}}}]}}]\n"),
    (load_scenario, f"nodes: [{{name: {LONG}}}, {{name: {LONG}}}]\n"),
    (open_recording, LONG),
]


@pytest.mark.parametrize(
    ("read", "text"), MISTAKES, ids=lambda one: one.__name__ if callable(one) else one[:30]
)
def test_an_error_is_one_line_that_fits_on_a_screen(tmp_path: Path, read: Read, text: str) -> None:
    file = tmp_path / "file"
    file.write_text(text)
    with pytest.raises(UserError) as caught:
        read(file)
    message = str(caught.value)
    assert 0 < len(message) < 1500
    assert message.splitlines() == [message]
