"""Object store options may come from files, and are split from request options."""

from pathlib import Path

import duckdb
import pytest

from gpuledger.errors import SettingsError
from gpuledger.store.object_files import open_object_files, resolve_options, split_options


def test_the_value_of_an_option_can_come_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text("hunter2\n")
    given = {
        "aws_region": "eu-central-1",
        "AWS_SECRET_ACCESS_KEY_FILE": str(file),
        "aws_web_identity_token_file": "/run/token",
    }
    assert resolve_options(given) == {
        "aws_region": "eu-central-1",
        "AWS_SECRET_ACCESS_KEY": "hunter2",
        # deltalake reads this file itself, repeatedly.
        "aws_web_identity_token_file": "/run/token",
    }


@pytest.mark.parametrize("content", [None, "", "hunter2\nhunter3\n"])
def test_an_empty_file_is_refused_with_the_name_of_the_option(
    tmp_path: Path, content: str | None
) -> None:
    file = tmp_path / "secret"
    if content is not None:
        file.write_text(content)
    with pytest.raises(SettingsError, match=r"storage_options\.aws_token_file") as refused:
        resolve_options({"aws_token_file": str(file)})
    assert "hunter" not in str(refused.value)


def test_request_options_are_separated_from_store_options() -> None:
    options = {
        "AWS_ALLOW_HTTP": "true",
        "timeout": "30s",
        "AWS_REGION": "eu",
        "google_proxy_url": "p",
    }
    assert split_options(options) == (
        {"allow_http": "true", "timeout": "30s", "proxy_url": "p"},
        {"aws_region": "eu"},
    )


@pytest.mark.parametrize(
    ("uri", "options"),
    [
        ("s3://ledger/gpuledger", {"aws_access_key_id": "a", "aws_secret_access_key": "b"}),
        # Only commits use this option; a reader does not know it.
        ("s3://ledger/gpuledger", {"aws_s3_allow_unsafe_rename": "true"}),
        ("gs://ledger/gpuledger", {}),
        ("az://ledger/gpuledger", {"azure_storage_account_name": "ledger"}),
        ("/var/lib/gpuledger/store", {}),
    ],
)
def test_duckdb_can_read_the_files_of_every_kind_of_store(
    uri: str, options: dict[str, str]
) -> None:
    with duckdb.connect() as connection:
        open_object_files(connection, uri, options)
        protocol = uri.partition("://")[0]
        assert (protocol in connection.list_filesystems()) == ("://" in uri)
