"""Suggests values for filters: the values of a field in a bill. Pure."""

from gpuledger_reports.api.fields import dimensions_of, value_of
from gpuledger_reports.api.filters import passes
from gpuledger_reports.api.questions import AutocompleteQuestion
from gpuledger_reports.pricing.billing import Bill
from gpuledger_reports.pricing.tenants import UNALLOCATED


def dimensions_for(question: AutocompleteQuestion) -> tuple[str, ...]:
    """Return the dimensions that a bill must have to answer a question."""
    fields = (question.field, *(term.field for term in question.filters))
    # A bill needs at least one dimension.
    named = (name for field in ("cluster", *fields) for name in dimensions_of(field))
    return tuple(dict.fromkeys(named))


def suggestions(bill: Bill, question: AutocompleteQuestion) -> list[str]:
    """Return the field's values that contain the searched text, in order."""
    found = set()
    for line in bill.lines:
        values = dict(zip(bill.by, line.values, strict=True))
        if passes(values, question.filters, is_absent=lambda _: False):
            found.add(value_of(question.field, values))
    search = question.search.casefold()
    matching = (value for value in found - {UNALLOCATED} if search in value.casefold())
    return sorted(matching)[: question.limit]
