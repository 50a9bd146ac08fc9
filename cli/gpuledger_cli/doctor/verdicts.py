"""The results of the doctor's checks, and the function that runs checks.

A check is a function that returns its verdicts or raises an error. If a check raises an error or
does not end before its deadline, its status is `unknown`, never `ok`.
"""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from enum import StrEnum
from typing import NamedTuple, TypeAlias

import msgspec

from gpuledger.errors import UnavailableError, UserError


class Status(StrEnum):
    """The result of a check."""

    OK = "ok"
    PROBLEM = "problem"
    UNKNOWN = "unknown"
    """The check could not run."""
    SKIPPED = "skipped"
    """The check does not apply, or the user has left it out."""


class Verdict(NamedTuple):
    """One finding of a check."""

    status: Status
    finding: str
    action: str = ""
    """The user's next step; empty if there is nothing to do."""


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One row of the result: a verdict with the name of its check."""

    check: str
    status: Status
    finding: str
    action: str


Check: TypeAlias = Callable[[], Awaitable[Sequence[Verdict]]]


def ok(finding: str) -> Verdict:
    """Return the verdict that everything is as it should be."""
    return Verdict(Status.OK, finding)


def problem(finding: str, action: str) -> Verdict:
    """Return the verdict that the user must act."""
    return Verdict(Status.PROBLEM, finding, action)


def unknown(finding: str, action: str = "") -> Verdict:
    """Return the verdict that the check could not run."""
    return Verdict(Status.UNKNOWN, finding, action)


def skipped(finding: str, action: str = "") -> Verdict:
    """Return the verdict that the check does not apply."""
    return Verdict(Status.SKIPPED, finding, action)


async def run_checks(
    checks: Mapping[str, Check], *, deadline_seconds: float, left_out: Collection[str] = ()
) -> list[Finding]:
    """Run the checks at the same time, and return their findings in the order of the checks."""
    wanted = {name: check for name, check in checks.items() if name not in left_out}
    done = await asyncio.gather(
        *(run_check(check, deadline_seconds=deadline_seconds) for check in wanted.values())
    )
    by_name = dict(zip(wanted, done, strict=True))
    return [
        Finding(check=name, status=verdict.status, finding=verdict.finding, action=verdict.action)
        for name in checks
        for verdict in by_name.get(name, [skipped("left out by --skip")])
    ]


async def run_check(check: Check, *, deadline_seconds: float) -> Sequence[Verdict]:
    """Return the verdicts of a check; `unknown` if it fails or does not end before its deadline."""
    try:
        async with asyncio.timeout(deadline_seconds):
            return await check()
    except TimeoutError:
        return [
            unknown(f"no result within {deadline_seconds:g} s", "Raise --timeout, and try again.")
        ]
    except (UnavailableError, UserError) as error:
        return [unknown(str(error))]


def exit_code(findings: Collection[Finding]) -> int:
    """Return 1 if there is a problem, else 2 if a check could not run, else 0."""
    statuses = {finding.status for finding in findings}
    if Status.PROBLEM in statuses:
        return 1
    return 2 if Status.UNKNOWN in statuses else 0
