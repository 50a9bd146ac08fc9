"""Apache Kafka: one broker that is its own controller, with ports and a folder of its own."""

from __future__ import annotations

import shutil
import socket
import struct
from dataclasses import dataclass
from pathlib import Path

from typing_extensions import override

from tests.real.services.ports import free_ports
from tests.real.services.process import Part, Process

# C1 and the serial collector suit a short life on two cores; class data sharing saves as much
# again.
JVM_FLAGS = ("-Xmx512m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1")
CLUSTER_ID = "Z3B1bGVkZ2VyLXRlc3RzMQ"
NOT_LOGGED = -1
TOOL_SECONDS = 120.0
ANSWER_SECONDS = 5.0

SERVER_PROPERTIES = """
process.roles=broker,controller
node.id=1
controller.listener.names=CONTROLLER
auto.create.topics.enable=false
group.initial.rebalance.delay.ms=0
num.network.threads=2
num.io.threads=2
num.partitions=1
offsets.topic.replication.factor=1
offsets.topic.num.partitions=2
transaction.state.log.replication.factor=1
transaction.state.log.min.isr=1
transaction.state.log.num.partitions=2
log.cleaner.backoff.ms=200
log.cleaner.min.cleanable.ratio=0.01
log.cleaner.dedupe.buffer.size=8388608
log.cleaner.threads=1
log.retention.check.interval.ms=1000
log.retention.ms=-1
log.segment.delete.delay.ms=1000
# Indexes are sparse files in memory. If the disk is full, a write to one raises SIGBUS instead of
# ENOSPC; Kafka 4.3.1 then writes a batch twice at one offset, and never loads its groups again.
log.index.interval.bytes=2147483647
num.recovery.threads.per.data.dir=2
unclean.leader.election.enable=false
broker.heartbeat.interval.ms=200
"""

LOG_PROPERTIES = """
status=error
appenders=o
appender.o.type=Console
appender.o.name=O
appender.o.layout.type=PatternLayout
appender.o.layout.pattern=[%d] %p %m (%c)%n
rootLogger.level=WARN
rootLogger.appenderRefs=o
rootLogger.appenderRef.o.ref=O
"""


@dataclass(frozen=True, kw_only=True)
class KafkaDistribution:
    """The location of Kafka's jars, and files prepared from them for a faster start."""

    java: Path
    libs: Path
    archive: Path | None = None
    """Class data archive; a JVM that cannot use it starts without it."""
    formatted: Path | None = None
    """A formatted data folder to copy, which avoids formatting."""


class KafkaBroker:
    """A broker to connect to, wherever it runs."""

    def __init__(self, *, bootstrap_servers: str) -> None:
        self.bootstrap_servers = bootstrap_servers


