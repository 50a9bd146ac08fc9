"""A connection to DuckDB that answers questions about a store, and does nothing else.

A statement is looked at before it runs: one alone, which gives rows. What a statement that gives
rows could reach beside the views, such as files by `read_csv`, DuckDB itself refuses once the
connection is confined. What it may take of memory and time is not bounded here.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Protocol

from gpuledger.errors import UserError
from gpuledger.store.query import escape_path, quoted

_QUESTION: Final = "SELECT"
"""DuckDB's type of whatever gives rows and changes nothing: of FROM, WITH, SHOW too."""


class QueryConnection(Protocol):
    """What is asked of a connection to DuckDB."""

    def execute(self, query: str) -> Any:  # noqa: ANN401  # DuckDB's own
        """Run a statement."""

    def extract_statements(self, query: str) -> Sequence[Any]:
        """Return the statements of a text, parsed and not run."""


def confine(
    connection: QueryConnection,
    files: Mapping[str, Iterable[str]],
    *,
    written: Path | None = None,
) -> None:
    """Let a connection read the folders of a store's files, by table, and no other file.

    It may write to one file, where there is one to be written. No setting can be changed after it.
    """
    folders = {
        file.rpartition(f"/{name}/")[0] for name, of_table in files.items() for file in of_table
    }
    # DuckDB compares what it is given: of a path with a `[` the pattern that means just this.
    allowed = sorted(folders | {escape_path(folder) for folder in folders})
    settings = {
        "allowed_directories": f"[{', '.join(map(quoted, allowed))}]",
        "allowed_paths": f"[{quoted(str(written))}]" if written else "[]",
        # A name that no table has would be looked for among the variables of this program.
        "python_enable_replacements": "false",
        "autoinstall_known_extensions": "false",
        "autoload_known_extensions": "false",
        "enable_external_access": "false",
        "lock_configuration": "true",
    }
    for name, value in settings.items():
        connection.execute(f"SET {name} = {value}")


def parse_question(connection: QueryConnection, sql: str) -> Any:  # noqa: ANN401  # DuckDB's own
    """Return the one statement of a text; raises UserError where it is not one that gives rows."""
    statements = connection.extract_statements(sql)
    if not statements:
        raise UserError("the SQL is empty; begin it with SELECT, FROM, WITH or SHOW")
    kinds = [str(statement.type.name) for statement in statements]
    if len(kinds) > 1:
        raise UserError(
            f"the SQL is {len(kinds)} statements ({', '.join(kinds)}); give one alone, and of a"
            " PIVOT the values of its column: ON column IN (…)"
        )
    if kinds != [_QUESTION]:
        raise UserError(
            f"the SQL gives no rows of the store ({kinds[0]}), and was not run; begin it with"
            " SELECT, FROM, WITH or SHOW"
        )
    return statements[0]
