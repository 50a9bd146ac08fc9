"""What a YAML parser found wrong, without the text that it stumbled over, which may be a secret."""

import re
from typing import Final

import yaml

from gpuledger.settings.secret import MASK

# What a parser says where a text is taken for YAML's own, as it begins with one of YAML's signs.
_UNQUOTED: Final = re.compile(
    r"character '[@`%]' that cannot start|expected the node content|alias|anchor|\btag\b"
    r"|indentation indicators|flow|not allowed here|quoted scalar|but found '<scalar>'"
)
_REMEDY: Final = (
    "quote a text that begins with one of @ ` % * & ! | > , [ ] { } ' \" or has a colon and a blank"
)
_OF_A_VALUE: Final = re.compile(r"\b(alias|anchor|tag) (['\"]).+\2", re.DOTALL)


def explain_yaml(error: yaml.YAMLError) -> str:
    """Return where the mistake is and what it is; neither the line nor a piece of a value."""
    if not isinstance(error, yaml.MarkedYAMLError):
        return " ".join(str(error).split())
    said = ": ".join(filter(None, (error.context, error.problem)))
    said = " ".join(_OF_A_VALUE.sub(rf"\1 {MASK}", said).split())
    mark = error.problem_mark or error.context_mark
    if mark:
        said = f"{said} (line {mark.line + 1}, column {mark.column + 1})"
    return f"{said}; {_REMEDY}" if _UNQUOTED.search(said) else said
