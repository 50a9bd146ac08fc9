"""The real parts of a run and the components under test; each of them can be taken away.

This module starts and ends them; the schedule decides when something happens to them.
"""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from typing import TYPE_CHECKING, Final

from gpuledger.bus.administration import create_topics
from gpuledger.errors import UnavailableError
from gpuledger.settings import KafkaSettings
from tests.real.deployment.chart import render
from tests.real.deployment.rendering import RBAC
from tests.real.end_to_end.components import Component
from tests.real.services.kafka import Kafka
from tests.real.services.kubernetes import KubeApi
from tests.tools import catalogue
from tests.tools.errors import MissingToolError

if TYPE_CHECKING:
    from pathlib import Path


SESSION_SECONDS: Final = 6.0
"""The shortest session that a broker allows by default."""
NAMESPACE: Final = "gpuledger"
_REQUEST_SECONDS: Final = 15.0


class RealParts:
    """A broker with the topics, and an API server with podwatch's account."""

    def __init__(self, folder: Path) -> None:
        try:
            distribution = catalogue.KAFKA.distribution()
            programs = ("kube-apiserver", "etcd", "helm")
            found = {name: catalogue.named(name).find() for name in programs}
        except MissingToolError as error:
            raise UnavailableError(str(error)) from error
        self.kafka = Kafka(distribution=distribution, folder=folder / "kafka")
        self.kube_api = KubeApi(
            apiserver=found["kube-apiserver"], etcd=found["etcd"], folder=folder / "kubernetes"
        )

    @property
    def settings(self) -> KafkaSettings:
        """Return a client's settings for this broker."""
        return KafkaSettings(
            bootstrap_servers=self.kafka.bootstrap_servers,
            request_timeout_seconds=_REQUEST_SECONDS,
        )

    async def start(self) -> None:
        """Start both, and create the topics."""
        await asyncio.to_thread(self.kafka.start)
        await asyncio.to_thread(self.kube_api.start)
        await create_topics(self.settings)

    def podwatch_kubeconfig(self) -> Path:
        """Return a kubeconfig of an account with only the permissions of podwatch's manifests."""
        self.kube_api.create_namespace(NAMESPACE)
        for manifest in render().of_kind(*RBAC):
            self.kube_api.apply(manifest)
        return self.kube_api.service_account_kubeconfig(
            namespace=NAMESPACE, name="gpuledger-podwatch"
        )

    def discard(self) -> None:
        """End both and delete their data; the logs stay."""
        with ExitStack() as stack:
            stack.callback(self.kafka.discard)
            stack.callback(self.kube_api.discard)


class Components:
    """podwatch and the workers of the join."""

    def __init__(self, *, parts: RealParts, folder: Path, workers: int) -> None:
        self._servers = parts.kafka.bootstrap_servers
        self._folder = folder
        kubeconfig = {"KUBERNETES__KUBECONFIG": str(parts.podwatch_kubeconfig())}
        made = [self._component("podwatch", **kubeconfig)]
        made += [self._component(f"join-{number}") for number in range(workers)]
        self.components = {each.name: each for each in made}

    def start(self) -> None:
        """Start all; return when all are ready."""
        for each in self.components.values():
            each.start()
        for each in self.components.values():
            each.wait_until_ready()

    def end(self) -> dict[str, int | None]:
        """End all by SIGTERM; return the exit codes."""
        return {name: each.stop() for name, each in self.components.items()}

    def kill(self) -> None:
        """Kill all processes, including stopped ones."""
        with ExitStack() as stack:
            for each in self.components.values():
                stack.callback(each.kill)

    def _component(self, name: str, **settings: str) -> Component:
        program = name.split("-", maxsplit=1)[0]
        return Component(
            name=name,
            command=["gpuledger", program],
            folder=self._folder / name,
            environment={
                "KAFKA__BOOTSTRAP_SERVERS": self._servers,
                "KAFKA__SESSION_TIMEOUT_SECONDS": str(SESSION_SECONDS),
                **settings,
            },
        )
