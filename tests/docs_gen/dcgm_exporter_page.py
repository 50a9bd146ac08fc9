"""The tables of flags and of differences in docs/reference/dcgm-exporter.md."""

from typing import Final

from gpuledger_agent.dcgm_differences import KNOWN, Kind
from gpuledger_agent.dcgm_exporter import FLAGS, Flag
from tests.docs_gen.markdown import code, put_between_marks, table

_COLUMNS: Final = ("flag", "variable", "here")
_DIFFERENCE_COLUMNS: Final = ("difference", "metrics or labels", "reason")
_KINDS: Final[dict[Kind, str]] = {
    "missing": "only dcgm-exporter has the metric",
    "label": "label",
    "value": "value",
}


def dcgm_exporter_page(standing: str) -> str:
    """Return the page with new tables; raises `UserError` if the marks of one are missing."""
    # Flags with an effect first.
    flags = sorted(FLAGS, key=lambda flag: flag.meaning.startswith("no effect"))
    rows = [(_describe_flag(flag), code(flag.variable), flag.meaning) for flag in flags]
    page = put_between_marks(standing, "flags", table(_COLUMNS, rows))
    known = [(_KINDS[one.kind], code(*one.names), one.reason) for one in KNOWN]
    return put_between_marks(page, "differences", table(_DIFFERENCE_COLUMNS, known))


def _describe_flag(flag: Flag) -> str:
    """Return the names of a flag with their dashes, the short one first."""
    name, *short = flag.names.split()
    return ", ".join([*(f"`-{one}`" for one in short), f"`--{name}`"])
