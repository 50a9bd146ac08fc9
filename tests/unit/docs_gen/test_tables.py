"""The columns of the store's tables, each with its type and meaning."""

import pytest

from gpuledger.errors import UserError
from gpuledger.store.bill_table import BILL_LINES
from gpuledger.store.views import TABLES
from tests.docs_gen.tables_page import MEANINGS, meaning_of, type_of
from tests.errors import has_words


def test_a_decimal_is_named_with_its_digits() -> None:
    types = {column.name: type_of(column) for column in BILL_LINES.columns}

    assert types["cost"] == "decimal(38,4)"
    assert types["closed_time"] == "timestamp"


def test_a_column_without_a_meaning_is_named() -> None:
    with pytest.raises(UserError, check=has_words("usage.colour")):
        meaning_of("usage", "colour")


def test_a_meaning_of_a_table_is_of_one_of_its_columns() -> None:
    columns = {f"{name}.{column.name}" for name in TABLES for column in TABLES[name].columns}

    assert {name for name in MEANINGS if "." in name} <= columns
