"""The catalogue as a table for people: `python -m cli.readings_page docs/agent.md`.

It stands in the page between two marks and is replaced there.
"""

import sys
from pathlib import Path
from typing import Final

import pynvml

from agent.nvml.answers import CallGroup
from agent.nvml.catalogue import CATALOGUE
from agent.nvml.questions import Call, FieldValue, Question, Reading

_BEGIN: Final = "<!-- readings: begin -->"
_END: Final = "<!-- readings: end -->"
_HEAD: Final = ("reading", "asked by", "driver's unit", "group", "since")
_FIELDS: Final = {
    getattr(pynvml, name): name for name in dir(pynvml) if name.startswith("NVML_FI_DEV_")
}
_METRICS: Final = {
    getattr(pynvml, name): name
    for name in dir(pynvml)
    if name.startswith("NVML_GPM_METRIC_") and name != "NVML_GPM_METRICS_GET_VERSION"
}


def readings_table() -> str:
    """Give the table in Markdown."""
    rows = [_row(group, reading) for group, readings in CATALOGUE.items() for reading in readings]
    lines = [_line(_HEAD), _line(["---"] * len(_HEAD)), *map(_line, rows)]
    return "\n".join(lines)


def _row(group: CallGroup, reading: Reading) -> list[str]:
    asked = ", else ".join(map(_describe, reading.asked))
    return [f"`{reading.name}`", asked, reading.unit.name, group.value, reading.since]


def _describe(question: Question) -> str:
    if isinstance(question, Call):
        part = f"[{question.part}]" if isinstance(question.part, int) else question.part
        dot = "." if isinstance(question.part, str) else ""
        return f"`{question.name}{_arguments(question)}{dot}{part if part is not None else ''}`"
    if isinstance(question, FieldValue):
        return f"field {question.number} `{_FIELDS[question.number]}`"
    last = f" to {question.number + question.count - 1}" if question.count else ""
    return f"metric {question.number}{last} `{_METRICS[question.number]}`"


def _arguments(call: Call) -> str:
    # The number of a struct's version tells nobody anything.
    small = [str(one) for one in call.arguments if one < 1 << 16]
    return f"({', '.join(small)})" if small else ""


def _line(cells: "list[str] | tuple[str, ...]") -> str:
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Replace the table in the page that is named."""
    path = Path(sys.argv[1])
    before, rest = path.read_text().split(_BEGIN)
    after = rest.split(_END)[1]
    path.write_text(f"{before}{_BEGIN}\n\n{readings_table()}\n\n{_END}{after}")


if __name__ == "__main__":
    main()
