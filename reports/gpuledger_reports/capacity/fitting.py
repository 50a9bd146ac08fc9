"""Whether a workload fits a smaller device, and the risk of moving it there. Pure.

The load is known by minute. On a slower device, busy time grows by the ratio of compute or of
memory bandwidth, whichever is greater. If the chip's counters show the load of the memory
interface, busy time grows only by the ratio of compute, and the interface is checked separately.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

from typing_extensions import override

from gpuledger_reports.pricing.policy import has_product

MEMORY_ROOM: Final = 0.9
"""The part of a device's memory that a workload may hold in 99 % of its minutes."""
BUSY_ROOM: Final = 80.0
"""Percent of a minute for which a device may be busy in 95 % of a workload's minutes."""
RISKS: Final = ("low", "medium", "high")


class Speed(NamedTuple):
    """The speed of a product by NVIDIA's data sheets."""

    compute: float
    """FP16 tensor operations without sparsity, in TFLOPS."""
    bandwidth: float
    """Bandwidth of the device memory, in GB/s."""


SPEEDS: Final[Mapping[str, Speed]] = {
    "B200": Speed(2250, 8000),
    "H200": Speed(989, 4800),
    "H100 PCIe": Speed(756, 2000),
    "H100 NVL": Speed(835, 3900),
    "H100": Speed(989, 3350),
    "H20": Speed(148, 4000),
    "A100 40GB": Speed(312, 1555),
    "A100": Speed(312, 2039),
    "A40": Speed(150, 696),
    "A30": Speed(165, 933),
    "A10G": Speed(70, 600),
    "A10": Speed(125, 600),
    "L40S": Speed(362, 864),
    "L4": Speed(121, 300),
    "T4": Speed(65, 320),
    "V100": Speed(125, 900),
}
"""By product name. The first product whose words are in the model's name applies."""


def speed_of(model: str | None) -> Speed | None:
    """Return the speed of a model; `None` if it is not listed."""
    return next((speed for name, speed in SPEEDS.items() if has_product(model or "", name)), None)


@dataclass(frozen=True, kw_only=True)
class Device:
    """A whole GPU or a MIG instance."""

    model: str | None
    mig_profile: str | None = None
    compute_part: float = 1.0
    """Its part of the physical GPU's compute slices."""
    memory_part: float = 1.0
    """Its part of the physical GPU's memory slices, which have the bandwidth."""
    memory_gib: float

    @override
    def __str__(self) -> str:
        return f"{self.model} {self.mig_profile}" if self.mig_profile else f"{self.model}"


class Percentiles(NamedTuple):
    """Percentiles of a workload's minutes on a device, rounded up to a bucket's bound."""

    p50: float
    p95: float
    p99: float
    max: float


class Load(NamedTuple):
    """The load of a workload on each of its devices."""

    busy: Percentiles
    """Percent of a minute."""
    memory_gib: Percentiles
    bandwidth: Percentiles | None
    """Percent of a minute in which the memory interface works; `None` without counters."""


class Slowdown(NamedTuple):
    """How many times longer work takes on another device."""

    busy: float
    bandwidth: float


def slowdown(load: Load, now: Device, then: Device) -> Slowdown | None:
    """Return the slowdown of a load; `None` if the speed of a model is not known."""
    compute, bandwidth = (
        now.compute_part / then.compute_part,
        now.memory_part / then.memory_part,
    )
    if now.model != then.model:
        before, after = speed_of(now.model), speed_of(then.model)
        if before is None or after is None:
            return None
        compute *= before.compute / after.compute
        bandwidth *= before.bandwidth / after.bandwidth
    return Slowdown(compute if load.bandwidth else max(compute, bandwidth), bandwidth)


def misfit(load: Load, now: Device, then: Device) -> str | None:
    """Return the reason why a load does not fit a device; `None` if it fits."""
    if then == now:
        return None
    slower = slowdown(load, now, then)
    if slower is None:
        return "the speed of a model is unknown"
    room = MEMORY_ROOM * then.memory_gib
    if load.memory_gib.p99 > room:
        return (
            f"memory p99 of {load.memory_gib.p99:.4g} GiB is more than {room:.3g} GiB"
            f" ({MEMORY_ROOM * 100:.0f} % of the device's memory)"
        )
    busy = load.busy.p95 * slower.busy
    if busy > BUSY_ROOM:
        return f"utilization p95 would be {busy:.0f} %, more than {BUSY_ROOM:.0f} %"
    bandwidth = load.bandwidth.p95 * slower.bandwidth if load.bandwidth else 0.0
    if bandwidth > BUSY_ROOM:
        return f"bandwidth p95 would be {bandwidth:.0f} %, more than {BUSY_ROOM:.0f} %"
    return None


def move_risks(load: Load, now: Device, then: Device) -> Iterator[tuple[str, str]]:
    """Yield each risk of moving a load to a device that it fits, with its reason."""
    slower = slowdown(load, now, then)
    maximum = load.memory_gib.max
    if maximum > then.memory_gib:
        has = f"the device's {then.memory_gib:.3g} GiB"
        yield "high", f"memory max of {maximum:.4g} GiB is more than {has}"
    elif maximum > MEMORY_ROOM * then.memory_gib:
        yield "medium", f"memory max of {maximum:.4g} GiB leaves less than 10 % free"
    if slower and (busy := load.busy.max * slower.busy) > 100:  # noqa: PLR2004  # percent
        level = "high" if load.busy.p99 * slower.busy > 100 else "medium"  # noqa: PLR2004
        yield level, f"the busiest minutes would take {busy / 100:.1f} times as long"
    if load.bandwidth is None and then != now:
        yield "medium", "memory bandwidth is not measured"
    if then.model != now.model:
        yield "medium", "the speeds of the models are from data sheets"
