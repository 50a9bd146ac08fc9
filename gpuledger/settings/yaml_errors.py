"""What a YAML parser found wrong, without the text that it stumbled over, which may be a secret."""

import re
from typing import Final

import yaml

from gpuledger.settings.secret import MASK

_OF_A_VALUE: Final = re.compile(r"\b(alias|anchor|tag) (['\"]).+\2", re.DOTALL)


def explain_yaml(error: yaml.YAMLError) -> str:
    """Return where the mistake is and what it is; neither the line nor a piece of a value."""
    if not isinstance(error, yaml.MarkedYAMLError):
        return " ".join(str(error).split())
    said = ": ".join(filter(None, (error.context, error.problem)))
    said = " ".join(_OF_A_VALUE.sub(rf"\1 {MASK}", said).split())
    mark = error.problem_mark or error.context_mark
    return f"{said} (line {mark.line + 1}, column {mark.column + 1})" if mark else said
