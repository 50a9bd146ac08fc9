"""A tick: its rows (each GPU, and behind it its MIG instances), and its records.

Behind the rows of the GPUs that answered stand those of the known ones that did not, without
anything measured: who holds them holds them on.

Beside a tick stands the record of what was read and is not booked, in the same order.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from gpuledger.records import GpuDetails, GpuReading, NodeReadings, NodeSample, ProcessRecord
from gpuledger_agent.core.gpu_sampler import GpuTick
from gpuledger_agent.core.raw import RawGpuSample


@dataclass(frozen=True, kw_only=True)
class NodeTick:
    """All that a node reports of one tick."""

    sample: NodeSample
    """The readings from which it is booked, and what runs."""
    readings: NodeReadings
    """All other readings."""
    processes: list[ProcessRecord]
    """What happened to the processes."""
    relayouted: Sequence[str] = ()
    """The GPUs whose MIG instances are not those of the tick before, by UUID."""


def flatten(raw: Iterable[RawGpuSample]) -> list[RawGpuSample]:
    """Return the answers in the order of the tick's rows."""
    rows: list[RawGpuSample] = []
    for gpu in sorted(raw, key=lambda gpu: gpu.index):
        rows.append(gpu)
        # What the chip's counters measured of an instance came with the GPU's own.
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
    """Return the row of a device that did not answer: what identifies it, and no measurement."""
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
    """Return the other readings under the identity of the sample; a GPU without any is left out."""
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
