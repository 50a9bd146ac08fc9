"""The request itself, against sockets that are not a kubelet and against the played one."""

import asyncio
import errno
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path, PosixPath
from tempfile import TemporaryDirectory

import pytest
from typing_extensions import override

from gpuledger_agent.host.kubelet.allocations import SocketKubelet
from gpuledger_agent.host.kubelet.messages import KubeletError, parse_answer
from gpuledger_simulator.clock import ManualClock
from gpuledger_simulator.kubelet import serve_kubelet
from gpuledger_simulator.scenario.load import load_scenario
from gpuledger_simulator.simulation import Simulation

QUICKSTART = Path(__file__).parents[5] / "scenarios" / "quickstart.yaml"
EPOCH_NS = 1_795_000_000_000_000_000


@pytest.fixture
def socket() -> Iterator[Path]:
    # A socket's path may have at most 107 bytes, and pytest's directories are deep.
    with TemporaryDirectory() as folder:
        yield Path(folder) / "kubelet.sock"


async def reason_of(socket: Path) -> str:
    with pytest.raises(KubeletError) as caught:
        await SocketKubelet(socket, timeout_seconds=0.5).list_pods()
    return caught.value.reason


@asynccontextmanager
async def sending(socket: Path, words: bytes) -> AsyncIterator[None]:
    """Listen, and send the same bytes on each connection."""

    class Sender(asyncio.Protocol):
        @override
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            assert isinstance(transport, asyncio.Transport)
            transports.append(transport)
            transport.write(words)

    transports: list[asyncio.Transport] = []
    async with await asyncio.get_running_loop().create_unix_server(Sender, socket):
        yield
        for transport in transports:
            transport.abort()


async def test_the_played_kubelet_is_queried_like_the_real_one(socket: Path) -> None:
    clock = ManualClock(start_ns=EPOCH_NS)
    simulation = Simulation(load_scenario(QUICKSTART), epoch_ns=EPOCH_NS, clock=clock)
    played = simulation.node("gpu-node-1").kubelet
    async with serve_kubelet(played, socket):
        answer = await SocketKubelet(socket, timeout_seconds=5).list_pods()
    assert answer == await played.list_pods()
    assert parse_answer(answer)


async def test_a_missing_socket_and_one_without_a_listener_have_different_reasons(
    socket: Path,
) -> None:
    assert await reason_of(socket) == "missing"
    async with sending(socket, b""):
        pass
    assert await reason_of(socket) == "refused"


async def test_a_peer_that_does_not_speak_grpc_is_an_error(socket: Path) -> None:
    async with sending(socket, b"HTTP/1.1 200 OK\r\n\r\n" * 100):
        assert await reason_of(socket) in ("broken", "deadline")
    async with sending(socket, b""):
        assert await reason_of(socket) == "deadline"


class Locked(PosixPath):
    """A path without permission, even if the tests run as root."""

    @override
    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        raise PermissionError(errno.EACCES, "Permission denied")


async def test_a_socket_without_permission_is_reported_as_forbidden(socket: Path) -> None:
    with pytest.raises(KubeletError) as caught:
        await SocketKubelet(Locked(socket), timeout_seconds=0.5).list_pods()
    assert caught.value.reason == "forbidden"
