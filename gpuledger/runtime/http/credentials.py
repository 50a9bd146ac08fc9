r"""The credentials that a request carries, masked in what its server answers. Pure.

What a server answers is shown on a page that is open and in the log, so all of it goes through
here. It may quote a password as it came, or as its JSON, its HTML, its logger or the proxy in
between writes it, and each does that in its own way (`\u0026`, `&amp;`, `&#38;`, `%26`, in base64).

So no list of writings is searched for: the escapes in the text are undone, two deep, and the secret
itself is searched for in what comes out. What is found is masked where it stands in the original
text, for which each character of an unescaped text knows its position there.
"""

import base64
import html
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, NamedTuple
from urllib.parse import parse_qsl, quote, quote_plus, unquote, urlsplit

from gpuledger.settings.secret import MASK

_MIN_ENCODED: Final = 4
"""A shorter secret is looked for as it is alone: its other writings stand in many a word."""
_MIN_CUT: Final = 4
"""Where a text breaks off within a secret, so many of its characters are masked as well."""
_ENCODINGS: Final = ("utf-8", "latin-1", "utf-16-le", "utf-16-be")
"""In which servers and their languages hold texts; some quote the bytes of one as another's."""
_MAX_BYTES_OF_CHARACTER: Final = 4
_LAST_CHARACTER: Final = 0x10FFFF


def mask_quotes(text: str, secrets: Iterable[str]) -> str:
    """Return the text with each of the secrets masked, also one within which the text breaks off.

    Upper and lower case count as the same, and what stands between the characters of a secret does
    not count where it is no visible one: the line ends of base64, the zeros of UTF-16, which are
    shown as replaced. Of a secret with others than ASCII's, those are between.
    """
    found = {writing for secret in secrets if secret.strip() for writing in _Wanted.all_of(secret)}
    if not found:
        return text
    wanted = sorted(found, key=lambda writing: -len(writing.text))
    whole = _View(text, range(len(text)), range(1, len(text) + 1))
    views = list(whole.undone())
    if begun := _BEGUN.search(text):
        # What stands before an escape that is cut off may be the begin of a secret.
        end = begun.start()
        views += _View(text[:end], whole.starts[:end], whole.ends[:end]).undone()
    kept_from = 0
    pieces: list[str] = []
    for start, end in sorted(span for view in views for span in view.find(wanted, end=len(text))):
        if start > kept_from or not pieces:
            pieces += (text[kept_from:start], MASK)
        kept_from = max(kept_from, end)  # spans overlap where several secrets, or views, do
    return "".join((*pieces, text[kept_from:]))


class _Wanted(NamedTuple):
    """What is looked for."""

    text: str
    """Its visible characters, in small letters; as it is where it has hardly any."""
    is_visible: bool
    before: str = ""
    """What is not visible before that, and behind it."""
    behind: str = ""
    in_escapes: bool = False
    """Whether it is looked for where escapes were undone."""

    @classmethod
    def all_of(cls, secret: str) -> "Iterator[_Wanted]":
        """Yield what a secret is looked for as: itself, and those writings that are no escapes."""
        if len(secret) < _MIN_ENCODED:
            visible = cls.visible_part(secret, in_escapes=False)
            yield visible or cls(secret, is_visible=False)
            return
        if visible := cls.visible_part(secret):
            yield visible
        else:
            # Hardly anything of it is visible, so it is looked for as each of its usual writings.
            escaped = json.dumps(secret)[1:-1]
            references = secret.encode("ascii", "xmlcharrefreplace").decode()
            quoted = (quote(secret, safe=""), quote_plus(secret), html.escape(secret))
            for text in (secret, *quoted, escaped, references):
                yield cls(text, is_visible=False)
        for encoding in _ENCODINGS:
            data = secret.encode(encoding, errors="replace")
            plain, of_urls = base64.b64encode(data), base64.urlsafe_b64encode(data)
            in_base64 = (plain.decode().rstrip("="), of_urls.decode().rstrip("="))
            for text in (*in_base64, data.hex(), data.decode(errors="replace")):
                if found := cls.visible_part(text):
                    yield found

    @classmethod
    def visible_part(cls, text: str, *, in_escapes: bool = True) -> "_Wanted | None":
        """Return the visible characters of a text; `None` where that are too few of them."""
        visible = [position for position, character in enumerate(text) if _is_visible(character)]
        if len(visible) < min(_MIN_ENCODED, len(text)):
            return None
        return cls(
            "".join(text[position] for position in visible).lower(),
            is_visible=True,
            before=text[: visible[0]].lstrip(),
            behind=text[visible[-1] + 1 :].rstrip(),
            in_escapes=in_escapes,
        )


