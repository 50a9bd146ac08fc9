"""The settings of a class, and two sources of their values: a YAML file and the environment.

A settings class becomes a flat table of settings, including nested groups; each source gives a
flat layer of values for it. This module rejects unknown names and reads secrets from their files;
`gpuledger.settings.build` checks types.
"""

import re
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path as FilePath
from types import UnionType
from typing import Any, Final, Union, get_args, get_origin

import msgspec
import yaml
from typing_extensions import override

from gpuledger.codegen import field_docstrings
from gpuledger.errors import SettingsError
from gpuledger.settings.secret import Secret, mask_address, mask_value
from gpuledger.settings.yaml_errors import yaml_errors
from gpuledger.small_files import read_small_file
from gpuledger.texts import find_near, shorten_middle

PREFIX: Final = "GPULEDGER_"
FILE_SUFFIX: Final = "_file"
REQUIRED: Final = object()

Path = tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One setting of a settings class."""

    path: Path
    """Names of the groups and of the field."""
    group: type[msgspec.Struct]
    """The class that has the field."""
    type: Any
    """The annotation, which determines the accepted values."""
    default: Any
    """The default, or `REQUIRED`."""

    @property
    def meaning(self) -> str:
        """Return the field's docstring; only for help, because it is read from the source code."""
        return field_docstrings(self.group).get(self.path[-1], "")

    @property
    def name(self) -> str:
        """Name in the YAML file, groups separated by dots."""
        return dotted(self.path)

    @property
    def variable(self) -> str:
        """Name of the environment variable."""
        return variable_of(self.path)

    @property
    def is_secret(self) -> bool:
        """Whether the value may also come from a file that `<name>_file` names."""
        return Secret in alternatives(self.type)

    @property
    def may_hold_secrets(self) -> bool:
        """Return whether the setting's values must not be shown.

        True for secrets, and for mappings to texts, such as headers, which may contain passwords.
        """
        return self.is_secret or any(
            get_origin(part) is dict and str in alternatives(get_args(part)[1])
            for part in alternatives(self.type)
        )

    @property
    def file_path(self) -> Path:
        """Return the path of the setting that names the file of this secret setting."""
        return (*self.path[:-1], self.path[-1] + FILE_SUFFIX)


def settings_of(model: type[msgspec.Struct]) -> tuple[Setting, ...]:
    """Return all settings of a class in order, including those of its groups."""
    return tuple(_walk(model, (), None))


def dotted(path: Path) -> str:
    """Return a path in dotted form, as in the file."""
    return ".".join(path)


def variable_of(path: Path) -> str:
    """Return the environment variable of a path: `GPULEDGER_KAFKA__CLIENT_ID`."""
    return PREFIX + "__".join(path).upper()


def alternatives(hint: Any) -> tuple[Any, ...]:  # noqa: ANN401  # any type annotation
    """Return the members of a union; for other types, only the type itself."""
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)


def is_group(hint: Any) -> bool:  # noqa: ANN401  # any type annotation
    """Return whether a field's type is a group of settings."""
    return isinstance(hint, type) and issubclass(hint, msgspec.Struct)


_ELSEWHERE: Final = {"cluster": "only `gpuledger agent` and `gpuledger podwatch` have this setting"}


def nearest(name: str, known: Iterable[str]) -> str:
    """Return text to end an error message: a hint at the name that was probably meant.

    If only other components have the setting, and people are likely to give it to all of them,
    the hint names these components.
    """
    if elsewhere := _ELSEWHERE.get(name.lower()):
        return elsewhere
    found = find_meant(name, known)
    return f"did you mean {found}?" if found else "`gpuledger config explain` lists all settings"


def find_meant(name: str, known: Iterable[str]) -> str | None:
    """Return the known name that was probably meant, or `None`."""
    by_lower = {candidate.lower(): candidate for candidate in known}
    # Users omit a setting's group as often as they mistype its name.
    tails = (full for lower, full in by_lower.items() if lower.endswith("." + name.lower()))
    return next(tails, None) or find_near(name, by_lower.values())


def _walk(model: type[msgspec.Struct], path: Path, instance: Any) -> Iterator[Setting]:  # noqa: ANN401  # a group's default
    for field in msgspec.structs.fields(model):
        default: Any = REQUIRED
        if instance is not None:  # the group's default instance determines its fields' defaults
            default = getattr(instance, field.name)
        elif field.default is not msgspec.NODEFAULT:
            default = field.default
        elif field.default_factory is not msgspec.NODEFAULT:
            default = field.default_factory()
        here = (*path, field.name)
        if is_group(field.type):
            yield from _walk(field.type, here, None if default is REQUIRED else default)
        else:
            yield Setting(path=here, type=field.type, default=default, group=model)


@dataclass(frozen=True, kw_only=True)
class Given:
    """A value for a setting, and the source that it comes from."""

    value: Any
    """The value, in the source's form."""
    origin: str
    """Where the value comes from, for error messages."""
    is_text: bool
    """Whether the source contains only texts, from which numbers must be parsed."""
    file: str = ""
    """The settings file, if the value comes from one."""


Layer = Mapping[Path, Given]

_MAX_BYTES: Final = 1 << 20  # of a settings file; all settings with their help take 20 kB
# Variables that Kubernetes, like Docker links, sets in each container for every Service of the
# namespace. They are ignored; otherwise a Service named gpuledger-join would keep all components
# from starting.
_SERVICE_LINK: Final = re.compile(
    r"\w+_SERVICE_(HOST|PORT(_\w+)?)|\w+_PORT(_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?"
)


