"""An event's readings under dcgm-exporter's names, labels and units, for dashboards made for those.

A device has the labels `namespace`, `pod` and `container` where one container holds all of it by
the books; what several use is told under the ledger's own names alone. The node's page goes by what
the kubelet allocated, and names nobody for a replica, also where that is the only one. Pure.
"""

from collections import Counter
from collections.abc import Mapping
from typing import Final

from gpuledger.ledger.aliases import NO_XIDS, AliasMetric, Read, alias_devices
from gpuledger.ledger.entries import PodIndex, holder_job_of
from gpuledger.ledger.families import Family, FamilyMetric, OverInterval
from gpuledger.ledger.series import SeriesGroup, SeriesValues
from gpuledger.records import Entry, GpuBooks, GpuEvent, GpuReading


def _mib(size_bytes: int | None) -> int | None:
    return None if size_bytes is None else size_bytes >> 20


def _mhz(hertz: int | None) -> int | None:
    return None if hertz is None else hertz // 1_000_000


def _percent(ratio: float | None) -> float | None:
    return None if ratio is None else round(ratio * 100, 4)


def _free_mib(reading: GpuReading) -> int | None:
    if reading.memory_total_bytes is None or reading.memory_used_bytes is None:
        return None
    taken = reading.memory_used_bytes + (reading.memory_reserved_bytes or 0)
    return _mib(max(0, reading.memory_total_bytes - taken))


def _field(name: str, help_text: str, read: Read, *, kind: str = "gauge") -> AliasMetric:
    # A mean of what a counter says falls behind it.
    over = OverInterval.LAST if kind == "counter" else OverInterval.MEAN
    return AliasMetric(FamilyMetric(name=name, help=help_text, kind=kind, over_interval=over), read)


OF_DEVICES: Final = (
    _field(
        "DCGM_FI_DEV_SM_CLOCK",
        "SM clock frequency (in MHz).",
        lambda reading: _mhz(reading.sm_clock_hertz),
    ),
    _field(
        "DCGM_FI_DEV_MEM_CLOCK",
        "Memory clock frequency (in MHz).",
        lambda reading: _mhz(reading.memory_clock_hertz),
    ),
    _field(
        "DCGM_FI_DEV_GPU_TEMP",
        "GPU temperature (in C).",
        lambda reading: reading.temperature_celsius,
    ),
    _field(
        "DCGM_FI_DEV_POWER_USAGE",
        "Power draw (in W).",
        lambda reading: (
            None if reading.power_milliwatts is None else reading.power_milliwatts / 1000
        ),
    ),
    _field(
        "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION",
        "Total energy consumption since boot (in mJ).",
        lambda reading: reading.energy_total_millijoules,
        kind="counter",
    ),
    _field(
        "DCGM_FI_DEV_GPU_UTIL",
        "GPU utilization (in %).",
        lambda reading: _percent(reading.utilization_ratio),
    ),
    _field(
        "DCGM_FI_DEV_MEM_COPY_UTIL",
        "Memory utilization (in %).",
        lambda reading: _percent(reading.memory_utilization_ratio),
    ),
    _field(
        "DCGM_FI_PROF_SM_ACTIVE",
        "The ratio of cycles an SM has at least 1 warp assigned.",
        lambda reading: reading.sm_active_ratio,
    ),
    _field(
        "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE",
        "Ratio of cycles the tensor (HMMA) pipe is active.",
        lambda reading: reading.tensor_active_ratio,
    ),
    _field(
        "DCGM_FI_PROF_DRAM_ACTIVE",
        "Ratio of cycles the device memory interface is active sending or receiving data.",
        lambda reading: reading.dram_active_ratio,
    ),
)
OF_MEMORIES: Final = (
    _field("DCGM_FI_DEV_FB_FREE", "Framebuffer memory free (in MiB).", _free_mib),
    _field(
        "DCGM_FI_DEV_FB_USED",
        "Framebuffer memory used (in MiB).",
        lambda reading: _mib(reading.memory_used_bytes),
    ),
    _field(
        "DCGM_FI_DEV_FB_RESERVED",
        "Framebuffer memory reserved (in MiB).",
        lambda reading: _mib(reading.memory_reserved_bytes),
    ),
    _field(
        "DCGM_FI_DEV_FB_TOTAL",
        "Framebuffer memory total (in MiB).",
        lambda reading: _mib(reading.memory_total_bytes),
    ),
)
LAST_XID: Final = FamilyMetric(
    name="DCGM_FI_DEV_XID_ERRORS",
    help="Value of the last XID error encountered.",
    over_interval=OverInterval.LAST,
)
_LABELS: Final = ("gpu", "UUID", "device", "modelName", "GPU_I_PROFILE", "GPU_I_ID")
_HOLDER_LABELS: Final = ("namespace", "pod", "container", "hpc_job")
_NO_LABELS: Final = ("",) * len(_HOLDER_LABELS)
_NOBODY: Final = (None, None)


