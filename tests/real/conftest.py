"""Fixtures that start the real parts, and the report of missing ones.

Shared parts serve the whole session and start with the first test that uses them. The `start_*`
fixtures give a test parts of its own, to stop, kill and restart.
"""

from __future__ import annotations

import os
import signal
from collections import Counter
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import pytest

from tests.real.services.alertmanager import Alertmanager, AlertmanagerApi
from tests.real.services.authorizing_kafka import AuthorizingKafka
from tests.real.services.cluster_tools import Helm, Kubectl
from tests.real.services.kafka import Kafka, KafkaBroker, KafkaDistribution
from tests.real.services.kafka_cluster import KafkaCluster
from tests.real.services.kafka_pool import KafkaPool, lending
from tests.real.services.kcat import Kcat
from tests.real.services.kube_client import KubeApiClient
from tests.real.services.kubeconfig import read_kubeconfig
from tests.real.services.kubelet import KubeletServer
from tests.real.services.kubernetes import KubeApi
from tests.real.services.object_store import ObjectStore
from tests.real.services.prometheus import (
    Prometheus,
    Prometheus2,
    PrometheusApi,
    VictoriaMetrics,
    VictoriaMetricsApi,
)
from tests.real.services.secure_kafka import SecureKafka
from tests.real.services.starter import Starter, running
from tests.tools import catalogue
from tests.tools.errors import MissingToolError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

MISSING = "real part missing: "


def _must_have_all() -> bool:
    return os.environ.get("CI") == "true" or bool(os.environ.get("TESTS_REQUIRE_REAL_PARTS"))


def _go_without(error: MissingToolError) -> NoReturn:
    if _must_have_all():
        pytest.fail(f"{MISSING}{error}", pytrace=False)
    pytest.skip(f"{MISSING}{error}")


def _found(name: str) -> Path:
    try:
        return catalogue.named(name).find()
    except MissingToolError as error:
        _go_without(error)


def _kafka_distribution() -> KafkaDistribution:
    try:
        return catalogue.KAFKA.distribution()
    except MissingToolError as error:
        _go_without(error)


def pytest_configure() -> None:
    """Let SIGTERM end a run as Ctrl-C does, so that no part is left running."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print loudly which tests could not run without a real part; skips are easy to miss."""
    reasons: Counter[str] = Counter()
    for report in terminalreporter.stats.get("skipped", []):
        if isinstance(report.longrepr, tuple) and MISSING in report.longrepr[2]:
            reasons[report.longrepr[2].split(MISSING, 1)[1]] += 1
    for reason, count in sorted(reasons.items()):
        line = f"!!! {count} test(s) NOT RUN, real part missing: {reason}"
        terminalreporter.write_line(line, red=True, bold=True)


@pytest.fixture
def starter(tmp_path: Path) -> Iterator[Starter]:
    starter = Starter(tmp_path)
    yield starter
    starter.end()


@pytest.fixture(scope="session")
def remote_write_compliance() -> Path:
    """Return the public suite for remote-write 2.0 senders, as a program."""
    return _found("remote-write-sender-suite")


@pytest.fixture(scope="session")
def kafka_distribution() -> KafkaDistribution:
    return _kafka_distribution()


@pytest.fixture(scope="session")
def kafka(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KafkaBroker]:
    given = os.environ.get("KAFKA_BOOTSTRAP_SERVERS")
    if given:
        yield KafkaBroker(bootstrap_servers=given)
        return
    part = Kafka(distribution=_kafka_distribution(), folder=tmp_path_factory.mktemp("kafka"))
    with running(part):
        yield part


@pytest.fixture(scope="session")
def kafka_pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KafkaPool[Kafka]]:
    """Yield this process's pool of brokers, for the project's fixed topic names."""
    distribution = _kafka_distribution()

    def make() -> Kafka:
        return Kafka(distribution=distribution, folder=tmp_path_factory.mktemp("kafka-of-a-test"))

    pool = KafkaPool(make)
    yield pool
    pool.discard()


