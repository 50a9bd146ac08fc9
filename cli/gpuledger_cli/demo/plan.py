"""The options of a run of the demo, checked before anything starts."""

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from gpuledger.errors import UserError
from gpuledger.records.base import DEFAULT_CLUSTER
from gpuledger.settings import KafkaSettings
from gpuledger.settings.groups import require_brokers, require_cluster_name, require_http_url
from gpuledger.settings.secret import may_contain_credentials, shown_brokers
from gpuledger_cli.in_process.store_directory import make_directory

Source = Literal["auto", "nvml", "simulated"]
DEMO_SCENARIO: Final = Path(__file__).with_name("demo.yaml")
_KAFKA_SCHEME: Final = "kafka://"
_ANSWER_SECONDS: Final = 10.0
_SESSION_SECONDS: Final = 10.0


@dataclass(frozen=True, kw_only=True)
class DemoPlan:
    """The options of one run."""

    scenario: Path
    """The scenario to play if GPUs are simulated."""
    source: Source
    """GPU data source; `auto` selects this machine's GPUs if NVML is available."""
    cluster: str = DEFAULT_CLUSTER
    """Cluster name in the run's records."""
    kafka: KafkaSettings | None
    """Settings of Kafka; `None` for the in-memory bus."""
    store: Path
    """Directory of the store."""
    seconds: float | None
    """Duration of the run, in real seconds; `None` until Ctrl-C."""
    remote_write_url: str | None = None
    """A real remote-write receiver; `None` for the built-in one."""
    alertmanager_url: str | None = None
    """A real Alertmanager; `None` for the built-in one."""


def find_scenario(given: Path | None) -> Path:
    """Return the scenario's file, or the demo's own; raises `UserError` if it is missing."""
    if given is not None and not given.is_file():
        reason = "not a regular file" if given.exists() else "no such file"
        raise UserError(f"--scenario {given}: {reason}")
    return given or DEMO_SCENARIO


def check_cluster(name: str) -> str:
    """Return the name of a cluster; raises `UserError` if it is invalid."""
    try:
        require_cluster_name(name)
    except ValueError as error:
        raise UserError(f"--{error}") from error
    return name


def check_url(option: str, url: str | None) -> str | None:
    """Return the URL of a receiver; raises `UserError` if it is invalid."""
    try:
        if url is not None:
            require_http_url(url)
    except ValueError as error:
        raise UserError(f"{option} {error}") from error
    return url


def parse_bus(bus: str) -> KafkaSettings | None:
    """Parse `memory` or `kafka://host:port[,…]`; raises `UserError` for anything else."""
    if bus == "memory":
        return None
    servers = bus.removeprefix(_KAFKA_SCHEME)
    if may_contain_credentials(bus):
        raise UserError(
            f"--bus {shown_brokers(bus)}: credentials are not supported; give only host:port of"
            " each broker"
        )
    is_kafka = bus.startswith(_KAFKA_SCHEME)
    try:
        require_brokers(servers)
    except ValueError:
        is_kafka = False
    if not is_kafka:
        raise UserError(
            f"--bus {shown_brokers(bus)}: expected `memory` or `kafka://host:port[,host:port…]`"
        )
    return KafkaSettings(
        bootstrap_servers=servers,
        client_id="gpuledger-demo",
        # A user is watching, so failures of brokers are reported soon.
        request_timeout_seconds=_ANSWER_SECONDS,
        session_timeout_seconds=_SESSION_SECONDS,
    )


def find_store(given: Path | None) -> Path:
    """Return the store's directory: the given one, or a new temporary one.

    Raises `UserError` if the given directory is not writable or is a URL.
    """
    if given is None:
        return Path(tempfile.mkdtemp(prefix="gpuledger-demo-")) / "store"
    return make_directory(given)
