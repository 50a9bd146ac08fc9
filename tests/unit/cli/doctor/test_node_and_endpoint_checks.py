"""The doctor's checks of a node, with the simulated one, and of components' own checks."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, cast

import orjson
import pynvml
import pytest

from gpuledger.runtime import Readiness
from gpuledger.runtime.http.client import HttpClient, NoAnswerError
from gpuledger.settings import KafkaSettings
from gpuledger_agent.gpu.nvidia.session import NvmlSession
from gpuledger_agent.host.kubelet.messages import KubeletError
from gpuledger_agent.settings import AgentSettings, KubeletSettings
from gpuledger_agent.source_selection import find_source
from gpuledger_cli.doctor.doctor_command import Plan, examine
from gpuledger_cli.doctor.endpoint_checks import check_components
from gpuledger_cli.doctor.node_checks import (
    check_cgroups,
    check_driver,
    check_kubelet,
    check_processes,
)
from gpuledger_cli.doctor.verdicts import Status

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

SETTINGS = AgentSettings(source="simulated", kubelet=KubeletSettings(enabled=True))
HOST = find_source(SETTINGS)


class NoDriver:
    """NVML without a driver."""

    def nvmlInit(self) -> None:  # noqa: N802  # NVML's name
        raise pynvml.NVMLError(pynvml.NVML_ERROR_DRIVER_NOT_LOADED)


class BrokenKubelet:
    async def list_pods(self) -> bytes:
        raise KubeletError("forbidden")

    async def list_allocatable(self) -> bytes:
        raise KubeletError("forbidden")


class EmptyProcfs:
    def read(self, path: str) -> bytes:
        raise FileNotFoundError(path)


async def test_a_simulated_node_passes() -> None:
    (driver,) = await check_driver(HOST)
    assert driver.status is Status.OK
    assert driver.finding.endswith(", 4 GPUs")
    (processes,) = await check_processes(HOST, SETTINGS)
    assert processes.status is Status.OK
    (kubelet,) = await check_kubelet(HOST, SETTINGS.kubelet)
    assert kubelet.status is Status.OK
    assert "with devices" in kubelet.finding


async def test_each_fault_of_a_node_is_a_problem_with_an_action() -> None:
    host = replace(
        HOST, gpus=NvmlSession(NoDriver()), kubelet=BrokenKubelet(), procfs=EmptyProcfs()
    )
    for (found,) in (
        await check_driver(host),
        await check_processes(host, SETTINGS),
        await check_kubelet(host, SETTINGS.kubelet),
    ):
        assert found.status is Status.PROBLEM
        assert found.action


async def test_a_node_without_a_kubelet_is_skipped(tmp_path: Path) -> None:
    (off,) = await check_kubelet(replace(HOST, kubelet=None), SETTINGS.kubelet)
    absent = KubeletSettings(socket=tmp_path / "absent.sock")
    (no_socket,) = await check_kubelet(HOST, absent)
    assert off.status is no_socket.status is Status.SKIPPED


@pytest.mark.parametrize(
    ("files", "finding"),
    [
        ([], "has no cgroups"),
        (["cgroup.controllers"], "version 2, without pods"),
        (["cgroup.controllers", "kubepods.slice/x"], "version 2, with the kubelet's pods"),
        (["memory/cgroup.procs", "memory/kubepods/x"], "version 1, with the kubelet's pods"),
    ],
)
async def test_cgroups_must_be_mounted(files: list[str], finding: str, tmp_path: Path) -> None:
    for file in files:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).touch()
    (found,) = await check_cgroups(KubeletSettings(cgroup_root=tmp_path))
    assert finding in found.finding
    assert (found.status is Status.OK) == bool(files)


class Pages:
    """Answers with pages by URL; an absent page is a server that does not answer."""

    def __init__(self, **pages: tuple[int, bytes]) -> None:
        self._pages = {f"http://{host}/readyz": page for host, page in pages.items()}

    async def get(self, url: str, **_: object) -> tuple[int, bytes]:
        if url not in self._pages:
            raise NoAnswerError(f"{url}: connection refused")
        return self._pages[url]


def report(*, failing: str = "") -> bytes:
    readiness = Readiness()
    readiness.check("kafka").ok()
    if failing:
        readiness.check(failing).failed("the broker is unavailable")
    return orjson.dumps(readiness.report())


async def test_the_failed_checks_of_each_component_are_problems() -> None:
    pages = Pages(
        fine=(200, report()), ill=(503, report(failing="delivery")), other=(200, b"<html>")
    )
    urls = ("http://fine", "http://ill/", "http://other", "http://absent")
    found = await check_components(cast("HttpClient", pages), urls)
    assert [one.status for one in found] == ["ok", "problem", "unknown", "problem"]
    assert "check delivery (critical): the broker is unavailable" in found[1].finding
    (none,) = await check_components(cast("HttpClient", pages), ())
    assert none.status is Status.SKIPPED


@asynccontextmanager
async def listening(answer: bytes) -> AsyncIterator[str]:
    """Serve an answer to each request on a local address; silent if it is empty."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        if not answer:
            await reader.read()  # until the client closes the connection
        writer.write(answer)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


