"""The demo's options: what is understood, and the one line for what is not."""

from pathlib import Path

import pytest

from gpuledger.errors import UserError
from gpuledger_cli.demo.plan import check_url, find_scenario, find_store, parse_bus
from gpuledger_simulator.scenario.load import load_scenario
from tests.errors import has_words


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
    with pytest.raises(UserError, check=has_words("--bus", "`memory`", "`kafka://host:port")):
        parse_bus(bus)


def test_a_scenario_that_is_not_there_is_refused(tmp_path: Path) -> None:
    """By its name."""
    with pytest.raises(UserError, check=has_words("--scenario", "absent.yaml")):
        find_scenario(tmp_path / "absent.yaml")


def test_the_scenario_that_ships_with_the_command_is_the_default() -> None:
    """It lies beside the code, so that it is in the wheel; and it shows what it promises."""
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
def test_an_address_that_is_none_is_refused_with_what_is_expected(url: str) -> None:
    with pytest.raises(UserError, check=has_words("--remote-write-url", "http://", "https://")):
        check_url("--remote-write-url", url)


def test_an_address_is_taken_and_none_is_the_receiver_built_in() -> None:
    assert check_url("--alertmanager-url", "https://alerts") == "https://alerts"
    assert check_url("--alertmanager-url", None) is None


@pytest.mark.parametrize("url", ["s3://bucket/x?hunter2", "file:///tmp/x", "s3:/usr:hunter2@b"])
def test_a_store_that_is_a_url_is_refused_without_being_repeated(url: str) -> None:
    """It would be a folder of that name, which the summary shows."""
    with pytest.raises(UserError, check=has_words("--store")) as raised:
        find_store(Path(url))

    assert "hunter2" not in str(raised.value)


def test_a_store_that_is_a_file_is_refused(tmp_path: Path) -> None:
    """A folder is wanted."""
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(UserError, check=has_words("--store", str(file))):
        find_store(file)


def test_a_store_that_cannot_be_written_is_refused() -> None:
    """Before anything runs: a run whose store stays empty would look like one that went well."""
    with pytest.raises(UserError, check=has_words("--store /proc/store", "writable directory")):
        find_store(Path("/proc/store"))
