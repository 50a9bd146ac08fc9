"""Reads the file of prices and policies, and says of each mistake its line, field and remedy."""

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
_REQUIRED_BY_OTHERS: Final = frozenset({("currency",), ("exchange_rates",), ("dimensions",)})
"""Sections without which nothing can be said of the others."""


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
    content = {} if content is None else content
    mistakes = list(mistakes_in(content, BillPolicy))
    mistakes += _between_the_right(content, mistakes)
    messages = [*lines.twice, *(f"{lines.name(path)}: {what}" for path, what in mistakes)]
    if messages:
        # Written above and below: `line 7: …`.
        raise PolicyError(sorted(messages, key=lambda mistake: int(mistake.split()[1].rstrip(":"))))
    return msgspec.convert(content, BillPolicy)


def _between_the_right(content: Any, mistakes: Sequence[Mistake]) -> Iterator[Mistake]:  # noqa: ANN401  # any YAML
    """Yield what is wrong between the sections and rows in which nothing else is.

    So that all mistakes are named at once; nothing where it cannot be told for the others.
    """
    wrong = {path[:2] for path, _ in mistakes}
    if {path[:1] for path in wrong} & {(), *_REQUIRED_BY_OTHERS}:
        return
    kept: dict[str, Any] = {}
    stood: dict[Steps, Steps] = {}
    # Keys may be anything in YAML; what stands for them in paths are texts.
    for section, rows in ((str(key), rows) for key, rows in content.items()):
        if isinstance(rows, list) and (section,) not in wrong:
            right = [at for at in range(len(rows)) if (section, at) not in wrong]
            stood |= {(section, now): (section, at) for now, at in enumerate(right)}
            kept[section] = [rows[at] for at in right]
        elif not any(path[0] == section for path in wrong):
            kept[section] = rows
    for path, what in mistakes_of(msgspec.convert(kept, BillPolicy)):
        yield (*stood.get(path[:2], path[:2]), *path[2:]), what


class _ExactLoader(yaml.SafeLoader):
    """Reads numbers as they are written: no digit is lost, and none means something else."""


def _whole_number(_: _ExactLoader, node: yaml.ScalarNode) -> int | MisreadValue:
    text = node.value
    # To YAML 1.1 010 is eight, and 1:30 is ninety.
    if _WHOLE_NUMBER.fullmatch(text):
        return int(text)
    why = f"{text} is no decimal number; write it without zeros before it, and whole"
    return MisreadValue(text, why)


def _number(loader: _ExactLoader, node: yaml.ScalarNode) -> Decimal | float:
    text = node.value.replace("_", "")
    # Infinity and the like are no prices, which is said where they stand for one.
    return Decimal(text) if _NUMBER.fullmatch(text) else loader.construct_yaml_float(node)


def _time(loader: _ExactLoader, node: yaml.ScalarNode) -> date | MisreadValue:
    try:
        found: date = loader.construct_yaml_timestamp(node)
    except ValueError:
        why = f"{node.value} is no day of the calendar; give one such as 2026-10-01"
        return MisreadValue(node.value, why)
    return found


_ExactLoader.add_constructor("tag:yaml.org,2002:int", _whole_number)
_ExactLoader.add_constructor("tag:yaml.org,2002:float", _number)
_ExactLoader.add_constructor("tag:yaml.org,2002:timestamp", _time)


class _LineNumbers:
    """Where each part of a YAML text stands."""

    def __init__(self, root: yaml.Node | None) -> None:
        self._lines: dict[Steps, int] = {}
        self._count = 0
        self.twice: list[str] = []
        """Of each field that stands twice: PyYAML would take the last of them in silence."""
        if root:
            self._walk(root, ())

    def name(self, path: Steps) -> str:
        """Return how a part is called in messages: `line 7: prices[0].model`."""
        dotted = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path)
        # A part that is not there is looked for where it would stand.
        at = next((path[:end] for end in range(len(path), 0, -1) if path[:end] in self._lines), ())
        return f"line {self._lines.get(at, 1)}: {dotted.lstrip('.') or 'the file'}"

    def _walk(self, node: yaml.Node, path: Steps) -> None:
        self._count += 1
        # An alias stands for all that its anchor has, and aliases of aliases for ever more.
        if self._count > MAX_VALUES:
            line = node.start_mark.line + 1
            raise PolicyError([f"line {line}: more than {MAX_VALUES} values, with all aliases"])
        # A key's line, where there is one, is where its mistake is looked for.
        self._lines.setdefault(path, node.start_mark.line + 1)
        if isinstance(node, yaml.SequenceNode):
            for at, item in enumerate(node.value):
                self._walk(item, (*path, at))
        elif isinstance(node, yaml.MappingNode):
            for key, value in node.value:
                here = (*path, str(key.value))
                if here in self._lines:
                    line, first = key.start_mark.line + 1, self._lines[here]
                    twice = f"{key.value!r} stands twice, in line {first} too; take one of them out"
                    self.twice.append(f"line {line}: {twice}")
                self._lines[here] = key.start_mark.line + 1
                self._walk(value, here)


def days_of_change(policy: BillPolicy) -> frozenset[date]:
    """Return the days at whose begin a row of the file comes into force or goes out of it."""
    dated = [*policy.prices, *policy.energy, *policy.idle, *policy.shared, *policy.teams]
    edges = {edge for row in dated for edge in (row.since, row.until)}
    return frozenset({edge for edge in edges if edge} | {r.since for r in policy.exchange_rates})
