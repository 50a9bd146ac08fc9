"""The parts of a PromQL query that the checks of autoscalers read.

This is not a parser: it finds series, label matchers, functions, the outermost aggregation and the
factor of constants. Everything else stays unknown, and the checks report nothing about it.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final, NamedTuple

_TOKEN: Final = re.compile(
    r"""(?P<text>"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*'|`[^`]*`)
    |(?P<comment>\#[^\n]*)
    |(?P<number>\d[\w.]*(?::(?:\d\w*)?)?|\.\d+)
    |(?P<name>[a-zA-Z_:][\w:]*)
    |(?P<sign>=~|!~|!=|==|<=|>=|[-+*/%^(){}\[\],=<>@:])""",
    re.VERBOSE,
)
_AGGREGATIONS: Final = frozenset(
    {"sum", "avg", "min", "max", "count", "quantile", "stddev", "stdvar", "group"}
    | {"topk", "bottomk", "count_values", "limitk", "limit_ratio"}
)
_LABEL_LISTS: Final = frozenset({"by", "without", "on", "ignoring", "group_left", "group_right"})
_WORDS: Final = _LABEL_LISTS | {"and", "or", "unless", "offset", "bool", "atan2", "inf", "nan"}
_MATCHINGS: Final = frozenset({"on", "ignoring"})
SAME_SERIES: Final = frozenset(
    {"abs", "ceil", "floor", "round", "clamp", "clamp_max", "clamp_min", "sort"}
    | {"avg_over_time", "max_over_time", "min_over_time", "last_over_time", "label_replace"}
)
"""Functions that have one result for each series of their first argument."""
_ANYTHING: Final = frozenset({"", ".*", ".+"})
_ALTERNATIVES: Final = (["0", "*"], ["vector", "("])
_OPEN, _CLOSE = "([{", ")]}"


class Token(NamedTuple):
    """A word or a sign of a query."""

    kind: str
    text: str
    depth: int
    """Number of brackets around it."""


class Matcher(NamedTuple):
    """A condition on a label."""

    label: str
    sign: str
    value: str

    @property
    def selects(self) -> bool:
        """Whether it requires certain values."""
        return self.sign in {"=", "=~"} and self.value not in _ANYTHING


class Aggregation(NamedTuple):
    """The aggregation around a whole query."""

    name: str
    by: tuple[str, ...]
    """The labels that its results keep; empty for `without` and for a single result."""


@dataclass(frozen=True)
class Query:
    """A PromQL query."""

    text: str

    @cached_property
    def tokens(self) -> tuple[Token, ...]:
        """Its tokens without comments."""
        return tuple(_tokens(self.text))

    @cached_property
    def main(self) -> "Query":
        """The query without its alternative for an empty result: `or 0 * …` or `or vector(…)`."""
        tokens = _main(self.tokens)
        return self if tokens is self.tokens else Query(" ".join(one.text for one in tokens))

    @cached_property
    def matchers(self) -> tuple[Matcher, ...]:
        """The matchers of all its series."""
        triples = zip(self.tokens, self.tokens[1:], self.tokens[2:], strict=False)
        return tuple(
            Matcher(label.text.strip("\"'`"), sign.text, value.text[1:-1])
            for label, sign, value in triples
            if sign.text in {"=", "!=", "=~", "!~"} and value.kind == "text"
        )

    @cached_property
    def places(self) -> tuple[tuple[int, str], ...]:
        """The names of its series, each with the index of its token."""
        return tuple(_series(self.tokens))

    @property
    def series(self) -> tuple[str, ...]:
        """The names of its series."""
        return tuple(name for _, name in self.places)

    @cached_property
    def functions(self) -> frozenset[str]:
        """The functions and aggregations that it calls."""
        following = zip(self.tokens, self.tokens[1:], strict=False)
        called = {one.text for one, after in following if one.kind == "name" and after.text == "("}
        named = {one.text for one in self.tokens if one.kind == "name"}
        return frozenset((called - _WORDS) | (named & _AGGREGATIONS))

    @cached_property
    def outer(self) -> Aggregation | None:
        """The aggregation around the whole query; None if unknown.

        Constant factors and functions that keep the unit do not count, and `sum(…) / count(…)` is
        an average.
        """
        return _aggregation(_bare(self.tokens))

    @cached_property
    def factor(self) -> float | None:
        """The product of its constant factors; None if it calculates anything else."""
        factor = 1.0
        for index, token in enumerate(self.tokens):
            if token.kind != "sign" or token.text not in "+-*/%^":
                continue
            if constant := self._constant_beside(index):
                factor *= constant
            elif not self._is_info_join(index):
                return None
        return factor

    def _after(self, index: int) -> Token:
        return self.tokens[min(index + 1, len(self.tokens) - 1)]

    def _constant_beside(self, index: int) -> float:
        """Return the factor of an operator with a constant; 0 if it is another operator."""
        operator, after = self.tokens[index].text, _number(self._after(index))
        if operator == "*":
            return after or _number(self.tokens[index - 1])
        return 1 / after if operator == "/" and after else 0

    def _is_info_join(self, index: int) -> bool:
        """Return whether an operator multiplies by an info series, whose value is 1."""
        return (
            self.tokens[index].text == "*"
            and self._after(index).text in {"on", "ignoring"}
            and any(name.endswith("_info") for name in self.series)
        )


def _tokens(text: str) -> Iterator[Token]:
    depth = 0
    for found in _TOKEN.finditer(text):
        kind, word = str(found.lastgroup), found[0]
        if kind == "comment":
            continue
        depth -= word in _CLOSE and kind == "sign"
        yield Token(kind, word, depth)
        depth += word in _OPEN and kind == "sign"


def _series(tokens: Sequence[Token]) -> Iterator[tuple[int, str]]:
    in_labels = in_braces = False
    for index, token in enumerate(tokens):
        after = tokens[index + 1].text if index + 1 < len(tokens) else ""
        if token.text == "{":
            in_braces = True
        elif token.text in {"}", ")"}:
            in_braces = in_labels = False
        elif in_braces:
            # The name may be a matcher, or the quoted first word of the braces.
            if token.text == "__name__" and index + 2 < len(tokens) and after in {"=", "=~"}:
                names = tokens[index + 2].text[1:-1].split("|")
                yield from ((index, name.strip("()")) for name in names)
            elif token.kind == "text" and tokens[index - 1].text in "{," and after in {",", "}"}:
                yield index, token.text[1:-1]
        elif token.text in _LABEL_LISTS and after == "(":
            in_labels = True
        elif token.kind == "name" and not in_labels and after != "(" and not _is_word(token.text):
            yield index, token.text


def _is_word(text: str) -> bool:
    return text.lower() in _WORDS or text in _AGGREGATIONS


def _number(token: Token) -> float:
    """Return a number, or 0 for anything else."""
    try:
        return float(token.text) if token.kind == "number" else 0
    except ValueError:
        return 0


def _main(tokens: Sequence[Token]) -> Sequence[Token]:
    """Return the tokens before `or 0 * …` and `or vector(…)`, without brackets around them all."""
    while tokens and tokens[0].text == "(" and _end(tokens, 0) == len(tokens) - 1:
        tokens = tokens[1:-1]
    for index, token in enumerate(tokens):
        if token.text == "or" and token.depth == tokens[0].depth:
            start = index + 1
            if start < len(tokens) and tokens[start].text in _MATCHINGS:
                start = _end(tokens, start + 1) + 1
            if [one.text for one in tokens[start : start + 2]] in _ALTERNATIVES:
                return _main(tokens[:index])
    return tokens


def _bare(tokens: Sequence[Token]) -> Sequence[Token]:
    """Return the tokens without brackets, functions, constant factors and `or vector(0)`."""
    while True:
        shorter = _shorter([token.text for token in tokens], tokens)
        if len(shorter) == len(tokens):
            return tokens
        tokens = shorter


def _shorter(texts: Sequence[str], tokens: Sequence[Token]) -> Sequence[Token]:
    if len(main := _main(tokens)) < len(tokens):
        return main
    if texts[:1] and texts[0] in SAME_SERIES | {"scalar"} and _end(tokens, 1) == len(tokens) - 1:
        depth = tokens[1].depth + 1
        ends = (i for i, one in enumerate(tokens) if one.text in {",", "["} and one.depth == depth)
        return tokens[2 : next(ends, -1)]
    if len(tokens) > 2 and texts[-2] in "*/" and _number(tokens[-1]):  # noqa: PLR2004  # operands
        return tokens[:-2]
    if len(tokens) > 2 and texts[1] == "*" and _number(tokens[0]):  # noqa: PLR2004  # as above
        return tokens[2:]
    return tokens


def _end(tokens: Sequence[Token], start: int) -> int:
    """Return the index of the bracket that closes the one at `start`; -1 if there is none."""
    if len(tokens) <= start or tokens[start].text not in _OPEN:
        return -1
    depth = tokens[start].depth
    closing = (
        index
        for index in range(start + 1, len(tokens))
        if tokens[index].depth == depth and tokens[index].text in _CLOSE
    )
    return next(closing, -1)


def _aggregation(tokens: Sequence[Token]) -> Aggregation | None:
    for index, token in enumerate(tokens):
        if token.text == "/" and token.depth == tokens[0].depth:
            total, number = map(_single, (tokens[:index], tokens[index + 1 :]))
            is_mean = total and number and (total.name, number.name) == ("sum", "count")
            return Aggregation("avg", total.by) if total and is_mean else None
    return _single(tokens)


def _single(tokens: Sequence[Token]) -> Aggregation | None:
    if not tokens or tokens[0].text not in _AGGREGATIONS:
        return None
    by: tuple[str, ...] = ()
    brackets, index = 0, 1
    while index < len(tokens):
        is_list = tokens[index].text in {"by", "without"}
        start = index + is_list
        end = _end(tokens, start) if start < len(tokens) and tokens[start].text == "(" else -1
        if end < 0:
            return None
        if tokens[index].text == "by":
            by = tuple(token.text for token in tokens[start + 1 : end] if token.kind == "name")
        brackets += not is_list
        index = end + 1
    return Aggregation(tokens[0].text, by) if brackets == 1 else None
