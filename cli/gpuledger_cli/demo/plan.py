"""What a run of the demo is to be: the options, checked before anything is started."""

import re
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from gpuledger.errors import UserError
from gpuledger.records.base import DEFAULT_CLUSTER
from gpuledger.settings import KafkaSettings
from gpuledger.settings.groups import require_brokers, require_cluster_name, require_http_url
from gpuledger.settings.secret import mask_address, may_part_a_login, shown_brokers

Source = Literal["auto", "nvml", "simulated"]
DEMO_SCENARIO: Final = Path(__file__).with_name("demo.yaml")
_KAFKA_SCHEME: Final = "kafka://"
_ANSWER_SECONDS: Final = 10.0
_SESSION_SECONDS: Final = 10.0


@dataclass(frozen=True, kw_only=True)
class DemoPlan:
    """The options of one run."""

    scenario: Path
    """The scenario that is played where GPUs are simulated."""
    source: Source
    """Where the readings come from; `auto` takes this machine's GPUs where NVML answers."""
    cluster: str = DEFAULT_CLUSTER
    """The cluster in whose name the run writes."""
    kafka: KafkaSettings | None
    """The brokers, or `None` for the bus in memory."""
    store: Path
    """Folder of the store."""
    seconds: float | None
    """How long to run, in real seconds; `None` until Ctrl-C."""
    remote_write_url: str | None = None
    """A real remote-write receiver; `None` for the built-in one."""
    alertmanager_url: str | None = None
    """A real Alertmanager; `None` for the built-in one."""


def find_scenario(given: Path | None) -> Path:
    """Return the scenario's file, by default the demo's own; raises `UserError` without one."""
    if given is not None and not given.is_file():
        reason = "it is no regular file" if given.exists() else "there is no such file"
        raise UserError(f"--scenario {given}: {reason}")
    return given or DEMO_SCENARIO


def check_cluster(name: str) -> str:
    """Return the name of a cluster; raises `UserError` where it is none."""
    try:
        require_cluster_name(name)
    except ValueError as error:
        raise UserError(f"--{error}") from error
    return name


def check_url(option: str, url: str | None) -> str | None:
    """Return the address of a receiver; raises `UserError` where it is none."""
    try:
        if url is not None:
            require_http_url(url)
    except ValueError as error:
        raise UserError(f"{option} {error}") from error
    return url


def parse_bus(bus: str) -> KafkaSettings | None:
    """Understand `memory` or `kafka://host:port[,…]`; raises `UserError` for anything else."""
    if bus == "memory":
        return None
    servers = bus.removeprefix(_KAFKA_SCHEME)
    if may_part_a_login(bus):
        raise UserError(
            f"--bus {shown_brokers(bus)}: brokers are named without user and password;"
            " the demo does not log in"
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
        # Somebody watches: silent brokers are reported soon.
        request_timeout_seconds=_ANSWER_SECONDS,
        session_timeout_seconds=_SESSION_SECONDS,
    )


def find_store(given: Path | None) -> Path:
    """Return the store's folder: the named one, or a new one under the system's temporary folder.

    Raises `UserError` where the named one cannot be written to, or is a URL, which is not repeated.
    """
    if given is None:
        return Path(tempfile.mkdtemp(prefix="gpuledger-demo-")) / "store"
    if re.match(r"[A-Za-z][\w+.-]*:/", str(given)):  # of a URL's slashes a path keeps one
        raise UserError("--store is a URL: the demo's store is a folder of this machine")
    if given.exists() and not given.is_dir():
        raise UserError(f"--store {mask_address(str(given))}: this is a file; name a folder")
    try:
        given.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=given):
            pass
    except OSError as error:
        shown = mask_address(str(given))
        raise UserError(f"--store {shown}: {error.strerror or error}; name a folder") from error
    return given.absolute()
