"""A secret is masked in every form in which another program usually quotes it."""

import base64
import html
import json
import time
from collections.abc import Callable
from urllib.parse import quote, quote_plus

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from gpuledger.runtime.http.credentials import BasicCredentials
from gpuledger.settings.secret import MASK

FORMS: dict[str, Callable[[str], str]] = {
    "unquoted": str,
    "in an address": lambda text: quote(text, safe=""),
    "in a path": quote,
    "in a form": quote_plus,
    "JSON": lambda text: json.dumps(text)[1:-1],
    "JSON in UTF-8": lambda text: json.dumps(text, ensure_ascii=False)[1:-1],
    "HTML": html.escape,
    "base64": lambda text: base64.b64encode(text.encode()).decode(),
    "base64 of addresses": lambda text: base64.urlsafe_b64encode(text.encode()).decode(),
}
SECRETS = st.text(
    st.one_of(st.characters(min_codepoint=0x20, max_codepoint=0x7E), st.sampled_from("äñ€ł漢😀")),
    min_size=4,
    max_size=40,
).filter(str.strip)


def masked(text: str, *secrets: str) -> str:
    return BasicCredentials(secrets).mask(text)


@pytest.mark.parametrize("form", FORMS)
@given(secret=SECRETS)
@example(secret="S3cr&t<Pw>+x'9")
@example(secret='tok "hünt/er+2')
def test_a_secret_is_masked_in_every_form(form: str, secret: str) -> None:
    # Characters of the surrounding words, or of a mask, may be a secret too.
    assume(secret.strip("*= ") and secret not in "NO: [] IS WRONG")
    assert masked(f"NO: [{FORMS[form](secret)}] IS WRONG", secret).replace("=", "") == (
        f"NO: [{MASK}] IS WRONG"
    )


@given(secrets=st.lists(SECRETS, min_size=1, max_size=4), data=st.data())
def test_no_form_of_any_of_several_secrets_is_left(secrets: list[str], data: st.DataObject) -> None:
    message = [FORMS[data.draw(st.sampled_from(sorted(FORMS)))](secret) for secret in secrets]
    shown = masked("\0".join(message), *secrets)
    assert not [form for form in message if form.strip("*=") and form.rstrip("=") in shown]


@pytest.mark.parametrize("form", FORMS)
def test_a_text_that_is_cut_off_within_a_secret_shows_only_its_first_characters(form: str) -> None:
    secret = "S3cr&t<Pw>+x'9/z&&&&"
    written = FORMS[form](secret).rstrip("=")
    for length in range(len(written) + 1):
        shown = written[:length] if length < 4 else MASK
        assert masked(f"no: {written[:length]}", secret) == f"no: {shown}"


def test_a_text_that_is_not_a_secret_is_kept() -> None:
    message = r"no \u0026 &amp; %20 + user bob, tenant 1 of db=1; S3c \\ &"
    assert masked(message, "S3cr&t") == message
    assert masked(message) == message
    assert masked("", "S3cr&t") == ""


def test_a_short_secret_is_masked_only_in_its_plain_form() -> None:
    assert masked("no: a%b &#97;", "a%b") == f"no: {MASK} &#97;"
    assert masked("no: ä, &auml;", "ä") == f"no: {MASK}, &auml;"


@pytest.mark.parametrize("again", ["%", "&", "a", "aA+"])
def test_masking_takes_little_time_whatever_the_text_is(again: str) -> None:
    """For a page of 16 KiB and a token of 2,000 characters, measured in CPU time."""
    begin_seconds = time.process_time()
    masked((again * 16_384)[:16_384], "aA+" * 700)
    assert time.process_time() - begin_seconds < 1.0
