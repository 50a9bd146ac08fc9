"""The demo's options: what is understood, and the one line for what is not."""

from pathlib import Path

import pytest

from cli.demo.plan import find_scenario, find_store, parse_bus
from gpuledger.errors import UserError


def test_several_brokers_may_be_named() -> None:
    """As Kafka's clients write them."""
    settings = parse_bus("kafka://one:9092,two:9093")
    assert settings is not None
    assert settings.bootstrap_servers == "one:9092,two:9093"


def test_the_bus_in_memory_needs_no_settings() -> None:
    """It is the default."""
    assert parse_bus("memory") is None


@pytest.mark.parametrize(
    "bus", ["kafka", "kafka://", "kafka://host", "kafka://host:0", "kafka://a:1,", "nats://a:1"]
)
def test_a_bus_that_is_none_is_refused_with_what_is_expected(bus: str) -> None:
    """The option, the value and the remedy in one line."""
    with pytest.raises(UserError, match=r"--bus .*expected `memory` or `kafka://host:port"):
        parse_bus(bus)


def test_a_scenario_that_is_not_there_is_refused(tmp_path: Path) -> None:
    """By its name."""
    with pytest.raises(UserError, match=r"--scenario .*absent\.yaml: there is no such file"):
        find_scenario(tmp_path / "absent.yaml")


def test_the_quick_start_is_the_default() -> None:
    """It ships with the project."""
    assert find_scenario(None).name == "quickstart.yaml"


def test_a_store_that_is_a_file_is_refused(tmp_path: Path) -> None:
    """A folder is wanted."""
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(UserError, match="this is a file; name a folder"):
        find_store(file)


def test_a_store_that_cannot_be_written_is_refused() -> None:
    """Before anything runs: a run whose store stays empty would look like one that went well."""
    with pytest.raises(UserError, match=r"--store /proc/store: .*; name a folder"):
        find_store(Path("/proc/store"))
