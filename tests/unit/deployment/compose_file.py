"""docker-compose.yml as the tests read it."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from gpuledger.programs import COMPONENTS
from tests.unit.deployment import components
from tests.unit.deployment.components import ROOT, Stage


@dataclass(frozen=True, kw_only=True)
class Mount:
    """A mount of a service: a path in the repository, or a named volume."""

    source: str
    target: str
    mode: str

    @property
    def is_file_of_the_repository(self) -> bool:
        return self.source.startswith("./")


@dataclass(frozen=True, kw_only=True)
class Service:
    name: str
    spec: Mapping[str, Any]

    @property
    def image(self) -> str:
        return str(self.spec["image"])

    @property
    def is_ours(self) -> bool:
        return self.image.partition(":")[0] in components.images()

    @property
    def stage(self) -> Stage:
        return components.target_of(self.image)

    @property
    def environment(self) -> dict[str, str]:
        return dict(self.spec.get("environment", {}))

    @property
    def mounts(self) -> list[Mount]:
        given = (f"{volume}:rw".split(":") for volume in self.spec.get("volumes", []))
        return [Mount(source=parts[0], target=parts[1], mode=parts[2]) for parts in given]

    def command(self) -> list[str]:
        """Return the command that the image or the service itself starts."""
        return [*self._entrypoint(), *self.spec.get("command", [])]

    def on_this_machine(self, volumes: Mapping[str, Path]) -> tuple[list[str], dict[str, str]]:
        """Return command and environment with each path in the container replaced by its source."""

        environment = {
            name: self.path_on_this_machine(value, volumes)
            for name, value in self.environment.items()
        }
        command = [self.path_on_this_machine(word, volumes) for word in self.command()]
        return command, environment

    def path_on_this_machine(self, text: str, volumes: Mapping[str, Path]) -> str:
        """Return a text with each path in the container replaced by its source.

        `volumes` maps named volumes to sources; a file of the repository in a volume takes
        precedence over the one in the checkout.
        """
        mounted = {one.target: volumes.get(one.source, ROOT / one.source) for one in self.mounts}
        sources = {**self._copied(), **mounted}
        if not sources:
            return text
        # The longest first and all at once, because a source may contain a target's name.
        targets = "|".join(map(re.escape, sorted(sources, key=len, reverse=True)))
        return re.sub(rf"({targets})(?![\w.-])", lambda found: str(sources[found[1]]), text)

    def _entrypoint(self) -> Sequence[str]:
        """Return what the image itself starts; for images of others it is unknown."""
        given: Sequence[str] = self.spec.get("entrypoint", ())
        return given or (components.entrypoint(self.stage) if self.is_ours else ())

    def _copied(self) -> dict[str, Path]:
        """Return the files that our image takes from the checkout, by their place in it."""
        copied = components.copied(self.stage) if self.is_ours else ()
        return {target: ROOT / source for source, target in copied}


@cache
def load() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
    return loaded


def services() -> list[Service]:
    return [Service(name=name, spec=spec) for name, spec in load()["services"].items()]


def deployed() -> list[Service]:
    """Return the services that run a component, so neither `topics` nor the simulator."""
    ours = [service for service in services() if service.is_ours]
    return [service for service in ours if service.command()[1] in COMPONENTS]


def urls(value: object) -> Iterator[str]:
    """Yield all URLs in settings."""
    if isinstance(value, str) and value.startswith(("http://", "https://")):
        yield value
    for inner in value.values() if isinstance(value, dict) else ():
        yield from urls(inner)
    for inner in value if isinstance(value, list) else ():
        yield from urls(inner)
