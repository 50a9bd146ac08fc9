"""User names and passwords: each is checked once, and no client delays the others."""

import asyncio
import base64
from collections import Counter

import bcrypt
import pytest

from gpuledger.runtime.http.web_config import BasicAuth

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
    ],
)
async def test_each_user_has_their_own_password(given: str, *, is_user: bool) -> None:
    users = BasicAuth(USERS)
    for _ in range(2):
        assert (await users.status_for(given) == 200) is is_user


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """Return the passwords that were checked with bcrypt."""
    seen: list[bytes] = []
    check = bcrypt.checkpw

    def count(password: bytes, hashed: bytes) -> bool:
        seen.append(password)
        return check(password, hashed)

    monkeypatch.setattr(bcrypt, "checkpw", count)
    return seen


async def test_a_password_is_checked_once_however_many_requests_come_at_once(
    tried: list[bytes],
) -> None:
    users = BasicAuth(USERS)
    requested = [users.status_for(header("alice", "right")) for _ in range(5)]
    assert await asyncio.gather(*requested) == [200] * 5
    assert tried == [b"right"]


async def test_an_unknown_user_takes_as_long_as_a_known_one(tried: list[bytes]) -> None:
    users = BasicAuth(USERS)
    assert await users.status_for(header("alice", "right")) == 200
    assert await users.status_for(header("carol", "right")) == 401
    assert tried == [b"right", b"right"]


async def test_a_flood_of_wrong_passwords_is_bounded_and_does_not_delay_a_known_user(
    tried: list[bytes],
) -> None:
    users = BasicAuth(USERS)
    await users.status_for(header("alice", "right"))
    flood = [users.status_for(header("alice", f"wrong {n}")) for n in range(50)]
    statuses = await asyncio.gather(*flood, users.status_for(header("alice", "right")))
    assert Counter(statuses) == {503: 50 - 8, 401: 8, 200: 1}
    assert len(tried) == 1 + 8
