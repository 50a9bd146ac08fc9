"""From layers of given values to a settings object: merge, convert, construct.

Pure: no file, no environment. Every error names the setting as its source wrote it, the value and
what is expected.
"""

import enum
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path as FilePath
from typing import Annotated, Any, Final, Literal, TypeVar, get_args, get_origin

import msgspec
import yaml

from gpuledger.errors import SettingsError
from gpuledger.settings.secret import MASK, Secret, mask_texts, mask_value
from gpuledger.settings.sources import (
    REQUIRED,
    Given,
    Layer,
    Path,
    Setting,
    alternatives,
    dotted,
    explain_yaml,
    is_group,
    settings_of,
)
from gpuledger.texts import shorten, shorten_middle

S = TypeVar("S", bound=msgspec.Struct)

_SHOWN_CHARACTERS: Final = 200
_NAMES: Final[Mapping[Any, str]] = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "a text",
    Secret: "a text",
    FilePath: "a path",
}
# How a group's own __post_init__ begins what it says of one of its fields.
_OF_A_FIELD: Final = re.compile(r"(?P<field>[a-z_]+):? (?!and )(?P<mistake>.+)", re.DOTALL)
_BOUNDS: Final = {"gt": ">", "ge": ">=", "lt": "<", "le": "<=", "min_length": "of length >="}


def build(model: type[S], layers: Sequence[Layer]) -> S:
    """Build the settings; a later layer wins. `SettingsError` names the first mistake."""
    given: dict[Path, Given] = {}
    for layer in layers:
        given |= layer
    values: dict[Path, Any] = {}
    for setting in settings_of(model):
        if setting.path in given:
            values[setting.path] = _convert(setting, given[setting.path])
        elif setting.default is not REQUIRED:
            values[setting.path] = setting.default
        else:
            raise SettingsError(
                f"{setting.name} is missing: set {setting.variable} or {setting.name} in the file"
            )
    return _construct(model, (), values, given)


def _convert(setting: Setting, given: Given) -> Any:  # noqa: ANN401  # any setting
    if setting.is_secret and given.value in (MASK, Secret(MASK)):
        raise SettingsError(f"{given.origin}: this is the mask of --print-config, not the secret")
    if _is_none(setting, given.value):
        return setting.default
    try:
        if given.is_text:
            return _read_text(setting.type, given.value)
        return msgspec.convert(given.value, setting.type, dec_hook=_from_text)
    except (msgspec.ValidationError, ValueError, yaml.YAMLError, RecursionError) as error:
        shown = (
            MASK
            if setting.may_hold_secrets
            else shorten(repr(mask_value(given.value)), _SHOWN_CHARACTERS)
        )
        expected = describe(setting.type)
        mistake = explain_yaml(error) if isinstance(error, yaml.YAMLError) else str(error)
        if setting.is_mapping and "`$[" not in mistake:  # the value itself, not one in it
            mistake = f"expected a mapping, {{name: value}}: {mistake}"
        mistake = shorten_middle(mask_texts(mistake, _texts_in(given.value)))
        problem = f"expected {expected}, got {shown}" if expected else f"{mistake}; got {shown}"
        raise SettingsError(f"{given.origin}: {problem}") from error


def _is_none(setting: Setting, value: Any) -> bool:  # noqa: ANN401  # any setting
    """Return whether a value says `none` of a text or a path that is none by default.

    Null and the empty text say it alike. An empty secret says nothing: a file that was not written.
    """
    if setting.default == "":
        return value is None
    return value == "" and setting.default is None and FilePath in alternatives(setting.type)


def _read_text(hint: Any, text: str) -> Any:  # noqa: ANN401  # any setting
    """Convert a text: as it stands where a text is wanted, else as a number, a list or YAML."""
    try:
        return msgspec.convert(text, hint, dec_hook=_from_text)
    except msgspec.ValidationError:
        return msgspec.convert(_parse(hint, text), hint, strict=False, dec_hook=_from_text)


def _parse(hint: Any, text: str) -> Any:  # noqa: ANN401  # any setting
    bare = [
        get_args(part)[0] if get_origin(part) is Annotated else part for part in alternatives(hint)
    ]
    kinds = {get_origin(part) or part for part in bare}
    if kinds & {list, tuple, set, frozenset} and not text.lstrip().startswith("["):
        return [part.strip() for part in text.split(",") if part.strip()]
    if any(is_group(kind) for kind in kinds) or kinds & {list, tuple, set, frozenset, dict}:
        return yaml.safe_load(text)
    return text


def _from_text(wanted: type, value: Any) -> Any:  # noqa: ANN401  # msgspec's hook for types that it does not know
    if isinstance(value, Secret) and wanted is Secret:  # read from its file already
        return value
    if wanted in (Secret, FilePath) and isinstance(value, str):
        return wanted(value)
    raise ValueError(f"expected {_NAMES.get(wanted, wanted.__name__)}")


def describe(hint: Any) -> str | None:  # noqa: ANN401  # any type annotation
    """Return what a simple setting accepts; None for lists and mappings, which msgspec explains."""
    parts = [part for part in alternatives(hint) if part is not type(None)]
    descriptions = [_describe_one(part) for part in parts]
    return " or ".join(text for text in descriptions if text) if all(descriptions) else None


def _describe_one(hint: Any) -> str | None:  # noqa: ANN401  # any type annotation
    if get_origin(hint) is Annotated:
        base, *notes = get_args(hint)
        # Of a note that is no msgspec.Meta there are no bounds.
        bounds = (
            f"{sign} {bound:g}"
            for note in notes
            for name, sign in _BOUNDS.items()
            if (bound := getattr(note, name, None)) is not None
        )
        return " ".join(filter(None, [describe(base), " and ".join(bounds)])) or None
    if get_origin(hint) is Literal:
        return "one of " + ", ".join(map(str, get_args(hint)))
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return "one of " + ", ".join(str(member.value) for member in hint)
    return _NAMES.get(hint)


def _construct(
    model: type[S], path: Path, values: Mapping[Path, Any], given: Mapping[Path, Given]
) -> S:
    arguments = {
        field.name: _construct(field.type, (*path, field.name), values, given)
        if is_group(field.type)
        else values[*path, field.name]
        for field in msgspec.structs.fields(model)
    }
    try:
        return model(**arguments)
    except ValueError as error:  # raised by a group's own __post_init__
        # What a group says may quote its values, with the secrets of addresses among them.
        mistake = shorten_middle(mask_texts(str(error), _texts_in(list(arguments.values()))))
        raise SettingsError(_with_origin(mistake, path, arguments, given)) from error


def _with_origin(
    mistake: str, path: Path, fields: Collection[str], given: Mapping[Path, Given]
) -> str:
    """Name the field that a group's message begins with as whoever gave it wrote it."""
    found = _OF_A_FIELD.fullmatch(mistake)
    if not found or found["field"] not in fields:
        return f"{dotted(path)}: {mistake}" if path else mistake
    at = (*path, found["field"])
    name = given[at].origin if at in given else dotted(at)
    return f"{name}: {found['mistake']}"


def _texts_in(value: Any) -> Iterator[str]:  # noqa: ANN401  # any built-in value
    """Yield the texts that a value is or holds, as keys too."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from _texts_in([*value, *value.values()])
    elif isinstance(value, list | tuple | set | frozenset):
        for inner in value:
            yield from _texts_in(inner)
