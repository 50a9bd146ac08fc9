"""Reads the DCGM series of a page in the Prometheus text format, by metric and GPU.

Metrics are named as before DCGM 4.6, so that pages with old and with new names can be compared.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Final, NamedTuple

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from gpuledger.errors import UserError
from gpuledger_agent.exposition.dcgm_fields import all_fields

_PREFIX: Final = "DCGM_"
_UUIDS: Final = ("UUID", "uuid", "gpu_uuid")
_INSTANCE: Final = "GPU_I_ID"
_PARTS: Final = (
    *("xid", "clock_event", "health_watch", "peer_gpu"),
    *("nvlink", "nvswitch", "cpu", "cpucore"),
)
"""Labels that distinguish the series of one field and GPU."""
_SHARE: Final = "gpuledger_share"
"""A label of the agent's series per container, which are left out: dcgm-exporter has none."""


class SeriesKey(NamedTuple):
    """Identifies a series on both pages: metric, GPU and part of the GPU."""

    metric: str
    gpu: str
    """The GPU's UUID; empty for series that belong to no GPU, such as those of CPUs."""
    part: str = ""
    """The MIG instance, XID, clock event, health watch or peer; empty if there is none."""


@dataclass(kw_only=True)
class ShownSeries:
    """A series on a page."""

    value: float
    labels: Mapping[str, str]
    """The labels that are not in the key."""


@dataclass(kw_only=True)
class DcgmPage:
    """The DCGM series of one page."""

    series: dict[SeriesKey, ShownSeries] = field(default_factory=dict)

    @property
    def gpus(self) -> set[str]:
        """The UUIDs of all GPUs on the page."""
        return {key.gpu for key in self.series} - {""}


def parse_page(text: str, *, url: str) -> DcgmPage:
    """Return the DCGM series of a page; raises `UserError` if it is not a page of metrics.

    If dcgm-exporter has a series of a shared device for each pod, the page has the one without a
    pod, otherwise the first one.
    """
    page = DcgmPage()
    try:
        families = list(text_string_to_metric_families(text))
    except ValueError as error:
        raise UserError(f"{url}: not a page in the Prometheus text format: {error}") from error
    for family in families:
        for sample in family.samples:
            if sample.name.startswith(_PREFIX) and _SHARE not in sample.labels:
                key, shown = _read(sample)
                former = page.series.get(key)
                if former is None or ("pod" in former.labels and "pod" not in shown.labels):
                    page.series[key] = shown
    return page


def _read(sample: Sample) -> tuple[SeriesKey, ShownSeries]:
    labels = sample.labels
    uuid = next((labels[name] for name in _UUIDS if name in labels), "")
    parts = [f"{name}={labels[name]}" for name in (_INSTANCE, *_PARTS) if name in labels]
    # The parser adds this suffix to the names of counters; DCGM's names are in capitals.
    name_on_page = sample.name.removesuffix("_total")
    metric = old_names().get(name_on_page, name_on_page)
    others = {name: value for name, value in labels.items() if name not in (_INSTANCE, *_PARTS)}
    return SeriesKey(metric, uuid, ",".join(parts)), ShownSeries(value=sample.value, labels=others)


@cache
def old_names() -> Mapping[str, str]:
    """Return the names before DCGM 4.6 of the supported fields, by all their names."""
    return {name: field.old for field in all_fields() for name in (field.old, field.new)}
