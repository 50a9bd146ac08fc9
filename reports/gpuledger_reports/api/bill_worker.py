"""A process that answers questions one after the other, until its standard input ends.

A process, and no thread: what takes too long, or too much memory, or hangs in an object store, can
be ended without those who ask meanwhile noticing (ADR 055).
"""

import os
import sys
import traceback
from http import HTTPStatus
from typing import BinaryIO

from gpuledger_reports.api.answering import AnswerSettings, ReportAnswer, answer_to, error_body
from gpuledger_reports.api.frames import QUESTION, SETTINGS, TAKEN, framed, read_frame


def work(questions: BinaryIO, answers: BinaryIO) -> None:
    """Answer all questions; what comes first is the settings."""
    head = read_frame(questions)
    if head is None:
        return
    settings = SETTINGS.decode(head)
    while (payload := read_frame(questions)) is not None:
        answers.write(TAKEN)
        answers.flush()
        answers.write(framed(_answer(payload, settings)))
        answers.flush()


def _answer(payload: bytes, settings: AnswerSettings) -> ReportAnswer:
    try:
        return answer_to(QUESTION.decode(payload), settings)
    except Exception:  # noqa: BLE001  # a mistake of ours costs one answer, and is told in full
        traceback.print_exc()
        status = HTTPStatus.INTERNAL_SERVER_ERROR
        body = error_body(status, "a mistake of the service's own; its log says more")
        return ReportAnswer(status=status, body=body)


def main() -> None:
    """Answer on standard output, which no library may write to meanwhile."""
    with os.fdopen(os.dup(1), "wb") as answers:
        os.dup2(2, 1)
        work(sys.stdin.buffer, answers)


if __name__ == "__main__":
    main()
