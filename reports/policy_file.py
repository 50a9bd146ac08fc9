"""Reads the file of prices and policies, and says of each mistake its line, field and remedy."""

import re
from collections.abc import Hashable, Iterator, Sequence
from datetime import date
from decimal import Decimal
from hashlib import sha256
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
import yaml

from gpuledger.errors import UserError
from gpuledger.small_files import read_small_file
from gpuledger.texts import find_near, shorten_middle
from reports.policy import BillPolicy, mistakes_of

MAX_BYTES: Final = 8 * 2**20
DEFAULT_FILE: Final = Path(__file__).with_name("list_prices.yaml")
_WHERE: Final = re.compile(r"^(?P<what>.*?)(?: - at `\$(?P<path>.*)`)?$", re.DOTALL)
_STEP: Final = re.compile(r"\.(?P<name>[^.\[]+)|\[(?P<at>\d+|\.\.\.)\]")
_UNKNOWN: Final = re.compile(r"unknown field `(?P<field>[^`]*)`")
_MISSING: Final = re.compile(r"missing required field `(?P<field>[^`]*)`")

_WHOLE_NUMBER: Final = re.compile(r"[-+]?(0|[1-9][0-9]*)")
_NUMBER: Final = re.compile(r"[-+]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][-+]?[0-9]+)?")
Steps = tuple[str | int, ...]


class PolicyError(UserError):
    """A file of prices and policies that means nothing; each mistake with its line and remedy."""

    def __init__(self, mistakes: Sequence[str], *, file: str = "") -> None:
        self.mistakes = tuple(mistakes)
        super().__init__(f"{file}{': ' if file else ''}{'; '.join(mistakes)}")


class ReadPolicy(NamedTuple):
    """A file that was read, with what a bill says of it."""

    policy: BillPolicy
    sha256: str
    """The hash of what it means: comments and the order of keys do not count."""
    name: str
    """What it is called on bills."""


def read_policy(file: Path | None) -> ReadPolicy:
    """Return the policy of a file, or the built-in example prices; raises UserError as below."""
    name = "built-in example prices" if file is None else file.name
    try:
        text = read_small_file(file or DEFAULT_FILE, max_bytes=MAX_BYTES).decode()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8"
        raise UserError(f"cannot read {file}: {reason}; give a file of prices") from error
    try:
        policy = parse_policy(text)
    except PolicyError as error:
        raise PolicyError(error.mistakes, file=str(file)) from error
    # Sorted, as the order in which a file names its fields says nothing; that of rows does.
    meaning = msgspec.json.encode(policy, order="sorted")
    return ReadPolicy(policy, sha256(meaning).hexdigest(), name)


def parse_policy(text: str) -> BillPolicy:
    """Return the policy that a YAML text means.

    Raises `PolicyError` with all mistakes that could be found: line, field, remedy.
    """
    try:
        root = yaml.compose(text, Loader=_ExactLoader)
        lines = _LineNumbers(root)
        content = yaml.load(text, Loader=_ExactLoader)  # noqa: S506  # a SafeLoader
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f"line {mark.line + 1}: " if mark else ""
        raise PolicyError([f"{where}no valid YAML: {error.problem or error.context}"]) from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise PolicyError([f"no valid YAML: {shorten_middle(str(error))}"]) from error
    try:
        policy = msgspec.convert({} if content is None else content, BillPolicy)
    except msgspec.ValidationError as error:
        raise PolicyError([_explain(str(error), content, lines)]) from error
    mistakes = [f"{lines.name(path)}: {what}" for path, what in mistakes_of(policy)]
    if mistakes:
        raise PolicyError(mistakes)
    return policy


class _ExactLoader(yaml.SafeLoader):
    """Reads numbers as they are written: no digit is lost, and none means something else."""


def _whole_number(_: _ExactLoader, node: yaml.ScalarNode) -> int:
    text = node.value
    # To YAML 1.1 010 is eight, and 1:30 is ninety.
    if not _WHOLE_NUMBER.fullmatch(text):
        raise yaml.MarkedYAMLError(
            problem=f"{text} is no decimal number; write it without zeros before it, and whole",
            problem_mark=node.start_mark,
        )
    return int(text)


def _number(loader: _ExactLoader, node: yaml.ScalarNode) -> Decimal | float:
    text = node.value.replace("_", "")
    # Infinity and the like are no prices, which is said where they stand for one.
    return Decimal(text) if _NUMBER.fullmatch(text) else loader.construct_yaml_float(node)


