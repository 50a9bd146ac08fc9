"""The record that stands beside a tick: what was read and is not booked. Pure."""

from collections.abc import Sequence

from agent.normalize.gpu import GpuTick
from gpuledger.records import GpuDetails, NodeReadings, NodeSample


def read_beside(sample: NodeSample, ticks: Sequence[GpuTick]) -> NodeReadings:
    """Return the other readings under the identity of the sample; a GPU without any is left out."""
    details = [tick.details for tick in ticks]
    return NodeReadings(
        node=sample.node,
        boot_id=sample.boot_id,
        seq=sample.seq,
        time_ns=sample.time_ns,
        interval_ns=sample.interval_ns,
        gpus=[one for one in details if one != GpuDetails(uuid=one.uuid)],
    )
