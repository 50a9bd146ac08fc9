"""The played kubelet as a process meets the real one: a gRPC server on a Unix socket.

The only place of the simulator that knows gRPC; imported where a socket is asked for.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from grpclib.const import Cardinality, Handler
from grpclib.encoding.base import CodecBase
from grpclib.server import Server, Stream
from typing_extensions import override

from gpuledger.runtime.tasks import end_tasks
from simulator.kubelet import SimulatedKubelet

_METHOD = "/v1.PodResourcesLister/List"
_ALLOCATABLE_METHOD = "/v1.PodResourcesLister/GetAllocatableResources"
_LINK_SECONDS = 1.0


class _Bytes(CodecBase):
    """Passes messages on as the bytes that they are: they are written by hand in `kubelet`."""

    __content_subtype__ = "proto"

    @override
    def encode(self, message: bytes, message_type: type[bytes]) -> bytes:
        return message

    @override
    def decode(self, data: bytes, message_type: type[bytes]) -> bytes:
        return data


class _Lister:
    def __init__(self, kubelet: SimulatedKubelet) -> None:
        self._kubelet = kubelet

    def __mapping__(self) -> Mapping[str, Handler]:
        async def list_pods(stream: Stream[Any, Any]) -> None:
            # Read though it has no field: the protocol has a message here.
            await stream.recv_message()
            await stream.send_message(await self._kubelet.list_pods())

        async def list_allocatable(stream: Stream[Any, Any]) -> None:
            await stream.recv_message()
            await stream.send_message(await self._kubelet.list_allocatable())

        return {
            _METHOD: Handler(list_pods, Cardinality.UNARY_UNARY, bytes, bytes),
            _ALLOCATABLE_METHOD: Handler(list_allocatable, Cardinality.UNARY_UNARY, bytes, bytes),
        }


@asynccontextmanager
async def serve_kubelet(
    kubelet: SimulatedKubelet, socket: Path, *, logs: Path | None = None
) -> AsyncIterator[None]:
    """Serve on `socket`, and keep the links in `logs` as they are now, while the block lasts.

    The socket's file stays behind, as that of a kubelet that was killed.
    """

    async def keep_links(logs: Path) -> None:
        while True:
            link_logs(kubelet, logs)
            await asyncio.sleep(_LINK_SECONDS)

    server = Server([_Lister(kubelet)], codec=_Bytes())
    await server.start(path=str(socket))
    linking = asyncio.create_task(keep_links(logs)) if logs else None
    try:
        yield
    finally:
        await end_tasks(linking)
        server.close()
        await server.wait_closed()


def link_logs(kubelet: SimulatedKubelet, logs: Path) -> None:
    """Make the folder hold one entry a container, by its name alone."""
    logs.mkdir(parents=True, exist_ok=True)
    wanted = set(kubelet.log_names())
    existing = {path.name for path in logs.glob("*.log")}
    for name in wanted - existing:
        # No link and no log behind it: readers of the folder go by the names.
        (logs / name).touch()
    for name in existing - wanted:
        (logs / name).unlink()
