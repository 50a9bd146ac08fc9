"""Apache Kafka from its published Maven artifacts, verified against the checksums in kafka/."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from tests.real.services.kafka import Kafka, KafkaDistribution
from tests.real.services.process import PartError
from tests.tools import cache, commands, debian, report
from tests.tools.errors import MissingToolError

FOLDER = Path(__file__).parent / "kafka"
LOCK = FOLDER / "kafka-jars.lock"
COPY = "org.apache.maven.plugins:maven-dependency-plugin:3.8.1:copy-dependencies"
OLDEST_JAVA = 17
JAVA_PACKAGE = "default-jre-headless"


def java_version(java: Path) -> str:
    """Ask a Java for its version, such as 17.0.15."""
    answer = commands.run([java, "-version"], name="kafka")
    found = re.search(r'version "([^"]+)"', answer)
    return found.group(1) if found else "0"


def find_java() -> Path:
    """Return the Java of JAVA_HOME or PATH, raises MissingToolError if it is absent or too old."""
    home = os.environ.get("JAVA_HOME")
    java = Path(home) / "bin" / "java" if home else commands.which("java")
    if java is None or not java.exists():
        raise MissingToolError(
            "kafka", f"Java {OLDEST_JAVA} or newer is missing: {debian.advice(JAVA_PACKAGE)}"
        )
    version = java_version(java)
    if int(version.split(".")[0]) < OLDEST_JAVA:
        raise MissingToolError(
            "kafka", f"Java {OLDEST_JAVA} or newer is needed, {java} is {version}"
        )
    return java


def verify(libs: Path, *, lock: Path = LOCK) -> None:
    """Compare the jars with the lock; raises MissingToolError that names the first difference."""
    expected = {}
    for line in lock.read_text().splitlines():
        path, digest, _size = line.split()
        expected[Path(path).name] = digest
    found = {jar.name: hashlib.sha256(jar.read_bytes()).hexdigest() for jar in libs.glob("*.jar")}
    wrong = sorted(
        name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name)
    )
    if wrong:
        raise MissingToolError(
            "kafka", f"{wrong[0]} is not what kafka-jars.lock says ({len(wrong)} such jars)"
        )


@dataclass(frozen=True, kw_only=True)
class KafkaTool:
    """Kafka's jars, and a class archive and formatted folder made from them to start faster."""

    name: str = "kafka"
    version: str = "4.3.1"
    given_by: str | None = "KAFKA_BOOTSTRAP_SERVERS"

    @property
    def folder(self) -> Path:
        """Where the jars lie in the cache."""
        return cache.folder_of(self.name, self.version)

    def find(self) -> Path:
        """Return the folder of the jars; raises MissingToolError."""
        find_java()
        home = os.environ.get("KAFKA_HOME")
        libs = Path(home) / "libs" if home else self.folder / "libs"
        if any(libs.glob("kafka_2.13-*.jar")):
            return libs
        if home:
            raise MissingToolError(self.name, f"KAFKA_HOME={home} has no libs/kafka_2.13-*.jar")
        raise MissingToolError(self.name, "not fetched yet: run `make test-tools`")

    def distribution(self) -> KafkaDistribution:
        """Return all that a broker needs to start; raises MissingToolError."""
        libs = self.find()
        java = find_java()
        warm = self._warm(java)
        if os.environ.get("KAFKA_HOME") or not warm.exists():
            return KafkaDistribution(java=java, libs=libs)
        return KafkaDistribution(
            java=java, libs=libs, archive=warm / "kafka.jsa", formatted=warm / "formatted"
        )

    def provide(self) -> Path:
        """Return the folder of the jars, fetched first when the cache has none of this version."""
        if os.environ.get("KAFKA_HOME"):
            return self.find()
        java = self._ensure_java()
        with cache.locked(self.folder):
            if not self.folder.exists():
                self._fetch()
            if not self._warm(java).exists():
                self._prepare(java)
        return self.find()

    def _ensure_java(self) -> Path:
        if not os.environ.get("JAVA_HOME"):
            debian.ensure_program(
                "java",
                package=JAVA_PACKAGE,
                name=self.name,
                version=self.version,
                called=f"Java {OLDEST_JAVA} or newer",
            )
        return find_java()

    def _warm(self, java: Path) -> Path:
        # The archive is bound to the exact Java and to the jars' modification times.
        return self.folder / f"warm-{java_version(java)}"

    def _fetch(self) -> None:
        mvn = debian.ensure_program("mvn", package="maven", name=self.name, version=self.version)
        with (
            report.step(self.name, self.version, "fetch from Maven and verify"),
            cache.filling(self.folder) as draft,
        ):
            argv: list[str | Path] = [mvn, "-q", "-B", "-f", FOLDER / "pom.xml", COPY]
            argv += ["-DincludeScope=runtime", f"-DoutputDirectory={draft / 'libs'}"]
            commands.run(argv, name=self.name)
            verify(draft / "libs")

    def _prepare(self, java: Path) -> None:
        plain = KafkaDistribution(java=java, libs=self.folder / "libs")
        with (
            report.step(self.name, self.version, "prepare a fast start"),
            cache.filling(self._warm(java)) as draft,
            tempfile.TemporaryDirectory(prefix="gpuledger-kafka-") as scratch,
        ):
            kafka = Kafka(distribution=plain, folder=Path(scratch), archive_to=draft / "kafka.jsa")
            try:
                kafka.prepare()
                shutil.copytree(Path(scratch) / "data", draft / "formatted")
                kafka.start()
                # The JVM writes the archive as it ends.
                kafka.process.stop(deadline_seconds=60)
            except PartError as error:
                raise MissingToolError(self.name, str(error)) from error
            finally:
                kafka.kill()
