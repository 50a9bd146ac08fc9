"""A secret is masked in whatever writing another program quotes it."""

import base64
import html
import json
import re
import time
from collections.abc import Callable
from urllib.parse import quote, quote_plus

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from gpuledger.runtime.http.credentials import mask_quotes
from gpuledger.settings.secret import MASK

Write = Callable[[str], str]


def escaping(characters: str, write: Callable[[str], str]) -> Write:
    """Return a writer that escapes these characters and no other."""
    return lambda text: "".join(write(one) if one in characters else one for one in text)


def in_units(text: str) -> str:
    r"""Return each character as `\uXXXX`, two of them for one beyond the first plane."""
    units = text.encode("utf-16-be")
    return "".join(rf"\u{units[at : at + 2].hex()}" for at in range(0, len(units), 2))


def shown(encoding: str) -> Write:
    """Return what is shown of the bytes of an encoding, taken for UTF-8."""
    return lambda text: text.encode(encoding, "replace").decode(errors="replace")


WRITINGS: dict[str, Write] = {
    "as it is": str,
    "in capitals": lambda text: "".join(one.upper() if one.isascii() else one for one in text),
    "in an address": lambda text: quote(text, safe=""),
    "in an address, small": lambda text: quote(text, safe="").replace("%2B", "%2b"),
    "in a path": quote,
    "in a form": quote_plus,
    "encodeURIComponent": lambda text: quote(text, safe="!'()*-._~"),
    "Latin-1 in an address": lambda text: quote(
        text, safe="", encoding="latin-1", errors="replace"
    ),
    "Python's JSON": lambda text: json.dumps(text)[1:-1],
    "JavaScript's JSON": lambda text: json.dumps(text, ensure_ascii=False)[1:-1],
    "PHP's JSON": lambda text: json.dumps(text)[1:-1].replace("/", r"\/"),
    "Go's JSON": lambda text: escaping("<>&", in_units)(json.dumps(text, ensure_ascii=False)[1:-1]),
    ".NET's JSON": lambda text: "".join(
        one if one.isalnum() and one.isascii() else in_units(one).upper().replace("U", "u")
        for one in text
    ),
    "Go's HTML": lambda text: (
        escaping("<>&'\"+", lambda one: f"&#{ord(one)};")(text)
        .replace("&#60;", "&lt;")
        .replace("&#62;", "&gt;")
        .replace("&#38;", "&amp;")
    ),
    "Python's HTML": html.escape,
    "PHP's HTML": lambda text: html.escape(text).replace("&#x27;", "&#039;"),
    "XML": lambda text: html.escape(text).replace("&#x27;", "&apos;"),
    "lodash's HTML": lambda text: html.escape(text).replace("`", "&#x60;").replace("/", "&#x2F;"),
    "all in HTML": lambda text: "".join(f"&#x{ord(one):04X};" for one in text),
    "repr": lambda text: repr(text)[1:-1],
    "bytes' repr": lambda text: repr(text.encode())[2:-1],
    "C": lambda text: "".join(
        one if one.isalnum() and one.isascii() else "".join(rf"\{b:03o}" for b in one.encode())
        for one in text
    ),
    "Rust": lambda text: "".join(
        one if one.isascii() else rf"\u{{{ord(one):x}}}"
        for one in text.replace("\\", "\\\\").replace('"', r"\"")
    ),
    "base64": lambda text: base64.b64encode(text.encode()).decode(),
    "base64 in lines": lambda text: base64.encodebytes(text.encode()).decode(),
    "base64 of addresses": lambda text: base64.urlsafe_b64encode(text.encode()).decode(),
    "base64 of Latin-1": lambda text: base64.b64encode(text.encode("latin-1", "replace")).decode(),
    "a login in base64": lambda text: base64.b64encode(f"bob:{text}".encode()).decode(),
    "hexadecimal": lambda text: text.encode().hex(),
    "Latin-1": shown("latin-1"),
    "UTF-16": shown("utf-16-le"),
    "UTF-16, high byte first": shown("utf-16-be"),
    "UTF-8 as Latin-1": lambda text: text.encode().decode("latin-1"),
}
PIECES = st.one_of(
    st.sampled_from([*"aBc17&<>+'\"/\\%=?#`{}~!()*-_. ;:@$,^|[]", "%41", "\\n", "&amp;"]),
    st.sampled_from(list("äßñéÄ€ł漢😀")),
    st.characters(min_codepoint=0x21, max_codepoint=0x7E),
)
SECRETS = st.lists(PIECES, min_size=8, max_size=40).map("".join).map(str.strip)