async def test_a_silent_address_is_a_problem_with_its_name_and_hides_no_other(
    tmp_path: Path,
) -> None:
    config = tmp_path / "sink.yaml"
    async with listening(b"") as silent, listening(b"HTTP/1.1 204 No Content\r\n\r\n") as fine:
        settings = {"remote_write": {"url": silent}, "alerts": {"urls": [fine, silent]}}
        config.write_bytes(orjson.dumps(settings))
        plan = Plan(
            urls=(silent, fine),
            receivers=("remote_write", "alerts"),
            config=config,
            left_out=frozenset({"brokers"}),
            deadline_seconds=1.0,
        )
        findings = await examine(KafkaSettings(), plan)

    found = [one for one in findings if one.check in {"components", "receivers"}]
    assert [(one.status, silent in one.finding, fine in one.finding) for one in found] == [
        (Status.PROBLEM, True, False),
        (Status.UNKNOWN, False, True),  # without the checks of a component
        (Status.PROBLEM, True, False),
        (Status.OK, False, True),
        (Status.PROBLEM, True, False),
    ]


async def test_a_receiver_whose_settings_cannot_be_used_hides_no_other(tmp_path: Path) -> None:
    config = tmp_path / "sink.yaml"
    async with listening(b"HTTP/1.1 500 Broken\r\n\r\n") as broken:
        settings = {
            "remote_write": {"ca_file": str(tmp_path / "absent.pem")},
            "alerts": {"urls": [broken]},
        }
        config.write_bytes(orjson.dumps(settings))
        findings = await examine(
            KafkaSettings(),
            Plan(
                receivers=("remote_write", "alerts"), config=config, left_out=frozenset({"brokers"})
            ),
        )

    unusable, refusing = [one for one in findings if one.check == "receivers"]
    assert (unusable.status, refusing.status) == (Status.UNKNOWN, Status.PROBLEM)
    assert "absent.pem" in unusable.finding
    assert "500" in refusing.finding
    assert "log and limits" in refusing.action


async def test_settings_that_cannot_be_used_are_one_finding_and_other_checks_still_run(
    tmp_path: Path,
) -> None:
    config = tmp_path / "agent.yaml"
    config.write_text("sampling_interval_seconds: soon\n")
    plan = Plan(on_node=True, config=config, left_out=frozenset({"brokers"}))

    findings = await examine(KafkaSettings(), plan)

    of_node = {one.check: one for one in findings if one.check in {"driver", "kubelet"}}
    assert "sampling_interval_seconds" in of_node["driver"].finding
    assert {one.status for one in of_node.values()} == {Status.UNKNOWN}
    assert of_node["kubelet"].finding != of_node["driver"].finding
    assert {"brokers", "receivers"} <= {one.check for one in findings}