def _is_visible(character: str) -> bool:
    return "!" <= character <= "~"


_DEPTH: Final = 2
"""A proxy writes as JSON what its server wrote percent-encoded."""
_BEGUN: Final = re.compile(
    r"(?:%[0-9a-f]?|\\(?:[ux][0-9a-f{]{0,7})?|&#?[0-9a-z]{0,10})\Z", re.IGNORECASE
)
"""An escape within which a text breaks off."""


class _Escapes(NamedTuple):
    """How something is escaped: what an escape looks like, and what it stands for."""

    pattern: re.Pattern[str]
    undo: Callable[[re.Match[str]], str]


def _of_percent(found: re.Match[str]) -> str:
    # A byte, as what is visible is one byte in each encoding.
    return chr(int(found[0][1:], 16)) if found[0] != "+" else " "


_OF_BACKSLASH: Final = {"n": "\n", "r": "\r", "t": "\t", "b": "\b", "f": "\f"}


def _of_backslash(found: re.Match[str]) -> str:
    if found["octal"]:
        return chr(int(found["octal"], 8))
    if digits := found["braced"] or found["four"] or found["two"] or found["eight"]:
        number = int(digits, 16)
        return chr(number) if number <= _LAST_CHARACTER else "\ufffd"
    return _OF_BACKSLASH.get(found["other"], found["other"])


def _of_base64(found: re.Match[str]) -> str:
    written = found[0].replace("-", "+").replace("_", "/")
    whole = written[: len(written) - (len(written) % 4 == 1)]
    return base64.b64decode(f"{whole}===").decode("latin-1")


_ESCAPES: Final = (
    _Escapes(re.compile(r"[A-Za-z0-9+/_-]{8,}"), _of_base64),
    _Escapes(re.compile(r"%[0-9A-Fa-f]{2}"), _of_percent),
    _Escapes(re.compile(r"%[0-9A-Fa-f]{2}|\+"), _of_percent),
    _Escapes(
        re.compile(
            r"\\(?:[ux]\{(?P<braced>[0-9A-Fa-f]{1,6})\}|u(?P<four>[0-9A-Fa-f]{4})"
            r"|x(?P<two>[0-9A-Fa-f]{2})|U(?P<eight>[0-9A-Fa-f]{8})"
            r"|(?P<octal>[0-3][0-7]{2})|(?P<other>.))",
            re.DOTALL,
        ),
        _of_backslash,
    ),
    _Escapes(
        re.compile(r"&(?:#[0-9]{1,7}|#[xX][0-9A-Fa-f]{1,6}|[A-Za-z][A-Za-z0-9]{1,31});?"),
        lambda found: html.unescape(found[0]),
    ),
)
"""Of logins, which are sent with a user before the password; of addresses, of forms, of JSON and
programming languages, of HTML and XML."""


