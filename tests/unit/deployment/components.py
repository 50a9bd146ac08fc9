"""The project's version, images and commands, which the deployment files depend on.

A command's settings come from the command itself, with `--print-config`, so that a setting that it
would refuse in a container is refused here.
"""

import importlib
import io
import json
import os
import re
import signal
import sys
import tomllib
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

ROOT: Final = Path(__file__).parents[3]
PYPROJECT: Final = tomllib.loads((ROOT / "pyproject.toml").read_text())
VERSION: Final[str] = PYPROJECT["project"]["version"]
SCRIPTS: Final[Mapping[str, str]] = PYPROJECT["project"]["scripts"]


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A stage of the Dockerfile."""

    name: str
    base: str
    instructions: tuple[tuple[str, str], ...]

    def values(self, keyword: str) -> list[str]:
        return [value for name, value in self.instructions if name == keyword]


@cache
def stages() -> dict[str, Stage]:
    """Read the Dockerfile's stages by name."""
    text = (ROOT / "Dockerfile").read_text().replace("\\\n", " ")
    lines = [line.strip() for line in text.splitlines() if line.strip() and line[0] != "#"]
    instructions = [(line.split(maxsplit=1)[0], line.split(maxsplit=1)[1]) for line in lines]
    starts = [at for at, (keyword, _) in enumerate(instructions) if keyword == "FROM"]
    made = {}
    for start, end in zip(starts, [*starts[1:], len(instructions)], strict=True):
        base, name = re.split(r"\s+AS\s+", instructions[start][1])
        made[name] = Stage(name=name, base=base, instructions=tuple(instructions[start + 1 : end]))
    return made


def targets() -> dict[str, Stage]:
    """Return the stages that are images, by name."""
    return {name: stage for name, stage in stages().items() if stage.values("ENTRYPOINT")}


def images() -> dict[str, Stage]:
    """Return the stages that are images, by the image's name."""
    return {"gpuledger-agent": targets()["agent"], "gpuledger": targets()["gpuledger"]}


def target_of(image: str) -> Stage:
    """Return the stage behind an image of ours such as `gpuledger-agent:0.1.0`."""
    name, _, version = image.partition(":")
    assert version == VERSION, f"{image} is no image of version {VERSION}"
    return images()[name]


def entrypoint(stage: Stage) -> list[str]:
    (command,) = stage.values("ENTRYPOINT")
    words: list[str] = json.loads(command)
    return words


def copied(stage: Stage) -> list[tuple[str, str]]:
    """Return what an image copies from the checkout, and where to."""
    words = [value.split() for value in stage.values("COPY") if not value.startswith("--from=")]
    return [(source, target) for source, target in words]


def run(command: Sequence[str], environ: Mapping[str, str]) -> str:
    """Run a script of the project with only these variables; return what it prints.

    It runs in this process, which is a hundred times faster: an option such as `--help` or
    `--print-config` must end it before it does its work.
    """
    module, _, function = SCRIPTS[command[0]].partition(":")
    main = getattr(importlib.import_module(module), function)
    printed, complaint = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "environ", dict(environ))
        patch.setattr(sys, "argv", list(command))
        with redirect_stdout(printed), redirect_stderr(complaint):
            numbers = (signal.SIGTERM, signal.SIGINT)
            handlers = [(number, signal.getsignal(number)) for number in numbers]
            code = _exit_code(main)
            for number, handler in handlers:
                signal.signal(number, handler)  # the tests' own, not the component's
    assert code == 0, f"{' '.join(command)}: {complaint.getvalue()}"
    return printed.getvalue()


def _exit_code(main: Callable[[], int]) -> object:
    try:
        return main()
    except SystemExit as ended:
        return ended.code or 0


def settings(command: Sequence[str], environ: Mapping[str, str]) -> dict[str, Any]:
    """Return the settings with which a component would start."""
    return _settings(tuple(command), tuple(sorted(environ.items())))


@cache
def _settings(command: tuple[str, ...], environ: tuple[tuple[str, str], ...]) -> dict[str, Any]:
    printed = run([*command, "--print-config"], dict(environ))
    loaded: dict[str, Any] = yaml.safe_load(printed)
    return loaded


@cache
def port_of(component: str) -> int:
    """Return the port on which a component listens by default."""
    kind = ["store"] if component == "sink" else []
    return listen_port(settings(["gpuledger", component, *kind], {"NODE_NAME": "node-1"}))


def listen_port(loaded: Mapping[str, Any]) -> int:
    return int(loaded["http"]["listen"].rpartition(":")[2])
