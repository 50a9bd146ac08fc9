"""Answers one question from the store, in a process of the service. Independent of HTTP.

The store is only read. DuckDB runs in memory and does not spill to disk.
"""

from collections.abc import Mapping
from http import HTTPStatus
from pathlib import Path
from typing import Any, Final

import duckdb
import msgspec

from gpuledger.errors import ArgumentError, UserError
from gpuledger_reports.api import autocomplete
from gpuledger_reports.api.allocation import allocation_set, dimensions_for
from gpuledger_reports.api.capacity import capacity_content
from gpuledger_reports.api.fields import WITHOUT_VALUE, dimensions_of, field_names
from gpuledger_reports.api.parameters import shown
from gpuledger_reports.api.questions import (
    MEDIA_TYPES,
    AllocationQuestion,
    AutocompleteQuestion,
    BillQuestion,
    CapacityQuestion,
    ExplainQuestion,
    Question,
    StoreStateQuestion,
)
from gpuledger_reports.presenting.explanation import explanation_of
from gpuledger_reports.presenting.output import (
    as_json,
    dimensions_without_value,
    hours_text,
    usage_text,
)
from gpuledger_reports.pricing.billing import Bill, BillMaker, gpu_count, gpu_seconds
from gpuledger_reports.pricing.closing import ClosedLine, closed_lines, standing_bill
from gpuledger_reports.pricing.periods import month_of
from gpuledger_reports.pricing.policy import BillPolicy
from gpuledger_reports.pricing.policy_file import read_policy
from gpuledger_reports.reading.inventory import Node
from gpuledger_reports.reading.times import Window
from gpuledger_reports.reading.usage_sums import StoreReadError, UsageReader, check_tables

MAX_LINES: Final = 100_000
"""Maximum number of allocations in an answer; each is about 2 KB of JSON."""


class AnswerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The settings that a process needs to answer questions."""

    store_uri: str
    storage_options: dict[str, str]
    prices: str | None
    memory_bytes: int


class ReportAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The response to a question."""

    body: bytes
    status: int = 200
    media_type: str = MEDIA_TYPES["json"]
    logged: str = ""
    """The cause of an error, for the log only: it names files of the store."""


def error_body(status: int, message: str, *, parameter: str | None = None) -> bytes:
    """Return the JSON of an error, in OpenCost's form."""
    named = {} if parameter is None else {"parameter": parameter}
    content = {"code": status, "status": "error", "message": message, **named}
    return msgspec.json.encode(content) + b"\n"


def answer_to(question: Question, settings: AnswerSettings) -> ReportAnswer:
    """Return the answer to a question.

    If the question is invalid or the store cannot be read, the answer contains an error status.
    """
    try:
        chosen = question.format if isinstance(question, CapacityQuestion) else "json"
        return ReportAnswer(body=_body(question, settings), media_type=MEDIA_TYPES[chosen])
    except ArgumentError as error:
        return _error(HTTPStatus.BAD_REQUEST, str(error), parameter=error.name)
    except (StoreReadError, OSError) as error:
        # For example, a compaction has replaced a file, or the object store is unavailable. Clients
        # must not see the file's name or location.
        name = type(error).__name__
        answer = _error(HTTPStatus.SERVICE_UNAVAILABLE, f"cannot read the store: {name}")
        return msgspec.structs.replace(answer, logged=str(error))
    except UserError as error:
        # The store or the prices are wrong, which the client cannot fix.
        return _error(HTTPStatus.SERVICE_UNAVAILABLE, str(error))
    except (duckdb.OutOfMemoryException, MemoryError):
        with_window = AllocationQuestion | AutocompleteQuestion | CapacityQuestion
        has_window = isinstance(question, with_window)
        range_name = "window" if has_window else "period"
        problem = f"needs more memory than {settings.memory_bytes} bytes; request less at a time"
        return _error(HTTPStatus.BAD_REQUEST, f"{range_name}: {problem}", parameter=range_name)


def _error(status: HTTPStatus, message: str, *, parameter: str | None = None) -> ReportAnswer:
    return ReportAnswer(status=status, body=error_body(status, message, parameter=parameter))


def _body(question: Question, settings: AnswerSettings) -> bytes:
    read = read_policy(Path(settings.prices) if settings.prices else None)
    match question:
        case StoreStateQuestion():
            versions = check_tables(settings.store_uri, settings.storage_options)
            return msgspec.json.encode({"tables": versions, "prices": read.sha256})
        case AllocationQuestion():
            by = dimensions_for(question, find=lambda field: _dimensions(field, read.policy))
            maker = BillMaker(_reader(settings, by), read, by=by)
            return _allocations(question, maker)
        case AutocompleteQuestion():
            by = autocomplete.dimensions_for(question)
            maker = BillMaker(_reader(settings, by), read, by=by)
            bill = maker.make(question.window, with_budgets=False)
            found = autocomplete.suggestions(bill, question)
            # Twice, because OpenCost wraps its own response.
            content = {"code": 200, "status": "success", "data": {"data": found}}
            return msgspec.json.encode(content) + b"\n"
        case BillQuestion():
            return as_json(_shown_bill(question, settings)).encode()
        case ExplainQuestion():
            return _explanation(question, settings)
        case CapacityQuestion():
            return capacity_content(
                question,
                store_uri=settings.store_uri,
                storage_options=settings.storage_options,
                memory_bytes=settings.memory_bytes,
                policy=read.policy,
            )


