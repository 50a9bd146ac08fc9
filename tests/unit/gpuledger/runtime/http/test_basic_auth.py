"""Names and passwords: who is right gets in, once tried for nothing, and nobody holds up others."""

import asyncio
import base64
import sys

import bcrypt
import pytest

from gpuledger.errors import UnavailableError, UserError
from gpuledger.runtime.http.health_pages import BasicAuth
from tests.errors import has_words

USERS = {
    "alice": bcrypt.hashpw(b"right", bcrypt.gensalt(4)).decode(),
    "bob": bcrypt.hashpw(b"other:with colon", bcrypt.gensalt(4)).decode(),
}


def header(name: str, password: str) -> str:
    return "Basic " + base64.b64encode(f"{name}:{password}".encode()).decode()


@pytest.mark.parametrize(
    ("given", "is_user"),
    [
        (header("alice", "right"), True),
        (header("bob", "other:with colon"), True),
        (header("alice", "right").replace("Basic", "bAsIc"), True),
        (header("alice", "wrong"), False),
        (header("alice", ""), False),
        (header("bob", "right"), False),
        (header("carol", "right"), False),
        (header("alice", "x" * 200), False),
        ("Basic !!!", False),
        ("Basic YWxpY2U=", False),
        ("Bearer right", False),
        ("", False),
        (None, False),
    ],
)
async def test_a_user_is_a_name_with_its_own_password(given: str | None, *, is_user: bool) -> None:
    users = BasicAuth(USERS)
    assert await users.allows(given) is is_user
    assert await users.allows(given) is is_user


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """Return the passwords that were tried with bcrypt."""
    seen: list[bytes] = []
    check = bcrypt.checkpw

    def count(password: bytes, hashed: bytes) -> bool:
        seen.append(password)
        return check(password, hashed)

    monkeypatch.setattr(bcrypt, "checkpw", count)
    return seen


async def test_a_password_is_tried_once_however_many_ask_at_once(tried: list[bytes]) -> None:
    users = BasicAuth(USERS)
    asked = [users.allows(header("alice", "right")) for _ in range(5)]
    assert await asyncio.gather(*asked) == [True] * 5
    assert tried == [b"right"]


async def test_an_unknown_name_costs_what_a_known_one_costs(tried: list[bytes]) -> None:
    users = BasicAuth(USERS)
    await users.allows(header("carol", "guess"))
    assert tried == [b"guess"]


async def test_a_flood_of_wrong_passwords_is_bounded_and_holds_up_no_known_user(
    tried: list[bytes],
) -> None:
    users = BasicAuth(USERS)
    assert await users.allows(header("alice", "right"))
    flood = [users.allows(header("alice", f"wrong {n}")) for n in range(50)]
    known = users.allows(header("alice", "right"))
    answers = await asyncio.gather(*flood, known, return_exceptions=True)
    assert answers[-1] is True
    refused = [answer for answer in answers if isinstance(answer, UnavailableError)]
    assert len(refused) == 50 - 8
    assert len(tried) == 1 + 8


async def test_what_is_remembered_is_bounded_and_no_password(tried: list[bytes]) -> None:
    users = BasicAuth(USERS)
    assert await users.allows(header("alice", "right"))
    for number in range(150):
        await users.allows(header("alice", f"wrong {number}"))
    await users.allows(header("alice", "wrong 0"))
    assert tried.count(b"wrong 0") == 2
    assert await users.allows(header("alice", "right"))
    assert tried.count(b"right") == 1
    assert "right" not in repr(vars(users))


def test_without_bcrypt_the_user_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bcrypt", None)
    with pytest.raises(UserError, check=has_words("bcrypt")):
        BasicAuth(USERS)
