"""requirements/*.lock: exact, hashed, without addresses, and no larger than needed."""

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
REQUIREMENTS = ROOT / "requirements"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]
LOCKS = sorted(REQUIREMENTS.glob("*.lock"))
# One creates the environment; the other has packages that only benchmarks need.
BEYOND_DEV = {"bootstrap", "bench"}

lock_files = pytest.mark.parametrize("lock", LOCKS, ids=lambda lock: str(lock.stem))


def entries(lock: Path) -> list[str]:
    """Return each requirement with its markers and hashes as one line."""
    lines = lock.read_text().replace("\\\n", "").splitlines()
    return [line for line in lines if line.strip() and not line.startswith("#")]


def pinned(lock: Path) -> dict[str, set[str]]:
    """Return the locked versions by name; a name has several if they differ by marker."""
    versions: dict[str, set[str]] = {}
    for entry in entries(lock):
        requirement = Requirement(entry.partition(" --hash")[0])
        versions.setdefault(canonicalize_name(requirement.name), set()).add(
            str(requirement.specifier).removeprefix("==")
        )
    return versions


def declared(extra: str) -> list[Requirement]:
    """Return the requirements of an extra in pyproject.toml, and of the extras that it includes."""
    found = [Requirement(text) for text in PROJECT["dependencies"]]
    for text in EXTRAS[extra]:
        requirement = Requirement(text)
        if requirement.name == PROJECT["name"]:
            found += [inner for name in sorted(requirement.extras) for inner in declared(name)]
        else:
            found.append(requirement)
    return found


def test_every_extra_has_a_lock_and_every_lock_an_extra() -> None:
    assert {lock.stem for lock in LOCKS} == {*EXTRAS, "bootstrap"}


@lock_files
def test_every_locked_version_is_exact_and_hashed(lock: Path) -> None:
    assert entries(lock)
    for entry in entries(lock):
        assert re.match(r"[a-z0-9-]+==[^ *]+ ", entry), entry
        assert " --hash=sha256:" in entry, entry


@lock_files
def test_a_lock_contains_no_address_and_no_path_of_the_machine_that_created_it(lock: Path) -> None:
    text = lock.read_text()

    assert text.splitlines()[1].split() == ["#", "make", "lock"]
    for trace in (
        "://",
        "--index-url",
        "--extra-index-url",
        "--find-links",
        "file:",
        "/home/",
        "/tmp/",  # noqa: S108 - looked for, not written to
    ):
        assert trace not in text, trace


@lock_files
def test_every_lock_has_the_versions_of_dev_so_that_they_share_one_environment(
    lock: Path,
) -> None:
    dev = pinned(REQUIREMENTS / "dev.lock")

    own = {name: found for name, found in pinned(lock).items() if name in dev}

    assert own == {name: dev[name] for name in own}
    if lock.stem not in BEYOND_DEV:
        assert set(pinned(lock)) <= set(dev)


@pytest.mark.parametrize("extra", EXTRAS)
def test_the_requirements_of_pyproject_are_locked(extra: str) -> None:
    locked = pinned(REQUIREMENTS / f"{extra}.lock")

    for requirement in declared(extra):
        versions = locked.get(canonicalize_name(requirement.name))
        assert versions, f"{requirement} is not locked; run make lock"
        assert all(requirement.specifier.contains(version) for version in versions), requirement


def test_the_agents_lock_has_neither_the_kubernetes_client_nor_arrow() -> None:
    heavy = {"kubernetes", "kubernetes-asyncio", "pyarrow", "arro3-core", "deltalake", "duckdb"}

    assert not heavy & set(pinned(REQUIREMENTS / "agent.lock"))
    assert {"kubernetes-asyncio", "deltalake"} <= set(pinned(REQUIREMENTS / "dev.lock"))
