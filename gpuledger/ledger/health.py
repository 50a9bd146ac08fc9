"""The series of GPU health: errors, throttling, links, and the driver's recommended action.

Events lack this data; it comes from `gpuledger.readings.v1`, where each GPU's health and throttling
reasons are queried every few seconds, at different times for different GPUs. The last values of
each GPU are therefore remembered (`NodeHealth`) and sent together at regular intervals. A GPU
without readings for a minute is left out.

`HEALTH_FAMILIES` is the table. A device is identified by its UUID; `GPU_INFO` describes it.

Events at an instant are incidents, counted by labels with a bounded set of values: a kind from
`INCIDENT_KINDS`, an XID from NVIDIA's catalogue, and `OTHER` for everything else. This module does
no I/O.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Final

from gpuledger.ledger.families import Family, FamilyMetric
from gpuledger.ledger.series import SeriesGroup, SeriesValues
from gpuledger.records import (
    GpuDetails,
    GpuHealth,
    GpuLimits,
    GpuThrottling,
    GpuTraffic,
    Incident,
    NodeReadings,
)
from gpuledger.records.bounds import MAX_GPUS
from gpuledger.records.incidents import INCIDENT_KINDS
from gpuledger.xids import UNKNOWN, find_xid

THROTTLE_REASONS: Final = {
    0x1: "gpu_idle",
    0x2: "clocks_setting",
    0x4: "power_cap",
    0x8: "hw_slowdown",
    0x10: "sync_boost",
    0x20: "sw_thermal",
    0x40: "hw_thermal",
    0x80: "hw_power_brake",
    0x100: "display_clocks",
}
"""NVML's bits, with dcgm-exporter's names."""
OTHER: Final = "other"
"""Label value for everything that this version does not know."""
KEPT_NS: Final = 60 * 10**9
"""How long a GPU without readings is still sent."""
MAX_AGE_NS: Final = 3_660 * 10**9
"""How long health is sent after it was queried; agents query it at least hourly."""


@dataclass(frozen=True, kw_only=True, eq=False)
class HealthFamily:
    """One metric of GPU health, and the readings from which its series are made."""

    family: Family
    members: tuple[tuple[tuple[str, ...], str], ...]
    """The label values after `gpu_uuid`, and the path of the reading: part and field."""


def _metric(
    name: str,
    help_text: str,
    *members: tuple[str, ...],
    labels: tuple[str, ...] = (),
    kind: str = "gauge",
) -> HealthFamily:
    return HealthFamily(
        family=Family(
            labels=("gpu_uuid", *labels),
            metrics=(FamilyMetric(name=f"gpuledger_gpu_{name}", help=help_text, kind=kind),),
        ),
        members=tuple((tuple(values), path) for path, *values in members),
    )


_TABLE: Final = (
    _metric(
        "throttled_seconds_total",
        "Total time for which the clocks were throttled.",
        *(
            (f"throttling.{reason}_ns_total", reason)
            for reason in (
                "power",
                "thermal",
                "sync_boost",
                "board_limit",
                "low_utilization",
                "reliability",
                "software_thermal",
                "hardware_thermal",
                "power_brake",
            )
        ),
        labels=("reason",),
        kind="counter",
    ),
    _metric(
        "ecc_errors_total",
        "Total number of memory errors since the driver was loaded (volatile) or in the GPU's"
        " lifetime (aggregate).",
        ("health.ecc_corrected_volatile_total", "corrected", "volatile"),
        ("health.ecc_uncorrected_volatile_total", "uncorrected", "volatile"),
        ("health.ecc_corrected_aggregate_total", "corrected", "aggregate"),
        ("health.ecc_uncorrected_aggregate_total", "uncorrected", "aggregate"),
        labels=("kind", "counted"),
        kind="counter",
    ),
    _metric(
        "sram_errors_total",
        "Total number of SRAM errors in the GPU's lifetime.",
        ("health.sram_corrected_total", "corrected"),
        ("health.sram_uncorrected_parity_total", "parity"),
        ("health.sram_uncorrected_secded_total", "secded"),
        labels=("kind",),
        kind="counter",
    ),
    _metric(
        "sram_threshold_exceeded",
        "Whether SRAM errors exceed the manufacturer's threshold (1 = yes).",
        ("health.sram_threshold_exceeded",),
    ),
    _metric(
        "retired_pages",
        "Number of retired memory pages (before Ampere).",
        ("health.retired_pages_single_bit", "single_bit"),
        ("health.retired_pages_double_bit", "double_bit"),
        labels=("cause",),
    ),
    _metric(
        "retired_pages_pending",
        "Whether a page waits for a reboot to be retired (1 = yes).",
        ("health.retired_pages_pending",),
    ),
    _metric(
        "remapped_rows",
        "Number of remapped memory rows (Ampere and newer).",
        ("health.remapped_rows_correctable", "correctable"),
        ("health.remapped_rows_uncorrectable", "uncorrectable"),
        labels=("cause",),
    ),
    _metric(
        "remapped_rows_pending",
        "Whether a row waits for a GPU reset to be remapped (1 = yes).",
        ("health.remapped_rows_pending",),
    ),
    _metric(
        "remapped_rows_failed",
        "Whether a row could not be remapped (1 = yes).",
        ("health.remapped_rows_failed",),
    ),
    _metric(
        "remap_banks",
        "Number of memory banks by remaining spare rows.",
        *(
            (f"health.remap_banks_{left}", left)
            for left in ("max", "high", "partial", "low", "none")
        ),
        labels=("spare_rows",),
    ),
    _metric(
        "pcie_replays_total",
        "Total number of PCIe replays.",
        ("health.pcie_replays_total",),
        kind="counter",
    ),
    _metric(
        "pcie_link_generation",
        "Current PCIe link generation.",
        ("health.pcie_link_generation",),
    ),
    _metric("pcie_link_width", "Current number of PCIe lanes.", ("health.pcie_link_width",)),
    _metric(
        "pcie_max_link_generation",
        "Highest PCIe generation supported by both the GPU and the machine.",
        ("health.pcie_max_link_generation",),
    ),
    _metric(
        "pcie_max_link_width",
        "Largest number of PCIe lanes supported by both the GPU and the machine.",
        ("health.pcie_max_link_width",),
    ),
    _metric(
        "pcie_errors_total",
        "Total number of PCIe errors.",
        ("health.pcie_correctable_errors_total", "correctable"),
        ("health.pcie_naks_received_total", "nak_received"),
        ("health.pcie_receiver_errors_total", "receiver"),
        ("health.pcie_bad_tlps_total", "bad_tlp"),
        ("health.pcie_naks_sent_total", "nak_sent"),
        ("health.pcie_bad_dllps_total", "bad_dllp"),
        ("health.pcie_non_fatal_errors_total", "non_fatal"),
        ("health.pcie_fatal_errors_total", "fatal"),
        ("health.pcie_unsupported_requests_total", "unsupported_request"),
        ("health.pcie_lcrc_errors_total", "lcrc"),
        ("health.pcie_lane_errors_total", "lane"),
        labels=("kind",),
        kind="counter",
    ),
    _metric(
        "nvlink_errors_total",
        "Total number of NVLink errors.",
        ("health.nvlink_crc_flit_errors_total", "crc_flit"),
        ("health.nvlink_crc_data_errors_total", "crc_data"),
        ("health.nvlink_replays_total", "replay"),
        ("health.nvlink_recoveries_total", "recovery"),
        ("health.nvlink_link_replays_totals", "dl_replay"),
        ("health.nvlink_link_recoveries_totals", "dl_recovery"),
        ("health.nvlink_link_crc_errors_totals", "dl_crc"),
        ("health.nvlink_link_malformed_packets_totals", "malformed_packet"),
        ("health.nvlink_link_buffer_overruns_totals", "buffer_overrun"),
        ("health.nvlink_link_receive_errors_totals", "receive"),
        ("health.nvlink_link_receive_remote_errors_totals", "receive_remote"),
        ("health.nvlink_link_receive_general_errors_totals", "receive_general"),
        ("health.nvlink_link_integrity_errors_totals", "integrity"),
        ("health.nvlink_link_discards_totals", "discard"),
        ("health.nvlink_link_failed_recoveries_totals", "failed_recovery"),
        ("health.nvlink_link_effective_errors_totals", "effective"),
        ("health.nvlink_link_symbol_errors_totals", "symbol"),
        labels=("kind",),
        kind="counter",
    ),
    _metric(
        "nvlink_successful_recoveries_total",
        "Total number of successful NVLink recoveries (Blackwell and newer).",
        ("health.nvlink_link_successful_recoveries_totals",),
        kind="counter",
    ),
    _metric(
        "nvlink_bit_error_ratio",
        "Bit error ratio of the worst NVLink: after correction (effective) or of symbols (symbol).",
        ("health.nvlink_link_effective_bit_error_ratios", "effective"),
        ("health.nvlink_link_symbol_bit_error_ratios", "symbol"),
        labels=("kind",),
    ),
    _metric(
        "fabric_condition",
        "Whether the NVLink fabric has the condition (1 = yes).",
        ("health.fabric_bandwidth_degraded", "bandwidth_degraded"),
        ("health.fabric_route_recovery", "route_recovery"),
        ("health.fabric_route_unhealthy", "route_unhealthy"),
        ("health.fabric_access_timeout", "access_timeout"),
        labels=("condition",),
    ),
    _metric(
        "link_bytes_total",
        "Total number of bytes over the link; on NVLink only data bytes.",
        *(
            (f"traffic.{link}_{direction}_bytes_total", link, direction)
            for link in ("pcie", "nvlink")
            for direction in ("sent", "received")
        ),
        labels=("link", "direction"),
        kind="counter",
    ),
    *(
        _metric(
            f"{engine}_utilization_ratio",
            f"Fraction of the driver's last sampling window in which the {engines} were busy.",
            (f"details.{engine}_utilization_ratio",),
        )
        for engine, engines in {
            "encoder": "video encoders",
            "decoder": "video decoders",
            "jpeg": "JPEG engines",
            "optical_flow": "optical flow engines",
        }.items()
    ),
    _metric(
        "temperature_margin_celsius",
        "Temperature increase after which the GPU slows down (Ada and newer).",
        ("details.temperature_margin_celsius",),
    ),
    _metric(
        "temperature_margin_limit_celsius",
        "Temperature margin at which the hardware slows down or shuts down, or the minimum for"
        " operation.",
        *(
            (f"limits.temperature_margin_{limit}_celsius", limit)
            for limit in ("max", "memory_max", "slowdown", "shutdown")
        ),
        labels=("limit",),
    ),
    _metric(
        "sm_clock_limit_hertz",
        "Maximum clock of the streaming multiprocessors.",
        ("limits.sm_clock_max_hertz",),
    ),
    _metric(
        "memory_clock_limit_hertz",
        "Maximum clock of the device memory.",
        ("limits.memory_clock_max_hertz",),
    ),
)
_REASON: Final = _metric(
    "throttle_reason",
    "Whether the clocks were reduced for the reason since the sample before, or when last queried"
    " (1 = yes, 0 = no); `other` for unknown reasons.",
    labels=("reason",),
).family
_RECOVERY: Final = _metric(
    "recovery_action_info",
    "Action that the driver recommends to recover the GPU, or `none`. Always 1.",
    labels=("action",),
).family
HEALTH_FAMILIES: Final = (*(metric.family for metric in _TABLE), _REASON, _RECOVERY)
"""The families of GPU health."""
READINGS: Final = {
    (metric.family.metrics[0].name, labels): path
    for metric in _TABLE
    for labels, path in metric.members
}
"""Path of each series' reading (part and field), by metric and label values after `gpu_uuid`."""
_NS_PER_SECOND: Final = 10**9
_REPORTED: Final = ("health", "limits", "throttling", "traffic")
"""Parts of a device's readings. Its series are sent once a record has had one of these parts."""
_STATE_BYTES: Final = 65_536
"""Approximate memory of a GPU's state without its labels: series groups and last health."""


