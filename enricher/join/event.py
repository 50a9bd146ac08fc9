"""Puts a tick's event together: what the node said, the books, who the pods are."""

from typing import cast

from enricher.join.pods.describe import PodDescriptions
from gpuledger.records import GpuBooks, GpuEvent, NodeSample, PodDescription, Settlement


def make_event(
    sample: NodeSample,
    books: list[GpuBooks],
    said: PodDescriptions,
    *,
    late: bool = False,
    uncovered_seconds: float | None = None,
    settlements: list[Settlement] | None = None,
) -> GpuEvent:
    """Return the event of a tick, ready for `encode`; its descriptions are encoded already."""
    return GpuEvent(
        node=sample.node,
        boot_id=sample.boot_id,
        seq=sample.seq,
        time_ns=sample.time_ns,
        interval_ns=sample.interval_ns,
        late=True if late else None,
        uncovered_seconds=uncovered_seconds,
        gpus=books,
        containers=sample.containers,
        pods=cast("list[PodDescription]", said.pods),
        allocations=sample.allocations,
        holder_uids=cast("list[str | None] | None", said.holder_uids),
        settlements=settlements,
    )
