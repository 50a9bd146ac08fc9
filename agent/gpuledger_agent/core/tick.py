"""Builds a tick's rows and records.

A tick has one row for each GPU that answered, followed by the rows of its MIG instances, and then
rows for the known GPUs that did not answer. A GPU that did not answer has no measurements, but may
still be allocated. The first record, `NodeSample`, contains the readings from which usage is
computed. The second record, `NodeReadings`, contains all other readings, in the same order.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from gpuledger.records import GpuDetails, GpuReading, NodeReadings, NodeSample, ProcessRecord
from gpuledger_agent.core.gpu_sampler import GpuTick
from gpuledger_agent.core.raw import RawGpuSample


@dataclass(frozen=True, kw_only=True)
class NodeTick:
    """Everything that a node reports in one tick."""

    sample: NodeSample
    """The readings from which the join computes usage, and the processes."""
    readings: NodeReadings
    """All other readings."""
    processes: list[ProcessRecord]
    """Records of the processes that started, changed or ended since the last tick."""
    relayouted: Sequence[str] = ()
    """UUIDs of the GPUs whose MIG instances have changed since the previous tick."""
    boot_time_ns: int | None = None
    """The time of the node's boot by the clock that gave the tick its times."""


def flatten(raw: Iterable[RawGpuSample]) -> list[RawGpuSample]:
    """Return the answers of GPUs and MIG instances in the order of the tick's rows.

    An instance's values of the chip's counters are moved from its GPU's answer to its own.
    """
    rows: list[RawGpuSample] = []
    for gpu in sorted(raw, key=lambda gpu: gpu.index):
        rows.append(gpu)
        # The chip's counters of an instance are in the answer of its GPU.
        activity, profiling = gpu.instance_activity, gpu.instance_profiling
        rows += (
            replace(
                instance,
                **activity.get(instance.uuid, {}),
                **profiling.get(instance.uuid, {}),
            )
            for instance in gpu.instances
        )
    return rows


def without_measurements(reading: GpuReading) -> GpuReading:
    """Return the row of a device that did not answer: its identity without measurements."""
    return GpuReading(
        uuid=reading.uuid,
        index=reading.index,
        model=reading.model,
        parent_uuid=reading.parent_uuid,
        gpu_instance=reading.gpu_instance,
        compute_instance=reading.compute_instance,
        mig_profile=reading.mig_profile,
        mig_enabled=reading.mig_enabled,
        compute_slices=reading.compute_slices,
        memory_slices=reading.memory_slices,
        unresponsive=True,
    )


def read_details(sample: NodeSample, ticks: Sequence[GpuTick]) -> NodeReadings:
    """Return the tick's readings that are not in `sample`; omit GPUs without such readings."""
    details = [tick.details for tick in ticks]
    return NodeReadings(
        cluster=sample.cluster,
        node=sample.node,
        boot_id=sample.boot_id,
        seq=sample.seq,
        time_ns=sample.time_ns,
        interval_ns=sample.interval_ns,
        gpus=[gpu for gpu in details if gpu != GpuDetails(uuid=gpu.uuid)],
    )
