"""Each right of the table is needed: without it a deployable names what it may not do."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import orjson
import pytest

from gpuledger.bus.administration import create_topics
from gpuledger.records import GpuEvent
from gpuledger.rights import DEPLOYABLES, Grant, KafkaUser, grants
from gpuledger.settings import KafkaSettings
from gpuledger.topics import Topic, Topics
from tests.real.deployment.test_kafka_rights import RESOURCES
from tests.real.end_to_end.deployables import Deployable, refuse_stray_settings
from tests.real.services.authorizing_kafka import Operation, Right, allow_on
from tests.real.services.oauth_kafka import OauthKafka
from tests.real.services.starter import running

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.real.services.kafka import KafkaDistribution
    from tests.real.services.kube_client import KubeApiClient

SCENARIO: Final = Path(__file__).parents[2] / "scenarios" / "quickstart.yaml"
WITHIN_SECONDS: Final = 15.0
OWN: Final = {
    "agent": {"NODE_NAME": "gpu-node-1", "SOURCE": f"simulated:{SCENARIO}"},
    "podwatch": {"LEASE__ENABLED": "false"},
    "sink remote_write": {"REMOTE_WRITE__URL": "http://127.0.0.1:9/"},
    "sink alerts": {"ALERTS__URLS": "http://127.0.0.1:9"},
}
"""What a deployable needs to be told beside its brokers."""


class Case(NamedTuple):
    """One operation of one grant, which a deployable is to do without."""

    who: KafkaUser
    missing: Grant
    operation: str


CASES: Final = [
    Case(who, grant, operation)
    for who in DEPLOYABLES
    for grant in grants(who, Topics())
    for operation in grant.operations
    if not who.on_all_topics and who.name != "replay"  # commands: test_topics_rights, test_replay
]


@pytest.fixture(scope="module")
def brokers(
    kafka_distribution: KafkaDistribution, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[OauthKafka]:
    """Yield brokers with all topics that admit whoever a token names, and deny all to them."""
    refuse_stray_settings()
    folder = tmp_path_factory.mktemp("oauth-kafka")
    with running(OauthKafka(distribution=kafka_distribution, folder=folder)) as part:
        settings = KafkaSettings(bootstrap_servers=part.plaintext_bootstrap_servers)
        asyncio.run(create_topics(settings, partitions=1))
        otlp = Topic(name="otlp_metrics", record=GpuEvent, key="node", partitions=1)
        asyncio.run(create_topics(settings, [otlp]))
        yield part


def rights_without(case: Case | None, who: KafkaUser, user: str) -> list[Right]:
    return [
        Right(user, Operation[operation], RESOURCES[grant.resource], grant.name, grant.is_prefix)
        for grant in grants(who, Topics())
        for operation in grant.operations
        if case is None or (grant, operation) != (case.missing, case.operation)
    ]


def login(brokers: OauthKafka, user: str, folder: Path) -> dict[str, str]:
    token = folder / "token"
    token.write_text(brokers.keys.sign(user, for_seconds=600.0))
    return {
        "KAFKA__BOOTSTRAP_SERVERS": brokers.bootstrap_servers,
        "KAFKA__SECURITY_PROTOCOL": "SASL_SSL",
        "KAFKA__SASL_MECHANISM": "OAUTHBEARER",
        "KAFKA__OAUTH__TOKEN_FILE": str(token),
        "KAFKA__SSL_CA_FILE": str(brokers.ca_file),
    }


def shown(deployable: Deployable) -> str:
    try:
        return orjson.dumps(deployable.readyz()).decode()
    except OSError:
        return ""


@pytest.mark.parametrize(
    "case",
    CASES,
    ids=lambda case: f"{case.who.name} {case.operation} {case.missing.name}".replace(" ", "-"),
)
def test_a_right_that_is_missing_is_missed_by_name(
    brokers: OauthKafka, kube_api: KubeApiClient, tmp_path: Path, case: Case
) -> None:
    who, missing = case.who, case.missing
    user = f"{who.user}-{CASES.index(case)}"
    asyncio.run(allow_on(brokers.plaintext_bootstrap_servers, rights_without(case, who, user)))
    name, _, kind = who.name.partition(" ")
    own = dict(OWN.get(who.name, {}))
    if name == "agent":
        own["SPOOL__FOLDER"] = str(tmp_path / "spool")
    if name == "podwatch":
        own["KUBERNETES__KUBECONFIG"] = str(kube_api.kubeconfig)
    if kind == "store":
        own["STORE__URI"] = str(tmp_path / "store")
    made = Deployable(
        name=f"{user}",
        command=[f"gpuledger-{name}", *([kind] if kind else [])],
        folder=tmp_path / "run",
        environment={**login(brokers, user, tmp_path), **own},
    )
    made.start()
    try:
        deadline = time.monotonic() + WITHIN_SECONDS
        wanted = missing.name if missing.resource != "transactionalId" else "transactional id"
        while not (wanted in (said := shown(made)) and "does not allow this user" in said):
            assert made.exit_status() is None, made.log_tail()
            assert time.monotonic() < deadline, said
            time.sleep(0.2)
    finally:
        made.kill()
