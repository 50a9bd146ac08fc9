"""Energy: idle draw is split by time, active draw by work; a MIG GPU's among its instances."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from gpuledger.records import Category, Entry, GpuReading
from gpuledger_enricher.join.booking.books import (
    book_tick,
    compute_slices_of_profile,
    energy_by_row,
)
from gpuledger_enricher.join.booking.shares import (
    Energy,
    energy_of,
    idle_milliwatts,
    make_split,
    split_energy,
)
from tests.unit.enricher.join.ticks import GIB, SECOND_NS, process, reading, sample

H100 = "NVIDIA H100 80GB HBM3"


def joules(energy: Energy | None, interval_ns: int = SECOND_NS) -> tuple[float, float, float]:
    """Return, in joules, the energy split by busy time, its floor, and the energy of idle."""
    assert energy is not None
    floor = energy.floor_numerator * interval_ns / energy.floor_denominator
    return energy.millijoules / 1e3, floor / 1e3, energy.idle_millijoules / 1e3


@pytest.mark.parametrize(
    ("model", "milliwatts"),
    [
        (H100, 71_000),
        ("NVIDIA H200", 76_000),
        ("NVIDIA H200 NVL", 69_000),
        ("NVIDIA H20", 74_000),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", 42_000),
        ("Tesla V100-SXM2-32GB", 38_000),
        ("Tesla T4", 9_000),
        ("A100-SXM4-80GB", 45_000),
        ("NVIDIA H100 NVL", None),
        ("NVIDIA T4G", None),
        ("NVIDIA A1000", None),
        ("", None),
        (None, None),
    ],
)
def test_a_products_idle_draw_is_found_by_its_full_name(
    model: str | None, milliwatts: int | None
) -> None:
    assert idle_milliwatts(model) == milliwatts


def test_the_floor_never_exceeds_the_energy_drawn() -> None:
    device = reading(model=H100, energy_millijoules=100_000)
    assert joules(energy_of(device, SECOND_NS)) == (100.0, 71.0, 0.0)
    assert joules(energy_of(device, 2 * SECOND_NS), 2 * SECOND_NS) == (100.0, 100.0, 0.0)


def test_the_floor_of_an_unlisted_product_is_all_its_energy() -> None:
    assert joules(energy_of(reading(model="Vendor X"), SECOND_NS)) == (300.0, 300.0, 0.0)


def test_a_gpu_that_reports_no_energy_drew_an_unknown_amount() -> None:
    assert energy_of(reading(energy_millijoules=None), SECOND_NS) is None


SPLITS: list[tuple[str, int | None, tuple[int, int]]] = [
    ("idle and active draw apart", 250_000_000, (250_000, 75_000)),
    ("busy throughout: idle gets nothing", SECOND_NS, (325_000, 0)),
    ("never busy: all is idle", 0, (0, 325_000)),
    ("busy for no longer than a nanosecond", 1, (225_000, 100_000)),
    ("unknown busy time: all is unattributed", None, (325_000, 0)),
]


@pytest.mark.parametrize(("case", "worked", "split"), SPLITS, ids=[row[0] for row in SPLITS])
def test_the_floor_is_split_by_time_and_the_rest_by_work(
    case: str, worked: int | None, split: tuple[int, int]
) -> None:
    """The expected parts are unattributed and idle, because no process is known."""
    busy = None if worked is None else make_split(worked, SECOND_NS - worked, None)
    found = split_energy(Energy(325_000, 100_000, SECOND_NS), busy, [], SECOND_NS)
    assert (found.unclaimed, found.idle) == split, case


def physical_gpu(**changes: object) -> GpuReading:
    return reading(**{"mig_enabled": True, "utilization_ratio": None, "model": H100, **changes})


def instance(number: int, profile: str | None, total: int, busy: float | None) -> GpuReading:
    return reading(
        uuid=f"MIG-{number}",
        parent_uuid="GPU-a",
        gpu_instance=number,
        compute_instance=0,
        mig_profile=profile,
        memory_total_bytes=total * GIB,
        memory_used_bytes=0,
        memory_reserved_bytes=None,
        utilization_ratio=busy,
        energy_millijoules=None,
    )


def joules_of(entries: list[Entry]) -> dict[str, float]:
    return {
        str(entry.category): entry.energy_millijoules / 1e3
        for entry in entries
        if entry.energy_millijoules
    }


def test_a_partitioned_gpus_floor_is_split_by_memory_and_its_active_draw_by_busy_slices() -> None:
    rows = [
        physical_gpu(energy_millijoules=371_000),
        instance(1, "1g.10gb", 10, 1.0),
        instance(2, "3g.40gb", 40, 0.5),
    ]
    whole, one, other = map(joules, energy_by_row(rows, SECOND_NS))
    assert whole == pytest.approx((0.0, 0.0, 71 * 3 / 8))
    assert one == pytest.approx((71 / 8 + 300 * 1 / 2.5, 71 / 8, 0.0))
    assert other == pytest.approx((71 / 2 + 300 * 1.5 / 2.5, 71 / 2, 0.0))


@pytest.mark.parametrize("profile", ["7g.80gb", None])
def test_energy_like_allocated_time_is_split_by_the_slices_that_the_driver_reports(
    profile: str | None,
) -> None:
    """Whatever the profile is called, even if a later driver invents a name."""
    rows = [
        physical_gpu(energy_millijoules=371_000),
        replace(instance(1, profile, 10, 1.0), compute_slices=1),
        replace(instance(2, "3g.40gb", 40, 0.5), compute_slices=3),
    ]
    _, one, other = map(joules, energy_by_row(rows, SECOND_NS))
    assert one == pytest.approx((71 / 8 + 300 * 1 / 2.5, 71 / 8, 0.0))
    assert other == pytest.approx((71 / 2 + 300 * 1.5 / 2.5, 71 / 2, 0.0))


def test_a_pod_in_an_instance_is_booked_the_energy_of_the_instance() -> None:
    tick = sample(
        gpus=[physical_gpu(energy_millijoules=371_000), instance(1, "1g.10gb", 10, 1.0)],
        processes=[process(gpu=1, container=0)],
    )
    whole, part = book_tick(tick)
    assert joules_of(part.entries) == pytest.approx({"pod": 300 + 71 / 8})
    assert joules_of(whole.entries) == pytest.approx({"idle": 71 * 7 / 8})


def test_a_partitioned_gpu_without_work_is_idle_by_memory() -> None:
    tick = sample(
        gpus=[physical_gpu(), instance(1, "1g.10gb", 10, 0.0), instance(2, "1g.10gb", 20, 0.0)]
    )
    found = [joules_of(row.entries) for row in book_tick(tick)]
    assert found == [
        pytest.approx({"idle": 300 * 5 / 8}),
        pytest.approx({"idle": 300 / 8}),
        pytest.approx({"idle": 300 / 4}),
    ]


@pytest.mark.parametrize(
    "part",
    [
        instance(2, "1g.10gb", 10, None),
        reading(
            uuid="MIG-2", parent_uuid="GPU-a", memory_total_bytes=None, energy_millijoules=None
        ),
    ],
    ids=["busy time", "memory"],
)
def test_a_gpu_keeps_its_energy_if_a_reading_of_an_instance_is_missing(
    part: GpuReading,
) -> None:
    whole, *parts = book_tick(sample(gpus=[physical_gpu(), instance(1, "1g.10gb", 10, 0.5), part]))
    assert joules_of(whole.entries) == {"unattributed": 300.0}
    assert {one.energy_millijoules for row in parts for one in row.entries} == {None}


def test_compute_instances_share_the_floor_of_their_memory() -> None:
    shared = [
        reading(
            uuid=f"MIG-1-{place}",
            parent_uuid="GPU-a",
            gpu_instance=1,
            compute_instance=place,
            mig_profile="1c.2g.20gb",
            memory_total_bytes=20 * GIB,
            utilization_ratio=0.0,
            energy_millijoules=None,
        )
        for place in range(2)
    ]
    _, one, other = map(joules, energy_by_row([physical_gpu(), *shared], SECOND_NS))
    assert one == other == (37.5, 37.5, 0.0)


@pytest.mark.parametrize(
    ("profile", "slices"),
    [
        ("1g.10gb", 1),
        ("1c.3g.40gb", 1),
        ("7g.80gb", 7),
        ("1g.10gb+me", 1),
        ("?", None),
        (None, None),
    ],
)
def test_a_profile_name_contains_its_compute_slices(
    profile: str | None, slices: int | None
) -> None:
    assert compute_slices_of_profile(profile) == slices


ratios = st.none() | st.floats(0.0, 1.0)
profiles = st.sampled_from(["1g.10gb", "3g.40gb", "1c.2g.20gb", None])
parts = st.lists(
    st.builds(
        instance, st.integers(1, 4), profiles, st.integers(0, 90), st.floats(0.0, 1.0) | ratios
    ),
    max_size=7,
)


@given(
    parts=parts,
    drawn=st.none() | st.integers(0, 10**11),
    milliwatts=st.none() | st.integers(0, 10**6),
    interval_ns=st.integers(1, 10**14),
)
def test_the_rows_of_a_gpu_sum_to_its_energy(
    parts: list[GpuReading], drawn: int | None, milliwatts: int | None, interval_ns: int
) -> None:
    rows = [physical_gpu(energy_millijoules=drawn, idle_draw_milliwatts=milliwatts), *parts]
    found = [each for each in energy_by_row(rows, interval_ns) if each]
    assert sum(each.millijoules + each.idle_millijoules for each in found) == (drawn or 0)
    for each in found:
        assert min(each.millijoules, each.floor_numerator, each.idle_millijoules) >= 0
        assert each.floor_numerator * interval_ns <= each.millijoules * each.floor_denominator


def test_unattributed_use_gets_its_part_of_the_draw() -> None:
    (row,) = book_tick(sample(gpus=[reading(model=H100, energy_millijoules=171_000)]))
    found = {one.category: one.energy_millijoules for one in row.entries}
    assert found[Category.UNATTRIBUTED] == 135_500
    assert found[Category.IDLE] == 35_500
