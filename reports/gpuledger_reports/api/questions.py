"""Parses the parameters of a request into a question, which a process answers. Pure."""

from collections.abc import Collection, Mapping
from typing import Final, Literal

import msgspec

from gpuledger.errors import ArgumentError
from gpuledger_reports.api.filters import FilterTerm, parse_field, parse_filter
from gpuledger_reports.api.parameters import (
    flag,
    listed,
    read_query,
    shown,
    whole_number,
)
from gpuledger_reports.api.sets import parse_accumulate, sets_of
from gpuledger_reports.pricing.periods import bill_window, parse_window
from gpuledger_reports.reading.times import HOUR_US, Window, time_text

Split = Literal["weighted", "even"]
MAX_DAYS: Final = 400
MAX_DIMENSIONS: Final = 12
MAX_SHARED: Final = 100
MAX_ROWS: Final = 100_000
_DEFAULT_ROWS: Final = 20
MAX_SUGGESTIONS: Final = 1000
_DEFAULT_SUGGESTIONS: Final = 100
"""As in OpenCost."""
WITHOUT_EFFECT: Final = frozenset(
    {
        "metrics",  # the answer always has all of them
        "external",
        "reconcile",
        "reconcileNetwork",
        "resolution",  # the store has every tick, so nothing is sampled
        "includeAggregatedMetadata",
        "includeProportionalAssetResourceCosts",
        "sharelb",  # costs do not include load balancers
    }
)
_FORMATS: Final = ("", "json")
MEDIA_TYPES: Final = {
    "json": "application/json",
    "csv": "text/csv",
    "parquet": "application/vnd.apache.parquet",
}
"""The media type of an answer by its format; only capacity reports have others than JSON."""
_REFUSED: Final = {
    "shareCost": "is not supported; put your own costs into the price file",
    "shareTenancyCosts": "is not supported; costs do not include cluster management",
}
_ALLOCATION: Final = frozenset(
    {
        *WITHOUT_EFFECT,
        *_REFUSED,
        *("window", "aggregate", "step", "accumulate", "accumulateBy", "format"),
        *("idle", "includeIdle", "idleByNode", "splitIdle", "shareIdle"),
        *("shareNamespaces", "shareLabels", "shareSplit", "filter"),
    }
)
_AUTOCOMPLETE: Final = frozenset({"window", "field", "search", "limit", "filter"})
_BILL: Final = frozenset({"period", "from", "to", "by"})
_EXPLAIN: Final = _BILL | {"line", "rows"}


class AllocationQuestion(msgspec.Struct, frozen=True, kw_only=True, tag="allocation"):
    """The parameters of `/allocation`."""

    sets: tuple[Window, ...]
    aggregate: tuple[str, ...]
    """The fields to group by, as OpenCost names them, such as `namespace` or `label:app`."""
    has_idle: bool = False
    """Whether the answer contains idle as an allocation."""
    idle_by_node: bool = False
    """Whether idle is calculated per node instead of per cluster."""
    splits_idle: bool = False
    """Whether the idle of each cluster or node has its own allocation."""
    share_idle: Split | None = None
    """How idle is distributed among tenants; `None` if it is not."""
    share_namespaces: tuple[str, ...] = ()
    share_labels: tuple[tuple[str, str], ...] = ()
    """Keys and values of labels. The costs of pods with one of these labels are distributed among
    all other pods."""
    share_split: Split = "weighted"
    filters: tuple[FilterTerm, ...] = ()
    """Conditions on the allocations in the answer. They apply after costs are shared."""
    without_effect: tuple[str, ...] = ()
    """The given parameters that do not change the answer, for its warnings."""

    @property
    def fields(self) -> tuple[str, ...]:
        """The fields whose values the answer needs."""
        return (*self.aggregate, *(term.field for term in self.filters))


class AutocompleteQuestion(msgspec.Struct, frozen=True, kw_only=True, tag="autocomplete"):
    """The parameters of `/allocation/autocomplete`."""

    window: Window
    field: str
    search: str = ""
    """The text that values contain, in any case."""
    limit: int
    filters: tuple[FilterTerm, ...] = ()


class BillQuestion(msgspec.Struct, frozen=True, kw_only=True, tag="bill"):
    """The parameters of `/bill`; the default window is the month of the newest usage."""

    window: Window | None
    by: tuple[str, ...]


class ExplainQuestion(msgspec.Struct, frozen=True, kw_only=True, tag="explain"):
    """The parameters of `/bill/explain`."""

    bill: BillQuestion
    line: str
    rows: int


class CapacityQuestion(msgspec.Struct, frozen=True, kw_only=True, tag="capacity"):
    """The parameters of a page of `/capacity`."""

    report: str
    given: dict[str, str]
    """The texts of the report's options, which mean times that depend on the store."""
    format: str = "json"
    now_us: int
    """The start of the current hour, so that equal requests within an hour are equal questions."""


class StoreStateQuestion(msgspec.Struct, frozen=True, kw_only=True, tag="store_state"):
    """Requests the state on which answers depend: the table versions and the hash of the prices."""


Question = (
    AllocationQuestion
    | AutocompleteQuestion
    | BillQuestion
    | CapacityQuestion
    | ExplainQuestion
    | StoreStateQuestion
)


