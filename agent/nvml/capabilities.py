"""What a GPU's driver answers and what not, with its reasons, as records."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

from gpuledger.records import Capability


def capabilities_of(outcomes: Mapping[tuple[Any, ...], str | None]) -> list[Capability]:
    """Return a record for each question that was answered or refused, in the order of their names.

    An argument stands behind the name where one function was asked with several.
    """
    asked = Counter(key[0] for key in outcomes)
    given = [
        Capability(call=_label(key, alone=asked[key[0]] == 1), supported=not reason, reason=reason)
        for key, reason in outcomes.items()
    ]
    return sorted(given, key=lambda one: one.call)


def _label(key: tuple[Any, ...], *, alone: bool) -> str:
    name, *arguments = key
    if alone or not arguments:
        return str(name)
    return f"{name}:{','.join(map(str, arguments))}"
