"""Kafka's jars are exactly those whose checksums the lock file contains."""

import hashlib
from pathlib import Path

import pytest

from tests.tools import kafka_jars
from tests.tools.errors import MissingToolError


def write_lock(path: Path, jars: dict[str, bytes]) -> Path:
    lines = [
        f"org/example/{name} {hashlib.sha256(content).hexdigest()} {len(content)}"
        for name, content in jars.items()
    ]
    path.write_text("\n".join(lines))
    return path


@pytest.mark.parametrize(
    ("found", "named"),
    [
        ({"a.jar": b"a", "b.jar": b"b"}, None),
        ({"a.jar": b"a", "b.jar": b"tampered"}, "b.jar"),
        ({"a.jar": b"a"}, "b.jar"),
        ({"a.jar": b"a", "b.jar": b"b", "c.jar": b"c"}, "c.jar"),
    ],
)
def test_a_jar_that_differs_from_the_lock_is_named(
    found: dict[str, bytes], named: str | None, tmp_path: Path
) -> None:
    lock = write_lock(tmp_path / "jars.lock", {"a.jar": b"a", "b.jar": b"b"})
    libs = tmp_path / "libs"
    libs.mkdir()
    for name, content in found.items():
        (libs / name).write_bytes(content)
    if named is None:
        kafka_jars.verify(libs, lock=lock)
        return
    with pytest.raises(MissingToolError, match=named):
        kafka_jars.verify(libs, lock=lock)


def test_the_lock_has_the_version_that_the_pom_requires() -> None:
    tool = kafka_jars.KafkaTool()
    assert f"<kafka.version>{tool.version}<" in (kafka_jars.FOLDER / "pom.xml").read_text()
    assert f"/kafka_2.13-{tool.version}.jar " in kafka_jars.LOCK.read_text()
