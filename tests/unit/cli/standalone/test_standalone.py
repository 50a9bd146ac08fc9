"""`gpuledger standalone`: all that one machine sampled is in its store, across starts."""

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import REGISTRY

from gpuledger.errors import SettingsError, UserError
from gpuledger.runtime import Readiness
from gpuledger.settings import load_settings
from gpuledger_agent.settings import name_node
from gpuledger_agent.source_selection import find_source
from gpuledger_cli.command import main
from gpuledger_cli.demo.sending import serve_receivers
from gpuledger_cli.in_process.store_directory import last_mark_us
from gpuledger_cli.standalone.standalone_command import (
    UncleanEndError,
    locked_store,
    run_standalone,
)
from gpuledger_cli.standalone.standalone_settings import StandaloneSettings
from tests.hanging import HANG_SECONDS

FEW_SAMPLES = 6
CLOSED_PORT_URL = "http://127.0.0.1:9/api/v1/write"


def settings_of(store: Path, **others: str) -> StandaloneSettings:
    given = {
        "GPULEDGER_STORE__URI": str(store),
        "GPULEDGER_STORE__ENTRIES": "true",
        "GPULEDGER_SOURCE": "simulated",
        "GPULEDGER_NODE_NAME": "here",
        "GPULEDGER_SAMPLING_INTERVAL_SECONDS": "0.25",
    } | {f"GPULEDGER_{name.upper()}": value for name, value in others.items()}
    loaded = load_settings(
        StandaloneSettings, prog="gpuledger standalone", description="", argv=[], environ=given
    )
    return name_node(loaded, {})


def samples_taken() -> float:
    return REGISTRY.get_sample_value("gpuledger_agent_samples_total") or 0.0


async def run_for_samples(
    settings: StandaloneSettings,
    *,
    before_end: Callable[[], object] = bool,
    undelivered_by: str = "",
) -> Readiness:
    """Run until the agent has taken a few samples, then cancel it as a signal does.

    Expects an error if `undelivered_by` names a component.
    """
    before, readiness = samples_taken(), Readiness()
    running = asyncio.create_task(run_standalone(settings, readiness, host=find_source(settings)))
    async with asyncio.timeout(HANG_SECONDS):
        while samples_taken() < before + FEW_SAMPLES and not running.done():  # noqa: ASYNC110  # a metric has no event
            await asyncio.sleep(0.02)
    before_end()
    running.cancel()
    lost = pytest.raises(UncleanEndError, match=f"{undelivered_by} did not deliver [1-9]")
    with lost if undelivered_by else pytest.raises(asyncio.CancelledError):
        await running
    return readiness


def queried(store: Path, sql: str, capsys: pytest.CaptureFixture[str]) -> Sequence[dict[str, Any]]:
    capsys.readouterr()
    assert main(["query", "--store", str(store), "--format", "json", sql]) == 0
    found: list[dict[str, Any]] = json.loads(capsys.readouterr().out)
    return found


