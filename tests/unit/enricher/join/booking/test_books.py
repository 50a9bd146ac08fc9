"""The entries of a GPU: their categories, their methods, and that they sum to the GPU."""

import pytest

from gpuledger.records import (
    BusyMethod,
    Category,
    ContainerRef,
    EnergyMethod,
    Entry,
    GpuBooks,
    GpuReading,
    IdleDrawSource,
    MemoryMethod,
    ProcessKind,
)
from gpuledger_enricher.join.booking.books import book_tick
from gpuledger_enricher.join.booking.shares import Claim, energy_of, make_claim
from gpuledger_enricher.join.booking.shares import book_gpu as book_row
from tests.unit.enricher.join.ticks import GIB, SECOND_NS, process, reading, sample

POD, HOST, IDLE, UNATTRIBUTED = (
    Category.POD,
    Category.HOST,
    Category.IDLE,
    Category.UNATTRIBUTED,
)


def book_gpu(device: GpuReading, claims: list[Claim], interval_ns: int = SECOND_NS) -> GpuBooks:
    """Book a GPU that is neither partitioned nor allocated."""
    return book_row(device, device, claims, interval_ns, energy_of(device, interval_ns))


def claim(
    category: Category,
    container: int | None = None,
    *,
    ratio: float | None = None,
    held: int | None = None,
) -> Claim:
    found = make_claim(category, container)
    found.add(process(sm_utilization_ratio=ratio, memory_used_bytes=held))
    return found


def seconds_by_account(entries: list[Entry]) -> dict[str, float]:
    """Sum the busy seconds of each category; those of pods by the position of their container."""
    found: dict[str, float] = {}
    for entry in entries:
        name = str(entry.category if entry.container is None else entry.container)
        found[name] = found.get(name, 0.0) + (entry.busy_ns or 0) / SECOND_NS
    return found


BUSY = [
    ("no process, idle", 0.0, [], {"idle": 1.0}),
    ("no process, busy", 0.4, [], {"unattributed": 0.4, "idle": 0.6}),
    (
        "a single pod gets everything, whatever its own samples are",
        0.4,
        [(0, 0.1, 1, False)],
        {"0": 0.4, "idle": 0.6},
    ),
    (
        "two pods get what they used",
        0.8,
        [(0, 0.6, 1, False), (1, 0.2, 1, False)],
        {"0": 0.6, "1": 0.2, "idle": 0.2},
    ),
    (
        "rounding is spread in proportion",
        0.9,
        [(0, 0.5, 1, False), (1, 0.5, 1, False)],
        {"0": 0.45, "1": 0.45, "idle": 0.1},
    ),
    ("a host process is the host's", 0.5, [(None, 0.5, 1, False)], {"host": 0.5, "idle": 0.5}),
    (
        "the missing part belongs to the process that ended",
        0.8,
        [(0, 0.1, 1, True), (1, 0.3, 1, False)],
        {"0": 0.5, "1": 0.3, "idle": 0.2},
    ),
    (
        "without samples, memory in use decides",
        0.6,
        [(0, None, 2, False), (1, None, 1, False)],
        {"0": 0.4, "1": 0.2, "idle": 0.4},
    ),
    (
        "without samples and memory, in equal parts",
        0.6,
        [(0, None, None, False), (1, None, None, False)],
        {"0": 0.3, "1": 0.3, "idle": 0.4},
    ),
    (
        "samples that are all zero decide nothing",
        0.6,
        [(0, 0.0, 2, False), (1, 0.0, 1, False)],
        {"0": 0.4, "1": 0.2, "idle": 0.4},
    ),
]


