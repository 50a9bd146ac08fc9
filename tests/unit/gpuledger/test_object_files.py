"""Options of an object store: from files, and told apart into the store's and the requests'."""

from pathlib import Path

import duckdb
import pytest

from gpuledger.errors import SettingsError
from gpuledger.store.object_files import open_object_files, resolve_options, split_options


def test_an_option_s_value_may_stand_in_a_file(tmp_path: Path) -> None:
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
        # deltalake reads this one itself, again and again.
        "aws_web_identity_token_file": "/run/token",
    }


@pytest.mark.parametrize("content", [None, "", "hunter2\nhunter3\n"])
def test_a_file_without_a_value_is_refused_by_the_option_s_name(
    tmp_path: Path, content: str | None
) -> None:
    file = tmp_path / "secret"
    if content is not None:
        file.write_text(content)
    with pytest.raises(SettingsError, match=r"storage_options\.aws_token_file") as refused:
        resolve_options({"aws_token_file": str(file)})
    assert "hunter" not in str(refused.value)


def test_options_of_requests_are_told_from_those_of_the_store() -> None:
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
        # For commits alone: a reader knows no such option.
        ("s3://ledger/gpuledger", {"aws_s3_allow_unsafe_rename": "true"}),
        ("gs://ledger/gpuledger", {}),
        ("az://ledger/gpuledger", {"azure_storage_account_name": "ledger"}),
        ("/var/lib/gpuledger/store", {}),
    ],
)
def test_duckdb_knows_the_files_of_every_kind_of_store(uri: str, options: dict[str, str]) -> None:
    with duckdb.connect() as connection:
        open_object_files(connection, uri, options)
        protocol = uri.partition("://")[0]
        assert (protocol in connection.list_filesystems()) == ("://" in uri)
