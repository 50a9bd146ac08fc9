"""Builds a settings object from layers of given values: merges, converts, constructs.

This module reads neither files nor the environment. Every error shows the setting's name as written
in its source, the value and the expected form.
"""

import enum
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path as FilePath
from typing import Annotated, Any, Final, Literal, NamedTuple, TypeVar, get_args, get_origin

import msgspec
import yaml

from gpuledger.errors import SettingsError
from gpuledger.settings.secret import MASK, Secret, mask_address, mask_texts
from gpuledger.settings.sources import (
    REQUIRED,
    Given,
    Layer,
    Path,
    Setting,
    alternatives,
    dotted,
    is_group,
    kind_of,
    settings_of,
)
from gpuledger.settings.yaml_errors import explain_yaml
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
# The form in which a group's `__post_init__` begins its message on one of its fields.
_OF_A_FIELD: Final = re.compile(
    r"(?P<field>[a-z_]\w*(?:\.[a-z_]\w*)*):? (?!and )(?P<mistake>.+)", re.DOTALL | re.ASCII
)
_BOUNDS: Final = {
    "gt": ">",
    "ge": ">=",
    "lt": "<",
    "le": "<=",
    "min_length": "of length >=",
    "max_length": "of length <=",
}
_LISTS: Final = frozenset({list, tuple, set, frozenset})
_PLAIN_KEY: Final = re.compile(r"[\w*?/-][\w.*?/-]{0,99}")
"""Keys that need no quotes in a dotted path."""
_PLAIN_ITEMS: Final = re.compile(r"[\w./-]+(?:\s*,\s*[\w./-]+)*")
"""Texts that are probably meant as lists of names, but lack the brackets."""


def build(model: type[S], layers: Sequence[Layer]) -> S:
    """Build the settings; later layers override earlier ones.

    Raises `SettingsError` for the first mistake.
    """
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
    except msgspec.ValidationError as error:
        raise SettingsError(_explain(setting, given)) from error
    except (ValueError, yaml.YAMLError, RecursionError) as error:
        mistake = explain_yaml(error) if isinstance(error, yaml.YAMLError) else str(error)
        mistake = shorten_middle(mask_texts(mistake, _texts_in(given.value)))
        raise SettingsError(
            f"{given.origin}: expected {describe(setting.type)}: {mistake}"
        ) from error


def _is_none(setting: Setting, value: Any) -> bool:  # noqa: ANN401  # any setting
    """Return whether a value of a text or path setting means the default `none`.

    Null means `none` if the default is the empty text; the empty text means `none` if a path is
    optional. The empty text of a secret does not mean `none`.
    """
    if setting.default == "":
        return value is None
    return value == "" and setting.default is None and FilePath in alternatives(setting.type)


def _read_text(hint: Any, text: str) -> Any:  # noqa: ANN401  # any setting
    """Convert a text to the type `hint`: unchanged, or parsed as a number, a list or YAML."""
    try:
        return msgspec.convert(text, hint, dec_hook=_from_text)
    except msgspec.ValidationError:
        return msgspec.convert(_parse(hint, text), hint, strict=False, dec_hook=_from_text)


def _parse(hint: Any, text: str) -> Any:  # noqa: ANN401  # any setting
    kinds = {get_origin(part) or part for part in map(_bare, alternatives(hint))}
    if kinds & _LISTS and not text.lstrip().startswith("["):
        return [part.strip() for part in text.split(",") if part.strip()]
    if any(is_group(kind) for kind in kinds) or kinds & {*_LISTS, dict}:
        return yaml.safe_load(text)
    return text


def _from_text(wanted: type, value: Any) -> Any:  # noqa: ANN401  # msgspec's hook for types that it does not know
    if isinstance(value, Secret) and wanted is Secret:  # read from its file already
        return value
    if wanted in (Secret, FilePath) and isinstance(value, str):
        return wanted(value)
    raise ValueError(wanted.__name__)  # `_explain` writes the message


# Messages on invalid values: where in the value the mistake is, what is expected there, what was
# given, and a remedy. They avoid msgspec's messages, which are about its own types.


class _Mistake(NamedTuple):
    at: tuple[Any, ...]
    """Indices and keys of the invalid part within the setting's value."""
    hint: Any
    """The expected type."""
    value: Any
    """The given value."""


