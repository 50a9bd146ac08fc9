"""The record that stands beside a tick: what was read and is not booked. Pure."""

from collections.abc import Sequence
from typing import Final

from agent.normalize.gpu import GpuTick
from gpuledger.records import NodeReadings, NodeSample

# Of a record that knows nothing else: what is absent is not in it.
_SILENT: Final = {"uuid"}


def read_beside(sample: NodeSample, ticks: Sequence[GpuTick]) -> NodeReadings:
    """Return the other readings under the identity of the sample; a GPU without any is left out."""
    details = [tick.details for tick in ticks]
    return NodeReadings(
        node=sample.node,
        boot_id=sample.boot_id,
        seq=sample.seq,
        time_ns=sample.time_ns,
        interval_ns=sample.interval_ns,
        gpus=[one for one in details if vars(one).keys() != _SILENT],
    )
