"""A small installation for single faults: a node, a join and a store, on real parts.

All faults share a cluster, that is an API server with the node's pod. Each fault has its own
broker, because most faults leave traces on it.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

from gpuledger.bus.administration import create_topics
from gpuledger.errors import UserError
from gpuledger.settings import KafkaSettings
from tests.chaos.scraping import NODE
from tests.chaos.small_disk import SmallDisk
from tests.chaos.stored_time import StoredTime, read_time
from tests.real.end_to_end.components import BIN, Component
from tests.real.services.kafka import Kafka
from tests.real.services.process import Process

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.chaos.parts import RealParts

SCENARIO: Final = Path(__file__).with_name("scenario.yaml")
_AGENT_PROGRAM: Final = Path(__file__).with_name("socket_agent.py")
_SESSION_SECONDS: Final = "6"
_START_SECONDS: Final = 60.0
_POLL_SECONDS: Final = 0.5
# A kubelet waits ten seconds before it restarts a container that crashed, then twice as long.
_RESTART_SECONDS: Final = 10.0


class FaultCluster:
    """The parts that all faults share: the API server, and the node's pod in it."""

    def __init__(self, parts: RealParts, *, folder: Path) -> None:
        self.parts = parts
        self.folder = folder
        self.epoch_ns = time.time_ns()
        self.uids = folder / "uids.json"
        self._driver: Process | None = None

    def start(self) -> None:
        """Start the API server, and create the node's pod."""
        self.parts.kube_api.start()
        self.kubeconfig = self.parts.podwatch_kubeconfig()
        argv = self.simulator("drive", "--kubeconfig", str(self.parts.kube_api.kubeconfig))
        self._driver = Process(name="driver", argv=argv, folder=self.folder / "driver")
        self._driver.start()
        self._driver.wait_until(self.uids.exists, deadline_seconds=_START_SECONDS)

    def simulator(self, command: str, *options: str) -> list[str]:
        """Return the command line of a part of the simulator."""
        shared = ["--scenario", str(SCENARIO), "--epoch-ns", str(self.epoch_ns)]
        argv = [str(BIN / "python"), "-m", "gpuledger_simulator", command, *shared]
        return [*argv, "--uids", str(self.uids), *options]

    def discard(self) -> None:
        """End everything."""
        if self._driver is not None:
            self._driver.kill()
        self.parts.kube_api.discard()