_LARGE: Final = 10**100
"""Python does not convert numbers with thousands of digits to text."""


def _is_large(value: Any) -> bool:  # noqa: ANN401  # any built-in value
    return isinstance(value, int) and abs(value) >= _LARGE


def _explain(setting: Setting, given: Given) -> str:
    value = _parse(setting.type, given.value) if given.is_text else given.value
    found = _find_mistake(setting.type, value, is_strict=not given.is_text)
    # Checked before splitting: a secret may contain a comma, and its parts do not look secret.
    is_plain = all(mask_address(text) == text for text in _texts_in(given.value))
    is_shown = is_plain and not setting.may_hold_secrets
    # If the value itself may be secret, only its kind is shown, which is enough to fix the mistake.
    # A list or mapping may be of any length and contain a password.
    is_whole = isinstance(found.value, dict | list | tuple | set | frozenset)
    if setting.may_hold_secrets or _is_large(found.value) or is_whole:
        shown = kind_of(found.value)
    elif is_plain:
        shown = _shown(found.value)
    else:
        shown = repr(mask_address(given.value)) if isinstance(given.value, str) else MASK
    name = given.origin
    # The origin names only the whole setting, so the path of the invalid part is added.
    if found.at:
        keys = (_written(key, is_plain=is_plain, is_shown=is_shown) for key in found.at)
        path = f"{setting.name}{''.join(keys)}"
        name = f"{path} in {given.file}" if given.file else f"{given.origin}: {path}"
    remedy = _remedy(found, is_shown=is_shown)
    return f"{name}: expected {describe(found.hint)}, got {shown}{remedy}"


def _written(key: Any, *, is_plain: bool, is_shown: bool) -> str:  # noqa: ANN401  # any built-in value
    """Return the text that identifies an item in errors: its index or key, as in `name.key`.

    An unusual key of a mapping that may hold secrets is masked, because the key may contain a
    secret (`name=value`).
    """
    if isinstance(key, _Index):
        return f"[{key}]"
    if is_plain and _PLAIN_KEY.fullmatch(str(key)):
        return f".{key}"
    return f"[{shorten(repr(key), _SHOWN_CHARACTERS)}]" if is_shown else f"[{MASK}]"


def _find_mistake(hint: Any, value: Any, *, is_strict: bool) -> _Mistake:  # noqa: ANN401  # any annotation, any value
    """Return the innermost invalid part of an invalid value, with the type expected there."""
    for key, wanted, part in _parts(hint, value):
        try:
            msgspec.convert(part, wanted, strict=is_strict, dec_hook=_from_text)
        except msgspec.ValidationError:
            # Terminates however deep the value is, because each hint is part of the one before.
            found = _find_mistake(wanted, part, is_strict=is_strict)
            return found._replace(at=(key, *found.at))
    return _Mistake((), hint, value)


class _Index(int):
    """The position of an item in a list, as opposed to a key of a mapping."""


def _parts(hint: Any, value: Any) -> Iterator[tuple[Any, Any, Any]]:  # noqa: ANN401  # as above
    """Yield the index or key of each part of a value, the type expected there, and the part."""
    # A value of the wrong shape has no parts, so the whole value is the mistake.
    for wanted in map(_bare, alternatives(hint)):
        inner = get_args(wanted)
        if get_origin(wanted) in _LISTS and isinstance(value, list | tuple):
            yield from ((_Index(index), inner[0], item) for index, item in enumerate(value))
        elif get_origin(wanted) is dict and isinstance(value, dict):
            for key, item in value.items():
                yield key, inner[0], key
                yield key, inner[1], item
        elif is_group(wanted) and isinstance(value, dict):
            for field in msgspec.structs.fields(wanted):
                if field.encode_name in value:
                    yield field.encode_name, field.type, value[field.encode_name]


def _bare(hint: Any) -> Any:  # noqa: ANN401  # as above
    """Return a type annotation without its constraints."""
    return get_args(hint)[0] if get_origin(hint) is Annotated else hint


def _shown(value: Any) -> str:  # noqa: ANN401  # as above
    # Written as in YAML and JSON, because the user wrote it that way.
    if value is None or isinstance(value, bool):
        return msgspec.json.encode(value).decode()
    text = repr(value) if isinstance(value, str | list | dict) else str(value)
    return shorten(text, _SHOWN_CHARACTERS)