@dataclass(slots=True)
class _GpuState:
    """The last readings of one GPU's health, and their times by the node's clock."""

    groups: tuple[SeriesGroup, ...]
    """The groups of `_READS`, in the same order."""
    health: GpuHealth | None = None
    health_ns: int = 0
    limits: GpuLimits | None = None
    """Queried together with the health."""
    details: GpuDetails | None = None
    details_ns: int = 0
    throttling: GpuThrottling | None = None
    throttling_ns: int = 0
    traffic: GpuTraffic | None = None
    traffic_ns: int = 0
    reasons: int | None = None
    """The bits of all queries since the values were last sent; `None` if there was no query."""
    seen_ns: int = 0
    """Time of its last readings."""


def of_all_links(name: str, by_link: Mapping[str, float]) -> float:
    """Return one value for all NVLinks: the sum if it is a total, otherwise the highest value."""
    return sum(by_link.values()) if name.endswith("_totals") else max(by_link.values())


def _read_at(path: str) -> Callable[[_GpuState], float | None]:
    part_name, _, name = path.partition(".")
    part_of, get = attrgetter(part_name), attrgetter(name)
    divisor = _NS_PER_SECOND if name.endswith("_ns_total") else 1

    def read(gpu: _GpuState) -> float | None:
        part = part_of(gpu)
        value = None if part is None else get(part)
        if isinstance(value, dict):
            value = of_all_links(name, value)
        return None if value is None else value / divisor

    return read


