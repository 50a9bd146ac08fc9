"""The flat row: one table from which the topic, the store and the series take their columns."""

from typing import get_type_hints

import pytest

from gpuledger.ledger.entries import BookedEntry
from gpuledger.ledger.families import ACCOUNT, ALLOCATION, POD
from gpuledger.ledger.quantities import QUANTITIES, Quantity
from gpuledger.ledger.rows import COLUMNS, TOPIC_COLUMNS, Column, EntryRow
from gpuledger.store.schema import ENTRIES
from tests.tables import for_each


def names(columns: object) -> list[str]:
    return [column.name for column in columns]  # type: ignore[attr-defined]  # of any table here


def test_the_topics_record_has_the_columns_of_the_table_in_their_order() -> None:
    assert list(get_type_hints(EntryRow)) == names(TOPIC_COLUMNS)


def test_the_stores_table_has_all_columns_except_those_only_in_the_topic() -> None:
    assert set(names(ENTRIES.columns)) == set(names(COLUMNS)) - {"row"}


@for_each("column", COLUMNS)
def test_a_column_is_read_from_an_entry_of_an_event(column: Column) -> None:
    assert column.source.partition(".")[0] in BookedEntry._fields


@for_each("column", TOPIC_COLUMNS)
def test_a_column_of_the_topic_is_documented(column: Column) -> None:
    assert column.meaning.endswith(".")


@pytest.mark.parametrize("quantity", QUANTITIES, ids=lambda quantity: quantity.name)
def test_a_booked_quantity_is_a_column_and_a_series_of_pods_and_categories(
    quantity: Quantity,
) -> None:
    assert quantity.name in names(TOPIC_COLUMNS)
    assert quantity.name in names(ENTRIES.columns)
    if quantity.is_of_allocations:
        assert f"gpuledger_allocation_gpu_{quantity.average}" in {
            one.name for one in ALLOCATION.metrics
        }
        return
    for family, prefix in ((POD, "gpuledger_pod_gpu_"), (ACCOUNT, "gpuledger_category_gpu_")):
        assert f"{prefix}{quantity.average}" in {metric.name for metric in family.metrics}
