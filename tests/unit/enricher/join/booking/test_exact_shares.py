"""Each entry against its exact share: an oracle in fractions, by the documented rules.

The rules are in docs/concepts/attribution.md. It shares no code with the join. A partitioned
GPU is checked in two steps, as it is booked: the integer energy of each row against the GPU's
energy, and the row's entries against the row.
"""

from fractions import Fraction
from math import ceil, floor

from hypothesis import example, given
from hypothesis import strategies as st

from gpuledger.ledger.division import divide, part_of, parts_per_million
from gpuledger.records import Category, ContainerRef, NodeSample
from gpuledger.records.bounds import MAX_INTERVAL_NS, MAX_TICK_MILLIJOULES
from gpuledger_enricher.join.booking.books import book_tick
from tests.examples import examples
from tests.unit.enricher.join.booking.test_allocated_parts import replica
from tests.unit.enricher.join.booking.test_laws import draws, energies, intervals
from tests.unit.enricher.join.ticks import CONTAINER_IDS, GIB, UIDS, process, reading, sample

PODS = 3


@st.composite
def shared_gpus(draw: st.DrawFn) -> NodeSample:
    """Draw a GPU used by several sampled pods; some of them have an allocation."""
    busy = st.integers(1, 10**6).map(lambda ppm: ppm / 10**6) | st.floats(1e-6, 1.0)
    return sample(
        interval_ns=draw(intervals),
        gpus=[
            reading(
                utilization_ratio=draw(busy),
                model=None,
                energy_millijoules=draw(energies),
                idle_draw_milliwatts=draw(draws),
            )
        ],
        processes=[
            process(pid=10 + number, container=number, sm_utilization_ratio=draw(busy))
            for number in range(draw(st.integers(2, PODS)))
        ],
        allocations=[replica(number, f"p{number}") for number in range(draw(st.integers(0, 3)))],
    )


def ppm_of(ratio: float | None) -> Fraction:
    return Fraction(round((ratio or 0.0) * 1_000_000), 10**6)


@examples(300)
@given(shared_gpus())
def test_every_entry_is_within_one_unit_of_its_exact_share(tick: NodeSample) -> None:
    (gpu,) = tick.gpus
    (row,) = book_tick(tick)
    busy_part = ppm_of(gpu.utilization_ratio)
    used = [ppm_of(one.sm_utilization_ratio) for one in tick.processes]
    holders = max(1, len(tick.allocations))
    booked_busy = sum(e.busy_ns or 0 for e in row.entries if e.category is not Category.IDLE)
    idle_ns = tick.interval_ns - booked_busy
    drawn = gpu.energy_millijoules
    draw = gpu.idle_draw_milliwatts
    # Idle draw per nanosecond: all energy if the table has none, or if it exceeds the energy
    # drawn.
    rate = Fraction(drawn or 0, tick.interval_ns)
    if draw is not None:
        rate = min(rate, Fraction(draw, 10**9))
    for entry in row.entries:
        if entry.category is Category.IDLE:
            time = (1 - busy_part) * tick.interval_ns / holders
            energy = rate * idle_ns / holders if booked_busy else Fraction(drawn or 0, holders)
        elif entry.category is Category.POD:
            assert entry.container is not None
            time = busy_part * tick.interval_ns * used[entry.container] / sum(used)
            active = (drawn or 0) - rate * idle_ns
            energy = active * Fraction(entry.busy_ns or 0, booked_busy) if booked_busy else active
            energy = energy if booked_busy else Fraction(0)
        else:
            time = energy = Fraction(0)
        assert entry.busy_ns in (floor(time), ceil(time))
        if drawn is None:
            assert entry.energy_millijoules is None
        else:
            assert entry.energy_millijoules in (floor(energy), ceil(energy))


SLICES = {"1g.10gb": 1, "3g.40gb": 3, "1c.3g.40gb": 1}