_OF_DETAILS: Final = tuple(
    path.removeprefix("details.")
    for health in _TABLE
    for _, path in health.members
    if path.startswith("details.")
)
_READS: Final = tuple(
    (health.family, labels, _read_at(path)) for health in _TABLE for labels, path in health.members
)
"""The series of a GPU: family, label values after `gpu_uuid`, and the function that reads it."""


@dataclass(slots=True)
class NodeHealth:
    """The last health readings of a node's GPUs."""

    due_ns: int | None = None
    """When the values are sent next, by the node's clock; absent before the first readings."""
    gpus: dict[str, _GpuState] = field(default_factory=dict)

    @property
    def size_bytes(self) -> int:
        """Approximate memory in bytes."""
        return len(self.gpus) * _STATE_BYTES


def health_values(
    readings: NodeReadings, known: NodeHealth, *, every_ns: int
) -> dict[SeriesGroup, SeriesValues] | None:
    """Store the readings in `known`; every `every_ns`, return the values of all of the node's GPUs.

    Returns `None` if the values are not due yet. They are first due `every_ns` after the first
    readings, because the health of all GPUs has been queried by then. Raises `ValueError` if a
    record has more GPUs than a node can have.
    """
    now_ns = readings.time_ns
    if len(readings.gpus) > MAX_GPUS:
        raise ValueError(f"gpus: too many: {len(readings.gpus)}; at most {MAX_GPUS} have health")
    for details in readings.gpus:
        _remember(details, known, now_ns)
    # Start a new interval if the node's clock was set back.
    if known.due_ns is None or known.due_ns - now_ns > every_ns:
        known.due_ns = now_ns + every_ns
    if now_ns < known.due_ns:
        return None
    known.due_ns = now_ns + every_ns
    known.gpus = {
        uuid: gpu for uuid, gpu in known.gpus.items() if abs(now_ns - gpu.seen_ns) <= KEPT_NS
    }
    values: dict[SeriesGroup, SeriesValues] = {}
    for uuid, gpu in known.gpus.items():
        if abs(now_ns - gpu.health_ns) > MAX_AGE_NS:
            gpu.health, gpu.limits = None, None
        # Some parts are queried less often than the values are sent.
        if abs(now_ns - gpu.throttling_ns) > KEPT_NS:
            gpu.throttling = None
        if abs(now_ns - gpu.traffic_ns) > KEPT_NS:
            gpu.traffic = None
        if abs(now_ns - gpu.details_ns) > KEPT_NS:
            gpu.details = None
        values.update(_values_of(uuid, gpu))
        gpu.reasons = None
    return values