async def test_each_sample_of_each_start_is_stored_exactly_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also those sampled just before the end."""
    before = samples_taken()
    for _ in range(2):
        readiness = await run_for_samples(settings_of(tmp_path))
        assert "store.receiver" in str(readiness.report()["checks"])

    (stored,) = queried(tmp_path, "SELECT count(DISTINCT (boot_id, seq)) n FROM entries", capsys)
    repeated = queried(
        tmp_path,
        "SELECT count(*) FROM entries GROUP BY boot_id, seq, gpu_uuid, category, pod_uid,"
        " container_id, job_id, allocated_pod, allocated_container HAVING count(*) > 1",
        capsys,
    )
    assert stored["n"] == samples_taken() - before >= 2 * FEW_SAMPLES
    assert repeated == []
    assert queried(tmp_path, "SELECT * FROM gaps", capsys) == []


async def test_a_receiver_that_does_not_answer_does_not_keep_usage_from_the_store(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = settings_of(
        tmp_path,
        sinks="store,remote_write",
        remote_write__url=CLOSED_PORT_URL,
        remote_write__interval_seconds="0",
    )
    await run_for_samples(settings, undelivered_by="remote_write")
    (counted,) = queried(tmp_path, "SELECT count(DISTINCT seq) seqs FROM entries", capsys)
    assert counted["seqs"] >= FEW_SAMPLES - 1


async def test_an_interval_of_remote_write_that_is_not_over_is_no_error_at_the_end(
    tmp_path: Path,
) -> None:
    async with serve_receivers() as received:
        settings = settings_of(
            tmp_path,
            sinks="store,remote_write",
            remote_write__url=f"{received.url}/api/v1/write",
            remote_write__interval_seconds="15",
        )
        await run_for_samples(settings)


@pytest.mark.parametrize(
    ("usage_end", "now", "mark"),
    [(120, 90, 120), (120, 300, 120), (72_000, 90, 120), (72_000, 120, 180)],
)
def test_a_store_is_marked_complete_at_most_through_the_present_minute(
    usage_end: int, now: int, mark: int
) -> None:
    """In seconds; a clock that was ahead for some seconds has written usage of later hours."""
    assert last_mark_us(usage_end * 10**6, now_us=now * 10**6) == mark * 10**6


async def test_a_run_can_be_billed_as_soon_as_it_has_ended(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """All GPUs are on the bill, although the run ends before its first minute is over."""
    await run_for_samples(settings_of(tmp_path))
    sampled = queried(tmp_path, "SELECT DISTINCT gpu_uuid FROM entries ORDER BY ALL", capsys)
    assert sampled
    known = "SELECT DISTINCT gpu_uuid FROM inventory ORDER BY ALL"
    assert queried(tmp_path, known, capsys) == sampled

    assert main(["bill", "--store", str(tmp_path), "--by", "gpu", "--format", "json"]) == 0
    lines = json.loads(capsys.readouterr().out)["lines"]
    billed = {line["gpu"] for line in lines if line["idle_kind"] != "no_data"}
    assert sorted(billed) == [gpu["gpu_uuid"] for gpu in sampled]


async def test_usage_that_the_store_does_not_take_at_the_end_is_an_error(tmp_path: Path) -> None:
    def replace_store_by_file() -> None:
        shutil.rmtree(tmp_path)
        tmp_path.touch()

    await run_for_samples(
        settings_of(tmp_path),
        before_end=replace_store_by_file,
        undelivered_by="store",
    )


async def test_the_error_of_a_component_ends_it(tmp_path: Path) -> None:
    settings = settings_of(
        tmp_path, sinks="store,remote_write", remote_write__bearer_token="two words"
    )
    with pytest.raises(UserError, match=r"remote_write\.bearer_token"):
        async with asyncio.timeout(HANG_SECONDS):
            await run_standalone(settings, Readiness(), host=find_source(settings))


@pytest.mark.parametrize(
    ("others", "named"),
    [
        ({"remote_write__url": CLOSED_PORT_URL}, "sinks: missing remote_write"),
        ({"alerts__urls": "http://127.0.0.1:9"}, "sinks: missing alerts"),
        ({"sinks": ""}, "SINKS: empty list"),
        ({"sinks": "rows"}, "SINKS"),
        ({"sinks": "store,store"}, "SINKS: a sink is listed twice"),
        ({"cluster": "Not A Label"}, "CLUSTER"),
        ({"store__uri": "http://host/x"}, "unknown scheme"),
        ({"store__uri": "file://tmp/x"}, "not an absolute path"),
    ],
)
def test_invalid_settings_are_rejected_by_name(
    others: dict[str, str], named: str, tmp_path: Path
) -> None:
    with pytest.raises(SettingsError, match=named):
        settings_of(tmp_path, **others)


@pytest.mark.parametrize(
    ("environ", "others"),
    [
        ({"KUBECONFIG": "/etc/k3s.yaml"}, {}),
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, {}),
        ({}, {"kubernetes__url": "http://127.0.0.1:8001"}),
        ({}, {"kubernetes__kubeconfig": "/etc/k3s.yaml"}),
    ],
)
def test_an_api_server_is_found_in_the_settings_or_the_environment(
    environ: dict[str, str], others: dict[str, str], tmp_path: Path
) -> None:
    assert settings_of(tmp_path, **others).kubernetes.is_configured(environ)
    assert not settings_of(tmp_path).kubernetes.is_configured({})


def test_sigterm_ends_the_program_with_code_0(tmp_path: Path) -> None:
    with subprocess.Popen(
        [
            *(sys.executable, "-m", "gpuledger_cli.standalone"),
            *("--store", tmp_path, "--source", "simulated", "--listen", "127.0.0.1:0"),
        ],
        env=os.environ | {"GPULEDGER_SAMPLING_INTERVAL_SECONDS": "0.25"},
        stderr=subprocess.PIPE,
        text=True,
    ) as running:
        assert running.stderr
        for line in running.stderr:
            if '"source_opened"' in line:
                break
        running.send_signal(signal.SIGTERM)
        _, said = running.communicate(timeout=HANG_SECONDS)
    assert running.returncode == 0, said
    assert '"service_ended"' in said


def test_a_store_has_one_writer_at_a_time(tmp_path: Path) -> None:
    with locked_store(tmp_path):
        with pytest.raises(UserError, match="writes to it"), locked_store(tmp_path):
            pass
        ended = start_on(tmp_path)
    assert ended.returncode == 2
    assert f"store.uri {tmp_path}: another `gpuledger standalone` writes to it" in ended.stderr
    with locked_store(tmp_path):
        pass


def test_a_store_that_cannot_be_written_is_an_error_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    ended = start_on(tmp_path / "file")
    assert ended.returncode == 2
    assert f"store.uri {tmp_path / 'file'}: not a directory; give a directory" in ended.stderr


def start_on(store: Path) -> subprocess.CompletedProcess[str]:
    """Start the program on a store that it refuses, and wait until it has ended."""
    return subprocess.run(
        [sys.executable, "-m", "gpuledger_cli.standalone", "--store", store],
        env=os.environ | {"GPULEDGER_SOURCE": "simulated"},
        capture_output=True,
        text=True,
        check=False,
        timeout=HANG_SECONDS,
    )