@pytest.mark.parametrize(
    ("case", "busy", "processes", "expected"), BUSY, ids=[row[0] for row in BUSY]
)
def test_busy_time_is_booked_on_the_containers_that_ran_kernels(
    case: str,
    busy: float,
    processes: list[tuple[int | None, float | None, int | None, bool]],
    expected: dict[str, float],
) -> None:
    """The table lists for each case who gets which part of a second."""
    tick = sample(
        gpus=[reading(utilization_ratio=busy)],
        processes=[
            process(
                pid=100 + place,
                container=container,
                sm_utilization_ratio=ratio,
                memory_used_bytes=None if held is None else held * GIB,
                ended=ended or None,
            )
            for place, (container, ratio, held, ended) in enumerate(processes)
        ],
    )
    found = {
        name: used for name, used in seconds_by_account(book_tick(tick)[0].entries).items() if used
    }
    assert found == pytest.approx({name: used for name, used in expected.items() if used}), case


METHODS = [
    ([], BusyMethod.EXCLUSIVE, MemoryMethod.MEASURED),
    ([claim(POD, 0, ratio=0.00003)], BusyMethod.EXCLUSIVE, MemoryMethod.APPORTIONED),
    (
        [claim(POD, 0, ratio=0.00003), claim(HOST)],
        BusyMethod.PROCESS_UTILIZATION,
        MemoryMethod.MEASURED,
    ),
    (
        [claim(POD, 0, held=21 * GIB), claim(HOST)],
        BusyMethod.MEMORY_SHARE,
        MemoryMethod.SCALED,
    ),
    ([claim(POD, 0), claim(HOST)], BusyMethod.EQUAL_SHARE, MemoryMethod.MEASURED),
]


@pytest.mark.parametrize(("claims", "busy", "memory"), METHODS)
def test_a_booked_gpu_names_the_method_of_each_quantity(
    claims: list[Claim], busy: BusyMethod, memory: MemoryMethod
) -> None:
    books = book_gpu(reading(), claims)
    assert (books.busy_method, books.memory_method) == (busy, memory)
    assert books.reading.energy_method is EnergyMethod.COUNTER
    assert books.energy_method is None


@pytest.mark.parametrize(
    ("held", "method", "expected"),
    [
        ([], MemoryMethod.UNIFIED, {"unattributed": 0, "idle": 128}),
        ([20, 12], MemoryMethod.UNIFIED, {"0": 20, "1": 12, "idle": 96}),
        ([96, 160], MemoryMethod.SCALED, {"0": 48, "1": 80, "idle": 0}),
    ],
)
def test_unified_memory_is_booked_on_its_processes_and_the_rest_is_idle(
    held: list[int], method: MemoryMethod, expected: dict[str, int]
) -> None:
    device = reading(
        memory_total_bytes=128 * GIB,
        memory_used_bytes=None,
        memory_reserved_bytes=None,
        memory_unified=True,
    )
    books = book_gpu(
        device, [claim(POD, place, ratio=0.1, held=one * GIB) for place, one in enumerate(held)]
    )
    found = {
        str(entry.category if entry.container is None else entry.container): entry.memory_bytes
        for entry in books.entries
    }
    assert found == {name: gibibytes * GIB for name, gibibytes in expected.items()}
    assert books.memory_method is method


@pytest.mark.parametrize(
    ("changes", "draw", "source"),
    [
        ({"model": "Vendor X"}, None, None),
        ({"model": "NVIDIA L4"}, 15_000, IdleDrawSource.TABLE),
        ({"model": "NVIDIA L4", "idle_draw_milliwatts": 12_345}, None, IdleDrawSource.MEASURED),
        ({"model": "NVIDIA L4", "energy_millijoules": None}, None, None),
    ],
)
def test_a_booked_gpu_names_the_idle_draw_by_which_its_energy_was_split(
    changes: dict[str, object], draw: int | None, source: IdleDrawSource | None
) -> None:
    """So that a replay after a change of the table can be recognized."""
    books = book_gpu(reading(**changes), [])
    assert (books.idle_draw_milliwatts, books.idle_draw_source) == (draw, source)


def test_memory_reserved_by_the_driver_is_booked_on_the_host() -> None:
    """A GPU with one pod has a host entry for the memory that the driver reserves."""
    entries = book_gpu(reading(), [claim(POD, 0, held=20 * GIB)]).entries
    held = {entry.category: entry.memory_bytes for entry in entries}
    assert held == {POD: 20 * GIB, HOST: GIB, IDLE: 59 * GIB}


