"""Makes DuckDB use one thread: with a few rows, more threads cost more time than they save."""

from collections.abc import Iterator
from functools import partial

import duckdb
import pytest


@pytest.fixture(scope="session", autouse=True)
def one_duckdb_thread() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(duckdb, "connect", partial(duckdb.connect, config={"threads": 1}))
        yield
