"""Logs are one JSON object per line on standard error, including warnings of libraries."""

import json
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, Literal

import pytest
import structlog

from gpuledger.runtime import configure_logs
from gpuledger.settings import LogSettings, Secret

PAGE: Final = (Path(__file__).parents[4] / "docs" / "reference" / "log-events.md").read_text()


def lines(capsys: pytest.CaptureFixture[str]) -> list[dict[str, object]]:
    captured = capsys.readouterr()
    assert captured.out == ""
    return [json.loads(line) for line in captured.err.splitlines()]


def test_an_event_is_one_line_with_logger_level_and_time(
    capsys: pytest.CaptureFixture[str],
) -> None:
    configure_logs(LogSettings())
    structlog.get_logger("gpuledger_agent.context").info("sampled", ticks=3, detail="two\nlines")

    (line,) = lines(capsys)
    assert line.pop("timestamp")
    assert line == {
        "event": "sampled",
        "logger": "gpuledger_agent.context",
        "level": "info",
        "ticks": 3,
        "detail": "two\nlines",
    }


@pytest.mark.parametrize("get_logger", [structlog.get_logger, logging.getLogger])
def test_a_line_begins_with_the_common_keys_in_the_documented_order(
    capsys: pytest.CaptureFixture[str], get_logger: Callable[[str], Any]
) -> None:
    documented = json.loads(re.findall(r"```json\n(.*?)\n", PAGE)[0])
    configure_logs(LogSettings())
    with structlog.contextvars.bound_contextvars(more=1):
        get_logger("x").warning("said")

    (line,) = lines(capsys)
    assert list(line) == [*list(documented)[:4], "more"]
    for time in (line["timestamp"], documented["timestamp"]):
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", str(time))


def test_a_traceback_is_part_of_its_line(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logs(LogSettings())
    structlog.get_logger("x").error("failed", exc_info=ValueError("broken"))

    (line,) = lines(capsys)
    assert str(line["exception"]).endswith("ValueError: broken")


def test_a_secret_is_written_as_its_mask(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logs(LogSettings())
    structlog.get_logger("x").info("login", password=Secret("hunter2"), all=[Secret("hunter2")])

    (line,) = lines(capsys)
    assert (line["password"], line["all"]) == ("********", ["********"])


def test_asyncios_message_about_a_lost_connection_is_not_logged(
    capsys: pytest.CaptureFixture[str],
) -> None:
    configure_logs(LogSettings())
    logging.getLogger("asyncio").warning("socket.send() raised exception.")

    assert lines(capsys) == []


@pytest.mark.parametrize("form", ["json", "text"])
def test_the_password_of_an_address_is_masked_wherever_it_occurs(
    capsys: pytest.CaptureFixture[str], form: Literal["json", "text"]
) -> None:
    configure_logs(LogSettings(format=form))
    address = "https://ada:hunter2@receiver:9093/api"
    structlog.get_logger("x").info("said", url=address, exc_info=ValueError(address))
    logging.getLogger("library").error("cannot reach %s", address)

    written = capsys.readouterr().err
    assert "hunter2" not in written
    assert "receiver:9093" in written


@pytest.mark.parametrize(
    ("level", "ours", "theirs"),
    [
        ("debug", ["debug", "info", "warning"], ["debug", "info", "warning"]),
        ("info", ["info", "warning"], ["warning"]),
        ("warning", ["warning"], ["warning"]),
        ("error", [], []),
    ],
)
def test_the_level_decides_what_is_written_and_libraries_log_from_warning_up(
    capsys: pytest.CaptureFixture[str], level: str, ours: list[str], theirs: list[str]
) -> None:
    configure_logs(LogSettings(level=level))  # type: ignore[arg-type]  # a row of the table above
    for name in ("debug", "info", "warning"):
        getattr(structlog.get_logger("ours"), name)("said")
        getattr(logging.getLogger("theirs"), name)("said %d", 1)

    written = lines(capsys)
    assert [line["level"] for line in written if line["logger"] == "ours"] == ours
    assert [line["level"] for line in written if line["logger"] == "theirs"] == theirs
    assert {line["event"] for line in written} <= {"said", "said 1"}


def test_a_second_setup_replaces_the_first(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logs(LogSettings())
    configure_logs(LogSettings())
    structlog.get_logger("x").info("once")

    assert len(lines(capsys)) == 1


def test_the_text_format_is_readable(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logs(LogSettings(format="text"))
    structlog.get_logger("x").info("sampled", ticks=3)

    written = capsys.readouterr().err
    assert "sampled" in written
    assert "ticks=3" in written
    assert "\x1b" not in written