def _remedy(found: _Mistake, *, is_shown: bool) -> str:
    wanted = set(map(_bare, alternatives(found.hint)))
    is_one = not isinstance(found.value, list | dict) and found.value is not None
    # YAML reads 1, no and 2026-11-21 as a number, a boolean and a date.
    if is_one and not isinstance(found.value, str) and wanted & {str, Secret, FilePath}:
        return ": put it in quotes"
    if {get_origin(part) for part in wanted} & _LISTS:
        text = "" if _is_large(found.value) else str(found.value)
        # Brackets around YAML's special characters would change their meaning.
        is_name = is_one and is_shown and _PLAIN_ITEMS.fullmatch(text)
        return f": write [{text}]" if is_name else ": write [a, b], or [] for none"
    return ""


def describe(hint: Any) -> str:  # noqa: ANN401  # any type annotation
    """Return a description of the values that a setting accepts."""
    return " or ".join(_describe_one(part) for part in alternatives(hint) if part is not type(None))


def _describe_one(hint: Any) -> str:  # noqa: ANN401  # any type annotation
    if get_origin(hint) is Annotated:
        base, *notes = get_args(hint)
        # Annotations other than msgspec.Meta have no constraints.
        bounds = (
            f"{sign} {_number(bound)}"
            for note in notes
            for name, sign in _BOUNDS.items()
            if (bound := getattr(note, name, None)) is not None
        )
        return " ".join(filter(None, [describe(base), " and ".join(bounds)]))
    if get_origin(hint) is Literal:
        values = [str(value) for value in get_args(hint)]
        return f"one of {', '.join(values)}" if len(values) > 1 else values[0]
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return "one of " + ", ".join(str(member.value) for member in hint)
    return _describe_whole(hint) or _NAMES.get(hint, str(hint))


def _number(bound: float) -> str:
    """Return a bound as text with all its digits; the format `:g` would round it."""
    shown = f"{bound:g}"
    return f"{bound:.0f}" if "e+" in shown else shown


def _describe_whole(hint: Any) -> str | None:  # noqa: ANN401  # any type annotation
    """Return the description of a list, mapping or group; `None` for other types."""
    if get_origin(hint) in _LISTS:
        item = get_args(hint)[0]
        items = ", ".join(str(value) for value in get_args(item))
        return f"a list of any of {items}" if get_origin(item) is Literal else "a list"
    if get_origin(hint) is dict:
        example = '"value"' if _bare(get_args(hint)[1]) is str else "1"
        return f'a mapping, {{"name": {example}}} in JSON or YAML'
    if is_group(hint):
        names = (field.encode_name for field in msgspec.structs.fields(hint))
        return f"a mapping of {', '.join(names)}"
    return None


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
        # The group's message may quote values, which may be addresses with secrets.
        mistake = shorten_middle(mask_texts(str(error), _texts_in(list(arguments.values()))))
        raise SettingsError(_with_origin(mistake, path, arguments, given)) from error


def _with_origin(
    mistake: str, path: Path, fields: Collection[str], given: Mapping[Path, Given]
) -> str:
    """Return a settings group's error message with the setting's name instead of the field's name.

    The setting is named as in the source that gave the value, for example by its environment
    variable. If the message does not begin with a field, the group's name is put before it.
    """
    found = _OF_A_FIELD.fullmatch(mistake)
    if not found or found["field"].partition(".")[0] not in fields:
        return f"{dotted(path)}: {mistake}" if path else mistake
    at = (*path, *found["field"].split("."))
    name = given[at].origin if at in given else dotted(at)
    return f"{name}: {found['mistake']}"


def _texts_in(value: Any) -> Iterator[str]:  # noqa: ANN401  # any built-in value
    """Yield all texts in a value, including keys."""
    # YAML anchors can make a list part of several others, or of itself.
    seen: set[int] = set()
    left = [value]
    while left:
        one = left.pop()
        if isinstance(one, str):
            yield one
        elif isinstance(one, dict | list | tuple | set | frozenset) and id(one) not in seen:
            seen.add(id(one))
            left += [*one, *one.values()] if isinstance(one, dict) else one
