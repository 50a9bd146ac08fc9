"""Who may see the pages, by name and password. What happens to others is the caller's business.

bcrypt is slow on purpose, so a password that was right is remembered, as a keyed digest, and at
most one is tried at a time, off the event loop; who would wait too long is told to come later.
"""

import asyncio
import base64
import hashlib
import hmac
import secrets
from collections import OrderedDict
from collections.abc import Mapping
from types import ModuleType
from typing import Final

from gpuledger.errors import UnavailableError, UserError

_MAX_WAITING: Final = 8
_MAX_REMEMBERED: Final = 100
_MAX_PASSWORD_BYTES: Final = 72
_SCHEME: Final = "basic "


class BasicAuth:
    """The users of a web configuration."""

    def __init__(self, users: Mapping[str, str]) -> None:
        """Take at least one name with its hash; raises `UserError` where there is no bcrypt."""
        _bcrypt()
        self._users = users
        # A name that is unknown must cost what a known one does, or the time tells which exist.
        self._nobodys_hash = next(iter(users.values()))
        self._key = secrets.token_bytes(32)
        self._known: OrderedDict[bytes, bool] = OrderedDict()
        self._one_at_a_time = asyncio.Lock()
        self._waiting = 0

    async def allows(self, header: str | None) -> bool:
        """Return whether an `Authorization` header is of a user.

        Raises `UnavailableError` where too many passwords wait to be tried.
        """
        credentials = _parse(header)
        if credentials is None:
            return False
        name, password = credentials
        hashed = self._users.get(name, self._nobodys_hash)
        digest = hmac.digest(self._key, b"\0".join((hashed.encode(), password)), hashlib.sha256)
        if digest not in self._known:
            is_right = await self._try(hashed, password, digest)
            self._remember(digest, is_right=is_right)
        return self._known.get(digest, False) and name in self._users

    async def _try(self, hashed: str, password: bytes, digest: bytes) -> bool:
        if self._waiting >= _MAX_WAITING:
            raise UnavailableError("too many passwords wait to be tried")
        self._waiting += 1
        try:
            async with self._one_at_a_time:
                if digest in self._known:
                    return self._known[digest]
                return await asyncio.to_thread(_matches, password, hashed)
        finally:
            self._waiting -= 1

    def _remember(self, digest: bytes, *, is_right: bool) -> None:
        """Remember an answer; a flood of wrong ones pushes out no right one."""
        if not is_right:
            wrong = [known for known, right in self._known.items() if not right]
            if len(wrong) >= _MAX_REMEMBERED:
                del self._known[wrong[0]]
        self._known[digest] = is_right


def _matches(password: bytes, hashed: str) -> bool:
    return bool(_bcrypt().checkpw(password[:_MAX_PASSWORD_BYTES], hashed.encode()))


def _bcrypt() -> ModuleType:
    try:
        import bcrypt  # noqa: PLC0415  # only who asks for passwords carries it in memory
    except ImportError as error:
        raise UserError(
            "basic_auth_users needs the package bcrypt, which is not installed"
        ) from error
    return bcrypt


def _parse(header: str | None) -> tuple[str, bytes] | None:
    if header is None or not header.lower().startswith(_SCHEME):
        return None
    try:
        decoded = base64.b64decode(header[len(_SCHEME) :], validate=True)
        name, colon, password = decoded.partition(b":")
        return (name.decode(), password) if colon else None
    except ValueError:  # no base64, or not in ASCII, or a name that is not in UTF-8
        return None
