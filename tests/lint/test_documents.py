"""The documents: links resolve, decisions are listed, commands exist."""

import asyncio
import re
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import pytest

from gpuledger.programs import COMPONENTS
from gpuledger_cli.command import app
from tests.tables import for_each

ROOT = Path(__file__).parents[2]
ADRS = sorted((ROOT / "docs" / "adr").glob("*.md"))
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
SECTIONS = ["Context", "Decision", "Consequences", "Alternatives"]


def targets_of_make() -> set[str]:
    """Return the targets that `make help` lists."""
    listed = subprocess.run(["make", "help"], cwd=ROOT, check=True, capture_output=True, text=True)  # noqa: S607 - the make that users have
    return {line.split()[1] for line in listed.stdout.splitlines() if line.startswith("  make ")}


@for_each("page", PAGES)
def test_every_link_within_the_repository_leads_to_a_file(page: Path) -> None:
    links = re.findall(r"\]\((?!\w+:|#)([^)#\s]+)", page.read_text())

    assert [link for link in links if not (page.parent / link).exists()] == []


def anchors_of(page: Path) -> set[str]:
    """Return the anchors of a page's headings, by GitHub's rule."""
    titles = re.findall(r"^#+ (.+)$", page.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


@for_each("page", PAGES)
def test_every_link_to_a_heading_leads_to_one(page: Path) -> None:
    links = re.findall(r"\]\((?!\w+:)([^)#\s]*)#([^)\s]+)\)", page.read_text())
    pages = [(page.parent / target if target else page, anchor) for target, anchor in links]

    assert [
        f"{target.name}#{anchor}"
        for target, anchor in pages
        if target.suffix == ".md" and anchor not in anchors_of(target)
    ] == []


def test_every_module_that_the_code_tour_names_exists() -> None:
    text = (ROOT / "docs" / "contribute" / "code-tour.md").read_text()
    modules = {f"/{path.relative_to(ROOT)}" for path in ROOT.glob("[a-z]*/**/*.py")}
    named = set(re.findall(r"`([\w/]+\.py)`", text))

    assert len(named) > 20
    assert [name for name in named if not any(path.endswith(f"/{name}") for path in modules)] == []


@for_each("page", PAGES)
def test_every_test_that_a_page_names_exists(page: Path) -> None:
    named = set(re.findall(r"`(test_\w+)`", page.read_text()))
    texts = (file.read_text() for file in (ROOT / "tests").rglob("test_*.py")) if named else ()
    defined = {name for text in texts for name in re.findall(r"\bdef (test_\w+)\(", text)}

    assert named - defined == set()


@for_each("page", PAGES)
def test_every_file_of_the_repository_that_a_page_names_exists(page: Path) -> None:
    named = re.findall(r"`((?:k8s|deploy|docs|scenarios)/[^`\s]*)`", page.read_text())

    assert [path for path in named if not (ROOT / path).exists()] == []


def test_one_window_for_late_samples_is_recommended_everywhere() -> None:
    texts = [page.read_text() for page in PAGES]
    texts += [file.read_text() for file in (ROOT / "deploy").rglob("*.yml")]
    windows = re.findall(r"out_of_order_time_window: (\w+)", "\n".join(texts))

    assert len(windows) > 1
    assert set(windows) == {"6h"}


@for_each("page", PAGES)
def test_every_make_target_that_a_page_names_exists(page: Path) -> None:
    named = set(re.findall(r"`make ([a-z-]+)", page.read_text()))

    assert named <= targets_of_make()


def commands_on(page: Path) -> Iterator[str]:
    """Yield the commands of a page: those in inline code, and the lines of console blocks."""
    text = page.read_text()
    yield from re.findall(r"`gpuledger ([^`\n]+)`", text)
    for block in re.findall(r"```console\n(.*?)```", text, flags=re.DOTALL):
        whole = re.sub(r"\\\n\s*", " ", block)
        yield from re.findall(
            r"^\s*(?:\w+=\S+ )*(?:[\w./-]*/)?gpuledger (.+)$", whole, flags=re.MULTILINE
        )


def unknown_words(words: list[str]) -> list[str]:
    """Return the words of a command line that are neither commands nor options of the command."""
    command, rest = app, list(words)
    while rest and not rest[0].startswith("-") and rest[0] in command:
        command = command[rest.pop(0)]
    if command.default_command is None:  # a group of commands
        return [word for word in rest[:1] if not word.startswith("-")]
    arguments = command.assemble_argument_collection(parse_docstring=True)
    known = {name for argument in arguments for name in argument.names}
    given = [word.partition("=")[0] for word in rest if word.startswith("--")]
    return [option for option in given if option not in {*known, "--help"}]


@for_each("page", sorted((ROOT / "docs" / "guides").glob("*.md")))
def test_every_command_and_option_that_a_guide_names_exists(page: Path) -> None:
    lines = [re.split(r"[|>&;]", line)[0].split() for line in commands_on(page)]
    # Components parse their own command lines; `gpuledger …` stands for any command.
    others = {*COMPONENTS, "standalone", "config", "…"}
    assert [
        unknown_words(line) for line in lines if line[0] not in others and unknown_words(line)
    ] == []


def test_each_decision_has_its_number_and_is_listed_in_the_index() -> None:
    index = (ROOT / "docs" / "README.md").read_text()

    assert len({adr.name[:3] for adr in ADRS}) == len(ADRS)
    assert [adr.name for adr in ADRS if f"adr/{adr.name}" not in index] == []


@for_each("adr", ADRS)
def test_a_decision_has_the_sections_of_its_template(adr: Path) -> None:
    text = adr.read_text()

    assert re.match(r"# \d{3} .+\n\n- Status: \w+", text)
    assert re.findall(r"^## (\w+)", text, flags=re.MULTILINE) == SECTIONS


def test_the_readme_gives_the_two_commands() -> None:
    text = (ROOT / "README.md").read_text()

    for command in ("make demo", "make test"):
        assert re.search(rf"^{command}$", text, flags=re.MULTILINE), command


class OneMessage:
    """In place of a Kafka consumer: a topic with one message."""

    def __init__(self, topic: str, **settings: object) -> None:
        assert topic == "gpuledger.events.v1"
        assert settings["isolation_level"] == "read_committed"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        pass

    async def __aiter__(self) -> AsyncIterator[object]:
        golden = ROOT / "tests" / "data" / "messages" / "gpuledger.events.v1" / "1.json"
        yield SimpleNamespace(value=golden.read_bytes())


def test_the_python_example_of_the_topics_page_prints_the_seconds_of_an_event(
    capsys: pytest.CaptureFixture[str],
) -> None:
    page = (ROOT / "docs" / "reference" / "topics.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    names: dict[str, Any] = {"__name__": "topics"}
    exec(code, names)  # noqa: S102  # the documentation's own lines
    names["AIOKafkaConsumer"] = OneMessage

    asyncio.run(names["main"]())

    assert re.fullmatch(r"([\d.]+ default [\w/-]+\n)+", capsys.readouterr().out)
