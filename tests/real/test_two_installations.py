"""Two installations on one real Kafka, each with a prefix: neither sees or disturbs the other."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from gpuledger.topics import Topics
from gpuledger_cli.__main__ import main
from tests.default_topics import TOPICS
from tests.real.end_to_end.components import Component, refuse_stray_settings

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tests.real.services.authorizing_kafka import AuthorizingKafka
    from tests.real.services.kcat import Kcat

SCENARIO = Path(__file__).parents[2] / "scenarios" / "quickstart.yaml"
NODE_OF = {"blue": "gpu-node-1", "green": "gpu-node-2"}
DEADLINE_SECONDS = 120.0
RIGHTS = (
    ("--topic", "blue.", "--resource-pattern-type", "prefixed"),
    ("--group", "blue-", "--resource-pattern-type", "prefixed"),
    ("--transactional-id", "blue-", "--resource-pattern-type", "prefixed"),
)


def settings_of(prefix: str, kafka: AuthorizingKafka) -> dict[str, str]:
    """Return the Kafka settings; blue is a user with permissions only for its prefix."""
    login = {
        "KAFKA__BOOTSTRAP_SERVERS": kafka.bootstrap_servers,
        "KAFKA__SECURITY_PROTOCOL": "SASL_SSL",
        "KAFKA__SASL_USERNAME": kafka.username,
        "KAFKA__SASL_PASSWORD": kafka.password,
        "KAFKA__SSL_CA_FILE": str(kafka.ca_file),
    }
    unbound = {"KAFKA__BOOTSTRAP_SERVERS": kafka.plaintext_bootstrap_servers}
    return {"KAFKA__TOPIC_PREFIX": prefix, **(login if prefix == "blue" else unbound)}


def create(
    settings: Mapping[str, str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> tuple[int, str]:
    """Return the exit code of `gpuledger topics create`, and its output."""
    with monkeypatch.context() as patched:
        for name, value in settings.items():
            patched.setenv(f"GPULEDGER_{name}", value)
        code = main(["topics", "create"])
    message = capsys.readouterr()
    return code, message.out + message.err


def components(prefix: str, settings: Mapping[str, str], folder: Path) -> list[Component]:
    """Return an agent, a join and a sink of rows; the node's name identifies the installation."""
    agent = {"NODE_NAME": NODE_OF[prefix], "SOURCE": f"simulated:{SCENARIO}"}
    commands = {"agent": agent, "join": {"JOIN__PODWATCH_TIMEOUT_SECONDS": "0"}, "sink": {}}
    kinds = {"sink": ["rows"]}
    return [
        Component(
            name=f"{prefix}-{name}",
            command=["gpuledger", name, *kinds.get(name, [])],
            folder=folder / f"{prefix}-{name}",
            environment={**settings, **own},
        )
        for name, own in commands.items()
    ]


def test_two_installations_on_one_kafka_book_only_their_own_nodes(
    start_authorizing_kafka: Callable[[], AuthorizingKafka],
    kcat: Kcat,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    refuse_stray_settings()
    kafka = start_authorizing_kafka()
    for right in RIGHTS:
        kafka.grant(*right)
    made = settings_of("blue", kafka)
    deadline = time.monotonic() + DEADLINE_SECONDS
    # A granted permission takes effect a moment later.
    while (done := create(made, monkeypatch, capsys))[0] and time.monotonic() < deadline:
        time.sleep(0.2)
    assert (done[0], done[1].count("created")) == (0, len(TOPICS)), done
    code, message = create(made | {"KAFKA__TOPIC_PREFIX": "green"}, monkeypatch, capsys)
    assert (code, "denies this user access to green." in message) == (2, True), message
    assert create(settings_of("green", kafka), monkeypatch, capsys)[0] == 0

    servers = kafka.plaintext_bootstrap_servers
    with ExitStack() as stack:
        for prefix in NODE_OF:
            for each in components(prefix, settings_of(prefix, kafka), tmp_path):
                stack.callback(each.kill)
                each.start()
        for prefix in NODE_OF:
            await_rows(kcat, servers, Topics(prefix).rows.name)
    listed: Any = json.loads(json.dumps(kcat.metadata(servers)))
    found = {each["topic"] for each in listed["topics"] if not each["topic"].startswith("__")}
    assert found == {topic.name for prefix in NODE_OF for topic in Topics(prefix)}
    for prefix, node in NODE_OF.items():
        table = Topics(prefix)
        for topic in (table.samples, table.events, table.rows):
            assert {each["node"] for each in values(kcat, servers, topic.name)} == {node}
        assert values(kcat, servers, table.dead_letters.name) == []


def values(kcat: Kcat, servers: str, topic: str) -> list[dict[str, Any]]:
    return [json.loads(each.value or b"") for each in kcat.consume(servers, topic)]


def await_rows(kcat: Kcat, servers: str, topic: str) -> None:
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not values(kcat, servers, topic):
        assert time.monotonic() < deadline, f"{topic} has no rows"
        time.sleep(0.5)
