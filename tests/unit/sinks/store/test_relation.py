"""SQL over the store: the whole numbers of rows, and exact values in base units."""

from collections.abc import Iterator
from decimal import Decimal, localcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuledger.ledger.quantities import BOOKED
from gpuledger.records import BusyMethod, Category, EnergyMethod, Entry, GpuEvent, MemoryMethod
from tests.examples import examples
from tests.unit.sinks.builders import SECOND_NS, books, entry, event, holder, reading
from tests.unit.sinks.events import events
from tests.unit.sinks.store.storing import at_seconds, fill, query

MAX = 2**63 - 1


@examples(25)
@given(st.lists(events(), min_size=1, max_size=3))
def test_sums_over_the_table_equal_the_sums_over_the_events(ticks: list[GpuEvent]) -> None:
    """Exactly, even if a sum exceeds 64 bits."""
    entries = [booked for one in ticks for booked in entries_in(one)]
    sums = ", ".join(f"sum({name})" for name in AMOUNTS)
    of_ticks = f"kafka_offset < {len(ticks)}"
    with TemporaryDirectory() as folder:
        # At least one event with rows, because a store without rows does not exist.
        fill(Path(folder), [*ticks, event()])
        (found,) = select(Path(folder), sums, where=of_ticks)

    message = [[getattr(one, name) for one in entries] for name in AMOUNTS]
    known = [[amount for amount in amounts if amount is not None] for amounts in message]
    assert list(found) == [sum(amounts) if amounts else None for amounts in known]


def select(store: Path, columns: str, *, where: str = "true") -> list[tuple[Any, ...]]:
    return query(store, f"select {columns} from {{entries}} where {where}")  # noqa: S608  # our own


def entries_in(one: GpuEvent) -> Iterator[Entry]:
    for each in (*one.gpus, *(one.late_adjustments or ())):
        yield from each.entries


AMOUNTS = tuple(quantity.name for quantity in BOOKED)
_AMOUNT = st.integers(0, MAX)


@examples(25)
@given(
    st.lists(st.tuples(_AMOUNT, st.integers(0, 2**48), _AMOUNT), min_size=1, max_size=5),
    st.integers(1, 90_000 * SECOND_NS),
)
def test_base_units_equal_the_whole_numbers_and_sum_without_rounding(
    amounts: list[tuple[int, int, int]], interval_ns: int
) -> None:
    booked = [
        entry(busy_ns=busy_ns, memory_bytes=allocated, energy_millijoules=drawn)
        for busy_ns, allocated, drawn in amounts
    ]
    with TemporaryDirectory() as folder:
        fill(Path(folder), [event(entries=booked, interval_ns=interval_ns)])
        names = "busy_seconds", "memory_byte_seconds", "joules"
        sums = ", ".join(f"sum({name})" for name in (*names, "interval_seconds"))
        (found,) = select(Path(folder), sums)

    busy, allocated, drawn = (sum(each) for each in zip(*amounts, strict=True))
    with localcontext(prec=60):
        nano, milli = Decimal(10) ** -9, Decimal(10) ** -3
        expected = (busy * nano, allocated * interval_ns * nano, drawn * milli)
        assert found == (*expected, len(amounts) * interval_ns * nano)


def test_hours_of_a_device_are_the_hours_of_its_ticks(tmp_path: Path) -> None:
    hour_ns = 3600 * SECOND_NS
    halves = [entry(busy_ns=hour_ns // 2), entry(Category.IDLE, busy_ns=hour_ns // 2)]
    fill(tmp_path, [event(tick, entries=halves, interval_ns=hour_ns) for tick in range(3)])

    assert select(tmp_path, "sum(gpu_hours)", where="category = 'pod'") == [(1.5,)]
    assert select(tmp_path, "sum(gpu_hours)") == [(3.0,)]


def test_a_missing_quantity_has_no_value_in_base_units_either(tmp_path: Path) -> None:
    nothing = entry(busy_ns=None, memory_bytes=None, energy_millijoules=None)
    fill(tmp_path, [event(entries=[nothing])])

    names = "busy_seconds, memory_byte_seconds, joules, gpu_hours, sm_active_seconds, gap_seconds"
    assert select(tmp_path, names) == [(None,) * 6]


@pytest.mark.parametrize("word", ["job", "a_kind_of_tomorrow", "ünknown"])
def test_enumeration_values_of_a_newer_writer_are_stored_unchanged(
    word: str, tmp_path: Path
) -> None:
    of_gpu = books(
        reading(),
        entry(Category(word)),
        busy_method=BusyMethod(word),
        memory_method=MemoryMethod(word),
        energy_method=EnergyMethod(word),
    )
    fill(tmp_path, [event(gpus=[of_gpu], allocated_to=[holder()])])

    names = "category, busy_method, memory_method, energy_method, busy_ns"
    assert select(tmp_path, names) == [(word, word, word, word, SECOND_NS // 2)]


@pytest.mark.parametrize("folder", ["cluster=eu/pod_state=x", "a folder", "what?", "*", "Zürich's"])
def test_the_stores_directory_may_have_any_name(folder: str, tmp_path: Path) -> None:
    path = tmp_path / folder
    fill(path, [event(0), event(86_400)])
    sql = (
        "SELECT DISTINCT cluster, pod_state, event_date::VARCHAR FROM {entries}"
        " WHERE pod_state IS NOT NULL ORDER BY 3"
    )
    days = [str(at_seconds(tick).date()) for tick in (0, 86_400)]
    assert query(path, sql) == [("default", "known", day) for day in days]


def test_a_query_of_a_day_reads_only_the_files_of_that_day(tmp_path: Path) -> None:
    fill(tmp_path, [event(86_400 * day) for day in range(5)])
    sql = "EXPLAIN SELECT * FROM {entries} WHERE event_date = '"
    plan = query(tmp_path, sql + str(at_seconds(86_400).date()) + "'")
    # The other days keep only files that no query can read.
    assert str(plan).count("Function:") == 1
