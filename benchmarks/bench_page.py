"""What a scrape of a node costs: CPU seconds, bytes, and the memory that writing it takes."""

import time
import tracemalloc
from collections.abc import Iterator
from typing import Final

from agent.exposition.page import NodePage
from agent.exposition.settings import ExpositionSettings
from agent.exposition.view import NodeView, make_view
from agent.kubelet.names import ContainerNames
from benchmarks.figure import Figure
from benchmarks.ticks import GPUS, Fleet
from gpuledger.clock import SystemClock
from gpuledger.records import GpuFacts, Inventory, NodeSample

NAME = "page"
_SCRAPES: Final = 200


def run() -> Iterator[Figure]:
    """Yield the cost of a page with both of DCGM's names, our own, and single processes."""
    settings = ExpositionSettings(names="both", process_series=True)
    fleet, clock = Fleet(nodes=1), SystemClock()
    ticks = [fleet.tick(0, second) for second in range(_SCRAPES)]
    view = make_view(settings, clock=clock, tick_seconds=1.0, names=_names(ticks, clock))
    view.equip(_inventory(ticks[0]))
    page = NodePage(view, settings=settings, clock=clock)
    yield Figure(name=f"{NAME}.bytes", value=_bytes(view, page, ticks[0]), unit="bytes/scrape")
    yield Figure(name=f"{NAME}.cpu", value=_seconds(view, page, ticks), unit="seconds/scrape")
    peak, growth = _memory(view, page, ticks)
    yield Figure(name=f"{NAME}.peak", value=peak, unit="bytes")
    yield Figure(name=f"{NAME}.growth", value=growth, unit=f"bytes/{_SCRAPES} scrapes")


def _bytes(view: NodeView, page: NodePage, tick: NodeSample) -> int:
    view.show(tick)
    return len(page())


def _seconds(view: NodeView, page: NodePage, ticks: list[NodeSample]) -> float:
    began = time.process_time()
    for tick in ticks:
        view.show(tick)
        page()
    return (time.process_time() - began) / len(ticks)


def _memory(view: NodeView, page: NodePage, ticks: list[NodeSample]) -> tuple[int, int]:
    """Give the most that writing held, and what all scrapes left behind."""
    tracemalloc.start()
    _seconds(view, page, ticks[:2])
    before = tracemalloc.get_traced_memory()[0]
    tracemalloc.reset_peak()
    _seconds(view, page, ticks)
    after, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return peak - before, after - before


def _names(ticks: list[NodeSample], clock: SystemClock) -> ContainerNames:
    ids = {one.container_id for tick in ticks for one in tick.containers}
    logs = [f"pod-{place}_team_main-{one}.log" for place, one in enumerate(sorted(map(str, ids)))]
    return ContainerNames(list_names=lambda: logs, clock=clock)


def _inventory(tick: NodeSample) -> Inventory:
    facts = [
        GpuFacts(
            uuid=gpu.uuid,
            index=gpu.index,
            pci_bus_id=f"00000000:{gpu.index:02X}:00.0",
            serial=f"16520241234{gpu.index}",
            instances=[],
            capabilities=[],
        )
        for gpu in tick.gpus[:GPUS]
    ]
    return Inventory(
        node=tick.node, boot_id=tick.boot_id, time_ns=1, driver_version="580.95.05", gpus=facts
    )
