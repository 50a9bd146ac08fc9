"""An invalid value gets a one-line message with the field, the value and the remedy.

The messages are compared in full for settings of each kind, because they are ours and not those of
a library.
"""

import re
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import pytest

from gpuledger.errors import SettingsError
from gpuledger.settings import Secret, load_settings

QUOTES = ": put it in quotes"
LIST = ": write [a, b], or [] for none"
MAPPING = 'expected a mapping, {"name": "value"} in JSON or YAML, got'


class Explained(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    labels: dict[str, str] = {}
    budgets: dict[str, Annotated[int, msgspec.Meta(ge=0)]] = {}
    names: Annotated[list[str], msgspec.Meta(max_length=2)] = []
    statuses: list[Literal[401, 403, 404]] = []
    name: str = "x"
    token: Secret | None = None


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    sink: Explained = Explained()


def message_of(file: Path | None = None, /, **variables: str) -> str:
    environ = {f"GPULEDGER_SINK__{name}": text for name, text in variables.items()}
    argv = ["--config", str(file)] if file else []
    with pytest.raises(SettingsError) as raised:
        load_settings(Settings, prog="p", description="", argv=argv, environ=environ)
    return str(raised.value).replace(str(file), "FILE")


IN_FILES = [
    ("labels: {replica: 1}", f"sink.labels.replica in FILE: expected a text, got a number{QUOTES}"),
    ("labels: {a: no}", f"sink.labels.a in FILE: expected a text, got true or false{QUOTES}"),
    ("labels: {a: [b]}", "sink.labels.a in FILE: expected a text, got a list"),
    ("labels: {a: null}", "sink.labels.a in FILE: expected a text, got nothing (null)"),
    ("labels: {1: a}", f"sink.labels.1 in FILE: expected a text, got a number{QUOTES}"),
    ("labels: {'a b': 1}", f"sink.labels[********] in FILE: expected a text, got a number{QUOTES}"),
    (
        "labels: {X-Key=secret}",
        "sink.labels[********] in FILE: expected a text, got nothing (null)",
    ),
    ("budgets: {a b: x}", "sink.budgets['a b'] in FILE: expected a whole number >= 0, got 'x'"),
    ("labels: replica=a", f"sink.labels in FILE: {MAPPING} a text"),
    ("labels: [a]", f"sink.labels in FILE: {MAPPING} a list"),
    ("budgets: {'*': -1}", "sink.budgets.* in FILE: expected a whole number >= 0, got -1"),
    (
        "budgets: {ci-*: many}",
        "sink.budgets.ci-* in FILE: expected a whole number >= 0, got 'many'",
    ),
    ("budgets: 5", 'sink.budgets in FILE: expected a mapping, {"name": 1} in JSON or YAML, got 5'),
    ("names: team", "sink.names in FILE: expected a list of length <= 2, got 'team': write [team]"),
    ("names: a, b", "sink.names in FILE: expected a list of length <= 2, got 'a, b': write [a, b]"),
    ("names:", f"sink.names in FILE: expected a list of length <= 2, got null{LIST}"),
    ("names: {a: 1}", f"sink.names in FILE: expected a list of length <= 2, got a mapping{LIST}"),
    ("names: [a, 1]", f"sink.names[1] in FILE: expected a text, got 1{QUOTES}"),
    (
        "statuses: 401",
        "sink.statuses in FILE: expected a list of any of 401, 403, 404, got 401: write [401]",
    ),
    ("statuses: [500]", "sink.statuses[0] in FILE: expected one of 401, 403, 404, got 500"),
    ("name: 5", f"sink.name in FILE: expected a text, got 5{QUOTES}"),
    ("name: 2026-11-21", f"sink.name in FILE: expected a text, got 2026-11-21{QUOTES}"),
    ("token: 5", f"sink.token in FILE: expected a text, got a number{QUOTES}"),
]


@pytest.mark.parametrize(("text", "message"), IN_FILES)
def test_a_value_in_the_file_is_named_by_its_own_path(
    text: str, message: str, tmp_path: Path
) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text(f"sink:\n  {text}\n")

    assert message_of(file) == message


IN_VARIABLES = [
    ({"BUDGETS": '{"*": -1}'}, "sink.budgets.*: expected a whole number >= 0, got -1"),
    ({"LABELS": '{"a": 1}'}, f"sink.labels.a: expected a text, got a number{QUOTES}"),
    ({"LABELS": "X-Scope-OrgID=a"}, f"{MAPPING} a text"),
    ({"LABELS": "[a]"}, f"{MAPPING} a list"),
    ({"STATUSES": "[500]"}, "sink.statuses[0]: expected one of 401, 403, 404, got 500"),
    ({"STATUSES": "401, 500"}, "sink.statuses[1]: expected one of 401, 403, 404, got '500'"),
]


@pytest.mark.parametrize(("variables", "message"), IN_VARIABLES)
def test_a_value_in_a_variable_is_named_by_the_variable_and_by_its_path(
    variables: dict[str, str], message: str
) -> None:
    (name,) = variables

    assert message_of(**variables) == f"GPULEDGER_SINK__{name}: {message}"


@pytest.mark.parametrize("text", [text for text, _ in IN_FILES])
def test_the_message_is_one_line_without_the_words_of_a_library(text: str, tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text(f"sink:\n  {text}\n")

    assert not re.search(
        r"[`$\n]|\bExpected\b|\barray\b|\bobject\b|\bint\b|\bstr\b", message_of(file)
    )


def test_no_key_of_a_mapping_breaks_the_line(tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text('sink: {budgets: {"a\\nb": x}}\n')

    assert "\n" not in message_of(file)


@pytest.mark.parametrize(
    "value",
    [
        "&a [*a]",
        "0x" + "f" * 4000,
        "[" * 50 + "]" * 50,
        "{password: hunter2}",
        "\n  - &a [x, x]\n  - &b [*a, *a, *a, *a, *a, *a, *a, *a, *a]\n"
        + "".join(
            f"  - &{new} [{', '.join(['*' + old] * 9)}]\n"
            for old, new in zip("bcdefgh", "cdefghi", strict=True)
        ),
    ],
)
def test_a_value_of_any_size_is_explained_in_one_line_and_shows_no_secret(
    tmp_path: Path, value: str
) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text(f"sink:\n names: {value}\n")
    message = message_of(file)
    assert "\n" not in message
    assert "hunter2" not in message
