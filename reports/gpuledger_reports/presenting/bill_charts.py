"""Draws a bill's charts as SVG with Vega-Lite, accessible to screen readers.

Lengths in charts are rounded floats; the texts next to them contain exact amounts. The layout does
not depend on text widths, so a chart is the same on machines with different fonts. Colours are
variables of the page, so one drawing works for light mode, dark mode and print.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from itertools import accumulate
from typing import Any, Final
from xml.etree import ElementTree as ET

import vl_convert
from markupsafe import Markup

_SVG: Final = "http://www.w3.org/2000/svg"
# In pixels of the drawing; the page scales it as a whole.
_BAR_STEP: Final = 26
_INK, _MUTED, _GRID = "var(--ink)", "var(--muted)", "var(--grid)"
_ELLIPSIS: Final = "…"
_UNPRINTABLE: Final = re.compile("[\x00-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")


@dataclass(frozen=True, kw_only=True)
class BarPart:
    """A part of a bar."""

    colour: str
    """The name of a colour of the page, such as `used` for `var(--c-used)`."""
    amount: Decimal
    text: str
    """The text for screen readers and for the tooltip."""


@dataclass(frozen=True, kw_only=True)
class Bar:
    """A bar whose parts are drawn end to end."""

    name: str
    parts: Sequence[BarPart]
    text: str = ""
    """The text at the bar's end."""


@dataclass(frozen=True, kw_only=True)
class Gauge:
    """A budget's spent, elapsed and forecast ratios; 1 is the whole amount or the whole time."""

    name: str
    spent_ratio: Decimal
    elapsed_ratio: Decimal
    forecast_ratio: Decimal | None
    text: str


@dataclass(frozen=True, kw_only=True)
class _Size:
    """The size of a drawing.

    Each chart is drawn in a wide and a narrow size, and the page shows whichever fits.
    """

    style: str
    width: int
    """The width of the plot area, without names and margins."""
    left: int
    right: int
    name_length: int
    """Maximum number of characters of a name; the layout does not depend on text widths."""
    days_width: int
    """The width of the plot area in the chart of days, which has no names on its left."""
    days_left: int
    ticks: int


_SIZES: Final = (
    _Size(
        style="wide",
        width=590,
        left=300,
        right=110,
        name_length=32,
        days_width=912,
        days_left=76,
        ticks=16,
    ),
    _Size(
        style="narrow",
        width=130,
        left=142,
        right=84,
        name_length=15,
        days_width=272,
        days_left=72,
        ticks=6,
    ),
)


def draw_bars(bars: Sequence[Bar], *, title: str) -> Markup:
    """Return a chart as SVG: horizontal bars, one below the other, with name and text."""
    return Markup("").join(_draw(_bars_spec(bars, size), title, size.style) for size in _SIZES)


def draw_days(days: Sequence[Bar], *, title: str) -> Markup:
    """Return a chart as SVG: vertical bars, one for each day.

    A bar's name is its day, such as 2026-10-01.
    """
    return Markup("").join(_draw(_days_spec(days, size), title, size.style) for size in _SIZES)


def draw_gauges(gauges: Sequence[Gauge], *, title: str) -> Markup:
    """Return a chart as SVG: a bar for each budget, with marks for elapsed time and forecast."""
    return Markup("").join(_draw(_gauges_spec(gauges, size), title, size.style) for size in _SIZES)


def printable(text: str) -> str:
    """Return a text in which characters that are invalid in XML and HTML are replaced."""
    return _UNPRINTABLE.sub("\N{REPLACEMENT CHARACTER}", text)


def _shortened(text: str, length: int) -> str:
    """Return a text of at most `length` characters; a longer one loses its middle.

    The end is kept, because many tenants' names differ only at the end.
    """
    if len(text) <= length:
        return text
    end = length // 3
    return f"{text[: length - end - 1]}{_ELLIPSIS}{text[-end:]}"


def _spans(bars: Sequence[Bar]) -> list[dict[str, Any]]:
    """Return a row for each part with a positive amount: its bar, start, end, colour and text."""
    rows = []
    for number, bar in enumerate(bars):
        lengths = [max(Decimal(0), part.amount) for part in bar.parts]
        ends = list(accumulate(lengths))
        for part, length, end in zip(bar.parts, lengths, ends, strict=True):
            if length:
                rows.append(
                    {
                        "at": number,
                        "begin": float(end - length),
                        "end": float(end),
                        "colour": f"var(--c-{part.colour})",
                        "text": printable(part.text),
                    }
                )
    return rows


