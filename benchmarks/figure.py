"""The value that a benchmark yields. Measures and prints nothing."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One measured number and, if there is one, its reference."""

    name: str
    """Name of the measured quantity, as `benchmark.subject`."""
    value: float
    """The number, in `unit`."""
    unit: str
    """The unit of both numbers, in full words (`ticks/s/core`, `seconds`, `bytes/tick`)."""
    reference: float | None = None
    """The same quantity of the reference, measured in the same run; None without a reference."""

    @property
    def ratio(self) -> float | None:
        """Value divided by reference; None if there is no reference or it is zero."""
        return self.value / self.reference if self.reference else None

    def as_json(self) -> dict[str, str | float | None]:
        """Return all five fields, even if they are null."""
        return {
            "name": self.name,
            "value": self.value,
            "unit": self.unit,
            "reference": self.reference,
            "ratio": self.ratio,
        }

    def as_line(self) -> str:
        """Return one line for people: name, value, unit, and the ratio if there is one."""
        line = f"{self.name:<44} {self.value:>14,.6g} {self.unit}"
        if self.ratio is None:
            return line
        return f"{line}  ({self.ratio:.3g} of the reference's {self.reference:,.6g})"