def _remember(details: GpuDetails, known: NodeHealth, now_ns: int) -> None:
    gpu = known.gpus.get(details.uuid)
    if gpu is None:
        if not any(getattr(details, name) is not None for name in _REPORTED):
            return
        if len(known.gpus) >= MAX_GPUS:
            # Drop the GPU not seen for longest: no real node has so many.
            known.gpus.pop(min(known.gpus, key=lambda uuid: known.gpus[uuid].seen_ns))
        groups = (SeriesGroup(family, (details.uuid, *labels)) for family, labels, _ in _READS)
        gpu = known.gpus[details.uuid] = _GpuState(groups=tuple(groups))
    gpu.seen_ns = now_ns
    if any(getattr(details, name) is not None for name in _OF_DETAILS):
        gpu.details, gpu.details_ns = details, now_ns
    if details.health is not None:
        gpu.health, gpu.health_ns = details.health, now_ns
    if details.limits is not None:
        gpu.limits, gpu.health_ns = details.limits, now_ns
    if details.traffic is not None:
        gpu.traffic, gpu.traffic_ns = details.traffic, now_ns
    if details.throttling is not None:
        gpu.throttling, gpu.throttling_ns = details.throttling, now_ns
        gpu.reasons = (gpu.reasons or 0) | (details.throttling.reasons or 0)


