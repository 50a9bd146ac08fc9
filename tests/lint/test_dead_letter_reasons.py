"""Every reason for a dead letter is described; docs/reference/topics.md shows who wrote one."""

import ast
import base64
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpuledger.bus.limits import MAX_MESSAGE_BYTES
from gpuledger.dead_letter_reasons import DEAD_LETTER_REASONS

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "reference" / "topics.md").read_text()
PACKAGES = ("gpuledger", "enricher", "sinks")


def given_reasons() -> set[str]:
    """Return the reasons in the code of the modules that reject records."""
    found: set[str] = set()
    for package in PACKAGES:
        for file in (ROOT / package).rglob("*.py"):
            if ".reject(" in (text := file.read_text()):
                found |= set(_reasons_in(ast.parse(text)))
    return found


def _reasons_in(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        match node:
            case ast.keyword(arg="reason", value=value):
                yield from _texts(value)
            case ast.Assign(targets=[ast.Name(id="reason")], value=value):
                yield from _texts(value)
            case _:
                pass


def _texts(value: ast.expr) -> Iterator[str]:
    match value:
        case ast.Constant(value=str(text)):
            yield text
        case ast.IfExp(body=body, orelse=other):
            yield from _texts(body)
            yield from _texts(other)
        case _:
            pass


def test_the_catalogue_has_each_reason_that_the_code_gives() -> None:
    known = {reason.name for reason in DEAD_LETTER_REASONS}

    assert len(known) == len(DEAD_LETTER_REASONS)
    assert given_reasons() <= known
    assert len(given_reasons()) > 7


def test_each_reason_has_a_meaning_a_cause_and_an_action() -> None:
    for reason in DEAD_LETTER_REASONS:
        assert all(text.endswith(".") for text in (reason.meaning, reason.cause, reason.action))


def test_the_maximum_size_that_a_reason_names_is_that_of_messages() -> None:
    (too_large,) = (each for each in DEAD_LETTER_REASONS if each.name == "too_large")

    assert f"{MAX_MESSAGE_BYTES:,} bytes" in too_large.meaning


@pytest.mark.skipif(shutil.which("jq") is None, reason="jq is not installed")
@pytest.mark.parametrize(
    ("key", "value", "shown"),
    [
        (b"node-1", b'{"node":"node-2","seq":"x"}', "key node-1 node node-2: why"),
        (b"node-1", b"no record", "key node-1 node ?: why"),
        (b"node-1", b"[1]", "key node-1 node ?: why"),
        (None, None, "key  node ?: why"),
    ],
)
def test_the_command_that_shows_dead_letters_prints_node_and_key(
    key: bytes | None, value: bytes | None, shown: str
) -> None:
    (program,) = re.findall(r"jq -r '(\n *\(\.key_base64[^']*)'", PAGE)
    dead_letter = {
        "topic": "t",
        "partition": 7,
        "offset": 9,
        "reason": "undecodable",
        "detail": "why",
    }
    dead_letter |= {"key_base64": _base64(key), "value_base64": _base64(value)}
    done = subprocess.run(
        ["jq", "-r", program],  # noqa: S607 - the jq that users have
        input=json.dumps(dead_letter),
        capture_output=True,
        text=True,
        check=True,
    )

    assert done.stdout == f"undecodable t[7]@9 {shown}\n"


def _base64(data: bytes | None) -> str | None:
    return None if data is None else base64.b64encode(data).decode()
