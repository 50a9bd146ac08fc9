"""`gpuledger podwatch` as its user runs it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


def podwatch(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the command to its end, without any setting of the tests' environment."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("GPULEDGER_", "KUBE"))
    }
    return subprocess.run(
        [sys.executable, "-m", "gpuledger_enricher.podwatch", *arguments],
        env=kept | {"GPULEDGER_HTTP__LISTEN": "127.0.0.1:0"} | environment,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )


def test_a_missing_kubeconfig_is_reported_in_one_line(tmp_path: Path) -> None:
    file = tmp_path / "kubeconfig"
    ended = podwatch(GPULEDGER_KUBERNETES__KUBECONFIG=str(file))
    message = [line for line in ended.stderr.splitlines() if not line.startswith("{")]
    assert ended.returncode == 2, ended.stderr
    assert len(message) == 1
    assert f"No such file or directory: '{file}'" in message[0]
    assert message[0].endswith(f"check the file named by kubernetes.kubeconfig: {file}")


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("http//user:hunter2@api:8001", "must begin with http:// or https://"),
        ("api:8001", "'api:8001' must begin with http:// or https://"),
        ("http://", "'********': missing host"),
    ],
)
def test_an_invalid_api_server_address_is_refused_in_one_line(url: str, message: str) -> None:
    ended = podwatch(GPULEDGER_KUBERNETES__URL=url)

    assert ended.returncode == 2, ended.stderr
    assert "KUBERNETES__URL: " in ended.stderr
    assert message in ended.stderr
    assert ended.stderr.count("\n") == 1
    assert "hunter2" not in ended.stderr


def test_the_settings_are_shown_with_their_defaults() -> None:
    shown = podwatch("--print-config")
    assert shown.returncode == 0, shown.stderr
    assert "tombstone_after_seconds: 900" in shown.stdout
    assert "page_limit: 500" in shown.stdout


def test_a_signal_does_not_wait_for_the_import_of_the_client_library(tmp_path: Path) -> None:
    (tmp_path / "kubernetes_asyncio.py").write_text("import time; time.sleep(60)")
    environ = {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": str(tmp_path),
        "GPULEDGER_HTTP__LISTEN": "127.0.0.1:0",
        "GPULEDGER_KUBERNETES__KUBECONFIG": str(tmp_path / "kubeconfig"),
    }
    command = [sys.executable, "-m", "gpuledger_enricher.podwatch"]
    with subprocess.Popen(command, env=environ, stderr=subprocess.PIPE, text=True) as child:
        try:
            assert child.stderr is not None
            message = child.stderr.readline()
            child.terminate()
            _, rest = child.communicate(timeout=30)
        finally:
            child.kill()
    assert '"service_started"' in message
    assert f'"url":null,"kubeconfig":"{tmp_path}/kubeconfig"' in message
    assert "service_ended" in rest
    assert child.returncode == 0