def _reader(settings: AnswerSettings, by: tuple[str, ...]) -> UsageReader:
    return UsageReader(
        settings.store_uri,
        storage_options=settings.storage_options,
        distinguishes_gpus="gpu" in by,
        memory_bytes=settings.memory_bytes,
    )


def _dimensions(field: str, policy: BillPolicy) -> tuple[str, ...]:
    # Custom dimensions of the price file are valid too.
    if found := dimensions_of(field) or ((field,) if policy.has_dimension(field) else ()):
        return found
    raise ArgumentError("aggregate", f"unknown field {shown(field)}; fields are {field_names()}")


def _allocations(question: AllocationQuestion, maker: BillMaker) -> bytes:
    sets, unpriced, count = [], dict[str, int](), 0
    nothing: str | None = None
    has_lines = False
    unlisted: set[tuple[Node, str]] = set()
    duplicate: set[tuple[Node, str]] = set()
    unknown = 0
    without_value: set[str] | None = None
    for bill in maker.make_each(question.sets):
        sets.append(allocation_set(bill, question))
        unpriced |= bill.unpriced
        has_lines, nothing = has_lines or bool(bill.lines), usage_text(bill)
        unlisted |= bill.unlisted_gpus
        duplicate |= bill.duplicate_gpus
        unknown += bill.unknown_units
        # A set without tenants, such as a day without usage, shows nothing about labels.
        if any(line.idle_kind is None for line in bill.lines):
            missing = set(dimensions_without_value(bill))
            without_value = missing if without_value is None else without_value & missing
        count += len(sets[-1])
        if count > MAX_LINES:
            problem = f"the answer has more than {MAX_LINES} allocations; request fewer"
            raise ArgumentError("aggregate", problem)
    content: dict[str, Any] = {"code": 200, "status": "success", "data": sets}
    nameless = (field for field in question.fields if field in WITHOUT_VALUE)
    missing = {*nameless, *(without_value or ())}
    warnings = [
        *(f"{name}: has no effect here" for name in question.without_effect),
        *(f"{name}: no allocation has a value" for name in sorted(missing)),
        *([nothing] if nothing and not has_lines else []),
        *([f"no price for {', '.join(sorted(unpriced))}: they cost nothing"] if unpriced else []),
        *(
            [f"GPUs that the inventory lacks: {gpu_count(unlisted)}; only their samples are billed"]
            if unlisted
            else []
        ),
        *(
            [f"GPUs whose samples of a second node are not billed: {gpu_count(duplicate)}"]
            if duplicate
            else []
        ),
        *(
            [f"GPU-hours of unknown allocation, in __idle__: {hours_text(unknown)}"]
            if unknown
            else []
        ),
    ]
    if warnings:
        # OpenCost's clients read the text, and others the list.
        content |= {"warning": "; ".join(warnings), "warnings": warnings}
    # Decimals become JSON numbers with all digits.
    return msgspec.json.Encoder(decimal_format="number").encode(content) + b"\n"


def _shown_bill(question: BillQuestion, settings: AnswerSettings) -> Bill:
    """Return the closed bill, or the bill calculated now if it was never closed."""
    maker, window, policy = _maker(question, settings)
    by = tuple(dict.fromkeys(question.by))
    if closed := _closed(window, by, settings):
        return standing_bill(closed, window=window, by=by, policy=policy)
    return maker.make(window)


def _closed(window: Window, by: tuple[str, ...], settings: AnswerSettings) -> list[ClosedLine]:
    uri, options = settings.store_uri, settings.storage_options
    return closed_lines(uri, window, by, options, memory_bytes=settings.memory_bytes)


def _bill(question: BillQuestion, settings: AnswerSettings) -> tuple[Bill, BillMaker]:
    maker, window, _ = _maker(question, settings)
    return maker.make(window, with_budgets=False), maker


def _maker(
    question: BillQuestion, settings: AnswerSettings
) -> tuple[BillMaker, Window, BillPolicy]:
    read = read_policy(Path(settings.prices) if settings.prices else None)
    reader = _reader(settings, question.by)
    maker = BillMaker(reader, read, by=question.by)
    return maker, question.window or month_of(reader.usage_end_us), read.policy


def _explanation(question: ExplainQuestion, settings: AnswerSettings) -> bytes:
    bill, maker = _bill(question.bill, settings)
    closed = _closed(bill.window, bill.by, settings)
    try:
        line, texts = explanation_of(
            bill, question.line, maker=maker, closed=closed, max_rows=question.rows
        )
    except ArgumentError as error:
        problem = f"{error.problem}; give the `line` of a line of /bill with the same parameters"
        raise ArgumentError(error.name, problem) from error
    content: Mapping[str, Any] = {
        "line": line.id,
        **dict(zip(bill.by, line.values, strict=True)),
        "idle_kind": line.idle_kind,
        "cost": f"{line.cost:f}",
        "currency": bill.currency,
        "billed_gpu_seconds": f"{gpu_seconds(line.billed):f}",
        "explanation": list(texts),
    }
    return msgspec.json.encode(content) + b"\n"
