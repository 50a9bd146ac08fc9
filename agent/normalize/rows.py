"""The rows of a tick: each GPU, and behind it the MIG instances into which it is cut. Pure."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from agent.core.raw import RawGpuSample
from gpuledger.records import GpuProfiling

Layout = Mapping[str, frozenset[str]]
"""The UUIDs of each GPU's instances."""


def flatten(answers: Iterable[RawGpuSample]) -> list[RawGpuSample]:
    """Return the answers in the order of the tick's rows."""
    return [row for gpu in sorted(answers, key=lambda one: one.index) for row in _rows(gpu)]


def layout_of(answers: Iterable[RawGpuSample]) -> Layout:
    """Return which instances there are."""
    return {gpu.uuid: frozenset(one.uuid for one in gpu.instances) for gpu in answers}


def gpu_instances_of(answers: Iterable[RawGpuSample]) -> dict[str, int]:
    """Return the driver's id of the GPU instance in which each instance is, where it is known."""
    return {
        one.uuid: one.instance.gpu_instance
        for gpu in answers
        for one in gpu.instances
        if one.instance and one.instance.gpu_instance is not None
    }


def find_vanished(before: Layout, answers: Iterable[RawGpuSample]) -> set[str]:
    """Return the instances that are gone from GPUs that answered: nothing runs in them any more."""
    now = layout_of(answers)
    return {uuid for gpu, found in now.items() for uuid in before.get(gpu, frozenset()) - found}


def find_relayouted(before: Layout, answers: Iterable[RawGpuSample]) -> list[str]:
    """Return the GPUs whose instances are not those that they were."""
    now = layout_of(answers)
    return [gpu for gpu, found in now.items() if before.get(gpu, found) != found]


def _rows(gpu: RawGpuSample) -> list[RawGpuSample]:
    if not gpu.instances:
        return [gpu]
    measured = gpu.instance_profiling
    return [gpu, *(replace(one, **measured.get(one.uuid, {})) for one in gpu.instances)]


def identify(answers: RawGpuSample) -> dict[str, Any]:
    """Return the fields of `GpuReading` that say which instance a row is of, or if it is cut."""
    instance = answers.instance
    if instance is None:
        return {"mig_enabled": answers.mig_enabled}
    return {
        "parent_uuid": instance.parent_uuid,
        "gpu_instance": instance.gpu_instance,
        "compute_instance": instance.compute_instance,
        "mig_profile": instance.profile,
    }


def measured_ratio(details: Mapping[str, Any]) -> float | None:
    """Return the share of time in which an instance was busy, by the chip's counters.

    The driver's own utilization is of whole GPUs only.
    """
    profiling: GpuProfiling | None = details.get("profiling")
    return profiling.graphics_engine_active_ratio if profiling else None