def test_memory_that_no_process_uses_is_unattributed() -> None:
    entries = book_gpu(reading(), [claim(POD, 0, held=15 * GIB)]).entries
    assert {e.category: e.memory_bytes for e in entries}[UNATTRIBUTED] == 5 * GIB


def test_a_container_with_neither_id_nor_pod_is_booked_on_the_host() -> None:
    """Two such containers make one host entry."""
    tick = sample(
        containers=[ContainerRef(), ContainerRef()],
        processes=[process(container=0, sm_utilization_ratio=0.2), process(container=1, pid=2)],
    )
    assert [entry.category for entry in book_tick(tick)[0].entries] == [HOST, IDLE]


def test_a_client_of_mps_is_booked_on_its_pod_and_the_server_on_the_host() -> None:
    """By the driver's samples of each."""
    clients = [
        process(
            pid=10 + number,
            container=number,
            kind=ProcessKind.MPS,
            sm_utilization_ratio=ratio,
            memory_used_bytes=GIB,
        )
        for number, ratio in enumerate((0.3, 0.1))
    ]
    server = process(sm_utilization_ratio=0.0, memory_used_bytes=GIB)
    tick = sample(gpus=[reading(utilization_ratio=0.4)], processes=[*clients, server])
    found = seconds_by_account(book_tick(tick)[0].entries)
    assert found == pytest.approx(
        {"0": 0.3, "1": 0.1, "host": 0.0, "unattributed": 0.0, "idle": 0.6}
    )


def test_a_process_that_ended_before_it_could_be_read_is_unattributed() -> None:
    """It is not the host's, because its container is unknown."""
    gone = process(started_boottime_ns=None, sm_utilization_ratio=0.5)
    assert seconds_by_account(book_tick(sample(processes=[gone]))[0].entries) == {
        "unattributed": 0.5,
        "host": 0.0,
        "idle": 0.5,
    }


@pytest.mark.parametrize("claims", [[], [claim(POD, 0)], [claim(POD, 0, ratio=0.1), claim(HOST)]])
def test_a_sampled_device_is_never_booked_as_measured(claims: list[Claim]) -> None:
    sampled = reading(busy_method=BusyMethod.SAMPLED)
    assert book_gpu(sampled, claims).busy_method is BusyMethod.SAMPLED


def test_the_use_of_an_mps_server_without_known_clients_is_not_booked_as_measured() -> None:
    served = reading(busy_method=BusyMethod.MPS_SERVER)
    assert book_gpu(served, [claim(HOST, ratio=0.5)]).busy_method is BusyMethod.MPS_SERVER


@pytest.mark.parametrize("claims", [[], [claim(POD, 0, ratio=0.1)]])
def test_missing_process_samples_do_not_matter_to_a_single_container(claims: list[Claim]) -> None:
    partial = reading(busy_method=BusyMethod.PARTIAL_SAMPLES)
    assert book_gpu(partial, claims).busy_method is BusyMethod.EXCLUSIVE


@pytest.mark.parametrize(
    ("field", "missing"),
    [
        ("busy_ns", {"utilization_ratio": None}),
        ("memory_bytes", {"memory_total_bytes": None}),
        ("energy_millijoules", {"energy_millijoules": None}),
    ],
)
def test_a_quantity_that_the_driver_does_not_report_is_absent(
    field: str, missing: dict[str, None]
) -> None:
    """Absent is not zero: no entry has the field."""
    entries = book_gpu(reading(**missing), [claim(POD, 0, held=GIB)]).entries
    assert {getattr(entry, field) for entry in entries} == {None}


def test_energy_without_busy_time_is_unattributed() -> None:
    """The device used it, but no user is known."""
    entries = book_gpu(reading(utilization_ratio=None), [claim(POD, 0)]).entries
    assert {entry.category: entry.energy_millijoules for entry in entries}[UNATTRIBUTED] == 300_000
