"""Reads the price file, and reports each mistake with its line, field and remedy."""

import re
from collections.abc import Iterator, Sequence
from datetime import date
from decimal import Decimal
from hashlib import sha256
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
import yaml

from gpuledger.errors import UserError
from gpuledger.small_files import read_small_file
from gpuledger.texts import shorten_middle
from gpuledger_reports.pricing.policy import BillPolicy, mistakes_of
from gpuledger_reports.pricing.policy_fields import MisreadValue, Mistake, Steps, mistakes_in

MAX_BYTES: Final = 8 * 2**20
MAX_VALUES: Final = 1_000_000
DEFAULT_FILE: Final = Path(__file__).with_name("list_prices.yaml")
_WHOLE_NUMBER: Final = re.compile(r"[-+]?(0|[1-9][0-9]*)")
_NUMBER: Final = re.compile(r"[-+]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][-+]?[0-9]+)?")


class PolicyError(UserError):
    """The price file is invalid; the error lists each mistake with its line and remedy."""

    def __init__(self, mistakes: Sequence[str], *, file: str = "") -> None:
        self.mistakes = tuple(mistakes)
        super().__init__(f"{file}{': ' if file else ''}{'; '.join(mistakes)}")


class ReadPolicy(NamedTuple):
    """A policy with the metadata that bills show."""

    policy: BillPolicy
    sha256: str
    """The hash of the content; comments and the order of keys do not count."""
    name: str
    """The policy's name on bills."""


def read_policy(file: Path | None) -> ReadPolicy:
    """Return the policy of a file; without a file, the built-in example prices.

    Raises `PolicyError` if the file is invalid, and `UserError` if it cannot be read.
    """
    name = "built-in example prices" if file is None else file.name
    try:
        text = read_small_file(file or DEFAULT_FILE, max_bytes=MAX_BYTES).decode()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8"
        raise UserError(f"cannot read {file}: {reason}; give a price file") from error
    try:
        policy = parse_policy(text)
    except PolicyError as error:
        raise PolicyError(error.mistakes, file=str(file)) from error
    # Sorted, because the order of fields has no meaning; the order of rows has.
    meaning = msgspec.json.encode(policy, order="sorted")
    return ReadPolicy(policy, sha256(meaning).hexdigest(), name)


def parse_policy(text: str) -> BillPolicy:
    """Return the policy that a YAML text describes.

    Raises `PolicyError` with the line, field and remedy of each mistake.
    """
    try:
        root = yaml.compose(text, Loader=_ExactLoader)
        lines = _LineNumbers(root)
        content = yaml.load(text, Loader=_ExactLoader)  # noqa: S506  # a SafeLoader
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f"line {mark.line + 1}: " if mark else ""
        raise PolicyError([f"{where}invalid YAML: {error.problem or error.context}"]) from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise PolicyError([f"invalid YAML: {shorten_middle(str(error))}"]) from error
    content = {} if content is None else content
    mistakes = list(mistakes_in(content, BillPolicy))
    mistakes += _mistakes_between_parts(content, mistakes)
    messages = [*lines.twice, *(f"{lines.name(path)}: {what}" for path, what in mistakes)]
    if messages:
        # Each message begins with `line N: `.
        raise PolicyError(sorted(messages, key=lambda mistake: int(mistake.split()[1].rstrip(":"))))
    return msgspec.convert(content, BillPolicy)


def _mistakes_between_parts(content: Any, mistakes: Sequence[Mistake]) -> Iterator[Mistake]:  # noqa: ANN401  # any YAML
    """Yield the mistakes that appear only if a file's parts are checked against each other.

    Sections and rows with mistakes of their own (`mistakes`) are left out of this check, so that
    all mistakes of a file are reported at once.
    """
    wrong = {path[:2] for path, _ in mistakes}
    if () in wrong:
        return
    kept: dict[str, Any] = {}
    in_file: dict[Steps, Steps] = {}
    # Keys may be any YAML value, but steps of paths are strings.
    for section, rows in ((str(key), rows) for key, rows in content.items()):
        if isinstance(rows, list) and (section,) not in wrong:
            right = [at for at in range(len(rows)) if (section, at) not in wrong]
            in_file |= {(section, now): (section, at) for now, at in enumerate(right)}
            kept[section] = [rows[at] for at in right]
        elif not any(path[0] == section for path in wrong):
            kept[section] = rows
    invalid = {str(path[0]) for path in wrong}
    for path, what in mistakes_of(msgspec.convert(kept, BillPolicy), invalid=invalid):
        yield (*in_file.get(path[:2], path[:2]), *path[2:]), what


