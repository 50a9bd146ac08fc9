"""The Prometheus text format: labels, numbers, families. What they say is decided elsewhere."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Final, NamedTuple

Label = tuple[str, str]
Labels = Sequence[Label]
_ESCAPES: Final = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})
_HELP_ESCAPES: Final = str.maketrans({"\\": r"\\", "\n": r"\n"})


class SampleLine(NamedTuple):
    """One series with its value now."""

    labels: str
    """Its labels, written."""
    value: float
    """Its value."""


def write_labels(labels: Labels) -> str:
    """Write labels without their braces; one without a value is left out, as it says the same."""
    return ",".join(f'{name}="{value.translate(_ESCAPES)}"' for name, value in labels if value)


def write_family(
    name: str, kind: str, help_text: str, samples: Iterable[SampleLine]
) -> Iterator[str]:
    """Write a family line by line; nothing at all where it has no series."""
    head = f"# HELP {name} {help_text.translate(_HELP_ESCAPES)}\n# TYPE {name} {kind}\n"
    for labels, value in samples:
        yield f"{head}{name}{{{labels}}} {value!r}\n"
        head = ""
