"""The demo's options: valid ones, and one line for each invalid one."""

from pathlib import Path

import pytest

from gpuledger.errors import UserError
from gpuledger_cli.demo.plan import check_url, find_scenario, find_store, parse_bus
from gpuledger_simulator.scenario.load import load_scenario
from tests.errors import has_words


def test_several_brokers_may_be_named() -> None:
    """In the format of Kafka's clients."""
    settings = parse_bus("kafka://one:9092,two:9093")
    assert settings is not None
    assert settings.bootstrap_servers == "one:9092,two:9093"


def test_the_bus_in_memory_needs_no_settings() -> None:
    assert parse_bus("memory") is None


@pytest.mark.parametrize(
    "bus", ["kafka", "kafka://", "kafka://host", "kafka://host:0", "kafka://a:1,", "nats://a:1"]
)
def test_an_invalid_bus_is_rejected_with_the_valid_values(bus: str) -> None:
    """The line has the option, the value and the remedy."""
    with pytest.raises(UserError, check=has_words("--bus", "`memory`", "`kafka://host:port")):
        parse_bus(bus)


def test_a_missing_scenario_is_rejected_by_name(tmp_path: Path) -> None:
    with pytest.raises(UserError, check=has_words("--scenario", "absent.yaml")):
        find_scenario(tmp_path / "absent.yaml")


def test_the_scenario_that_ships_with_the_command_is_the_default() -> None:
    """It is next to the code, so that the wheel contains it; and it shows what it promises."""
    scenario = load_scenario(find_scenario(None))
    processes = [
        (pod.node, index, pod.start_seconds, pod.end_seconds)
        for pod in scenario.pods
        for container in pod.containers
        for process in container.processes
        for index in process.gpus
    ]
    at_start = [place[:2] for place in processes if place[2] == 0]
    ends = {place[:2]: place[3] for place in processes if place[3] and place[3] < 20}
    unused = [
        device
        for pod in scenario.pods
        for container in pod.containers
        if not container.processes
        for device in container.devices or ()
    ]
    assert len(at_start) > len(set(at_start))  # two tenants on a GPU
    assert any(20 > place[2] >= ends.get(place[:2], 99) for place in processes)  # a turnover
    assert unused
    assert scenario.host_processes
    assert [incident.xid for incident in scenario.incidents] == [79]
    assert [fault.kind for fault in scenario.faults] == ["lost"]


@pytest.mark.parametrize("url", ["prometheus:9090", "kafka://host:1", ""])
def test_an_invalid_address_is_rejected_with_the_valid_form(url: str) -> None:
    with pytest.raises(UserError, check=has_words("--remote-write-url", "http://", "https://")):
        check_url("--remote-write-url", url)


def test_an_address_is_accepted_and_none_selects_the_built_in_receiver() -> None:
    assert check_url("--alertmanager-url", "https://alerts") == "https://alerts"
    assert check_url("--alertmanager-url", None) is None


@pytest.mark.parametrize("url", ["s3://bucket/x?hunter2", "file:///tmp/x", "s3:/usr:hunter2@b"])
def test_a_store_that_is_a_url_is_rejected_without_being_repeated(url: str) -> None:
    """It would be a directory of that name, which the summary shows."""
    with pytest.raises(UserError, check=has_words("--store")) as raised:
        find_store(Path(url))

    assert "hunter2" not in str(raised.value)


def test_a_store_that_is_a_file_is_rejected(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(UserError, check=has_words("--store", str(file))):
        find_store(file)


def test_a_store_that_cannot_be_written_is_rejected() -> None:
    """Before anything runs: a run whose store stays empty would look like a success."""
    with pytest.raises(UserError, check=has_words("--store /proc/store", "writable directory")):
        find_store(Path("/proc/store"))