class _ExactLoader(yaml.SafeLoader):
    """Reads YAML; keeps every digit of numbers and rejects numbers in unusual notations."""


def _whole_number(_: _ExactLoader, node: yaml.ScalarNode) -> int | MisreadValue:
    text = node.value
    # YAML 1.1 reads 010 as eight and 1:30 as ninety.
    if _WHOLE_NUMBER.fullmatch(text):
        return int(text)
    why = f"invalid number {text}; write digits only, without leading zeros"
    return MisreadValue(text, why)


def _number(loader: _ExactLoader, node: yaml.ScalarNode) -> Decimal | float:
    text = node.value.replace("_", "")
    # Infinity and NaN stay floats, which the price's field rejects.
    return Decimal(text) if _NUMBER.fullmatch(text) else loader.construct_yaml_float(node)


def _time(loader: _ExactLoader, node: yaml.ScalarNode) -> date | MisreadValue:
    try:
        found: date = loader.construct_yaml_timestamp(node)
    except ValueError:
        why = f"{node.value} is not a day of the calendar; give one such as 2026-10-01"
        return MisreadValue(node.value, why)
    return found


_ExactLoader.add_constructor("tag:yaml.org,2002:int", _whole_number)
_ExactLoader.add_constructor("tag:yaml.org,2002:float", _number)
_ExactLoader.add_constructor("tag:yaml.org,2002:timestamp", _time)


class _LineNumbers:
    """The line number of each part of a YAML text."""

    def __init__(self, root: yaml.Node | None) -> None:
        self._lines: dict[Steps, int] = {}
        self._count = 0
        self.twice: list[str] = []
        """Messages for duplicate keys; PyYAML would silently use the last one."""
        if root:
            self._walk(root, ())

    def name(self, path: Steps) -> str:
        """Return a part's name for messages: `line 7: prices[0].model`."""
        dotted = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path)
        # A missing part has the line of the nearest part around it.
        at = next((path[:end] for end in range(len(path), 0, -1) if path[:end] in self._lines), ())
        return f"line {self._lines.get(at, 1)}: {dotted.lstrip('.') or 'the file'}"

    def _walk(self, node: yaml.Node, path: Steps) -> None:
        self._count += 1
        # An alias repeats its anchor's content, so nested aliases could make this walk very long.
        if self._count > MAX_VALUES:
            line = node.start_mark.line + 1
            raise PolicyError(
                [f"line {line}: more than {MAX_VALUES} values, including aliases; use fewer"]
            )
        # Mistakes of a value are reported at the line of its key, if it has one.
        self._lines.setdefault(path, node.start_mark.line + 1)
        if isinstance(node, yaml.SequenceNode):
            for at, item in enumerate(node.value):
                self._walk(item, (*path, at))
        elif isinstance(node, yaml.MappingNode):
            for key, value in node.value:
                here = (*path, str(key.value))
                if here in self._lines:
                    line, first = key.start_mark.line + 1, self._lines[here]
                    twice = f"duplicate key {key.value!r}, also in line {first}; remove one"
                    self.twice.append(f"line {line}: {twice}")
                self._lines[here] = key.start_mark.line + 1
                self._walk(value, here)


def days_of_change(policy: BillPolicy) -> frozenset[date]:
    """Return the days on which a row of the file begins to apply, or no longer applies."""
    dated = [*policy.prices, *policy.energy, *policy.idle, *policy.shared, *policy.teams]
    edges = {edge for row in dated for edge in (row.since, row.until)}
    return frozenset({edge for edge in edges if edge} | {r.since for r in policy.exchange_rates})