@pytest.fixture(scope="module")
def kafka_of_this_run(kafka_pool: KafkaPool[Kafka]) -> Iterator[Kafka]:
    """Lend the tests of a file an empty broker, for the project's fixed topic names."""
    kafka = kafka_pool.lend()
    yield kafka
    kafka_pool.take_back(kafka)


@pytest.fixture(scope="session")
def secure_kafka(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecureKafka]:
    folder = tmp_path_factory.mktemp("secure-kafka")
    with running(SecureKafka(distribution=_kafka_distribution(), folder=folder)) as part:
        yield part


@pytest.fixture
def start_kafka(kafka_pool: KafkaPool[Kafka]) -> Iterator[Callable[[], Kafka]]:
    """Lend a test empty brokers of its own, which it may stop and kill."""
    yield from lending(kafka_pool)


@pytest.fixture(scope="session")
def authorizing_kafka_pool(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[KafkaPool[AuthorizingKafka]]:
    distribution = _kafka_distribution()

    def make() -> AuthorizingKafka:
        folder = tmp_path_factory.mktemp("authorizing-kafka")
        return AuthorizingKafka(distribution=distribution, folder=folder)

    pool = KafkaPool(make)
    yield pool
    pool.discard()


@pytest.fixture
def start_authorizing_kafka(
    authorizing_kafka_pool: KafkaPool[AuthorizingKafka],
) -> Iterator[Callable[[], AuthorizingKafka]]:
    yield from lending(authorizing_kafka_pool)


@pytest.fixture
def start_kafka_cluster(starter: Starter) -> Callable[[], KafkaCluster]:
    distribution = _kafka_distribution()

    def start() -> KafkaCluster:
        folder = starter.new_folder("kafka-cluster")
        return starter.start(KafkaCluster(distribution=distribution, folder=folder))

    return start


@pytest.fixture(scope="session")
def kube_api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KubeApiClient]:
    folder = tmp_path_factory.mktemp("kubernetes")
    # Not KUBECONFIG: in a developer's shell it may point to a production cluster.
    given = os.environ.get("TESTS_KUBECONFIG")
    if given:
        cluster, login = read_kubeconfig(Path(given), folder=folder)
        yield KubeApiClient(cluster=cluster, login=login, kubeconfig=Path(given), folder=folder)
        return
    part = KubeApi(apiserver=_found("kube-apiserver"), etcd=_found("etcd"), folder=folder)
    with running(part):
        yield part


@pytest.fixture(scope="session")
def own_kube_api() -> Callable[..., KubeApi]:
    """Return a function that creates an unshared API server, which the caller starts."""
    return partial(KubeApi, apiserver=_found("kube-apiserver"), etcd=_found("etcd"))


@pytest.fixture
def start_kube_api(
    starter: Starter, own_kube_api: Callable[..., KubeApi]
) -> Callable[..., KubeApi]:
    def start(*, arguments: Sequence[str] = ()) -> KubeApi:
        folder = starter.new_folder("kubernetes")
        return starter.start(own_kube_api(folder=folder, arguments=arguments))

    return start


@pytest.fixture(scope="session")
def helm() -> Helm:
    return Helm(binary=_found("helm"))


@pytest.fixture(scope="session")
def kubectl() -> Kubectl:
    return Kubectl(binary=_found("kubectl"))


@pytest.fixture
def start_kubelet(starter: Starter) -> Callable[[], KubeletServer]:
    binary = _found("kubelet")

    def start() -> KubeletServer:
        return starter.start(KubeletServer(binary=binary, folder=starter.new_folder("kubelet")))

    return start


@pytest.fixture(scope="session")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PrometheusApi]:
    given = os.environ.get("PROMETHEUS_URL")
    if given:
        yield PrometheusApi(url=given)
        return
    part = Prometheus(binary=_found("prometheus"), folder=tmp_path_factory.mktemp("prometheus"))
    with running(part):
        yield part


