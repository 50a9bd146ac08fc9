"""Devices that a load fits, and the risks of moving it there."""

from gpuledger_reports.capacity.fitting import (
    Device,
    Load,
    Percentiles,
    misfit,
    move_risks,
    speed_of,
)
from tests.tables import for_each

H100 = Device(model="NVIDIA H100 80GB HBM3", memory_gib=80)
L4 = Device(model="NVIDIA L4", memory_gib=24)
UNLISTED = Device(model="Vega", memory_gib=24)


def instance(profile: str, compute: int, memory: int) -> Device:
    return Device(
        model=H100.model,
        mig_profile=profile,
        compute_part=compute / 7,
        memory_part=memory / 8,
        memory_gib=memory * 10,
    )


SEVENTH, TWO, THREE = (
    instance("1g.10gb", 1, 1),
    instance("2g.20gb", 2, 2),
    instance("3g.40gb", 3, 4),
)


def load(
    busy: tuple[float, float, float] = (10, 10, 10),
    gib: tuple[float, float] = (8, 8),
    bandwidth: float | None = None,
) -> Load:
    """Return a load by p95, p99 and maximum; of memory by p99 and maximum."""
    p95, p99, most = busy
    return Load(
        busy=Percentiles(0, p95, p99, most),
        memory_gib=Percentiles(gib[0], gib[0], *gib),
        bandwidth=None if bandwidth is None else Percentiles(*[bandwidth] * 4),
    )


@for_each(
    "of, then, problem",
    [
        # Without counters, a quarter of the bandwidth may take four times as long.
        (load((20, 20, 20)), TWO, None),
        (load((30, 30, 30)), TWO, "utilization p95 would be 120 %, more than 80 %"),
        # With counters, only the seventh of the compute slices counts for busy time.
        (load((20, 20, 20), bandwidth=20), TWO, None),
        (load((20, 20, 20), bandwidth=30), TWO, "bandwidth p95 would be 120 %, more than 80 %"),
        (load((5, 5, 5), gib=(9, 9)), SEVENTH, None),
        (
            load((5, 5, 5), gib=(9.1, 9.1)),
            SEVENTH,
            "memory p99 of 9.1 GiB is more than 9 GiB (90 % of the device's memory)",
        ),
        # The maximum is a risk, not an obstacle.
        (load((5, 90, 100), gib=(9, 30)), SEVENTH, None),
        (load((5, 5, 5)), L4, None),
        (load((10, 10, 10)), L4, "utilization p95 would be 112 %, more than 80 %"),
        (load((0, 0, 0)), UNLISTED, "the speed of a model is unknown"),
        (load((100, 100, 100), gib=(79, 79)), H100, None),
    ],
)
def test_a_load_fits_if_there_is_room(of: Load, then: Device, problem: str | None) -> None:
    assert misfit(of, H100, then) == problem


@for_each(
    "of, then, risks",
    [
        (load(bandwidth=10), THREE, []),
        (load(), H100, []),
        (load(), THREE, [("medium", "bandwidth")]),
        (load((5, 5, 5), bandwidth=5), L4, [("medium", "data sheets")]),
        (load(gib=(8, 37), bandwidth=1), THREE, [("medium", "less than 10 %")]),
        (load(gib=(8, 41), bandwidth=1), THREE, [("high", "more than the device's 40 GiB")]),
        (load((10, 40, 50), bandwidth=1), THREE, [("medium", "1.2 times as long")]),
        (load((10, 50, 50), bandwidth=1), THREE, [("high", "1.2 times as long")]),
    ],
)
def test_rare_minutes_and_unknown_speeds_are_risks(
    of: Load, then: Device, risks: list[tuple[str, str]]
) -> None:
    found = [*move_risks(of, H100, then)]
    assert [level for level, _ in found] == [level for level, _ in risks]
    assert all(words in reason for (_, reason), (_, words) in zip(found, risks, strict=True))


@for_each(
    "model, compute",
    [
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 NVL", 835),
        ("NVIDIA A100-SXM4-40GB", 312),
        ("Tesla V100-SXM2-16GB", 125),
        ("NVIDIA GH200 480GB", None),
        ("NVIDIA A10-24Q", None),
        (None, None),
    ],
)
def test_a_speed_is_that_of_the_product_in_the_models_name(
    model: str | None, compute: float | None
) -> None:
    speed = speed_of(model)
    assert (speed and speed.compute) == compute