def _values_of(uuid: str, gpu: _GpuState) -> Iterator[tuple[SeriesGroup, SeriesValues]]:
    for group, (_, _, read) in zip(gpu.groups, _READS, strict=True):
        if (value := read(gpu)) is not None:
            yield group, (value,)
    if gpu.throttling is not None and gpu.throttling.reasons is not None:
        # Without a new query, the last known reasons may still apply.
        reasons = gpu.throttling.reasons if gpu.reasons is None else gpu.reasons
        for reason, is_set in throttle_reasons(reasons):
            yield SeriesGroup(_REASON, (uuid, reason)), (float(is_set),)
    if gpu.health is not None and gpu.health.recovery_action is not None:
        yield SeriesGroup(_RECOVERY, (uuid, gpu.health.recovery_action)), (1.0,)


def throttle_reasons(bits: int) -> Iterator[tuple[str, bool]]:
    """Yield the name of each throttle reason, and whether its bit is set.

    The reason `other` stands for all unknown bits.
    """
    for bit, reason in THROTTLE_REASONS.items():
        yield reason, bool(bits & bit)
    yield OTHER, bool(bits & ~sum(THROTTLE_REASONS))


COUNTED_KINDS: Final = (*INCIDENT_KINDS, OTHER)
"""Values of the label `kind` of incidents."""


def counted_kind(incident: Incident) -> str:
    """Return the value of the label `kind`: the incident's kind, or `other` if it is unknown."""
    return incident.kind if incident.kind in INCIDENT_KINDS else OTHER


def counted_xid(incident: Incident) -> str | None:
    """Return the value of the label `xid`; `None` if the incident is not an XID."""
    if incident.xid is None:
        return None
    return OTHER if find_xid(incident.xid).category == UNKNOWN else str(incident.xid)


def incident_hash(incident: Incident) -> str:
    """Return 16 hexadecimal digits that identify an incident of a node.

    The hash includes the driver's message, by which two incidents with the same time, GPU, kind and
    code differ. A state that existed when the agent started is reported again at each start of the
    agent, with another time. The hash of such an incident therefore does not include the time.
    """
    identity = (
        incident.boot_id,
        incident.gpu_uuid,
        incident.gpu_instance,
        incident.compute_instance,
        None if incident.present_at_start else incident.time_ns,
        incident.kind,
        incident.xid,
        incident.source,
        # Other incidents may coincide; the driver's message distinguishes them.
        incident.message,
    )
    return hashlib.blake2b(repr(identity).encode(), digest_size=8).hexdigest()
