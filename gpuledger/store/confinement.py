"""A DuckDB connection that can query a store and do nothing else.

An SQL text is checked before it runs: it must be a single statement that returns rows. Such a
statement could still read other files, for example with `read_csv`; DuckDB rejects this once the
connection is confined. Memory and time are not limited here.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Protocol

from gpuledger.errors import UserError
from gpuledger.store.query import escape_path, quoted

_QUESTION: Final = "SELECT"
"""DuckDB's type of all statements that return rows and change nothing, including FROM and SHOW."""


class QueryConnection(Protocol):
    """The part of a DuckDB connection that is used here."""

    def execute(self, query: str) -> Any:  # noqa: ANN401  # DuckDB's own
        """Run a statement."""

    def extract_statements(self, query: str) -> Sequence[Any]:
        """Return the statements of a text, parsed but not run."""


def confine(
    connection: QueryConnection,
    files: Mapping[str, Iterable[str]],
    *,
    written: Path | None = None,
) -> None:
    """Restrict a connection to reading the directories that contain these files.

    `files` has the store's files by table. The connection may also write the file `written`, if
    given. Afterwards, no setting can be changed.
    """
    folders = {
        file.rpartition(f"/{name}/")[0] for name, of_table in files.items() for file in of_table
    }
    # DuckDB compares paths as they are written, and a path with a `[` may also be written as its
    # escaped pattern.
    allowed = sorted(folders | {escape_path(folder) for folder in folders})
    settings = {
        "allowed_directories": f"[{', '.join(map(quoted, allowed))}]",
        "allowed_paths": f"[{quoted(str(written))}]" if written else "[]",
        # Otherwise, unknown table names would be looked up in this program's variables.
        "python_enable_replacements": "false",
        "autoinstall_known_extensions": "false",
        "autoload_known_extensions": "false",
        "enable_external_access": "false",
        "lock_configuration": "true",
    }
    for name, value in settings.items():
        connection.execute(f"SET {name} = {value}")


def parse_question(connection: QueryConnection, sql: str) -> Any:  # noqa: ANN401  # DuckDB's own
    """Return the parsed statement; raise `UserError` unless the text is one query for rows."""
    statements = connection.extract_statements(sql)
    if not statements:
        raise UserError("the SQL is empty; begin it with SELECT, FROM, WITH or SHOW")
    kinds = [str(statement.type.name) for statement in statements]
    if len(kinds) > 1:
        raise UserError(
            f"the SQL has {len(kinds)} statements ({', '.join(kinds)}); give only one, and for a"
            " PIVOT list the values of its column: ON column IN (…)"
        )
    if kinds != [_QUESTION]:
        raise UserError(
            f"the SQL returns no rows of the store ({kinds[0]}) and was not run; begin it with"
            " SELECT, FROM, WITH or SHOW"
        )
    return statements[0]