@st.composite
def partitioned_gpus(draw: st.DrawFn) -> NodeSample:
    """Draw a GPU partitioned into instances, each measured, with up to three pods on each."""
    busy = st.sampled_from([0.0, 1.0]) | st.integers(0, 10**6).map(lambda ppm: ppm / 10**6)
    memories = st.sampled_from([GIB, 10 * GIB, 40 * GIB]) | st.integers(1, 80 * GIB)
    # Either all instances have a profile, or only some.
    profiles = st.sampled_from([*SLICES] if draw(st.booleans()) else [*SLICES, None])
    board = reading(
        model=None,
        mig_enabled=True,
        utilization_ratio=None,
        memory_total_bytes=draw(memories),
        energy_millijoules=draw(energies.filter(lambda drawn: drawn is not None)),
        idle_draw_milliwatts=draw(draws),
    )
    instances = [
        reading(
            uuid=f"MIG-{number}",
            parent_uuid=board.uuid,
            gpu_instance=draw(st.none() | st.integers(0, 2)),
            mig_profile=draw(profiles),
            compute_slices=draw(st.none() | st.integers(1, 7)),
            utilization_ratio=draw(busy),
            memory_total_bytes=draw(memories),
            energy_millijoules=None,
        )
        for number in range(draw(st.integers(1, 4)))
    ]
    return sample(
        interval_ns=draw(intervals),
        gpus=draw(st.permutations([board, *instances])),
        processes=[
            process(
                pid=10 * row + number, gpu=row, container=number, memory_used_bytes=draw(memories)
            )
            for row in range(len(instances) + 1)
            for number in range(draw(st.integers(0, PODS)))
        ],
    )


def shared_energy(tick: NodeSample) -> list[tuple[Fraction, Fraction]]:
    """Return for each row, in order, its energy and the idle draw in it, as fractions."""
    (board,) = (gpu for gpu in tick.gpus if gpu.parent_uuid is None)
    instances = [gpu for gpu in tick.gpus if gpu.parent_uuid is not None]
    homes = [
        instance.uuid if instance.gpu_instance is None else instance.gpu_instance
        for instance in instances
    ]
    sizes = [
        Fraction(one.memory_total_bytes or 0, homes.count(home))
        for one, home in zip(instances, homes, strict=True)
    ]
    whole = max(Fraction(board.memory_total_bytes or 0), sum(sizes, Fraction(0)))
    drawn = Fraction(board.energy_millijoules or 0)
    floor = drawn
    if board.idle_draw_milliwatts is not None:
        floor = min(drawn, Fraction(board.idle_draw_milliwatts * tick.interval_ns, 10**9))
    # By the driver's slices, else the profile's; by memory if an instance has neither.
    slices = [one.compute_slices or SLICES.get(one.mig_profile or "") for one in instances]
    by = sizes if None in slices else [Fraction(one or 0) for one in slices]
    work = [
        ppm_of(one.utilization_ratio) * weight for one, weight in zip(instances, by, strict=True)
    ]
    if not sum(work):
        floor = drawn
    active = [(drawn - floor) * one / (sum(work) or 1) for one in work]
    shares = {
        one.uuid: (floor * size / whole + its, floor * size / whole)
        for one, size, its in zip(instances, sizes, active, strict=True)
    }
    rest = floor * (1 - sum(sizes) / whole)
    shares[board.uuid] = (rest, rest)
    return [shares[gpu.uuid] for gpu in tick.gpus]


@examples(300)
@given(partitioned_gpus())
def test_every_row_of_a_partitioned_gpu_and_its_entries_are_within_a_unit_of_their_share(
    tick: NodeSample,
) -> None:
    booked = book_tick(tick)
    for row, (share, floor_share) in zip(booked, shared_energy(tick), strict=True):
        given_energy = sum(entry.energy_millijoules or 0 for entry in row.entries)
        assert given_energy in (floor(share), ceil(share))
        busy_ns = sum(e.busy_ns or 0 for e in row.entries if e.category is not Category.IDLE)
        # Because of rounding, a row may have less than its part of the floor.
        draw = min(floor_share, Fraction(given_energy))
        of_idle = draw * (tick.interval_ns - busy_ns) / tick.interval_ns
        for entry in row.entries:
            if entry.category is Category.IDLE:
                energy = of_idle if busy_ns else Fraction(given_energy)
            elif busy_ns:
                energy = (given_energy - of_idle) * Fraction(entry.busy_ns or 0, busy_ns)
            else:
                energy = Fraction(0)
            assert entry.energy_millijoules in (floor(energy), ceil(energy))