class _View(NamedTuple):
    """A text with escapes undone, and for each of its characters where it stood."""

    characters: str
    starts: Sequence[int]
    ends: Sequence[int]

    def undone(self, *, depth: int = _DEPTH) -> "Iterator[_View]":
        """Yield the view, and those of it in which escapes of one kind are undone, and so on."""
        yield self
        if not depth:
            return
        for escapes in _ESCAPES:
            undone = self.undo(escapes)
            if undone.characters != self.characters:
                yield from undone.undone(depth=depth - 1)

    def undo(self, escapes: _Escapes) -> "_View":
        """Return the view with the escapes of one kind undone."""
        characters: list[str] = []
        starts: list[int] = []
        ends: list[int] = []
        kept_from = 0
        for found in escapes.pattern.finditer(self.characters):
            first, behind = found.span()
            undone = escapes.undo(found)
            characters += (self.characters[kept_from:first], undone)
            starts += self.starts[kept_from:first]
            # Each character of what an escape stands for is where all of the escape stood.
            starts += [self.starts[first]] * len(undone)
            ends += self.ends[kept_from:first]
            ends += [self.ends[behind - 1]] * len(undone)
            kept_from = behind
        if not kept_from:
            return self
        characters.append(self.characters[kept_from:])
        starts += self.starts[kept_from:]
        ends += self.ends[kept_from:]
        return _View("".join(characters), starts, ends)

    def find(self, wanted: Sequence[_Wanted], *, end: int) -> Iterator[tuple[int, int]]:
        """Yield where something wanted stands in the original text, which goes on to `end`."""
        seen = [at for at, character in enumerate(self.characters) if _is_visible(character)]
        visible = "".join([self.characters[position] for position in seen]).lower()
        is_raw = isinstance(self.starts, range)
        for secret in wanted:
            if not is_raw and not secret.in_escapes:
                continue
            text = visible if secret.is_visible else self.characters
            positions = seen if secret.is_visible else range(len(text))
            for found in re.finditer(re.escape(secret.text), text):
                first, last = positions[found.start()], positions[found.end() - 1]
                yield (
                    self.starts[self.reach(first, -1, over=secret.before)],
                    self.ends[self.reach(last, 1, over=secret.behind)],
                )
            if length := _length_of_cut(text, secret.text):
                yield self.starts[positions[-length]], end

    def reach(self, position: int, step: int, *, over: str) -> int:
        """Return the position up to which characters follow that may be those not visible."""
        # A server may show each byte of a character as one that is replaced.
        for _ in range(_MAX_BYTES_OF_CHARACTER * len(over)):
            beyond = position + step
            if not 0 <= beyond < len(self.characters) or _is_visible(self.characters[beyond]):
                break
            if self.characters[beyond] == " " and " " not in over:
                break
            position = beyond
        return position


def _length_of_cut(text: str, wanted: str) -> int:
    """Return with how many characters of what is wanted the text breaks off; 0 for too few."""
    for length in range(min(len(wanted) - 1, len(text)), _MIN_CUT - 1, -1):
        # The last character first: texts are long, and most lengths are none.
        if text[-1] == wanted[length - 1] and text.endswith(wanted[:length]):
            return length
    return 0


_SECRET_HEADER: Final = re.compile(
    r"auth|token|key|secret|passw|credential|cookie|signature", re.IGNORECASE
)
_MIN_OF_QUERY: Final = 4
"""A value of the query that is shorter, such as `db=1`, is no secret, and stands in many a word."""


@dataclass(frozen=True)
class BasicCredentials:
    """Secrets that were sent to a server."""

    secrets: tuple[str, ...] = ()

    @classmethod
    def sent(cls, url: str, headers: Mapping[str, str]) -> "BasicCredentials":
        """Return those of a request: of its headers, and of its address' user and query."""
        secrets = (*_of_headers(headers), *_of_address(url))
        return cls(tuple(dict.fromkeys(filter(str.strip, secrets))))

    def mask(self, text: str) -> str:
        """Return the text with each of them masked, also one within which the text breaks off."""
        return mask_quotes(text, self.secrets)


NO_CREDENTIALS: Final = BasicCredentials()


def _of_headers(headers: Mapping[str, str]) -> Iterator[str]:
    for name, value in headers.items():
        if not _SECRET_HEADER.search(name):
            continue
        scheme, _, token = value.strip().partition(" ")
        if "authorization" not in name.lower() or not token:
            yield value.strip()
            continue
        yield token.strip()
        if scheme.lower() == "basic":
            with suppress(ValueError):  # a token that is no base64 is masked as it is
                yield from _of_pair(base64.b64decode(token).decode(errors="replace"))


def _of_address(url: str) -> Iterator[str]:
    with suppress(ValueError):
        parts = urlsplit(url)
        if parts.password:
            yield parts.password
            yield from _of_pair(f"{unquote(parts.username or '')}:{unquote(parts.password)}")
        for name, value in parse_qsl(parts.query, keep_blank_values=True):
            if len(value or name) >= _MIN_OF_QUERY:
                yield value or name


def _of_pair(pair: str) -> Iterator[str]:
    """Yield the secrets of `user:password`: a user alone is none, its name may be any word."""
    yield pair.partition(":")[2]
    for encoding in ("utf-8", "latin-1"):  # the latter is aiohttp's, of an address
        data = pair.encode(encoding, errors="replace")
        yield base64.b64encode(data).decode().rstrip("=")
        yield base64.urlsafe_b64encode(data).decode().rstrip("=")