def _bars_spec(bars: Sequence[Bar], size: _Size) -> dict[str, Any]:
    labels = _labels(((bar.name, bar.text) for bar in bars), size)
    # The text follows the drawn bar; negative amounts are not drawn.
    ends = [
        float(sum((max(Decimal(0), part.amount) for part in bar.parts), Decimal(0))) for bar in bars
    ]
    labels = [{**label, "end": end} for label, end in zip(labels, ends, strict=True)]
    band = {"field": "at", "type": "ordinal", "axis": None, "scale": {"paddingInner": 0.34}}
    return {
        "width": size.width,
        "height": _BAR_STEP * len(bars),
        "padding": {"left": size.left, "right": size.right, "top": 4, "bottom": 4},
        "layer": [
            {
                "data": {"values": _spans(bars)},
                "mark": {"type": "bar"},
                "encoding": {
                    "y": band,
                    "x": {**_length("begin"), "axis": None},
                    "x2": {"field": "end"},
                    **_COLOURED,
                },
            },
            _text_layer(labels, "name", {"x": {"value": -8}}, align="right", fill=_INK),
            _text_layer(labels, "text", {"x": _length("end")}, align="left", fill=_MUTED),
        ],
    }


def _days_spec(days: Sequence[Bar], size: _Size) -> dict[str, Any]:
    spans = [{**row, "at": days[row["at"]].name} for row in _spans(days)]
    # As many day labels as fit, at regular intervals from the first day.
    every = -(-len(days) // size.ticks)
    return {
        "width": size.days_width,
        "height": 200,
        "padding": {"left": size.days_left, "right": 12, "top": 8, "bottom": 22},
        "data": {"values": spans},
        "mark": {"type": "bar"},
        "encoding": {
            "x": {
                "field": "at",
                "type": "ordinal",
                "scale": {"domain": [day.name for day in days], "paddingInner": 0.2},
                "axis": {
                    "title": None,
                    "labelAngle": 0,
                    "labelExpr": "slice(datum.value, 5)",
                    "values": [day.name for day in days[::every]],
                    "grid": False,
                },
            },
            "y": {
                **_length("begin"),
                "axis": {"title": None, "tickCount": 4, "labelExpr": _PLAIN, **_FIXED},
            },
            "y2": {"field": "end"},
            **_COLOURED,
        },
    }


def _gauges_spec(gauges: Sequence[Gauge], size: _Size) -> dict[str, Any]:
    labels = _labels(((gauge.name, gauge.text) for gauge in gauges), size)
    bars: list[dict[str, Any]] = []
    marks: list[dict[str, Any]] = []
    for number, gauge in enumerate(gauges):
        name, spent = printable(gauge.name), float(gauge.spent_ratio)
        # Red means overspent. A budget that is nearly spent is not a problem.
        over = spent > 1
        bars += [
            {"at": number, "begin": 0, "end": 1, "colour": _GRID, "text": f"{name}: the budget"},
            {
                "at": number,
                "begin": 0,
                "end": spent,
                "colour": "var(--c-over)" if over else "var(--c-used)",
                "text": f"{name}: {gauge.text} spent",
            },
        ]
        ticks = {"elapsed time": gauge.elapsed_ratio, "forecast": gauge.forecast_ratio}
        for number_of_tick, (what, ratio) in enumerate(ticks.items()):
            if ratio is not None:
                marks.append(
                    {
                        "at": number,
                        "end": float(ratio),
                        "colour": (_INK, "var(--c-billed_unused)")[number_of_tick],
                        "text": f"{name}: {what}, {ratio * 100:.0f} %",
                    }
                )
    # The scale ends at 200 %, so that a far overspent budget does not make the others too short.
    longest = min(2.0, max(1.0, *(row["end"] for row in (*bars, *marks))))
    shown = [ratio for ratio in (0, 0.5, 1, 1.5, 2) if ratio <= longest]
    scale = {"domain": [0, longest], "clamp": True, "nice": False}
    band = {"field": "at", "type": "ordinal", "axis": None, "scale": {"paddingInner": 0.34}}
    axis = {"title": None, "format": "%", "values": shown, **_FIXED}
    along = {"type": "quantitative", "scale": scale}
    return {
        "width": size.width,
        "height": _BAR_STEP * len(gauges),
        "padding": {"left": size.left, "right": size.right, "top": 4, "bottom": 22},
        "layer": [
            {
                "data": {"values": bars},
                "mark": {"type": "bar"},
                "encoding": {
                    "y": band,
                    "x": {"field": "begin", **along, "axis": axis},
                    "x2": {"field": "end"},
                    **_COLOURED,
                },
            },
            {
                "data": {"values": marks},
                "mark": {"type": "tick", "thickness": 3, "size": 24},
                "encoding": {"y": band, "x": {"field": "end", **along}, **_COLOURED},
            },
            _text_layer(labels, "name", {"x": {"value": -8}}, align="right", fill=_INK),
            _text_layer(
                labels, "text", {"x": {"value": size.width + 8}}, align="left", fill=_MUTED
            ),
        ],
    }


_COLOURED: Final[Mapping[str, Any]] = {
    "color": {"field": "colour", "type": "nominal", "scale": None},
    "description": {"field": "text", "type": "nominal"},
}
# Plain numbers below ten million, because a suffix `m` for thousandths would be unclear for money.
_PLAIN: Final = "format(datum.value, abs(datum.value) < 1e7 ? ',~f' : '~s')"
# The extents are fixed, because otherwise Vega measures texts with the fonts of this machine.
_FIXED: Final[Mapping[str, Any]] = {"minExtent": 0, "maxExtent": 0, "labelOverlap": False}


def _length(name: str) -> dict[str, Any]:
    return {"field": name, "type": "quantitative"}


def _labels(names: Iterable[tuple[str, str]], size: _Size) -> list[dict[str, Any]]:
    # Labels are identified by number, because two names may be equal once they are shortened.
    return [
        {"at": number, "name": _shortened(printable(name), size.name_length), "text": text}
        for number, (name, text) in enumerate(names)
    ]


def _text_layer(
    labels: Sequence[Mapping[str, Any]], name: str, at: Mapping[str, Any], *, align: str, fill: str
) -> dict[str, Any]:
    mark = {"type": "text", "align": align, "baseline": "middle", "color": fill, "aria": False}
    return {
        "data": {"values": labels},
        "mark": {**mark, "dx": 6 if align == "left" and "field" in str(at) else 0},
        "encoding": {
            "y": {"field": "at", "type": "ordinal"},
            "text": {"field": name, "type": "nominal"},
            **at,
        },
    }


def _draw(spec: dict[str, Any], title: str, style: str) -> Markup:
    drawn = vl_convert.vegalite_to_svg(
        {
            "$schema": "https://vega.github.io/schema/vega-lite/v6.json",
            "autosize": {"type": "none"},
            "background": None,
            "config": {
                "view": {"stroke": None},
                "axis": {
                    "domain": False,
                    "ticks": False,
                    "gridColor": _GRID,
                    "labelColor": _MUTED,
                    "labelFontSize": 12,
                },
                "text": {"fontSize": 13},
            },
            **spec,
        },
        # No data is ever fetched, even if a name looks like a URL.
        allowed_base_urls=[],
    )
    return _for_page(drawn, title, style)


def _for_page(drawn: str, title: str, style: str) -> Markup:
    """Return a drawing for the page: with a label and tooltips, and without a fixed size."""
    ET.register_namespace("", _SVG)
    svg = ET.fromstring(drawn)  # noqa: S314  # made by Vega, which escapes texts
    del svg.attrib["width"], svg.attrib["height"]
    # A group instead of an image, so that screen readers can read its parts.
    svg.attrib |= {"class": f"chart {style}", "role": "group", "aria-label": printable(title)}
    for element in svg.iter():
        # The page's policy forbids style attributes, and the page sets the fonts.
        for name in ("style", "font-family"):
            element.attrib.pop(name, None)
        if (
            element.get("role") == "graphics-symbol"
            and element.get("aria-roledescription") != "axis"
        ):
            ET.SubElement(element, f"{{{_SVG}}}title").text = element.get("aria-label")
    return Markup(ET.tostring(svg, encoding="unicode"))  # noqa: S704  # serialized, so escaped