def window_text(question: Question) -> str:
    """Return the time that a question covers, for the log."""
    match question:
        case AllocationQuestion():
            window: Window | None = Window(question.sets[0].begin_us, question.sets[-1].end_us)
        case CapacityQuestion(given=given):
            times = [given[name] for name in ("window", "from", "to") if name in given]
            return " to ".join(times) or "default"
        case ExplainQuestion():
            window = question.bill.window
        case StoreStateQuestion():
            window = None
        case _:
            window = question.window
    return "newest month" if window is None else " to ".join(map(time_text, window))


def allocation_question(query: str, now_us: int) -> AllocationQuestion:
    """Return the question of an allocation request; raises `ArgumentError` if it is invalid."""
    given = read_query(query, known=_ALLOCATION)
    for name, problem in _REFUSED.items():
        if given.get(name, "") not in ("", "0", "false"):
            raise ArgumentError(name, problem)
    window = _window(given, now_us)
    if given.get("format", "") not in _FORMATS:
        raise ArgumentError("format", f"invalid value {shown(given['format'])}; use json")
    accumulate = parse_accumulate(given.get("accumulateBy") or given.get("accumulate", ""))
    # OpenCost's default is containers, but the finest level in a bill is pods.
    fields = listed(given, "aggregate", maximum=MAX_DIMENSIONS)
    return AllocationQuestion(
        sets=sets_of(window, step=given.get("step") or None, accumulate=accumulate),
        aggregate=fields or ("cluster", "node", "namespace", "pod"),
        has_idle=flag(given, "includeIdle") or flag(given, "idle"),
        idle_by_node=flag(given, "idleByNode"),
        splits_idle=flag(given, "splitIdle"),
        share_idle=_split(given, "shareIdle"),
        share_namespaces=listed(given, "shareNamespaces", maximum=MAX_SHARED),
        share_labels=_labels(given, "shareLabels"),
        share_split=_split(given, "shareSplit") or "weighted",
        filters=parse_filter(given.get("filter", "")),
        without_effect=tuple(name for name in given if name in WITHOUT_EFFECT),
    )


def autocomplete_question(query: str, now_us: int) -> AutocompleteQuestion:
    """Return the question of an autocomplete request; raises `ArgumentError` if it is invalid."""
    given = read_query(query, known=_AUTOCOMPLETE)
    limit = whole_number(given, "limit", default=0, maximum=MAX_SUGGESTIONS)
    return AutocompleteQuestion(
        window=_window(given, now_us),
        field=parse_field(given.get("field", ""), option="field"),
        search=given.get("search", "").strip(),
        limit=limit or _DEFAULT_SUGGESTIONS,
        filters=parse_filter(given.get("filter", "")),
    )


def bill_question(query: str, now_us: int) -> BillQuestion:
    """Return the question of a bill request; raises `ArgumentError` if it is invalid."""
    return _bill(read_query(query, known=_BILL), now_us)


def explain_question(query: str, now_us: int) -> ExplainQuestion:
    """Return the question of an explanation request; raises `ArgumentError` if it is invalid."""
    given = read_query(query, known=_EXPLAIN)
    if not given.get("line"):
        raise ArgumentError("line", "is missing; give the `line` of a line of /bill")
    rows = whole_number(given, "rows", default=_DEFAULT_ROWS, maximum=MAX_ROWS)
    return ExplainQuestion(bill=_bill(given, now_us), line=given["line"], rows=rows)


def capacity_question(
    report: str, options: Collection[str], query: str, now_us: int
) -> CapacityQuestion:
    """Return the question of a request for a report; raises `ArgumentError` if it is invalid.

    The values of the report's options are checked when it is answered.
    """
    given = read_query(query, known={*options, "format"})
    chosen = given.pop("format", "") or "json"
    if chosen not in MEDIA_TYPES:
        problem = f"invalid value {shown(chosen)}; use {', '.join(MEDIA_TYPES)}"
        raise ArgumentError("format", problem)
    return CapacityQuestion(
        report=report,
        given=dict(sorted(given.items())),
        format=chosen,
        now_us=now_us // HOUR_US * HOUR_US,
    )


def _window(given: Mapping[str, str], now_us: int) -> Window:
    if "window" not in given:
        raise ArgumentError("window", "is missing; give one such as 7d, today, lastweek or month")
    return parse_window(given["window"], option="window", now_us=now_us, max_days=MAX_DAYS)


def _bill(given: Mapping[str, str], now_us: int) -> BillQuestion:
    by = listed(given, "by", maximum=MAX_DIMENSIONS) or ("namespace",)
    return BillQuestion(window=bill_window(given, now_us=now_us, max_days=MAX_DAYS), by=by)


def _split(given: Mapping[str, str], name: str) -> Split | None:
    value = given.get(name, "")
    if value == "even":
        return "even"
    return "weighted" if value == "weighted" or flag(given, name) else None


def _labels(given: Mapping[str, str], name: str) -> tuple[tuple[str, str], ...]:
    pairs = [label.partition(":") for label in listed(given, name, maximum=MAX_SHARED)]
    for key, colon, value in pairs:
        if not (key and colon and value):
            raise ArgumentError(name, f"invalid label {shown(key)}; give KEY:VALUE")
    return tuple((key, value) for key, _, value in pairs)
