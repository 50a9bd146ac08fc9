"""The store is read, or one line tells the user what to do."""

from collections.abc import Callable
from pathlib import Path

import pytest
from deltalake import DeltaTable

from gpuledger.errors import UserError
from gpuledger.store.query import count_rows, entries_sql
from gpuledger.store.schema import ENTRIES, table_uri


def make_nothing(store: Path) -> None:
    """Leave the directory empty."""


def make_a_table_without_rows(store: Path) -> None:
    DeltaTable.create(table_uri(str(store)), ENTRIES.arrow)


EMPTY = [make_nothing, Path.mkdir, make_a_table_without_rows]


@pytest.mark.parametrize("make", EMPTY)
def test_a_store_without_rows_is_named_with_the_remedy(
    tmp_path: Path, make: Callable[[Path], None]
) -> None:
    store = tmp_path / "the-store"
    make(store)
    with pytest.raises(UserError) as raised:
        entries_sql(str(store))
    (line,) = str(raised.value).splitlines()
    assert str(store) in line
    assert "give the directory or URI to which a store sink" in line
    assert count_rows(str(store)) == 0


def test_credentials_in_the_stores_address_are_not_shown(tmp_path: Path) -> None:
    with pytest.raises(UserError) as raised:
        entries_sql(f"file://{tmp_path}/store?token=hunter2")
    assert "hunter2" not in str(raised.value)
