"""The fields of a settings class as a flat table: path, type, default, name in the environment.

Here lives the walk through nested groups. No value is read here.
"""

import difflib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import UnionType
from typing import Any, Final, Union, get_args, get_origin

import msgspec
from msgspec.structs import FieldInfo

from gpuledger.docstrings import field_docstrings
from gpuledger.settings.secret import Secret

PREFIX: Final = "GPULEDGER_"
FILE_SUFFIX: Final = "_file"
REQUIRED: Final = object()

Path = tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One setting of a settings class."""

    path: Path
    """Names of the groups and of the field."""
    type: Any
    """The annotation, which decides what values are accepted."""
    default: Any
    """The default, or `REQUIRED`."""
    meaning: str
    """The docstring under the field."""

    @property
    def name(self) -> str:
        """The name in the YAML file, groups separated by dots."""
        return dotted(self.path)

    @property
    def variable(self) -> str:
        """The name in the environment."""
        return variable_of(self.path)

    @property
    def is_secret(self) -> bool:
        """Whether it may also come from a file named by `<name>_file`."""
        return Secret in alternatives(self.type)

    @property
    def is_mapping(self) -> bool:
        """Whether it is a free mapping, such as headers."""
        return any(get_origin(part) is dict for part in alternatives(self.type))

    @property
    def may_hold_secrets(self) -> bool:
        """Whether its values are not to be shown: people put passwords into headers, too."""
        return self.is_secret or self.is_mapping

    @property
    def file_path(self) -> Path:
        """Of a secret: the path of the setting that names its file."""
        return (*self.path[:-1], self.path[-1] + FILE_SUFFIX)


def settings_of(model: type[msgspec.Struct]) -> tuple[Setting, ...]:
    """Return all settings of a settings class, those of its groups in place."""
    return tuple(_walk(model, (), None))


def dotted(path: Path) -> str:
    """Write a path as people write it."""
    return ".".join(path)


def variable_of(path: Path) -> str:
    """Return the environment variable of a path: `GPULEDGER_KAFKA__CLIENT_ID`."""
    return PREFIX + "__".join(path).upper()


def alternatives(hint: Any) -> tuple[Any, ...]:  # noqa: ANN401  # any type annotation
    """Return the members of a union, or the type alone."""
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)


def is_group(hint: Any) -> bool:  # noqa: ANN401  # any type annotation
    """Return whether a field holds a group of settings rather than one."""
    return isinstance(hint, type) and issubclass(hint, msgspec.Struct)


def nearest(name: str, known: Iterable[str]) -> str:
    """Return which known name was probably meant, as the end of an error message."""
    by_lower = {candidate.lower(): candidate for candidate in known}
    tail = [full for lower, full in by_lower.items() if lower.endswith("." + name.lower())]
    found = tail or [by_lower[lower] for lower in difflib.get_close_matches(name.lower(), by_lower)]
    return f"did you mean {found[0]}?" if found else "--help lists all settings"


def _walk(model: type[msgspec.Struct], path: Path, instance: Any) -> Iterator[Setting]:  # noqa: ANN401  # a group's default
    meanings = field_docstrings(model)
    for field in msgspec.structs.fields(model):
        default = _default(field) if instance is None else getattr(instance, field.name)
        here = (*path, field.name)
        if is_group(field.type):
            yield from _walk(field.type, here, None if default is REQUIRED else default)
        else:
            meaning = meanings.get(field.name, "")
            yield Setting(path=here, type=field.type, default=default, meaning=meaning)


def _default(field: FieldInfo) -> Any:  # noqa: ANN401  # whatever the class says
    if field.default is not msgspec.NODEFAULT:
        return field.default
    if field.default_factory is not msgspec.NODEFAULT:
        return field.default_factory()
    return REQUIRED