class DcgmSeries:
    """Makes these series, with the node's name in a label of that name."""

    def __init__(self, host_label: str = "hostname") -> None:
        """Take `hostname`, as dcgm-exporter's label is since May 2026, or `Hostname` as before.

        `instance`, which a scrape gives a target, is the node as well: dashboards choose by it.
        """
        labels = (*_LABELS, "instance", host_label)
        self.families: Final = (
            Family(
                labels=(*labels, *_HOLDER_LABELS, "GPU_C_ID"),
                metrics=tuple(field.metric for field in OF_DEVICES),
                is_alias=True,
            ),
            Family(
                labels=(*labels, *_HOLDER_LABELS),
                metrics=tuple(field.metric for field in OF_MEMORIES),
                is_alias=True,
            ),
            Family(labels=(*labels, *_HOLDER_LABELS), metrics=(LAST_XID,), is_alias=True),
        )

    def values_of(
        self, event: GpuEvent, last_xids: Mapping[str, int] = NO_XIDS
    ) -> dict[SeriesGroup, SeriesValues]:
        """Return the values of each group; raises ValueError as `EventSeries.values_of` does.

        `last_xids` are those of the node's GPUs since its boot, by UUID.
        """
        of_devices, of_memories, of_xids = self.families
        pods = PodIndex(event)
        values: dict[SeriesGroup, SeriesValues] = {}
        for device in alias_devices(event):
            reading = device.reading
            holder = _sole_holder(device.books, event.interval_ns, pods)
            labels = (*_labels_of(reading), event.node, event.node, *holder)
            compute_instance = str(reading.compute_instance) if device.is_split else ""
            group = SeriesGroup(of_devices, (*labels, compute_instance))
            values[group] = device.values(OF_DEVICES)
            if device.tells_memory:
                values[SeriesGroup(of_memories, labels)] = device.values(OF_MEMORIES)
            # Of instances the driver says it where it can; the last of the board stands for all.
            if reading.parent_uuid is None:
                last_xid = float(last_xids.get(reading.uuid, 0))
                values[SeriesGroup(of_xids, labels)] = (last_xid,)
        return values


def _labels_of(reading: GpuReading) -> tuple[str, ...]:
    number = reading.gpu_instance
    return (
        str(reading.index),
        reading.parent_uuid or reading.uuid,
        f"nvidia{reading.index}",
        reading.model or "",
        reading.mig_profile or "",
        "" if number is None else str(number),
    )


def _sole_holder(books: GpuBooks, interval_ns: int, pods: PodIndex) -> tuple[str, ...]:
    """Return the labels of who holds all of a device; empty where several do, or a part is free."""
    held: Counter[tuple[int | None, str | None]] = Counter()
    holds: dict[tuple[int | None, str | None], Entry] = {}
    for entry in books.entries:
        key = entry.holder, holder_job_of(entry)
        if key != _NOBODY:
            held[key] += entry.held_ns or 0
            holds[key] = entry
    if len(held) != 1 or not interval_ns or held.total() != interval_ns:
        return _NO_LABELS
    ((key, entry),) = holds.items()
    holder = pods.holder_of(entry)
    pod = holder.described
    return pod.namespace or "", pod.name or "", holder.container or "", key[1] or ""
