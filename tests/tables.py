"""Long tables of a law in one test, for cases that take less time than pytest's overhead."""

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

Test = Callable[..., None]


def for_each(names: str, rows: Iterable[Any]) -> Callable[[Test], Test]:
    """Call a test for each row of a table; like `parametrize`, but as one test.

    A failure shows its row. The rows share the test's fixtures.
    """
    columns = [name.strip() for name in names.split(",")]
    table = [row if len(columns) > 1 else (row,) for row in rows]
    assert table, f"no rows for {names}"

    def decorate(test: Test) -> Test:
        @functools.wraps(test)
        def test_all(**fixtures: Any) -> None:  # noqa: ANN401  # pytest's
            for row in table:
                given = dict(zip(columns, row, strict=True))
                try:
                    test(**given, **fixtures)
                except BaseException as error:
                    error.add_note(f"where {given}")
                    raise

        # Pytest passes the fixtures in the signature.
        requested = inspect.signature(test)
        left = [each for name, each in requested.parameters.items() if name not in columns]
        test_all.__signature__ = requested.replace(parameters=left)  # type: ignore[attr-defined]  # any function accepts attributes
        return test_all

    return decorate
