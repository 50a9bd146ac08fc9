"""The services of docker-compose.yml, as processes on this machine.

Services, commands, variables, mounted files, volumes and the start order are read from the file.
A container's addresses, such as `kafka:9092` or `0.0.0.0:9820`, become free ports of 127.0.0.1.
Its paths become paths in a directory of the run.
Things that a process cannot have are left out: the containers' users, permissions and read-only
roots.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from typing_extensions import override

from gpuledger.settings.sources import variable_of
from tests.real.services import web
from tests.real.services.kafka import Kafka, KafkaDistribution, count_brokers
from tests.real.services.ports import free_ports
from tests.real.services.process import Process
from tests.unit.deployment import components, compose_file
from tests.unit.deployment.components import ROOT, port_of
from tests.unit.deployment.compose_file import Mount, Service

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping

BIN: Final = Path(sys.executable).parent
READY_SECONDS: Final = 120.0
MAX_PORTS: Final = 40
UNAVAILABLE: Final = frozenset({"grafana"})
"""Grafana is neither in the Go modules nor in Debian; the tests send its queries instead."""


@dataclass(frozen=True, kw_only=True)
class Foreign:
    """A third-party program, with the defaults that its image sets."""

    port: int
    """The port on which it listens."""
    listen: str
    """The option for the listening address."""


FOREIGN: Final = {
    "prometheus": Foreign(port=9090, listen="--web.listen-address="),
    "alertmanager": Foreign(port=9093, listen="--web.listen-address="),
}
SERVICES: Final = {
    service.name: service for service in compose_file.services() if service.name not in UNAVAILABLE
}
ALWAYS: Final = frozenset(name for name in SERVICES if "profiles" not in SERVICES[name].spec)
"""The services that run by default."""


class Places:
    """Where on this machine each service's addresses, mounts and volumes are."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._free = free_ports(MAX_PORTS)
        self._ports: dict[tuple[str, int], int] = {}
        self._sources: dict[str, dict[str, Path]] = {}
        names = "|".join(sorted(SERVICES, key=len, reverse=True))
        self._foreign_address = re.compile(rf"(?<![\w-])({names}):(\d+)\b")
        # `0.0.0.0:9820`, `localhost:8001`, and Kafka's `INSIDE://:9092`.
        self._own_address = re.compile(r"(?:\b0\.0\.0\.0|\blocalhost|(?<=//)):(\d+)\b")

    def port(self, service: str, port: int) -> int:
        """Return the port of this machine that replaces a service's."""
        if (service, port) not in self._ports:
            self._ports[service, port] = self._free.pop()
        return self._ports[service, port]

    def address(self, service: str, port: int) -> str:
        """Return the address of this machine that replaces a service's."""
        return f"127.0.0.1:{self.port(service, port)}"

    def volume(self, name: str) -> Path:
        """Return the directory that replaces a named volume."""
        made = self.folder / "volumes" / name
        made.mkdir(parents=True, exist_ok=True)
        return made

    def move(self, text: str, *, of: Service) -> str:
        """Return a service's text with its addresses and paths mapped to this machine."""
        text = of.path_on_this_machine(text, self._sources_of(of))
        text = self._foreign_address.sub(lambda found: self.address(found[1], int(found[2])), text)
        return self._own_address.sub(lambda found: self.address(of.name, int(found[1])), text)

    def _sources_of(self, service: Service) -> dict[str, Path]:
        """Return the replacement of each mount of a service; addresses in files are mapped too."""
        if service.name not in self._sources:
            files = [ROOT / one.source for one in service.mounts if one.is_file_of_the_repository]
            self._sources[service.name] = {
                mount.source: self._source(service, mount) for mount in service.mounts
            }
            for file in files:
                if file.is_file():
                    copy = self.folder / service.name / file.name
                    copy.parent.mkdir(parents=True, exist_ok=True)
                    copy.write_text(self.move(file.read_text(), of=service))
        return self._sources[service.name]

    def _source(self, service: Service, mount: Mount) -> Path:
        if not mount.is_file_of_the_repository:
            return self.volume(mount.source)
        given = ROOT / mount.source
        return given if given.is_dir() else self.folder / service.name / given.name


class ComposeKafka(Kafka):
    """A broker with the settings of the one in docker-compose.yml."""

    def __init__(self, *, distribution: KafkaDistribution, folder: Path, places: Places) -> None:
        super().__init__(distribution=distribution, folder=folder)
        self._places = places
        self.port = places.port("kafka", 9092)
        self.controller_port = places.port("kafka", 9093)
        self.bootstrap_servers = places.address("kafka", 9092)

    @override
    def listeners(self) -> dict[str, str]:
        service = SERVICES["kafka"]
        return {
            name.removeprefix("KAFKA_").lower().replace("_", "."): self._places.move(
                value, of=service
            )
            for name, value in service.environment.items()
            if name.startswith("KAFKA_")
        }