@pytest.fixture(scope="session")
def prometheus_binary() -> Path:
    return _found("prometheus")


@pytest.fixture(scope="session")
def otel_collector() -> Path:
    return _found("otel-collector")


@pytest.fixture(scope="session")
def alertmanager_binary() -> Path:
    return _found("alertmanager")


@pytest.fixture
def start_prometheus(starter: Starter) -> Callable[..., Prometheus]:
    binary = _found("prometheus")

    def start(*, config: str | None = None, arguments: Sequence[str] = ()) -> Prometheus:
        folder = starter.new_folder("prometheus")
        return starter.start(
            Prometheus(binary=binary, folder=folder, config=config, arguments=arguments)
        )

    return start


@pytest.fixture
def start_prometheus_2(starter: Starter) -> Callable[[], Prometheus2]:
    binary = _found("prometheus-2")

    def start() -> Prometheus2:
        return starter.start(Prometheus2(binary=binary, folder=starter.new_folder("prometheus-2")))

    return start


@pytest.fixture(scope="session")
def victoria_metrics(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VictoriaMetricsApi]:
    given = os.environ.get("VICTORIAMETRICS_URL")
    if given:
        yield VictoriaMetricsApi(url=given)
        return
    folder = tmp_path_factory.mktemp("victoria-metrics")
    with running(VictoriaMetrics(binary=_found("victoria-metrics"), folder=folder)) as part:
        yield part


@pytest.fixture
def start_object_store(starter: Starter) -> Callable[[], ObjectStore]:
    binary = _found("versitygw")

    def start() -> ObjectStore:
        return starter.start(ObjectStore(binary=binary, folder=starter.new_folder("versitygw")))

    return start


@pytest.fixture
def start_victoria_metrics(starter: Starter) -> Callable[..., VictoriaMetrics]:
    binary = _found("victoria-metrics")

    def start(*, arguments: Sequence[str] = ()) -> VictoriaMetrics:
        folder = starter.new_folder("victoria-metrics")
        return starter.start(VictoriaMetrics(binary=binary, folder=folder, arguments=arguments))

    return start


@pytest.fixture(scope="session")
def alertmanager(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AlertmanagerApi]:
    given = os.environ.get("ALERTMANAGER_URL")
    if given:
        yield AlertmanagerApi(url=given)
        return
    folder = tmp_path_factory.mktemp("alertmanager")
    with running(Alertmanager(binary=_found("alertmanager"), folder=folder)) as part:
        yield part


@pytest.fixture
def start_alertmanager(starter: Starter) -> Callable[..., Alertmanager]:
    binary = _found("alertmanager")

    def start(*, config: str | None = None) -> Alertmanager:
        folder = starter.new_folder("alertmanager")
        return starter.start(Alertmanager(binary=binary, folder=folder, config=config))

    return start


@pytest.fixture(scope="session")
def slurm_programs() -> dict[str, Path]:
    return {name: _found(name) for name in catalogue.SLURM_PROGRAMS}


@pytest.fixture(scope="session")
def node_programs() -> dict[str, Path]:
    if os.geteuid():
        _go_without(MissingToolError("node-kubelet", "it runs only as root"))
    return {name: _found(name) for name in catalogue.NODE_PROGRAMS}


@pytest.fixture(scope="session")
def autoscaling_programs() -> dict[str, Path]:
    return {name: _found(name) for name in catalogue.AUTOSCALING_PROGRAMS}


@pytest.fixture(scope="session")
def monitoring_programs() -> dict[str, Path]:
    return {name: _found(name) for name in catalogue.MONITORING_PROGRAMS}


@pytest.fixture(scope="session")
def kcat() -> Kcat:
    return Kcat(binary=_found("kcat"))


@pytest.fixture(scope="session")
def promtool() -> Path:
    return _found("promtool")
