"""Plays the scenario's pods into a cluster, step by step as time goes on.

Here lives the way from a step to a write. The cluster is the simulator's own API server or, through
`driver`, a real one: both get the same writes.
"""

from pathlib import Path
from typing import Protocol

import structlog
import yaml

from gpuledger.clock import NS_PER_SECOND
from simulator.kube.objects import Json, PodStep, pod_events, pod_object, pod_status
from simulator.simulation import Simulation

_log = structlog.get_logger(__name__)


class Cluster(Protocol):
    """Where pods are written."""

    async def create_pod(self, pod_key: str, item: Json) -> None:
        """Create a pod."""

    async def patch_pod_status(self, namespace: str, name: str, status: Json) -> None:
        """Write a pod's status as its kubelet would."""

    async def delete_pod(self, namespace: str, name: str, *, grace_seconds: int) -> None:
        """Delete a pod, or mark it as terminating where the grace period is not zero."""


class PodDriver:
    """The steps that are still to come."""

    def __init__(self, simulation: Simulation, cluster: Cluster) -> None:
        self._simulation = simulation
        self._cluster = cluster
        self._events = pod_events(simulation.pods)
        self._next = 0

    async def play(self) -> None:
        """Take each step when its time comes; returns after the last one."""
        while self._next < len(self._events):
            await self.play_due()
            if self._next < len(self._events):
                await self._simulation.clock.sleep(max(0.001, self._wait_seconds()))

    async def play_due(self) -> None:
        """Take the steps whose time has come."""
        while self._next < len(self._events) and self._wait_seconds() <= 0:
            event = self._events[self._next]
            pod, spec = event.pod, event.pod.spec
            match event.step:
                case PodStep.CREATED:
                    item = pod_object(self._simulation, pod, created_ns=event.at_ns)
                    await self._cluster.create_pod(pod.key, item)
                case PodStep.RUNNING | PodStep.FINISHED:
                    status = pod_status(self._simulation, pod, event.step)
                    await self._cluster.patch_pod_status(spec.namespace, spec.name, status)
                case PodStep.TERMINATING:
                    await self._cluster.delete_pod(spec.namespace, spec.name, grace_seconds=30)
                case PodStep.DELETED:
                    await self._cluster.delete_pod(spec.namespace, spec.name, grace_seconds=0)
            self._next += 1
            _log.info("pod_step_played", pod=event.pod.key, step=event.step.value)

    def _wait_seconds(self) -> float:
        at_ns = self._simulation.epoch_ns + self._events[self._next].at_ns
        return (at_ns - self._simulation.clock.time_ns()) / NS_PER_SECOND


def write_kubeconfig(path: Path, url: str) -> None:
    """Write a kubeconfig that names the simulator's API server and a user without credentials."""
    content = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "simulated", "cluster": {"server": url}}],
        "users": [{"name": "reader", "user": {}}],
        "contexts": [{"name": "simulated", "context": {"cluster": "simulated", "user": "reader"}}],
        "current-context": "simulated",
    }
    path.write_text(yaml.safe_dump(content, sort_keys=False))
