"""A percentile of summed buckets is the upper bound of the bucket that contains it."""

import math
from collections.abc import Sequence
from itertools import pairwise

import duckdb
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuledger.store.distributions import BUSY, DISTRIBUTIONS, MEMORY, Distribution
from tests.examples import examples


def summed(each: Distribution, rows: Sequence[Sequence[int | None]], sql: str) -> int | None:
    """Return an SQL aggregate over rows of counts."""
    values = ", ".join(
        f"({', '.join('NULL' if n is None else str(n) for n in row)})" for row in rows
    )
    query = f"SELECT {sql} FROM (VALUES {values}) AS rows({', '.join(each.columns)})"  # noqa: S608  # our own numbers
    found = duckdb.sql(query).fetchone()
    assert found is not None
    return None if found[0] is None else int(found[0])


@pytest.mark.parametrize("each", DISTRIBUTIONS, ids=lambda each: each.name)
def test_columns_are_named_by_ascending_bounds(each: Distribution) -> None:
    assert all(low < high for low, high in pairwise(each.bounds))
    assert each.columns[: len(each.bounds)] == tuple(f"{each.name}_{n}" for n in each.bounds)
    assert each.columns[len(each.bounds) :] == (("memory_minutes_more",) if each is MEMORY else ())


@pytest.mark.parametrize("each", [BUSY, MEMORY], ids=lambda each: each.name)
@examples(40)
@given(data=st.data(), percent=st.integers(1, 100))
def test_a_percentile_in_sql_is_that_of_the_single_minutes(
    each: Distribution, data: st.DataObject, percent: int
) -> None:
    size = len(each.columns)
    counts = st.lists(st.integers(0, 60), min_size=size, max_size=size)
    rows = data.draw(st.lists(counts, min_size=1, max_size=3))
    bounds: list[int | None] = [*each.bounds, None][:size]
    minutes = [
        bound for place, bound in enumerate(bounds) for _ in range(sum(row[place] for row in rows))
    ]
    expected = minutes[math.ceil(percent * len(minutes) / 100) - 1] if minutes else None
    older = [None] * size
    assert summed(each, [*rows, older], each.percentile_sql(percent)) == expected
    assert each.percentile([sum(column) for column in zip(*rows, strict=True)], percent) == expected
    assert summed(each, [*rows, older], each.minutes_sql) == len(minutes)


def test_rows_of_earlier_versions_have_no_percentile() -> None:
    older = [None] * len(BUSY.columns)
    assert summed(BUSY, [older], BUSY.percentile_sql(50)) is None
    assert summed(BUSY, [older], BUSY.minutes_sql) is None