def read_yaml(
    path: FilePath, settings: Sequence[Setting], *, ignores_other_sections: bool = False
) -> Layer:
    """Read a settings file; raise `SettingsError` if it is unreadable or has an unknown key.

    With `ignores_other_sections`, the file may belong to another program, and only known sections
    count.
    """
    sections = {setting.path[0] for setting in settings}
    groups = frozenset(
        setting.path[:depth] for setting in settings for depth in range(1, len(setting.path))
    )
    known = _known(settings)
    given: dict[Path, Given] = {}
    for at, value in _flatten(_load(path), (), groups, str(path)):
        # An unknown name may contain anything, even a secret.
        shown = shorten_middle(dotted(tuple(map(mask_address, at))))
        origin = f"{shown} in {path}"
        given[at] = Given(value=value, origin=origin, is_text=False, file=str(path))
    if ignores_other_sections:
        given = {at: named for at, named in given.items() if at[0] in sections}
    for at, named in given.items():
        if at not in known:
            meant = nearest(dotted(at), map(dotted, (*known, *sorted(groups))))
            raise SettingsError(f"unknown setting {named.origin}: {meant}")
    return _with_secrets(given, settings)


def read_environment(
    environ: Mapping[str, str],
    settings: Sequence[Setting],
    *,
    ignores_other_sections: bool = False,
) -> Layer:
    """Read all variables that begin with `GPULEDGER_`; raise `SettingsError` if one is unknown.

    With `ignores_other_sections`, variables of other programs are ignored, as in `read_yaml`.
    """
    if ignores_other_sections:
        own = tuple(variable_of((setting.path[0],)) for setting in settings)
        environ = {name: value for name, value in environ.items() if name.startswith(own)}
    paths = {variable_of(path): path for path in _known(settings)}
    given = {
        paths.get(name, (name,)): Given(value=value, origin=name, is_text=True)
        for name, value in environ.items()
        if name.startswith(PREFIX) and (name in paths or not _is_service_link(name, value))
    }
    unknown = sorted(path[0] for path in given if path not in paths.values())
    if unknown:
        meant = nearest(
            unknown[0].removeprefix(PREFIX), (name.removeprefix(PREFIX) for name in paths)
        )
        meant = meant.replace("did you mean ", f"did you mean {PREFIX}")
        shown = shorten_middle(mask_address(unknown[0]))
        raise SettingsError(f"unknown environment variable {shown}: {meant}")
    return _with_secrets(given, settings)


def _is_service_link(name: str, value: str) -> bool:
    if not _SERVICE_LINK.fullmatch(name):
        return False
    return not name.endswith("_PORT") or "://" in value or name.endswith("_SERVICE_PORT")


def _known(settings: Sequence[Setting]) -> list[Path]:
    files = [setting.file_path for setting in settings if setting.is_secret]
    return [*(setting.path for setting in settings), *files]


def _with_secrets(given: dict[Path, Given], settings: Sequence[Setting]) -> Layer:
    """Replace each `*_file` setting with the secret from that file."""
    for setting in settings:
        named = given.pop(setting.file_path, None) if setting.is_secret else None
        if named is None:
            continue
        if setting.path in given:
            raise SettingsError(f"{given[setting.path].origin} and {named.origin}: give only one")
        secret = Secret.load(FilePath(str(named.value)), name=named.origin)
        given[setting.path] = Given(value=secret, origin=named.origin, is_text=False)
    return given


def _load(path: FilePath) -> Mapping[str, Any]:
    with yaml_errors(path, kind="settings file ", raises=SettingsError):
        text = read_small_file(path, max_bytes=_MAX_BYTES).decode()
        loaded = yaml.load(text, Loader=_StrictLoader)  # noqa: S506  # a SafeLoader
    if loaded is not None and not isinstance(loaded, dict):
        raise SettingsError(f"{path}: expected a mapping of settings, got {kind_of(loaded)}")
    return loaded or {}


def _flatten(
    loaded: Mapping[str, Any], path: Path, groups: frozenset[Path], file: str
) -> Iterator[tuple[Path, Any]]:
    for key, value in loaded.items():
        here = (*path, str(key))
        if here not in groups:
            yield here, value
        elif isinstance(value, dict):
            yield from _flatten(value, here, groups, file)
        elif value is not None:
            raise SettingsError(
                f"{dotted(here)} in {file}: expected a mapping, got {kind_of(value)}"
            )


_KINDS: Final = {
    type(None): "nothing (null)",
    bool: "true or false",
    int: "a number",
    float: "a number",
    str: "a text",
    list: "a list",
    dict: "a mapping",
}


def kind_of(value: object) -> str:
    """Return a description of a value's type; the value itself may be a misplaced secret."""
    return _KINDS.get(type(value), f"a {type(value).__name__}")


class _StrictLoader(yaml.SafeLoader):
    """Rejects duplicate keys in a mapping; PyYAML would silently use the last one."""

    @override
    def construct_mapping(
        self,
        node: yaml.MappingNode,
        deep: bool = False,  # PyYAML's signature
    ) -> dict[Hashable, Any]:
        made = super().construct_mapping(node, deep=deep)
        # The error points to the second key, because it was probably added later.
        first: dict[Hashable, yaml.Node] = {}
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if (former := first.setdefault(key, key_node)) is not key_node:
                raise yaml.constructor.ConstructorError(
                    problem=f"duplicate key {shorten_middle(repr(mask_value(key)))}, first in line"
                    f" {former.start_mark.line + 1}: remove one of them",
                    problem_mark=key_node.start_mark,
                )
        return made
