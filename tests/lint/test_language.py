"""Names follow the glossary, and prose follows the rules of `tests.lint.prose`."""

import ast
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from itertools import chain
from pathlib import Path

import pytest

from tests.lint.prose import (
    CLEAN,
    PACKAGES,
    ROOT,
    Text,
    findings,
    page_texts,
    problems,
    python_texts,
)

RULES = ROOT / "k8s/chart/rules/gpuledger.rules.yaml"
# Generated from the code; other tests compare them with it.
METRIC_PAGES = tuple(
    ROOT / "docs" / "reference" / f"{name}.md" for name in ("metrics", "agent-metrics", "series")
)
GLOSSARY_ROW = re.compile(r"^\| (?P<words>[^|]+) \| [^|]+ \| (?P<refused>[^|]*) \|$", re.MULTILINE)
OPENINGS = re.compile(r"(Give(?! up| back)|Gives|Tell whether|Say whether|Take that|Make out)\b")
# Words of the glossary that Python, asyncio, Prometheus or a format uses for something else.
ELSEWHERE = {
    "moment",  # of time, in user text: `gpuledger replay --from`
    "ledger",  # the package's own name
    "answers",  # of HTTP
}


def glossary() -> list[re.Match[str]]:
    """Return the rows of the glossary, including its head."""
    section = (ROOT / "CONTRIBUTING.md").read_text().partition("## Glossary")[2]
    return list(GLOSSARY_ROW.finditer(section.partition("\n## ")[0]))


def refused_words() -> frozenset[str]:
    """Return the words of the glossary's last column."""
    words = {word.strip() for row in glossary() for word in row["refused"].split(",")}
    return frozenset(words - {"", "not"} - ELSEWHERE)


@cache
def modules() -> list[tuple[Path, ast.Module]]:
    """Return every module of the product, parsed."""
    files = sorted(file for package in PACKAGES for file in (ROOT / package).rglob("*.py"))
    return [(file.relative_to(ROOT), ast.parse(file.read_text())) for file in files]


@cache
def names() -> list[tuple[str, str]]:
    """Return where each module, class, function, variable, log event, alert and metric is named.

    Each place comes with the words of the name.
    """
    return [(where, words_of(name)) for where, name in chain(_names(), _names_outside_of_code())]


def _names() -> Iterator[tuple[str, str]]:
    for file, module in modules():
        yield str(file), file.stem
        for node in ast.walk(module):
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                yield f"{file}:{node.lineno}", node.name
            elif isinstance(node, ast.arg):
                yield f"{file}:{node.lineno}", node.arg
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                yield f"{file}:{node.lineno}", node.id
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                yield f"{file}:{node.lineno}", node.attr
            elif isinstance(node, ast.Call) and (event := _event_of(node)):
                yield f"{file}:{node.lineno}", event


def _names_outside_of_code() -> Iterator[tuple[str, str]]:
    for rule in re.findall(r"^ *- alert: (\w+)$", RULES.read_text(), re.MULTILINE):
        yield RULES.name, rule
    for page in METRIC_PAGES:
        for metric in re.findall(r"^\| `(\w+)` \|", page.read_text(), re.MULTILINE):
            yield page.name, metric


def _event_of(call: ast.Call) -> str | None:
    """Return the event of a log line; `None` for any other call."""
    match call:
        case ast.Call(
            func=ast.Attribute(value=ast.Name(id="_log")), args=[*_, ast.Constant(value=str(event))]
        ):
            return event
        case _:
            return None


def words_of(name: str) -> str:
    """Return a name's words in lower case, between blanks: `MaxTicks` becomes ` max ticks `."""
    parted = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name)
    words = " ".join(filter(None, parted.lower().split("_")))
    return f" {words.replace('at most', '').replace('at least', '')} "


def test_no_word_is_in_the_glossary_twice() -> None:
    words = Counter(word.strip() for row in glossary() for word in row["words"].split(","))
    assert "tick" in words
    assert [word for word, rows in words.items() if rows > 1] == []


def test_the_glossary_rejects_words() -> None:
    assert {"glance", "crew", "bury", "parcel", "most"} <= refused_words()


@pytest.mark.parametrize(
    "name",
    [
        "records_rejected",
        "GpuledgerThreadsLeaked",
        "gpuledger_agent_samples_total",
        "gpuledger_pod_gpu_power_watts",
        "gpuledger_node_info",
    ],
)
def test_names_of_log_events_alerts_and_metrics_are_checked_against_the_glossary_too(
    name: str,
) -> None:
    assert words_of(name) in {words for _, words in names()}


@pytest.mark.parametrize("word", sorted(refused_words()))
def test_no_name_has_a_word_that_the_glossary_rejects(word: str) -> None:
    forms = {f" {word} ", f" {word}s "}
    assert not [
        f"{where}:{words}" for where, words in names() if any(form in words for form in forms)
    ]


def test_no_docstring_opens_with_a_verb_that_python_docstrings_do_not_use() -> None:
    found = [
        f"{file}:{node.lineno}"
        for file, module in modules()
        for node in ast.walk(module)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        and OPENINGS.match(ast.get_docstring(node) or "")
    ]
    assert not found


def test_no_text_opens_with_the_name_of_a_class_instead_of_a_verb() -> None:
    """This happens when a class `Answer` gets a longer name and the prose is renamed with it."""
    classes = {
        node.name
        for _, module in modules()
        for node in ast.walk(module)
        if isinstance(node, ast.ClassDef) and re.match("[A-Z][a-z]+[A-Z]", node.name)
    }
    texts = [
        (f"{file}:{node.lineno}", re.match("([A-Za-z]+) [a-z]", node.value))
        for file, module in modules()
        for node in ast.walk(module)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    assert "ReportAnswer" in classes
    assert [where for where, opening in texts if opening and opening[1] in classes] == []


@pytest.mark.parametrize(
    ("prose", "problem"),
    [
        ("1,5 is no decimal number.", "`is no decimal`"),
        ("It is no longer there, and there are none.", None),
        ("It waits.\n\nOf nodes only metadata is read.", "opening `Of`"),
        ("Made anew", "`anew`"),
        ("`anew` is a word", None),
        ("The scrape fails, as the page is too large.", "`, as the`"),
        ("word " * 36, f"sentence of 36 words: {'word ' * 8}…"),
    ],
)
def test_prose_that_breaks_a_rule_is_found(prose: str, problem: str | None) -> None:
    assert list(problems(Text("", "comment", prose))) == ([problem] if problem else [])


def test_the_prose_of_modules_and_pages_is_read_without_their_code(tmp_path: Path) -> None:
    module, page = tmp_path / "a.py", tmp_path / "a.md"
    module.write_text('''"""Doc."""\n# One\n# two.\nraise E(f"no {x}")  # noqa: X1  # three\n''')
    page.write_text(
        "---\nbudget: 9\n---\n# Title\n```\ncode\n```\n[how](a.md) to `x`\n\n| cell |\n|---|\n"
    )
    assert {text[1:] for text in python_texts(module)} == {
        ("docstring", "Doc."), ("comment", "One two."), ("message", "no …"), ("comment", "three"),
    }  # fmt: skip
    assert [text[1:] for text in page_texts(page)] == [
        ("paragraph", "Title"), ("link", "how"), ("paragraph", "how to `x`"), ("paragraph", "cell"),
    ]  # fmt: skip


@pytest.mark.parametrize("part", CLEAN)
def test_prose_that_is_clean_stays_clean(part: str) -> None:
    assert findings(part) == []
