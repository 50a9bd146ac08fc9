"""What in a file of prices is allowed, and is probably meant otherwise: each with its remedy. Pure.

A row of which an earlier one has all, brackets that look like a choice of characters, a team that
nobody is in. Simple cases alone: what is said here is so.
"""

import re
from collections.abc import Iterator, Sequence
from typing import Any, Final

from gpuledger.texts import find_near
from gpuledger_reports.policy import SCOPE, BillPolicy, Dated, fits_pattern
from gpuledger_reports.policy_fields import Mistake

_FIRST_HOLDS: Final = ("prices", "energy", "basis", "idle", "shared", "teams")
"""The sections of which the first row that fits holds."""
# As in [0-9], [ab] and [!x]. Names of models have brackets too, such as A100 [PG506].
_CHOICE: Final = re.compile(r"\[([!^].*|.{1,3}|.*\w-\w.*)\]")


def doubts_of(policy: BillPolicy) -> Iterator[Mistake]:
    """Yield what may be meant otherwise: where, and what to do."""
    for section in _FIRST_HOLDS:
        rows = getattr(policy, section)
        for at, row in enumerate(rows):
            first = next((n for n in range(at) if _has_all_of(rows[n], row)), None)
            if first is not None:
                what = f"never holds: {section}[{first}] fits all that it does, and stands before"
                yield (section, at), f"{what}; put this row before that one"
    for section in (*_FIRST_HOLDS, "budgets"):
        for at, row in enumerate(getattr(policy, section)):
            for name, pattern in _patterns(row).items():
                if _CHOICE.search(pattern):
                    what = "brackets mean themselves in a pattern, where * and ? alone do not"
                    yield (section, at, *name), f"{what}; give each value a row of its own"
    yield from _unknown_teams(policy)


def _unknown_teams(policy: BillPolicy) -> Iterator[Mistake]:
    teams = [row.team for row in policy.teams]
    sections: Sequence[str] = ("basis", "shared", "budgets") if teams else ()
    for section in sections:
        for at, row in enumerate(getattr(policy, section)):
            pattern = row.match.get("team")
            if pattern is None or any(fits_pattern(team, pattern) for team in teams):
                continue
            near = find_near(pattern, teams)
            remedy = f"did you mean {near}?" if near else "add one, unless a label says it"
            yield (section, at, "match", "team"), f"{pattern!r} is in no row of teams; {remedy}"


def _patterns(row: Any) -> dict[tuple[str, ...], str]:  # noqa: ANN401  # a row of any section
    """Return the patterns of a row, by where they stand in it."""
    scoped = {(name,): getattr(row, name, None) for name in SCOPE}
    matched = {("match", name): pattern for name, pattern in getattr(row, "match", {}).items()}
    return {name: pattern for name, pattern in (scoped | matched).items() if pattern is not None}


def _has_all_of(first: Any, later: Any) -> bool:  # noqa: ANN401  # two rows of one section
    """Return whether a row fits whatever another one fits, on each of its days."""
    if getattr(first, "kind", None) != getattr(later, "kind", None):
        return False
    if isinstance(first, Dated) and not first.holds_whenever(later):
        return False
    narrow = _patterns(later)
    # A `*` of the wider pattern stands for any part of the narrower one, its `*` among them; a `?`
    # does not.
    return all(
        set(pattern) == {"*"}
        or narrow.get(name) == pattern
        or ("?" not in pattern and name in narrow and fits_pattern(narrow[name], pattern))
        for name, pattern in _patterns(first).items()
    )
