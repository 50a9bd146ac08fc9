"""Checks run at the same time, each with a deadline; a check that could not run is never ok."""

import asyncio
from collections.abc import Sequence

import pytest

from gpuledger.errors import BusUnavailableError, RefusedError
from gpuledger_cli.doctor.verdicts import (
    Finding,
    Status,
    Verdict,
    exit_code,
    ok,
    problem,
    run_checks,
    skipped,
    unknown,
)


async def passes() -> Sequence[Verdict]:
    return [ok("fine")]


async def hangs() -> Sequence[Verdict]:
    await asyncio.Event().wait()
    raise AssertionError


async def is_unavailable() -> Sequence[Verdict]:
    raise BusUnavailableError("no answer")


async def is_refused() -> Sequence[Verdict]:
    raise RefusedError("denied; grant it Read")


async def test_a_check_that_hangs_or_raises_an_error_is_unknown_and_the_others_pass() -> None:
    checks = {"a": hangs, "b": is_unavailable, "c": is_refused, "d": passes}
    findings = await run_checks(checks, deadline_seconds=0.01)
    assert [(one.check, one.status, one.finding) for one in findings] == [
        ("a", "unknown", "no result within 0.01 s"),
        ("b", "unknown", "no answer"),
        ("c", "unknown", "denied; grant it Read"),
        ("d", "ok", "fine"),
    ]


async def test_a_check_that_is_left_out_is_shown_and_not_run() -> None:
    findings = await run_checks({"a": hangs, "b": passes}, deadline_seconds=10.0, left_out={"a"})
    assert [(one.check, one.status) for one in findings] == [("a", "skipped"), ("b", "ok")]


@pytest.mark.parametrize(
    ("verdicts", "code"),
    [
        ([], 0),
        ([ok("")], 0),
        ([ok(""), skipped("")], 0),
        ([ok(""), unknown("")], 2),
        ([problem("", ""), unknown("")], 1),
    ],
)
def test_the_exit_code_is_that_of_the_worst_finding(verdicts: list[Verdict], code: int) -> None:
    findings = [
        Finding(check="a", status=one.status, finding=one.finding, action=one.action)
        for one in verdicts
    ]
    assert exit_code(findings) == code


def test_every_problem_has_an_action() -> None:
    assert problem("finding", "Do it.") == Verdict(Status.PROBLEM, "finding", "Do it.")
