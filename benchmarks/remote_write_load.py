"""The remote-write benchmark's environment: a remote receiver, events on Kafka, vmagent.

The receiver answers each request after 20 ms, like one in another zone, and stores nothing. It runs
in a separate process, as do the sink and vmagent, so that only their CPU time counts. Nothing is
measured here.
"""

import asyncio
import multiprocessing
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http import HTTPStatus
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Final

from aiohttp import web

from benchmarks.events import booked
from gpuledger.bus.kafka import KafkaBus
from gpuledger.bus.protocol import Message
from gpuledger.clock import NS_PER_MS
from gpuledger.codec import encode
from gpuledger.errors import UnavailableError
from gpuledger.keys import key_in
from gpuledger.settings import KafkaSettings
from gpuledger.topics import partition_of_node
from tests.default_topics import EVENTS
from tests.real.services.ports import free_ports
from tests.real.services.process import Process
from tests.real.services.web import fetch

DELAY_SECONDS: Final = 0.02
NODES: Final = [f"gpu-node-{number:04d}.cluster.example" for number in range(100)]


@contextmanager
def run_receiver() -> Iterator[str]:
    """Start a receiver that accepts everything; yields its address."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs,), daemon=True)
    process.start()
    try:
        yield f"http://127.0.0.1:{ours.recv()}/api/v1/write"
    finally:
        process.terminate()
        process.join()


def _serve(connection: Connection) -> None:
    asyncio.run(_receive(connection))


async def _receive(connection: Connection) -> None:
    async def answer(request: web.Request) -> web.Response:
        await request.read()
        await asyncio.sleep(DELAY_SECONDS)
        # A count above the number of samples means that all were written.
        return web.Response(
            status=204, headers={"X-Prometheus-Remote-Write-Samples-Written": "1000000"}
        )

    app = web.Application(client_max_size=2**26)
    app.router.add_post("/api/v1/write", answer)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    connection.send(runner.addresses[0][1])
    await asyncio.Event().wait()


async def publish(settings: KafkaSettings, ticks: Sequence[int], *, start_ns: int) -> None:
    """Write these ticks of all nodes; the nodes' records of a tick are sent together."""
    async with KafkaBus(settings).producer() as producer:
        for tick in ticks:
            by_partition: dict[int, list[Message]] = {}
            for node in NODES:
                event = booked(tick, node=node, start_ns=start_ns)
                key = key_in(event.cluster, node)
                at = partition_of_node(key, partitions=EVENTS.partitions)
                by_partition.setdefault(at, []).append(
                    Message(key.encode(), encode(event), event.time_ns // NS_PER_MS)
                )
            for partition, messages in by_partition.items():
                await producer.publish(EVENTS.name, partition, messages)


@contextmanager
def run_vmagent(receiver: str, folder: Path) -> Iterator[tuple[str, int]]:
    """Start vmagent, which relays its input; yields its address and process id."""
    binary = shutil.which("vmagent")
    if binary is None:
        raise UnavailableError("vmagent is not there: apt-get install victoria-metrics")
    (port,) = free_ports(1)
    part = Process(
        name="vmagent",
        argv=[
            Path(binary),
            f"-httpListenAddr=127.0.0.1:{port}",
            f"-remoteWrite.url={receiver}",
            f"-remoteWrite.tmpDataPath={folder / 'vmagent'}",
            "-remoteWrite.queues=12",  # as many as the sink has partitions
        ],
        folder=folder,
        environment={},
    )
    part.start()
    try:
        address = f"http://127.0.0.1:{port}"
        part.wait_until(lambda: _answers(address), deadline_seconds=20)
        yield address, part.pid
    finally:
        part.stop(deadline_seconds=10)


def _answers(address: str) -> bool:
    try:
        return fetch(f"{address}/health").status == HTTPStatus.OK
    except OSError:
        return False