_ExactLoader.add_constructor("tag:yaml.org,2002:int", _whole_number)
_ExactLoader.add_constructor("tag:yaml.org,2002:float", _number)


class _LineNumbers:
    """Where each part of a YAML text stands."""

    def __init__(self, root: yaml.Node | None) -> None:
        self._lines: dict[Steps, int] = {}
        if root:
            self._walk(root, ())

    def name(self, path: Steps) -> str:
        """Return how a part is called in messages: `line 7: prices[0].model`."""
        dotted = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path)
        # A part that is not there is looked for where it would stand.
        at = next((path[:end] for end in range(len(path), 0, -1) if path[:end] in self._lines), ())
        return f"line {self._lines.get(at, 1)}: {dotted.lstrip('.') or 'the file'}"

    def _walk(self, node: yaml.Node, path: Steps) -> None:
        # A key's line, where there is one, is where its mistake is looked for.
        self._lines.setdefault(path, node.start_mark.line + 1)
        if isinstance(node, yaml.SequenceNode):
            for at, item in enumerate(node.value):
                self._walk(item, (*path, at))
        elif isinstance(node, yaml.MappingNode):
            for key, value in node.value:
                here = (*path, str(key.value))
                if here in self._lines:
                    # PyYAML would take the last of them in silence.
                    line, first = key.start_mark.line + 1, self._lines[here]
                    twice = f"{key.value!r} stands twice, in line {first} too; take one of them out"
                    raise PolicyError([f"line {line}: {twice}"])
                self._lines[here] = key.start_mark.line + 1
                self._walk(value, here)


def _explain(message: str, content: object, lines: _LineNumbers) -> str:
    """Turn msgspec's words into ours, with the line, and the nearest field where one is unknown."""
    match = _WHERE.match(message)
    what, written = (match["what"], match["path"] or "") if match else (message, "")
    path = _path_of(written, content)
    if unknown := _UNKNOWN.search(what):
        known = sorted(_fields_at(path))
        near = find_near(unknown["field"], known)
        remedy = f"did you mean {near}?" if near else f"there are {', '.join(known)}"
        return f"{lines.name((*path, unknown['field']))}: is no field here; {remedy}"
    if missing := _MISSING.search(what):
        return f"{lines.name(path)}: {missing['field']} is missing; add it"
    return f"{lines.name(path)}: {what[:1].lower()}{what[1:]}"


def _path_of(written: str, content: object) -> Steps:
    path: list[str | int] = []
    for step in _STEP.finditer(written):
        if step["name"] is not None:
            path.append(step["name"])
        elif step["at"] != "...":
            path.append(int(step["at"]))
        else:
            # Of a mapping msgspec does not say which key; where it has one alone, it is that.
            keys = list(_value_at(content, path) or ())
            path += [str(keys[0])] if len(keys) == 1 else []
    return tuple(path)


def _value_at(content: Any, path: list[str | int]) -> dict[Hashable, Any] | None:  # noqa: ANN401  # any YAML
    for step in path:
        content = content[step]
    return content if isinstance(content, dict) else None


def _fields_at(path: Steps) -> Iterator[str]:
    """Yield the fields of the part at a path, as the file names them."""
    part: msgspec.inspect.Type = msgspec.inspect.type_info(BillPolicy)
    for step in path:
        if isinstance(part, msgspec.inspect.UnionType):
            part = next(each for each in part.types if isinstance(each, msgspec.inspect.StructType))
        if isinstance(part, msgspec.inspect.ListType):
            part = part.item_type
        elif isinstance(part, msgspec.inspect.StructType):
            part = next(field.type for field in part.fields if field.encode_name == step)
    if isinstance(part, msgspec.inspect.UnionType):
        part = next(each for each in part.types if isinstance(each, msgspec.inspect.StructType))
    if isinstance(part, msgspec.inspect.StructType):
        yield from (field.encode_name for field in part.fields)


def days_of_change(policy: BillPolicy) -> frozenset[date]:
    """Return the days at whose begin a row of the file comes into force or goes out of it."""
    dated = [*policy.prices, *policy.energy, *policy.idle, *policy.shared, *policy.teams]
    edges = {edge for row in dated for edge in (row.since, row.until)}
    return frozenset({edge for edge in edges if edge} | {r.since for r in policy.exchange_rates})
