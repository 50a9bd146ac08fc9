"""Scrapes of a run, as series for promtool. Pure.

A rule may require that its condition holds for minutes, and a run lasts seconds. So the end of the
run is extended: each series keeps its last value, but a counter or gauge that rose until then
continues to rise at its last rate, and a time that moved continues with the clock.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from enum import Enum, auto
from itertools import pairwise
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


class Kind(Enum):
    """How a series rises."""

    GAUGE = auto()
    """At every scrape."""
    COUNTER = auto()
    """Now and then, because events need not fall into each scrape."""
    TIME = auto()
    """With the clock, if it moves at all."""


SCRAPE_SECONDS: Final = 2
LAST_SCRAPES: Final = 6
"""The scrapes at the end that show whether a series rises."""
MIN_SCRAPES: Final = 3
_METRIC: Final = re.compile(r"\b(?:gpuledger|process)_[a-z0-9_]+")
_KINDS: Final = {
    Kind.COUNTER: re.compile(r"_(total|count|sum|bucket)(\{|$)"),
    Kind.TIME: re.compile(r"_timestamp_seconds(\{|$)"),
}
_LINE: Final = re.compile(r"(?P<name>\w+)(\{(?P<labels>.*)\})? (?P<value>\S+)")
_LABEL_NAME: Final = re.compile(r'(\w+)="(?:[^"\\]|\\.)*"')


@dataclass(frozen=True, kw_only=True)
class Target:
    """A component that Prometheus scrapes."""

    instance: str
    component: str
    node: str = ""

    def labels(self, exported: str = "") -> str:
        """Return labels of a page, and those that the shipped scrape configuration adds."""
        added = {
            "job": "gpuledger",
            "cluster": "default",
            "component": self.component,
            "node": self.node,
            "instance": self.instance,
        }
        # `honor_labels` of the configuration lets a page's own labels take precedence.
        own = set(_LABEL_NAME.findall(exported))
        left = [f'{name}="{value}"' for name, value in added.items() if value and name not in own]
        return ",".join([*filter(None, [exported]), *left])


@dataclass(kw_only=True)
class Scrapes:
    """All scrapes of a run at regular times; series of metrics that no rule reads are left out."""

    rules: str
    """The text of the rules."""
    started_seconds: int
    """Unix time of the first scrape."""
    others: Sequence[str] = ()
    """Components that a complete installation has as well, as if they were scraped."""
    count: int = 0
    _values: dict[str, list[float | None]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Find the metrics that the rules read."""
        self._names = frozenset(_METRIC.findall(self.rules))
        self._others = [Target(instance=name, component=name) for name in self.others]

    def add(self, pages: Mapping[Target, str | None]) -> None:
        """Add the pages of all targets, scraped at the same time; `None` if there was none."""
        for target in self._others:
            self._add(f"up{{{target.labels()}}}", 1.0)
        for target, page in pages.items():
            self._add(f"up{{{target.labels()}}}", float(page is not None))
            for line in (page or "").splitlines():
                found = _LINE.fullmatch(line)
                if found and found["name"] in self._names:
                    labels = target.labels(found["labels"] or "")
                    self._add(f"{found['name']}{{{labels}}}", float(found["value"]))
        self.count += 1

    def _add(self, series: str, value: float) -> None:
        values = self._values.setdefault(series, [])
        values += [None] * (self.count - len(values)) + [value]

    def series(self, *, first: int, extended: int) -> dict[str, str]:
        """Return the first scrapes, extended, as promtool's `input_series`: values by series."""
        return {
            series: write_values(
                [*values[:first], *[None] * (first - len(values))],
                extended=extended,
                kind=_kind_of(series),
            )
            for series, values in self._values.items()
        }


def _kind_of(series: str) -> Kind:
    return next((kind for kind, form in _KINDS.items() if form.search(series)), Kind.GAUGE)


def write_values(values: Sequence[float | None], *, extended: int, kind: Kind) -> str:
    """Return a series in promtool's notation; a value that is missing ends it until the next one.

    The last value is followed by `extended` more.
    """
    written = []
    for number, value in enumerate(values):
        if value is not None:
            written.append(_number(value))
        elif number and values[number - 1] is not None:
            written.append("stale")
        else:
            written.append("_")
    last = values[-1] if values else None
    if last is None:
        written.append(f"_x{extended}")
    elif step := _step(values[-LAST_SCRAPES:], kind):
        written.append(f"{_number(last + step)}+{_number(step)}x{extended - 1}")
    else:
        written.append(f"{_number(last)}x{extended - 1}")
    return " ".join(written)


def _step(values: Sequence[float | None], kind: Kind) -> float:
    """Return the rise from scrape to scrape; 0 if the values do not rise steadily."""
    known = [value for value in values if value is not None]
    if len(known) < MIN_SCRAPES:
        return 0.0
    steps = [after - before for before, after in pairwise(known)]
    if min(steps) < 0 or max(steps) == 0 or (kind is Kind.GAUGE and min(steps) == 0):
        return 0.0
    return SCRAPE_SECONDS if kind is Kind.TIME else (known[-1] - known[0]) / len(steps)


def _number(value: float) -> str:
    """Return a number without an exponent, which promtool would take for a repetition."""
    return f"{value:.6f}".rstrip("0").rstrip(".")
