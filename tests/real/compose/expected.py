"""The expected values of each dashboard panel, calculated from the scenario's truth."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from gpuledger_simulator.plan import PlannedPod
    from tests.real.compose.truth import Truth

Approximately = Any
"""The type of `pytest.approx(…)`, which pytest does not export."""
Expected = dict[str, Approximately]


def about(value: float, *, rel: float = 0.05, within: float = 0.0) -> Approximately:
    """Return an approximation of a value: by a ratio, and by the effect of the window's edges."""
    return pytest.approx(value, rel=rel, abs=within)


def between(low: float, high: float) -> Approximately:
    return pytest.approx((low + high) / 2, abs=(high - low) / 2)


def gpus(value: float) -> Approximately:
    return about(value, within=0.05)


def watts(value: float) -> Approximately:
    return about(value, within=15.0)


def by_pod(truth: Truth, value_of: Callable[[PlannedPod], Any]) -> Expected:
    return {f"default {pod.spec.namespace}/{pod.spec.name}": value_of(pod) for pod in truth.pods()}


def power_by_pod(truth: Truth) -> Expected:
    return {
        **by_pod(truth, lambda pod: watts(truth.used(pod).watts)),
        "idle": watts(truth.idle_watts),
        "host": watts(truth.used(None).watts),
        "unattributed": watts(0.0),
    }


def idle_by_gpu(truth: Truth) -> Expected:
    return {
        f"default {node} GPU {gpu.facts.index}": gpus(1 - truth.busy(gpu))
        for node, gpu in truth.gpus
    }


def top_pods(truth: Truth) -> Expected:
    found: Expected = {}
    for pod in truth.pods():
        spec, owner, used = pod.spec, pod.spec.owner, truth.used(pod)
        assert owner
        row = f"default {spec.namespace} {owner.kind} {owner.name} {spec.name}"
        found |= {
            f"A {row}": gpus(used.gpus),
            f"B {row}": about(used.bytes),
            f"C {row}": watts(used.watts),
        }
    return found


def busy(truth: Truth) -> Expected:
    shares = [truth.busy(gpu) for _, gpu in truth.gpus]
    return {"busy": gpus(sum(shares) / len(shares))}


EXPECTED: Mapping[str, Callable[[Truth], Expected]] = {
    "GPUs": lambda truth: {"GPUs": len(truth.gpus)},
    "Busy": busy,
    "Busy without a pod": lambda truth: {"GPUs busy": gpus(truth.used(None).gpus)},
    "Power": lambda truth: {"power": about(truth.watts, rel=0.02)},
    "Hottest": lambda truth: {"hottest": about(truth.celsius(), within=2)},
    "GPU busy, by pod": lambda truth: by_pod(truth, lambda pod: gpus(truth.used(pod).gpus)),
    "GPU memory, by pod": lambda truth: by_pod(truth, lambda pod: about(truth.used(pod).bytes)),
    "Power, by pod": power_by_pod,
    "Idle, by GPU": idle_by_gpu,
    "Top pods, now": top_pods,
    "GPUs allocated, by pod": lambda truth: by_pod(
        truth, lambda pod: about(truth.allocated(pod), rel=0.01)
    ),
    "Attribution method": lambda truth: {
        method: gpus(count) for method, count in truth.methods().items()
    },
    "Incidents, by kind": lambda _: {},
    "Event delay": lambda truth: {
        name: between(-2, 60) for name in ("join", "remote_write", "alerts", "store")
    },
}
"""The expected content of each panel, by the names in its legend."""
MAY_BE_ABSENT = frozenset({"unattributed"})
OF_THE_COMPONENTS = frozenset({"Event delay"})
"""Scraped values have the time of the scrape, so a change shows with the next one."""
