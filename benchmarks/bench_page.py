"""The cost of scraping a node: CPU seconds, bytes, and the memory for writing the page."""

import gzip
import time
import tracemalloc
from collections.abc import Iterator
from typing import Any, Final

from msgspec.structs import fields

from benchmarks.figure import Figure
from benchmarks.ticks import GPUS, Fleet
from gpuledger.clock import SystemClock
from gpuledger.records import (
    GpuDetails,
    GpuFacts,
    GpuProfiling,
    GpuThrottling,
    GpuTraffic,
    Inventory,
    NodeReadings,
    NodeSample,
)
from gpuledger_agent.exposition import PageRenderer
from gpuledger_agent.exposition.node_state import NodeState, make_node_state
from gpuledger_agent.exposition.pod_lookup import PodLookup
from gpuledger_agent.host.node_pods import ContainerNames
from gpuledger_agent.settings import ExpositionSettings

NAME = "page"
_SCRAPES: Final = 200
_Tick = tuple[NodeSample, NodeReadings]


def run() -> Iterator[Figure]:
    """Yield the cost of a default page, and of one with all optional series."""
    yield from _costs(NAME, ExpositionSettings())
    full = ExpositionSettings(
        dcgm_names="both", profile="full", pod_series=True, process_series=True
    )
    yield from _costs(f"{NAME}.full", full)


def _costs(name: str, settings: ExpositionSettings) -> Iterator[Figure]:
    fleet, clock = Fleet(nodes=1), SystemClock()
    samples = [fleet.tick(0, second) for second in range(_SCRAPES)]
    ticks = [(sample, _beside(sample)) for sample in samples]
    pods = PodLookup(name_of=_names(samples, clock).name_of)
    view = make_node_state(settings, clock=clock, sampling_interval_seconds=1.0, pods=pods)
    view.set_inventory(_inventory(samples[0]))
    page = PageRenderer(view, settings=settings, clock=clock)
    text = _text(view, page, ticks[0])
    series = sum(not line.startswith(b"#") for line in text.splitlines())
    yield Figure(name=f"{name}.series", value=series, unit="series")
    yield Figure(name=f"{name}.bytes", value=len(text), unit="bytes/scrape")
    yield Figure(name=f"{name}.gzip.bytes", value=len(_compress(text)), unit="bytes/scrape")
    yield Figure(name=f"{name}.gzip.cpu", value=_compressing(text), unit="seconds/scrape")
    yield Figure(name=f"{name}.cpu", value=_seconds(view, page, ticks), unit="seconds/scrape")
    peak, growth = _memory(view, page, ticks)
    yield Figure(name=f"{name}.peak", value=peak, unit="bytes")
    yield Figure(name=f"{name}.growth", value=growth, unit=f"bytes/{_SCRAPES} scrapes")


def _text(view: NodeState, page: PageRenderer, tick: _Tick) -> bytes:
    view.update(*tick)
    return page()


def _compress(text: bytes) -> bytes:
    """Compress as the health endpoints do."""
    return gzip.compress(text, compresslevel=1, mtime=0)


def _compressing(text: bytes) -> float:
    began = time.process_time()
    for _ in range(_SCRAPES):
        _compress(text)
    return (time.process_time() - began) / _SCRAPES


def _seconds(view: NodeState, page: PageRenderer, ticks: list[_Tick]) -> float:
    began = time.process_time()
    for tick in ticks:
        view.update(*tick)
        page()
    return (time.process_time() - began) / len(ticks)


def _memory(view: NodeState, page: PageRenderer, ticks: list[_Tick]) -> tuple[int, int]:
    """Return the peak memory of writing, and the growth over all scrapes."""
    tracemalloc.start()
    _seconds(view, page, ticks[:2])
    before = tracemalloc.get_traced_memory()[0]
    tracemalloc.reset_peak()
    _seconds(view, page, ticks)
    after, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return peak - before, after - before


def _beside(sample: NodeSample) -> NodeReadings:
    """Return the GPU readings that belong to a tick."""
    measured = [one.name for one in fields(GpuProfiling) if not one.name.endswith("_ratios")]
    values: dict[str, Any] = {
        name: 123_456 if name.endswith("_per_second") else 0.123456 for name in measured
    }
    counted = {one.name: 2**50 + place for place, one in enumerate(fields(GpuTraffic))}
    details = [
        GpuDetails(
            uuid=gpu.uuid,
            power_instant_milliwatts=412_345,
            memory_temperature_celsius=61,
            performance_state=0,
            profiling=GpuProfiling(**values),
            traffic=GpuTraffic(**counted),
            throttling=GpuThrottling(reasons=4, power_ns_total=1_234_500_000_000),
        )
        for gpu in sample.gpus
    ]
    return NodeReadings(
        cluster="default",
        node=sample.node,
        boot_id=sample.boot_id,
        seq=sample.seq,
        time_ns=sample.time_ns,
        interval_ns=sample.interval_ns,
        gpus=details,
    )


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
        cluster="default",
        node=tick.node,
        boot_id=tick.boot_id,
        time_ns=1,
        driver_version="580.95.05",
        gpus=facts,
    )
