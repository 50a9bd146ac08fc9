"""The table of flags in docs/reference/dcgm-exporter.md."""

from typing import Final

from gpuledger_agent.dcgm_exporter import FLAGS, Flag
from tests.docs_gen.markdown import code, put_between_marks, table

_COLUMNS: Final = ("flag", "variable", "here")


def dcgm_exporter_page(standing: str) -> str:
    """Return the page with a new table; raises `UserError` if the table's marks are missing."""
    # Flags with an effect first.
    flags = sorted(FLAGS, key=lambda flag: flag.meaning.startswith("no effect"))
    rows = [(_describe_flag(flag), code(flag.variable), flag.meaning) for flag in flags]
    return put_between_marks(standing, "flags", table(_COLUMNS, rows))


def _describe_flag(flag: Flag) -> str:
    """Return the names of a flag with their dashes, the short one first."""
    name, *short = flag.names.split()
    return ", ".join([*(f"`-{one}`" for one in short), f"`--{name}`"])
