"""Kafka settings: which values every program refuses, and which follow from others."""

from importlib import import_module

import pytest

from gpuledger.settings import KafkaSettings

PROGRAMS = {
    "gpuledger_agent.command": [],
    "gpuledger_enricher.podwatch.pod_watch": [],
    "gpuledger_enricher.join.join_command": [],
    "gpuledger_sinks.command": ["rows"],
}
MISNAMED = [
    ("kafka", "'kafka': expected host:port[,host:port…]"),
    ("kafka:http", "'********': expected host:port"),
    ("kafka:0", "expected host:port"),
    ("kafka:70000", "expected host:port"),
    ("localhost:9:9/x", "expected host:port"),
    ("one:9092,,two:9092", "expected host:port"),
    ("::1:9092", "expected host:port"),
    ("kafka://one:9092", "without a scheme; set TLS and login in kafka.security_protocol"),
    ("http://127.0.0.1:9/w?token=hunter2", "'********': expected"),
    ("http://usr:hunter2@host/x", "'********': expected"),
    ("kafka" * 5000, "expected host:port"),
    ("one:9092,usr:hunter2@two:9092", "set user and password in kafka.sasl_username and"),
]


@pytest.mark.parametrize(
    "servers", ["kafka:9092", "a:1, b-2.c_d:65535", "[::1]:9092,10.0.0.1:9092", " kafka:9092"]
)
def test_brokers_are_hosts_with_their_ports(servers: str) -> None:
    assert KafkaSettings(bootstrap_servers=servers).bootstrap_servers == servers


@pytest.mark.parametrize(("servers", "message"), MISNAMED)
@pytest.mark.parametrize("program", PROGRAMS)
def test_invalid_brokers_end_every_program_with_one_line_and_exit_code_2(
    program: str,
    servers: str,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("sys.argv", ["program", *PROGRAMS[program], "--print-config"])
    monkeypatch.setenv("GPULEDGER_KAFKA__BOOTSTRAP_SERVERS", servers)
    monkeypatch.setenv("NODE_NAME", "node-1")

    assert import_module(program).main() == 2

    line = capsys.readouterr().err
    assert line.startswith("program: GPULEDGER_KAFKA__BOOTSTRAP_SERVERS: ")
    assert message in line
    assert line.count("\n") == 1
    assert len(line) < 700
    assert "hunter2" not in line


@pytest.mark.parametrize(("session_seconds", "heartbeat_seconds"), [(6, 2), (9, 3), (30, 3)])
def test_heartbeats_are_frequent_enough_that_a_session_survives_two_lost_ones(
    session_seconds: float, heartbeat_seconds: float
) -> None:
    settings = KafkaSettings(session_timeout_seconds=session_seconds)

    assert settings.heartbeat_seconds == heartbeat_seconds