weights = st.lists(
    st.integers(0, 5)
    | st.sampled_from([2**31, 2**62, 2**63 - 1, 2**63, 2**64, 2**127])
    | st.integers(0, 2**130),
    min_size=1,
    max_size=20,
).filter(any)


@given(weights, st.integers(0, 2**64), st.integers(1, 2**64))
@example([1, 2], 2**63 - 1, 1)
@example([2**63 - 1, 1], 2**63, 2**63)
@example([2**62, 2**62 + 1], 2**64, 3)
@example([1, 1], 2**126 - 1, 2)
@example([1, 1], 2**126, 2)
@example([1, 2**126], 1, 3)
@example([1, 2**128], 0, 3)
def test_parts_are_rounded_exact_shares_and_sum_to_the_whole_beyond_64_and_128_bits(
    weights: list[int], numerator: int, denominator: int
) -> None:
    whole = Fraction(sum(weights) * numerator, denominator)
    total = part_of(sum(weights), numerator, denominator)
    assert abs(total - whole) <= Fraction(1, 2)
    parts = divide(total, weights, numerator, denominator)
    assert sum(parts) == total
    shares = [Fraction(weight * numerator, denominator) for weight in weights]
    for part, share in zip(parts, shares, strict=True):
        assert part in (floor(share), ceil(share))
    lost = [(share - floor(share), -index) for index, share in enumerate(shares)]
    given_up = [lost[index] for index, part in enumerate(parts) if part > floor(shares[index])]
    kept = [lost[i] for i, part in enumerate(parts) if part == floor(shares[i])]
    assert not given_up or not kept or min(given_up) > max(kept)


def test_among_equal_parts_the_first_gets_the_remaining_unit() -> None:
    assert divide(10, [1, 1, 1], 10, 3) == [4, 3, 3]
    assert divide(11, [1, 1, 1], 11, 3) == [4, 4, 3]


@given(st.floats(0.0, 1.0))
def test_a_ratio_is_converted_to_parts_per_million(ratio: float) -> None:
    assert parts_per_million(ratio) == round(ratio * 1_000_000)


def test_among_equal_pods_the_one_with_the_lower_uid_gets_the_remaining_nanosecond() -> None:
    """Whichever comes first in the tick."""
    refs = [ContainerRef(pod_uid=UIDS[n], container_id=CONTAINER_IDS[n]) for n in (1, 0)]
    tick = sample(
        interval_ns=3,
        gpus=[reading(utilization_ratio=1.0, energy_millijoules=1)],
        containers=refs,
        processes=[process(container=n, pid=n + 1, sm_utilization_ratio=0.5) for n in (0, 1)],
    )
    (row,) = book_tick(tick)
    pods = [one for one in row.entries if one.category is Category.POD]
    assert [(pod.container, pod.busy_ns, pod.energy_millijoules) for pod in pods] == [
        (1, 2, 1),
        (0, 1, 0),
    ]


def test_days_of_a_gpu_at_its_limit_are_booked_to_the_nanosecond() -> None:
    tick = sample(
        interval_ns=MAX_INTERVAL_NS,
        gpus=[reading(utilization_ratio=0.999999, energy_millijoules=MAX_TICK_MILLIJOULES)],
        processes=[
            process(container=n, pid=n + 1, sm_utilization_ratio=0.333333) for n in range(3)
        ],
    )
    (row,) = book_tick(tick)
    assert sum(one.busy_ns or 0 for one in row.entries) == MAX_INTERVAL_NS
    assert sum(one.energy_millijoules or 0 for one in row.entries) == MAX_TICK_MILLIJOULES


def test_a_tick_without_energy_use_books_zero() -> None:
    """Zero is a known value, so the field is not absent."""
    tick = sample(gpus=[reading(energy_millijoules=0)], processes=[process(container=0)])
    assert {one.energy_millijoules for one in book_tick(tick)[0].entries} == {0}