class Topology:
    """The services of docker-compose.yml that this machine can run, without those that are off."""

    def __init__(
        self, *, folder: Path, distribution: KafkaDistribution, programs: Mapping[str, Path]
    ) -> None:
        self.places = Places(folder)
        self.kafka = ComposeKafka(
            distribution=distribution, folder=folder / "kafka", places=self.places
        )
        self._programs = programs
        self._processes: dict[str, Process] = {}

    def start(self, *, without: Collection[str] = ()) -> None:
        """Start the services, each once its dependencies are there."""
        for name in in_order():
            if name in ALWAYS and name not in without:
                self.start_one(name)

    def wait_until_ready(self) -> None:
        """Wait until each started component is ready."""
        for service in compose_file.deployed():
            if service.name in self._processes:
                self._wait(service.name, partial(answers, f"{self.health_of(service)}/readyz"))

    def health_of(self, service: Service) -> str:
        """Return the address of a component's HTTP endpoints."""
        port = port_of(service.command()[1])
        return f"http://{self.places.address(service.name, port)}"

    def metrics_of(self, name: str) -> str:
        """Return the text of a component's metrics."""
        return web.fetch(f"{self.health_of(SERVICES[name])}/metrics").body.decode()

    def kill(self) -> None:
        """Kill all processes."""
        for process in self._processes.values():
            process.kill()

    def start_one(self, name: str) -> None:
        """Start a service as soon as its dependencies are there."""
        service = SERVICES[name]
        for needed, condition in conditions_of(service):
            self._await(SERVICES[needed], condition)
        process = self._kafka() if service.name == "kafka" else self._process(service)
        self._processes[name] = process
        process.start()

    def _kafka(self) -> Process:
        self.kafka.prepare()
        return self.kafka.process

    def _process(self, service: Service) -> Process:
        return Process(
            name=service.name,
            argv=self._argv(service),
            folder=self.places.folder / service.name,
            environment={
                **self.environment(service),
                "PATH": f"{BIN}:{os.environ['PATH']}",
                "PYTHONPATH": str(ROOT),
            },
        )

    def _argv(self, service: Service) -> list[str]:
        command = [self.places.move(word, of=service) for word in service.command()]
        foreign = FOREIGN.get(service.name)
        if foreign is None:
            return command
        address = self.places.address(service.name, foreign.port)
        return [str(self._programs[service.name]), *command, f"{foreign.listen}{address}"]

    def environment(self, service: Service) -> dict[str, str]:
        """Return a service's variables: the file's own, and mapped defaults of settings."""
        given = service.environment.items()
        variables = {name: self.places.move(value, of=service) for name, value in given}
        if service.name not in {one.name for one in compose_file.deployed()}:
            return variables
        command = [self.places.move(word, of=service) for word in service.command()]
        for path, value in leaves_of(components.settings(command, variables)):
            moved = self.places.move(value, of=service)
            if moved != value:
                variables[variable_of(path)] = moved
        return variables

    def _await(self, service: Service, condition: str) -> None:
        match condition:
            case "service_healthy":
                self._wait(service.name, self._health_check(service))
            case "service_completed_successfully":
                process = self._processes[service.name]
                self._wait(service.name, lambda: process.exit_status() == 0)
            case other:
                assert other == "service_started", other

    def _health_check(self, service: Service) -> Callable[[], bool]:
        if service.name == "kafka":  # its check is a script that exists only in its image
            return lambda: count_brokers("127.0.0.1", self.kafka.port) >= 1
        kind, *words = service.spec["healthcheck"]["test"]
        assert kind == "CMD", kind
        command = [self.places.move(word, of=service) for word in words]
        environment = {"PATH": f"{BIN}:{os.environ['PATH']}"}
        return lambda: (
            subprocess.run(
                command, env=environment, check=False, capture_output=True, timeout=10
            ).returncode
            == 0
        )

    def _wait(self, name: str, probe: Callable[[], bool]) -> None:
        self._processes[name].wait_until(probe, deadline_seconds=READY_SECONDS)


def answers(url: str) -> bool:
    """Return whether a page is there; raises OSError if no server answers."""
    return web.fetch(url).status == 200


def in_order() -> list[str]:
    """Return the services' names, each after its dependencies."""
    order: list[str] = []

    def add(name: str) -> None:
        for needed, _ in conditions_of(SERVICES[name]):
            add(needed)
        if name not in order:
            order.append(name)

    for name in SERVICES:
        add(name)
    # Services without dependencies start before any waiting.
    return sorted(order, key=lambda name: bool(list(conditions_of(SERVICES[name]))))


def conditions_of(service: Service) -> Iterator[tuple[str, str]]:
    """Yield each dependency of a service with the state that it must have."""
    needed: Any = service.spec.get("depends_on", {})
    for name in needed:
        yield name, needed[name]["condition"] if isinstance(needed, dict) else "service_started"


def leaves_of(
    settings: Mapping[str, Any], path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield the settings that are texts, with their paths."""
    for name, value in settings.items():
        if isinstance(value, dict):
            yield from leaves_of(value, (*path, name))
        elif isinstance(value, str):
            yield (*path, name), value
