"""The Dockerfile: what it copies and starts exists, and no image runs as root."""

import json
import re
from itertools import chain

import pytest

from tests.unit.deployment.components import (
    PYPROJECT,
    ROOT,
    VERSION,
    Stage,
    entrypoint,
    port_of,
    stages,
    targets,
)


def copies(stage: Stage) -> list[list[str]]:
    return [value.split() for value in stage.values("COPY")]


def stack(stage: Stage) -> list[Stage]:
    """Return a stage and all stages that it is based on."""
    below = stages().get(stage.base)
    return [stage, *(stack(below) if below else [])]


def test_one_image_starts_the_agent_and_the_other_one_every_command() -> None:
    commands = {name: entrypoint(stage) for name, stage in targets().items()}
    assert commands == {"agent": ["gpuledger", "agent"], "gpuledger": ["gpuledger"]}


@pytest.mark.parametrize("stage", stages().values(), ids=lambda stage: stage.name)
def test_everything_that_is_copied_exists_and_is_in_the_build_context(stage: Stage) -> None:
    ignore = (ROOT / ".dockerignore").read_text().splitlines()
    from_checkout = [words[:-1] for words in copies(stage) if not words[0].startswith("--from=")]

    for source in chain.from_iterable(from_checkout):
        assert (ROOT / source).exists(), source
        assert f"!{source.split('/')[0]}" in ignore, source


@pytest.mark.parametrize("stage", stages().values(), ids=lambda stage: stage.name)
def test_a_stage_is_based_on_a_stage_or_on_a_digest(stage: Stage) -> None:
    sources = [words[0].removeprefix("--from=") for words in copies(stage)]
    taken = [name for name, words in zip(sources, copies(stage), strict=True) if name != words[0]]

    assert set(taken) <= set(stages())
    assert stage.base in stages() or re.search(r":[\d.]+[\w-]*@sha256:[0-9a-f]{64}$", stage.base)


@pytest.mark.parametrize("stage", targets().values(), ids=lambda stage: stage.name)
def test_an_image_runs_as_a_numbered_user_and_builds_nothing(stage: Stage) -> None:
    users = [user for part in stack(stage) for user in part.values("USER")]

    assert users
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", users[0])
    assert "tools" not in [part.name for part in stack(stage)]


def test_no_instruction_uses_a_shell() -> None:
    commands = [
        value
        for stage in stages().values()
        for keyword in ("RUN", "ENTRYPOINT", "CMD")
        for value in stage.values(keyword)
    ]

    assert [command for command in commands if not command.startswith("[")] == []


def test_every_lock_file_is_installed_by_its_hashes() -> None:
    installs = [
        value
        for stage in stages().values()
        for value in stage.values("RUN")
        if '"install"' in value and '"pip"' in value
    ]
    free = [value for value in installs if "--require-hashes" not in value]

    assert installs
    assert [value for value in free if "--no-index" not in value] == []


def test_the_wheel_is_built_from_all_packages() -> None:
    copied = {words[0] for words in copies(stages()["wheel"])}

    packages = PYPROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]

    assert {package.partition("/")[0] for package in packages} <= copied


def test_only_the_wheels_stage_has_the_build_hook_and_a_compiler() -> None:
    copied = set(chain.from_iterable(copies(stages()["wheel"])))
    compiling = [
        name
        for name, stage in stages().items()
        if any("apt-get" in value for value in stage.values("RUN"))
    ]

    assert "hatch_build.py" in copied
    assert compiling == ["wheel"]
    assert {"gcc", "libc6-dev"} <= set(json.loads(stages()["wheel"].values("RUN")[1]))


def test_the_label_names_the_version() -> None:
    (labels,) = stages()["runtime"].values("LABEL")

    assert f'image.version="{VERSION}"' in labels


def test_the_agents_image_exposes_the_port_on_which_it_listens() -> None:
    assert targets()["agent"].values("EXPOSE") == [str(port_of("agent"))]


def test_the_base_image_has_a_supported_python() -> None:
    found = re.search(r"python:(\d+)\.(\d+)", stages()["base"].base)
    least = re.search(r"(\d+)\.(\d+)", PYPROJECT["project"]["requires-python"])

    assert found
    assert least
    assert tuple(map(int, found.groups())) >= tuple(map(int, least.groups()))
