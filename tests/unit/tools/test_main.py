"""The command that fetches the real parts: its output and exit codes."""

from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.tools.__main__ import main
from tests.tools.errors import MissingToolError


@dataclass(frozen=True, kw_only=True)
class FakeTool:
    name: str
    version: str = "1.0"
    given_by: str | None = None
    obstacle: str | None = None

    def find(self) -> Path:
        return self.provide()

    def provide(self) -> Path:
        if self.obstacle:
            raise MissingToolError(self.name, self.obstacle)
        return Path("/tools") / self.name


THERE = FakeTool(name="etcd")
ABSENT = FakeTool(name="kafka", obstacle="Java 17 or newer is missing", given_by="FAKE_KAFKA")


@pytest.mark.parametrize(
    ("arguments", "in_ci", "expected"),
    [
        ([], False, 0),
        ([], True, 1),
        (["etcd"], True, 0),
        (["--list"], True, 0),
        (["--check"], False, 1),
        (["--check", "etcd"], False, 0),
        (["zookeeper"], False, 2),
    ],
)
def test_a_missing_part_is_an_error_in_ci_and_if_it_was_requested(
    arguments: list[str], *, in_ci: bool, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CI", "true" if in_ci else "")
    assert main(arguments, known=[THERE, ABSENT]) == expected


def test_a_missing_part_is_one_conspicuous_line_with_its_reason(
    capsys: pytest.CaptureFixture[str],
) -> None:
    main([], known=[THERE, ABSENT])
    loud = [line for line in capsys.readouterr().out.splitlines() if line.startswith("!!!")]
    assert loud == ["!!! kafka 1.0 CANNOT BE HAD: Java 17 or newer is missing"]


def test_a_part_that_already_runs_elsewhere_is_not_fetched(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CI", "true")
    monkeypatch.setenv("FAKE_KAFKA", "broker:9092")
    assert main([], known=[ABSENT]) == 0
    assert "kafka: FAKE_KAFKA=broker:9092, nothing to fetch" in capsys.readouterr().out


def test_an_unknown_name_is_answered_with_the_known_ones(
    capsys: pytest.CaptureFixture[str],
) -> None:
    main(["zookeeper"], known=[THERE], extended=[ABSENT])
    assert capsys.readouterr().err == "zookeeper: no such part; there are etcd, kafka\n"