class Kafka(Part, KafkaBroker):
    """A broker without authentication that the tests own."""

    name = "kafka"

    def __init__(
        self, *, distribution: KafkaDistribution, folder: Path, archive_to: Path | None = None
    ) -> None:
        Part.__init__(self, folder=folder)
        self.distribution = distribution
        self.port, self.controller_port = free_ports(2)
        KafkaBroker.__init__(self, bootstrap_servers=f"127.0.0.1:{self.port}")
        self._archive_to = archive_to

    def listeners(self) -> dict[str, str]:
        """Return the settings of the listeners."""
        return {
            "listeners": f"PLAINTEXT://{self.bootstrap_servers},{self._controller()}",
            "advertised.listeners": f"PLAINTEXT://{self.bootstrap_servers}",
            "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT",
            "inter.broker.listener.name": "PLAINTEXT",
        }

    def voters(self) -> str:
        """Return the controllers of the cluster, `node@host:port`."""
        return f"1@127.0.0.1:{self.controller_port}"

    def format_arguments(self) -> list[str]:
        """Return the arguments for formatting the data folder, in addition to its id."""
        return []

    @override
    def start(self) -> None:
        if self._data.exists():
            self.write_settings()
        else:
            self.prepare()
        super().start()

    @override
    def argv(self) -> list[str | Path]:
        return [*self._java("kafka.Kafka"), self._properties]

    @override
    def is_ready(self) -> bool:
        return count_brokers("127.0.0.1", self.port) >= 1

    @property
    def _data(self) -> Path:
        return self.folder / "data"

    @property
    def _properties(self) -> Path:
        return self.folder / "server.properties"

    def _controller(self) -> str:
        return f"CONTROLLER://127.0.0.1:{self.controller_port}"

    def prepare(self) -> None:
        """Write the settings and format the data folder; `start` does it if it was not done."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self.write_settings()
        (self.folder / "log4j2.properties").write_text(LOG_PROPERTIES)
        if self.distribution.formatted and not self.format_arguments():
            shutil.copytree(self.distribution.formatted, self._data)
        else:
            self._format()

    def write_settings(self) -> None:
        """Write the current settings; a running broker reads them at its next start."""
        lines = {
            **self.listeners(),
            "log.dirs": str(self._data),
            "controller.quorum.voters": self.voters(),
            "broker.session.timeout.ms": str(self._session_timeout_ms()),
            "transaction.abort.timed.out.transaction.cleanup.interval.ms": str(
                self._abort_interval_ms()
            ),
        }
        settings = "\n".join(f"{key}={value}" for key, value in lines.items())
        self._properties.write_text(f"{SERVER_PROPERTIES}{settings}\n")

    def _session_timeout_ms(self) -> int:
        """Return how long the broker may be silent before it is fenced.

        On a busy machine it is silent for seconds. But after a kill, the controller waits this long
        for the killed broker before it accepts the new one.
        """
        return 3000 if self._data.exists() else 9000

    def _abort_interval_ms(self) -> int:
        """Return how often the broker aborts transactions that have timed out.

        Often, so that tests need not wait. But a broker that restarts leads its partitions until
        the controller fences its previous registration. An abort in between is completed without
        markers ("Couldn't find leader endpoint …, skip"), which leaves a hanging transaction.
        """
        return 10_000 if self._data.exists() else 500

    def _format(self) -> None:
        argv = [*self._java("kafka.tools.StorageTool"), "format", "-t", CLUSTER_ID]
        argv += ["-c", self._properties, *self.format_arguments()]
        formatting = Process(name="kafka-format", argv=argv, folder=self.folder)
        formatting.start()
        formatting.wait_until(lambda: formatting.exit_status() == 0, deadline_seconds=120)

    def run_tool(self, main_class: str, *arguments: str) -> None:
        """Run one of Kafka's administration tools to its end; it must succeed."""
        argv = [*self._java(main_class), *arguments]
        running = Process(name="tool", argv=argv, folder=self.folder)
        running.start()
        running.wait_until(lambda: running.exit_status() == 0, deadline_seconds=TOOL_SECONDS)

    def _java(self, main_class: str) -> list[str | Path]:
        flags = [*JVM_FLAGS, f"-Dlog4j2.configurationFile={self.folder / 'log4j2.properties'}"]
        flags.append(f"-Dkafka.logs.dir={self.folder}")
        if self._archive_to:
            flags.append(f"-XX:ArchiveClassesAtExit={self._archive_to}")
        elif self.distribution.archive:
            flags += [f"-XX:SharedArchiveFile={self.distribution.archive}", "-Xshare:auto"]
        return [self.distribution.java, *flags, "-cp", f"{self.distribution.libs}/*", main_class]


def count_brokers(host: str, port: int) -> int:
    """Return the number of brokers that a broker knows; raises OSError if it does not answer."""
    # Metadata v4, correlation id 1, no client id, no topics, no automatic creation.
    answer = request_raw(host, port, struct.pack(">hhihib", 3, 4, 1, NOT_LOGGED, 0, 0))
    # Correlation id, throttle time, then the array of brokers.
    return int(struct.unpack_from(">iii", answer)[2])


def request_raw(host: str, port: int, request: bytes) -> bytes:
    """Send a request in Kafka's protocol and return the answer, both without their sizes."""
    with socket.create_connection((host, port), timeout=ANSWER_SECONDS) as connection:
        connection.sendall(struct.pack(">i", len(request)) + request)
        with connection.makefile("rb") as stream:
            head = stream.read(4)
            if len(head) < 4:
                raise ConnectionError("closed without an answer")
            (size,) = struct.unpack(">i", head)
            return stream.read(size)
