"""The prose of packages, manifests and pages: its words, how often some occur, and findings.

`python -m tests.lint.prose` prints a table of all parts, and the findings in the parts that it is
given, such as `docs/start/demo.md`. The words of a page are those written by hand, in total and
by its budget.
"""

import ast
import inspect
import io
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any, Final, NamedTuple

import yaml
from markdown_it import MarkdownIt

ROOT: Final = Path(__file__).parents[2]
PACKAGES: Final = ("gpuledger", "agent", "enricher", "sinks", "reports", "simulator", "cli")
MANIFESTS: Final = ("deploy", "k8s", "scenarios", "docker-compose.yml")
CLEAN: Final = [
    "gpuledger",
    "agent",
    "enricher",
    "cli",
    "simulator",
    "sinks",
    "reports",
    "deploy",
    "k8s",
    "scenarios",
    "docker-compose.yml",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "docs",
]
"""Parts that must not have findings. Add a part here once it has none."""

CODE_WORDS: Final = ("if", "where", "what")
PAGE_WORDS: Final = ("what", "who|whoever|nobody", "says|tells", "you")
AVOID: Final = re.compile(
    r"\b(anew|afresh|likewise|besides?|for ever|as of|in place of|but for|by itself|be it"
    r"|as the case may be|mend(s|ed|ing)?|put(s|ting)? aside|pass(es|ed|ing)? over|go(es)? on"
    r"|stands? (in|at)|some (?=\d)|of (which|whom|it)|(?<!stand-)(?<!let )alone"
    r"|(?<!there )(is|are) (none|no (?!longer|more|less|later|earlier)[a-z]+))\b"
    r"|, as (a|the|it|there|nobody)\b",
    re.IGNORECASE,
)
OPENING: Final = re.compile(r"(What|Who|Whoever|Whose|Of)\s")
VAGUE_LINKS: Final = {"how", "why", "which", "below", "above", "more", "here", "this"}
MAX_HELP_WORDS: Final = 25
MAX_SENTENCE_WORDS: Final = 35
PRAGMA: Final = re.compile(r"^(noqa|type|fmt|ruff|pragma):[^#]*#?")
FRONT_MATTER: Final = re.compile(r"\A---\n.*?\n---\n", re.DOTALL)
GENERATED: Final = re.compile(r"<!-- ([\w-]+): begin -->.*?<!-- \1: end -->", re.DOTALL)
MAX_BUDGET_RATIO: Final = 1.25
"""A budget finds facts that nobody needs; a page may exceed it by a quarter to keep the others."""


class Text(NamedTuple):
    """A docstring, comment, help, message, annotation, paragraph (or cell) or link."""

    where: str
    kind: str
    prose: str


def strings(node: ast.AST) -> Iterator[str]:
    """Yield the strings within an expression, with `…` for each replacement field."""
    match node:
        case ast.Constant(value=str(text)):
            yield text
        case ast.JoinedStr(values=values):
            yield "".join(str(p.value) if isinstance(p, ast.Constant) else "…" for p in values)
        case _:
            for child in ast.iter_child_nodes(node):
                yield from strings(child)


def without_blocks(docstring: str) -> str:
    """Return a docstring without its tables and indented blocks, which are not sentences."""
    paragraphs = inspect.cleandoc(docstring).split("\n\n")
    return "\n\n".join(
        one
        for one in paragraphs
        if not all(line.startswith(("    ", "|")) for line in one.split("\n"))
    )


def python_texts(file: Path) -> Iterator[Text]:
    """Yield a module's docstrings, help texts, error messages and comments."""
    source = file.read_text()
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Expr(value=ast.Constant() as value):
                kind = "docstring"
            case ast.Raise(exc=ast.Call() as value):
                kind = "message"
            case ast.keyword(arg="help" | "description", value=value):
                kind = "help"
            case ast.Call(func=ast.Name(id="Counter" | "Gauge" | "Histogram"), args=[_, value, *_]):
                kind = "help"
            case _:
                continue
        for text in strings(value):
            prose = without_blocks(text) if kind == "docstring" else text
            yield Text(f"{file}:{value.lineno}", kind, prose)
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    found = (token for token in tokens if token.type == tokenize.COMMENT)
    comments = ((one.start[0], one.line[: one.start[1]], one.string) for one in found)
    yield from comment_texts(file, comments)


def yaml_texts(file: Path) -> Iterator[Text]:
    """Yield a file's comments and the annotations of its alerts."""
    text = file.read_text()
    lines = enumerate(text.splitlines(), start=1)
    found = ((number, re.search(r"(?:^|\s)# .*", line)) for number, line in lines)
    comments = ((number, one.string[: one.start()], one[0]) for number, one in found if one)
    yield from comment_texts(file, comments)
    if file.name.endswith(".rules.yaml"):
        for rule in (rule for group in yaml.safe_load(text)["groups"] for rule in group["rules"]):
            for prose in rule.get("annotations", {}).values():
                yield Text(f"{file} {rule['alert']}", "annotation", prose)


def comment_texts(file: Path, comments: Iterable[tuple[int, str, str]]) -> Iterator[Text]:
    """Yield comments, given as (line, code before it, text); lines without code are joined."""

    def block(numbered: tuple[int, tuple[int, str, str]]) -> int | str:
        number, (line, code, _) = numbered
        return f"line {line}" if code.strip() else line - number

    for _, numbered in groupby(enumerate(comments), key=block):
        lines = [comment for _, comment in numbered]
        prose = " ".join(PRAGMA.sub("", text.strip(" #")).strip() for _, _, text in lines)
        yield Text(f"{file}:{lines[0][0]}", "comment", prose)


