"""Energy: idle draw by time, active draw by work, and a cut GPU's among its instances."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from enricher.join.booking.books import book_tick, compute_slices, energy_by_row
from enricher.join.booking.shares import Energy, energy_of, idle_watts, split_joules
from gpuledger.records import Account, Entry, GpuReading
from tests.unit.enricher.join.ticks import GIB, process, reading, sample

H100 = "NVIDIA H100 80GB HBM3"


def joules(energy: Energy | None) -> tuple[float, float, float]:
    """Return what is split by busy time, how much of it is the floor, and what is idle's."""
    assert energy is not None
    return energy.joules, energy.floor_joules, energy.idle_joules


@pytest.mark.parametrize(
    ("model", "watts"),
    [
        (H100, 71.0),
        ("NVIDIA H200", 76.0),
        ("NVIDIA H200 NVL", 69.0),
        ("NVIDIA H20", 74.0),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", 42.0),
        ("Tesla V100-SXM2-32GB", 38.0),
        ("Tesla T4", 9.0),
        ("A100-SXM4-80GB", 45.0),
        ("NVIDIA H100 NVL", None),
        ("NVIDIA T4G", None),
        ("NVIDIA A1000", None),
        ("", None),
        (None, None),
    ],
)
def test_a_products_idle_draw_is_found_by_its_whole_name(
    model: str | None, watts: float | None
) -> None:
    assert idle_watts(model) == watts


def test_the_floor_is_never_more_than_was_drawn() -> None:
    device = reading(model=H100, energy_joules=100.0)
    assert joules(energy_of(device, 1.0)) == (100.0, 71.0, 0.0)
    assert joules(energy_of(device, 2.0)) == (100.0, 100.0, 0.0)


def test_the_floor_of_an_unlisted_product_is_all_it_drew() -> None:
    assert joules(energy_of(reading(model="Vendor X"), 1.0)) == (300.0, 300.0, 0.0)


def test_a_gpu_that_tells_neither_energy_nor_power_drew_an_unknown_amount() -> None:
    assert energy_of(reading(energy_joules=None), 1.0) is None


SPLITS: list[tuple[str, float | None, tuple[float, float, float]]] = [
    ("idle and active draw apart", 0.25, (1000.0, 0.0, 75.0)),
    ("busy throughout: idle has nothing", 1.0, (325.0, 0.0, 0.0)),
    ("nobody busy: all is idle's", 0.0, (0.0, 0.0, 325.0)),
    ("as good as nobody busy", 1e-300, (0.0, 0.0, 325.0)),
    ("busy time not known: all is nobody's", None, (0.0, 325.0, 0.0)),
]


@pytest.mark.parametrize(("case", "worked", "split"), SPLITS, ids=[row[0] for row in SPLITS])
def test_the_floor_goes_by_time_and_the_rest_by_work(
    case: str, worked: float | None, split: tuple[float, float, float]
) -> None:
    """Watts of those that were busy, joules of nobody, joules of idle."""
    found = split_joules(Energy(325.0, 100.0, 0.0), worked, 1.0)
    assert found is not None
    assert (found.watts, found.unclaimed_joules, found.idle_joules) == pytest.approx(split), case


def board(**changes: object) -> GpuReading:
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
        energy_joules=None,
    )


def joules_of(entries: list[Entry]) -> dict[str, float]:
    return {str(one.account): one.joules for one in entries if one.joules}


def test_a_cut_gpus_floor_goes_by_memory_and_its_active_draw_by_busy_slices() -> None:
    rows = [
        board(energy_joules=371.0),
        instance(1, "1g.10gb", 10, 1.0),
        instance(2, "3g.40gb", 40, 0.5),
    ]
    whole, one, other = map(joules, energy_by_row(rows, 1.0))
    assert whole == pytest.approx((0.0, 0.0, 71 * 3 / 8))
    assert one == pytest.approx((71 / 8 + 300 * 1 / 2.5, 71 / 8, 0.0))
    assert other == pytest.approx((71 / 2 + 300 * 1.5 / 2.5, 71 / 2, 0.0))


def test_a_pod_in_an_instance_is_debited_with_its_energy() -> None:
    tick = sample(
        gpus=[board(energy_joules=371.0), instance(1, "1g.10gb", 10, 1.0)],
        processes=[process(gpu=1, container=0)],
    )
    whole, part = book_tick(tick)
    assert joules_of(part.entries) == pytest.approx({"pod": 300 + 71 / 8})
    assert joules_of(whole.entries) == pytest.approx({"idle": 71 * 7 / 8})


def test_a_cut_gpu_without_work_is_idle_by_memory() -> None:
    tick = sample(gpus=[board(), instance(1, "1g.10gb", 10, 0.0), instance(2, "1g.10gb", 20, 0.0)])
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
        reading(uuid="MIG-2", parent_uuid="GPU-a", memory_total_bytes=None, energy_joules=None),
    ],
    ids=["busy time", "memory"],
)
def test_where_something_of_an_instance_is_not_known_the_gpu_keeps_its_energy(
    part: GpuReading,
) -> None:
    whole, *parts = book_tick(sample(gpus=[board(), instance(1, "1g.10gb", 10, 0.5), part]))
    assert joules_of(whole.entries) == {"unattributed": 300.0}
    assert {one.joules for row in parts for one in row.entries} == {None}


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
            energy_joules=None,
        )
        for place in range(2)
    ]
    _, one, other = map(joules, energy_by_row([board(), *shared], 1.0))
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
def test_a_profile_tells_its_compute_slices(profile: str | None, slices: int | None) -> None:
    assert compute_slices(profile) == slices


ratios = st.none() | st.floats(0.0, 1.0)
profiles = st.sampled_from(["1g.10gb", "3g.40gb", "1c.2g.20gb", None])
parts = st.lists(
    st.builds(
        instance, st.integers(1, 4), profiles, st.integers(0, 90), st.floats(0.0, 1.0) | ratios
    ),
    max_size=7,
)


@given(parts=parts, drawn=st.none() | st.floats(0.0, 1e5), watts=ratios, seconds=st.floats(0.1, 60))
def test_the_rows_of_a_gpu_have_its_energy_and_no_more(
    parts: list[GpuReading], drawn: float | None, watts: float | None, seconds: float
) -> None:
    rows = [board(energy_joules=drawn, power_watts=watts), *parts]
    found = [joules(each) for each in energy_by_row(rows, seconds) if each]
    expected = drawn if drawn is not None else watts and watts * seconds
    total = sum(all_ + of_idle for all_, _, of_idle in found)
    assert math.isclose(total, expected or 0.0, rel_tol=1e-9, abs_tol=1e-9)
    assert all(min(each) >= 0.0 and each[1] <= each[0] * (1 + 1e-9) for each in found)


def test_unattributed_use_has_its_part_of_the_draw() -> None:
    (row,) = book_tick(sample(gpus=[reading(model=H100, energy_joules=171.0)]))
    found = {one.account: one.joules for one in row.entries}
    assert found[Account.UNATTRIBUTED] == pytest.approx(71 / 2 + 100)
    assert found[Account.IDLE] == pytest.approx(71 / 2)
