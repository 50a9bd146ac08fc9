"""Answers a question to a capacity report, with the rows of `gpuledger capacity`."""

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

import duckdb
import orjson

from gpuledger.errors import ArgumentError, UserError
from gpuledger_reports.api.questions import MAX_ROWS, CapacityQuestion
from gpuledger_reports.capacity.asking import NO_HOURS, answer, ask, open_store
from gpuledger_reports.capacity.registry import REPORTS
from gpuledger_reports.capacity.report import Row, file_columns, file_rows, json_content
from gpuledger_reports.presenting.output import as_csv, write_parquet
from gpuledger_reports.pricing.policy import BillPolicy
from gpuledger_reports.reading.usage_sums import memory_bound


def capacity_content(
    asked: CapacityQuestion,
    *,
    store_uri: str,
    storage_options: Mapping[str, str],
    memory_bytes: int,
    policy: BillPolicy,
) -> bytes:
    """Return a report's answer in the requested format.

    Raises `ArgumentError` if the question is invalid, and `UserError` if the store has no hourly
    usage or cannot be read.
    """
    report = REPORTS[asked.report]
    with duckdb.connect() as connection:
        connection.execute(memory_bound(memory_bytes))
        complete = open_store(connection, store_uri, storage_options)
        if complete is None:
            raise UserError(NO_HOURS)
        question = ask(
            report,
            asked.given,
            complete=complete,
            policy=policy,
            now_us=asked.now_us,
            advance=lambda _: None,
        )
        found = answer(report, question, connection)
    if len(found.rows) > MAX_ROWS:
        raise ArgumentError("top", f"the answer has more than {MAX_ROWS} rows; give a maximum")
    columns = file_columns(report, question.by, found.rows)
    if asked.format == "csv":
        return as_csv([*columns], file_rows(question, found.rows)).encode()
    if asked.format == "parquet":
        return _parquet(columns, file_rows(question, found.rows))
    content = json_content(report, question, found)
    return orjson.dumps(content, option=orjson.OPT_APPEND_NEWLINE)


def _parquet(columns: dict[str, str], rows: Iterable[Row]) -> bytes:
    # A file in memory, because the service's directories may be read-only.
    descriptor = os.memfd_create("parquet")
    with os.fdopen(descriptor, "rb") as file:
        write_parquet(columns, rows, file=Path(f"/proc/self/fd/{descriptor}"))
        return file.read()
