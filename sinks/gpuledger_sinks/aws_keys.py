"""Sources of AWS keys: the settings and their files, or a role that is assumed with a token.

The role is assumed as in IRSA (IAM roles for service accounts): the kubelet keeps a token in a
file, and STS returns temporary keys in exchange (AssumeRoleWithWebIdentity). Four values are found
by name in the XML response of STS. They contain no character that XML escapes, so no parser is
needed.
"""

import asyncio
import math
import re
import time
from collections.abc import Callable, Mapping
from datetime import datetime
from http import HTTPStatus
from pathlib import Path
from typing import Final
from urllib.parse import urlencode

from gpuledger.errors import SettingsError, UnavailableError
from gpuledger.runtime.http.credentials import BasicCredentials
from gpuledger.runtime.http.token_endpoint import DEADLINE_SECONDS, FormPost
from gpuledger.runtime.tokens import spread_renewal
from gpuledger.settings import Secret
from gpuledger.settings.secret import shown_url
from gpuledger.texts import readable
from gpuledger_sinks.receiver_settings import Sigv4Settings
from gpuledger_sinks.sigv4 import AwsKeys

ROLE_VARIABLE: Final = "AWS_ROLE_ARN"
TOKEN_FILE_VARIABLE: Final = "AWS_WEB_IDENTITY_TOKEN_FILE"  # noqa: S105  # the name of a variable
_SHOWN_BYTES: Final = 2048
_FORM: Final = {"Content-Type": "application/x-www-form-urlencoded", "User-Agent": "gpuledger"}
_VALUES: Final = {
    name: re.compile(rf"<{name}>([\x21-\x3b\x3d\x3f-\x7e]{{1,16384}})</{name}>")
    for name in ("AccessKeyId", "SecretAccessKey", "SessionToken", "Expiration")
}


class GivenKeys:
    """Keys from the settings and their files, which may be rewritten at any time."""

    def __init__(self, current: Callable[[], AwsKeys]) -> None:
        """Use the keys that the function `current` returns."""
        self._current = current

    async def fetch(self) -> AwsKeys:
        """Return the current keys."""
        return self._current()

    def is_due(self, token: AwsKeys, *, now_seconds: float) -> bool:  # noqa: ARG002  # as TokenSource has it
        """Return whether `token` is outdated, because a file with the keys has changed."""
        return token != self._current()


class AssumedRole:
    """Fetches temporary keys of a role from STS, in exchange for a token from a file."""

    def __init__(
        self,
        *,
        group: str,
        role_arn: str,
        token_file: Path,
        sts_url: str,
        post: FormPost,
        deadline_seconds: float = DEADLINE_SECONDS,
        time_seconds: Callable[[], float] = time.time,
    ) -> None:
        """Assume the role `role_arn`; `post` posts to STS, and `group` is the settings' section."""
        self._group, self._role_arn, self._token_file = group, role_arn, token_file
        self._sts_url, self._post, self._time_seconds = sts_url, post, time_seconds
        self._deadline_seconds, self._renew_seconds = deadline_seconds, math.inf

    async def fetch(self) -> AwsKeys:
        """Return new keys from STS.

        Raises `UnavailableError` if STS returns no usable keys, and `SettingsError` if the token
        file cannot be used.
        """
        setting = f"{self._group}.web_identity_token_file"
        # The kubelet renews the file, so it is read each time.
        token = Secret.load(self._token_file, name=setting, is_known=True).reveal()
        sent = BasicCredentials((token,))
        form = urlencode(
            {
                "Action": "AssumeRoleWithWebIdentity",
                "Version": "2011-06-15",
                "RoleArn": self._role_arn,
                "RoleSessionName": "gpuledger",
                "WebIdentityToken": token,
            }
        )
        try:
            async with asyncio.timeout(self._deadline_seconds):
                status, body = await self._post(self._sts_url, form.encode(), _FORM)
            keys = self._read(status, body, sent)
        except TimeoutError as error:
            raise self._error(f"no answer within {self._deadline_seconds:g} s") from error
        except (OSError, ValueError, UnavailableError) as error:
            message = readable(sent.mask(str(error))) or type(error).__name__
            raise self._error(message) from error
        self._renew_seconds = spread_renewal(keys)
        return keys

    def is_due(self, token: AwsKeys, *, now_seconds: float) -> bool:
        """Return whether the keys will expire soon or have expired."""
        return now_seconds >= min(self._renew_seconds, token.end_seconds)

    def _error(self, message: str) -> UnavailableError:
        return UnavailableError(f"{self._group}.role_arn by {shown_url(self._sts_url)}: {message}")

    def _read(self, status: int, body: bytes, sent: BasicCredentials) -> AwsKeys:
        text = body.decode(errors="replace")
        if status != HTTPStatus.OK:
            group = self._group
            raise ValueError(
                f"answered {status}: {readable(sent.mask(text[:_SHOWN_BYTES]))}; check"
                f" {group}.role_arn, {group}.web_identity_token_file and the role's trust policy"
            )
        found = {name: value.search(text) for name, value in _VALUES.items()}
        if missing := [name for name, match in found.items() if match is None]:
            # The body is not shown, because a successful response may contain keys in any form.
            raise ValueError(f"answered 200 without {missing[0]}; check {self._group}.sts_url")
        values = {name: match[1] for name, match in found.items() if match}
        now_seconds = self._time_seconds()
        end_seconds = datetime.fromisoformat(values["Expiration"]).timestamp()
        if end_seconds <= now_seconds:
            raise ValueError("answered with keys that have expired by this machine's clock")
        return AwsKeys(
            access_key_id=values["AccessKeyId"],
            secret_access_key=values["SecretAccessKey"],
            session_token=values["SessionToken"],
            begin_seconds=now_seconds,
            end_seconds=end_seconds,
        )


def role_of(
    settings: Sigv4Settings, *, group: str, environ: Mapping[str, str]
) -> tuple[str, Path] | None:
    """Return the role's ARN and its token file, from the settings or the environment.

    Returns `None` if the settings contain keys. Raises `SettingsError` if the settings contain no
    keys and the role or its token file is missing.
    """
    if settings.access_key_id:
        return None
    role_arn = settings.role_arn or environ.get(ROLE_VARIABLE, "")
    file = settings.web_identity_token_file or environ.get(TOKEN_FILE_VARIABLE, "")
    if not role_arn or not file:
        raise SettingsError(
            f"{group}.region: no keys to sign with; set access_key_id and secret_access_key_file,"
            " or role_arn and web_identity_token_file (EKS sets them as the variables"
            f" {ROLE_VARIABLE} and {TOKEN_FILE_VARIABLE} in a pod whose service account has a role)"
        )
    return role_arn, Path(file)
