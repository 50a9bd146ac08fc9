"""The endpoints whose answers depend on the store."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Final

from gpuledger_reports.api.questions import (
    Question,
    allocation_question,
    autocomplete_question,
    bill_question,
    capacity_question,
    explain_question,
)
from gpuledger_reports.capacity.asking import parameters_of
from gpuledger_reports.capacity.registry import REPORTS

CAPACITY: Final = "/capacity"
PAGES: Final[Mapping[str, Callable[[str, int], Question]]] = {
    "/allocation": allocation_question,
    "/allocation/compute": allocation_question,
    "/allocation/autocomplete": autocomplete_question,
    "/bill": bill_question,
    "/bill/explain": explain_question,
    **{
        f"{CAPACITY}/{name}": partial(capacity_question, name, frozenset(parameters_of(report)))
        for name, report in REPORTS.items()
    },
}
"""The parser of each endpoint's parameters. Its arguments are the query string and the current time
in microseconds."""