class Installation:
    """The components of one fault. Components that end are restarted, as by a kubelet."""

    def __init__(
        self,
        cluster: FaultCluster,
        *,
        folder: Path,
        small_disk: str | None,
        print_line: Callable[[str], None],
    ) -> None:
        self._small_disk = small_disk
        self.cluster = cluster
        self.folder = folder
        self.print_line = print_line
        self.store = folder / "store-disk" / "store"
        self.disks = {
            name: SmallDisk(folder / f"{name}-disk") for name in ("kafka", "spool", "store")
        }
        self.kafka = Kafka(
            distribution=cluster.parts.kafka.distribution, folder=folder / "kafka-disk" / "kafka"
        )
        self.settings = KafkaSettings(bootstrap_servers=self.kafka.bootstrap_servers)
        # A socket's path may have 107 bytes.
        self._socket = folder / "k.sock"
        self.kubelet = Process(
            name="kubelet",
            argv=cluster.simulator("kubelet", "--node", NODE, "--socket", str(self._socket)),
            folder=folder / "kubelet",
        )
        self.components = {
            "podwatch": self._make("podwatch", KUBERNETES__KUBECONFIG=str(cluster.kubeconfig)),
            "join": self._make("join", KAFKA__SESSION_TIMEOUT_SECONDS=_SESSION_SECONDS),
            "store": self.make_store(),
            "agent": self.make_agent("agent", spool=self.disks["spool"].folder / "spool"),
        }
        self._taken: set[str] = set()

    def make_agent(self, name: str, *, spool: Path) -> Component:
        """Return an agent of the node."""
        return self._make(
            name,
            command=["python", "-P", str(_AGENT_PROGRAM)],
            NODE_NAME=NODE,
            SOURCE=f"simulated:{SCENARIO}",
            SIMULATOR__EPOCH_NS=str(self.cluster.epoch_ns),
            SIMULATOR__UIDS_FILE=str(self.cluster.uids),
            SPOOL__DIRECTORY=str(spool),
            SPOOL__SPILL_AFTER_SECONDS="1",
            SPOOL__MIN_FREE_BYTES="0",
            KUBELET__SOCKET=str(self._socket),
            KUBELET__REFRESH_SECONDS="1",
            KUBELET__CACHE_TTL_SECONDS="2",
            KAFKA__REQUEST_TIMEOUT_SECONDS="5",
        )

    def make_store(self, **settings: str) -> Component:
        """Return a sink that writes to the store."""
        return self._make(
            "store",
            command=["gpuledger", "sink", "store"],
            KAFKA__SESSION_TIMEOUT_SECONDS=_SESSION_SECONDS,
            STORE__URI=str(self.store),
            STORE__ENTRIES="true",
            STORE__FLUSH_SECONDS="1",
            **settings,
        )

    def _make(self, name: str, *, command: list[str] | None = None, **settings: str) -> Component:
        return Component(
            name=name,
            command=command or ["gpuledger", name],
            folder=self.folder / name,
            environment={"KAFKA__BOOTSTRAP_SERVERS": self.kafka.bootstrap_servers, **settings},
        )

    async def start(self) -> None:
        """Start everything; return when everything is ready and the store has a sample."""
        if self._small_disk:
            await asyncio.to_thread(self.disks[self._small_disk].mount)
        (self.disks["spool"].folder / "spool").mkdir(parents=True)
        self.disks["store"].folder.mkdir(exist_ok=True)
        await asyncio.to_thread(self.kafka.start)
        await create_topics(self.settings)
        self.kubelet.start()
        for each in self.components.values():
            each.start()
        for each in self.components.values():
            await asyncio.to_thread(each.wait_until_ready)
        await self.await_stored(time.time_ns(), seconds=_START_SECONDS)

    async def await_ready(self, *, seconds: float) -> bool:
        """Wait until all components are ready; return whether they were in time."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if await asyncio.to_thread(self._are_ready):
                return True
            await asyncio.sleep(_POLL_SECONDS)
        return False

    def _are_ready(self) -> bool:
        try:
            return all(each.readyz()["ready"] for each in self.components.values())
        except OSError:
            return False

    async def await_stored(self, time_ns: int, *, seconds: float) -> bool:
        """Wait until the store has a sample of this time; return whether it came in time."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            found = await asyncio.to_thread(self.read_store)
            if found is not None and found.newest_ns >= time_ns:
                return True
            await asyncio.sleep(_POLL_SECONDS)
        return False

    def read_store(self) -> StoredTime | None:
        """Judge the store; `None` if it has no rows."""
        with suppress(UserError):
            return read_time(self.store)
        return None

    async def take(self, name: str) -> None:
        """Kill a component, and do not restart it."""
        self._taken.add(name)
        await asyncio.to_thread(self.components[name].kill)

    async def stop(self, name: str) -> None:
        """End a component by SIGTERM, and do not restart it."""
        self._taken.add(name)
        await asyncio.to_thread(self.components[name].stop)

    async def await_end(self, name: str, *, seconds: float) -> None:
        """Wait until a component has ended by itself."""
        deadline = time.monotonic() + seconds
        while self.components[name].exit_status() is None and time.monotonic() < deadline:  # noqa: ASYNC110  # a process
            await asyncio.sleep(_POLL_SECONDS)

    def bring(self, name: str, component: Component | None = None) -> None:
        """Start a component that was taken, or a new one in its stead."""
        if component is not None:
            self.components[name] = component
        self.components[name].start()
        self._taken.discard(name)

    async def remove(self, name: str) -> None:
        """Kill a component and forget it, as if it had been uninstalled."""
        await asyncio.to_thread(self.components.pop(name).kill)

    async def keep_up(self) -> None:
        """Restart components that ended, until cancelled."""
        ends: dict[str, int] = {}
        due: dict[str, float] = {}
        while True:
            await asyncio.sleep(_POLL_SECONDS)
            for name, each in self.components.items():
                if name in self._taken or (status := each.exit_status()) is None:
                    continue
                now = time.monotonic()
                if name not in due:
                    ends[name] = ends.get(name, 0) + 1
                    due[name] = now + _RESTART_SECONDS * 2 ** (ends[name] - 1)
                    self.print_line(f"  {name} ended with {status}")
                elif now > due[name]:
                    del due[name]
                    each.start()

    async def end(self) -> None:
        """End all components by SIGTERM, upstream first."""
        for each in reversed(self.components.values()):
            each.resume()
            await asyncio.to_thread(each.stop)

    def discard(self) -> None:
        """Kill everything, and unmount the disks."""
        with ExitStack() as stack:
            for disk in self.disks.values():
                stack.callback(disk.discard)
            stack.callback(self.kafka.discard)
            stack.callback(self.kubelet.kill)
            for each in self.components.values():
                stack.callback(each.kill)
