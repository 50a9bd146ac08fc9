"""What an answer says of how a receiver is set: its address, its login, the protocol to speak.

For people, beside a check. Whether a refusal is final is decided by each receiver's own client.
"""

from http import HTTPStatus
from typing import Final

from gpuledger.runtime.http.client import HttpAnswer
from gpuledger.settings.secret import shown_url

_LOGINS: Final = frozenset(
    {
        HTTPStatus.UNAUTHORIZED,
        HTTPStatus.FORBIDDEN,
        HTTPStatus.PROXY_AUTHENTICATION_REQUIRED,
    }
)


def explain(answer: HttpAnswer, *, url: str, setting: str) -> str:
    """Return who gave an answer that is no word on what was sent, and where to look for it.

    `setting` is the name of the one that has the address; the login stands in the same section.
    """
    said = f"{shown_url(url)}: {answer.status} {answer.text}".rstrip()
    if answer.is_success:
        return (
            f"{said} with a page ({answer.content_type}), which is not the receiver's: the address"
            " leads elsewhere, or a proxy wants a login"
        )
    if remedy := _remedy(answer.status, setting=setting):
        return f"{said}: {remedy}"
    return said


def _remedy(status: int, *, setting: str) -> str:
    section = setting.partition(".")[0]
    if status in _LOGINS:
        return f"look at the login ({section}.username and .password, or .bearer_token)"
    is_for_later = status == HTTPStatus.TOO_MANY_REQUESTS or status // 100 not in {3, 4}
    return "" if is_for_later else f"look at {setting}: its scheme, host, port and path"
