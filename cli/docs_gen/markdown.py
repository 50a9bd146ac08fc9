"""Markdown that is made: tables, names as code, and text put between two marks of a page."""

from collections.abc import Iterable, Iterator, Sequence

from gpuledger.errors import UserError


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """Yield a table's lines; raises `UserError` where a cell would break its row."""
    yield _line(columns)
    yield _line(["---"] * len(columns))
    for row in rows:
        for column, cell in zip(columns, row, strict=True):
            _check(cell, of=row[0], column=column)
        yield _line(row)


def code(*names: str) -> str:
    """Return names as code, one behind the other."""
    return " ".join(f"`{name}`" for name in names)


def put_between_marks(page: str, name: str, lines: Iterable[str]) -> str:
    """Return a page with other lines between its marks; raises `UserError` where one is missing."""
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    before, found, rest = page.partition(begin)
    _, ended, after = rest.partition(end)
    if not (found and ended):
        raise UserError(f"the mark {end if found else begin} is missing; put it back")
    return "\n".join([f"{before}{begin}", "", *lines, "", f"{end}{after}"])


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _check(cell: str, *, of: str, column: str) -> None:
    if "|" in cell or "\n" in cell:
        raise UserError(f"{of}, {column}: {cell!r} would break its row; leave out | and new lines")
