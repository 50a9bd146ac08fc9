"""reference/dead-letter-reasons.md: why records are rejected, from the catalogue of reasons."""

from typing import Final

from gpuledger.dead_letter_reasons import DEAD_LETTER_REASONS
from tests.docs_gen.markdown import code, head, table

_HEAD: Final = head(
    "Dead-letter reasons",
    audience="SRE",
    about="""\
Reasons for which a component rejects a record and writes a dead-letter record. Look up the field
`reason` of a record, or the label of `gpuledger_dead_letters_total`, to find the cause.""",
)
_SEE: Final = """
- [Dead-letter records](../guides/dead-letter-records.md): find, fix and replay rejected records.
- [Permissions](permissions.md): who may write to which topic.
- [Prometheus and hosted receivers](../guides/prometheus.md): the receiver's window and limits.
- [Store](../guides/store.md): which days are stored.
- [Limits](limits.md): maximum sizes of records and messages.
"""
_COLUMNS: Final = ("reason", "meaning", "usual cause", "action")


def dead_letter_reasons_page() -> str:
    """Return the page, in Markdown."""
    rows = (
        (code(reason.name), reason.meaning, reason.cause, reason.action)
        for reason in DEAD_LETTER_REASONS
    )
    return "\n".join([*_HEAD.splitlines(), *_SEE.splitlines(), "", *table(_COLUMNS, rows), ""])