def letters(text: str) -> str:
    return re.sub("[^a-z0-9]", "", text.lower())


@pytest.mark.parametrize("name", WRITINGS)
@given(secret=SECRETS)
@example(secret="S3cr&t<Pw>+x'9")
@example(secret='tok "hünt/er+2')
def test_a_secret_is_masked_in_every_writing(name: str, secret: str) -> None:
    assume(len(re.sub("[^!-~]", "", secret)) >= 8)
    masked = mask_quotes(f"no: {WRITINGS[name](secret)} is wrong", [secret])
    assert masked.startswith("no:")
    assert masked.endswith("is wrong") or name.startswith("UTF-16")
    assert MASK in masked
    # Of what is not ASCII the first and the last may be left, as the bytes that they were.
    left = masked.replace(MASK, "").removeprefix("no:").removesuffix("is wrong")
    assert len(letters(left)) <= 4, masked


@pytest.mark.parametrize("outer", ["Python's JSON", "Go's HTML", "in an address", "in a form"])
@pytest.mark.parametrize("inner", ["Python's JSON", "Go's HTML", "in an address", "base64"])
@given(secret=SECRETS)
def test_a_writing_within_another_is_undone_as_well(inner: str, outer: str, secret: str) -> None:
    assume(len(re.sub("[^!-~]", "", secret)) >= 8)
    said = WRITINGS[outer](WRITINGS[inner](secret))
    masked = mask_quotes(f"no: {said} is wrong", [secret])
    left = masked.replace(MASK, "").removeprefix("no:").removesuffix("is wrong")
    assert MASK in masked
    assert len(letters(left)) <= 8, masked


@pytest.mark.parametrize("name", ["as it is", "Go's JSON", "Go's HTML", "in an address", "base64"])
@given(data=st.data())
def test_a_text_that_breaks_off_within_a_secret_shows_no_more_than_its_begin(
    name: str, data: st.DataObject
) -> None:
    secret = "S3cr&t<Pw>+x'9/z&&&&"
    written = WRITINGS[name](secret)
    cut = written[: data.draw(st.integers(0, len(written) - 1))]
    masked = mask_quotes(f"no: {cut}", [secret])
    assert letters(masked.removeprefix("no:").replace(MASK, "")) in {
        "",
        "s",
        "s3",
        "s3c",
        "uzn",
        "uz",
        "u",
    }


def test_what_is_no_secret_stays() -> None:
    said = r"no \u0026 &amp; %20 + user bob, tenant 1 of db=1; S3c \\ &"
    assert mask_quotes(said, ["S3cr&t"]) == said
    assert mask_quotes(said, []) == said
    assert mask_quotes("", ["S3cr&t"]) == ""


def test_a_short_secret_is_masked_as_it_is_alone() -> None:
    assert mask_quotes("no: a%b &#97;", ["a%b"]) == f"no: {MASK} &#97;"
    assert mask_quotes("no: ä, &auml;", ["ä"]) == f"no: {MASK}, &auml;"


@pytest.mark.parametrize("again", ["%", "%41", r"\u0025", "&#37;", "%2541", "\\", "&", "a", "+"])
def test_whatever_is_said_costs_little(again: str) -> None:
    """Of a page of 16 KiB and a token of 2,000 characters, in seconds of this process."""
    begin_seconds = time.process_time()
    mask_quotes((again * 16_384)[:16_384], ["aA+" * 700])
    assert time.process_time() - begin_seconds < 5.0