def page_texts(file: Path, *, left_out: tuple[re.Pattern[str], ...] = ()) -> Iterator[Text]:
    """Yield a page's paragraphs, headings and cells without code, and the texts of its links."""
    page = file.read_text()
    for pattern in (FRONT_MATTER, *left_out):
        page = pattern.sub(lambda found: "\n" * found[0].count("\n"), page)
    where = f"{file}:1"
    for token in MarkdownIt("commonmark").enable("table").parse(page):
        where = f"{file}:{token.map[0] + 1}" if token.map else where
        prose, link_start = "", 0
        for child in token.children or ():
            if child.type == "link_open":
                link_start = len(prose)
            elif child.type == "link_close":
                yield Text(where, "link", prose[link_start:])
            shown = {"text": child.content, "code_inline": "`x`", "softbreak": " "}
            prose += shown.get(child.type, "")
        if prose:
            yield Text(where, "paragraph", prose)


def parts() -> list[str]:
    """Return the names of all parts; `docs/adr` is one, and every other page is one."""
    pages = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
    names = [str(page.relative_to(ROOT)) for page in pages if page.parent.name != "adr"]
    return [*PACKAGES, *MANIFESTS, *names, "docs/adr"]


@cache
def texts(part: str) -> list[Text]:
    """Return all texts of a part."""
    readers = {".py": python_texts, ".yaml": yaml_texts, ".yml": yaml_texts, ".md": page_texts}
    files = [ROOT / part] if (ROOT / part).is_file() else sorted((ROOT / part).rglob("*"))
    return [text for file in files if file.suffix in readers for text in readers[file.suffix](file)]


def words(prose: str) -> list[str]:
    """Return the words of a text; each code span counts as one word."""
    return re.findall(r"[a-z][\w'-]*", re.sub(r"`[^`]*`", "x", prose).lower())


def front_matter(page: Path) -> dict[str, Any]:
    """Return the fields of a page's front matter; without one, an empty dictionary."""
    head = FRONT_MATTER.match(page.read_text())
    found: dict[str, Any] = yaml.safe_load(head[0].strip().strip("-")) if head else {}
    return found


def words_by_hand(page: Path) -> int:
    """Return the number of words of a page, apart from its generated tables."""
    if front_matter(page).get("generated"):
        return 0
    found = page_texts(page, left_out=(GENERATED,))
    return sum(len(words(text.prose)) for text in found if text.kind == "paragraph")


def problems(text: Text) -> Iterator[str]:
    """Yield each phrase, opening, link and length in a text that breaks a rule."""
    if text.kind == "link":
        if text.prose.lower() in VAGUE_LINKS:
            yield f"link text `{text.prose}`"
        return
    if text.kind == "help" and len(words(text.prose)) > MAX_HELP_WORDS:
        yield f"help of {len(words(text.prose))} words"
    for paragraph in re.split(r"\n\s*(?:\n|- )", re.sub(r"`[^`]*`", "x", text.prose)):
        for sentence in re.split(r"(?<=[.!?])\s+", " ".join(paragraph.split())):
            yield from (f"`{found[0]}`" for found in AVOID.finditer(sentence))
            if OPENING.match(sentence):
                yield f"opening `{sentence.split()[0]}`"
            if len(words(sentence)) > MAX_SENTENCE_WORDS:
                yield f"sentence of {len(words(sentence))} words: {sentence[:40]}…"


def findings(part: str) -> list[str]:
    """Return a part's problems, each with its place."""
    found = [f"{text.where}: {problem}" for text in texts(part) for problem in problems(text)]
    if part.endswith(".md"):
        count, budget = words_by_hand(ROOT / part), front_matter(ROOT / part).get("budget")
        if budget and count > MAX_BUDGET_RATIO * budget:
            found.append(f"{part}: {count} words, budget {budget}")
    return [one.removeprefix(f"{ROOT}/") for one in found]


def rates(part: str) -> dict[str, float]:
    """Return the number of a part's words, and how often some words occur per 1,000 words."""
    prose = [one.prose for one in texts(part) if one.kind in ("docstring", "comment", "paragraph")]
    counts = Counter(word for one in prose for word in words(one))
    total = counts.total()
    columns = CODE_WORDS if part in PACKAGES + MANIFESTS else PAGE_WORDS
    found = {names: sum(counts[name] for name in names.split("|")) for names in columns}
    return {"words": total} | {names: 1000 * n / max(1, total) for names, n in found.items()}


def main(given: list[str]) -> None:
    """Print the rates and the number of findings of parts, and the findings in the given parts."""
    total = 0
    for part in given or parts():
        numbers = " ".join(f"{name} {number:<7.1f}" for name, number in rates(part).items())
        if part.startswith("docs/") and part.endswith(".md"):
            count, budget = words_by_hand(ROOT / part), front_matter(ROOT / part).get("budget", "-")
            numbers += f" by hand {count:<6} budget {budget:<6}"
            total += count
        print(f"{part:36} {numbers} findings {len(findings(part))}")  # noqa: T201  # its purpose
    print(f"pages of docs/, without adr: {total} words by hand")  # noqa: T201  # its purpose
    for part in given:
        print(*findings(part), sep="\n")  # noqa: T201  # its purpose


if __name__ == "__main__":
    main(sys.argv[1:])
