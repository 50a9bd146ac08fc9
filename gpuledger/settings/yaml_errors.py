"""Messages on YAML files that cannot be read, without any part of the file's content."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import yaml

from gpuledger.errors import UserError
from gpuledger.settings.secret import MASK


@contextmanager
def yaml_errors(
    file: object, *, kind: str = "", raises: type[UserError] = UserError
) -> Iterator[None]:
    """Raise errors of reading and parsing a file as user errors, which name the file."""
    try:
        yield
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8"
        raise raises(f"cannot read {kind}{file}: {reason}") from error
    except yaml.YAMLError as error:
        raise raises(f"{file}: invalid YAML: {explain_yaml(error)}") from error
    except RecursionError as error:
        raise raises(f"{file}: invalid YAML: nested too deep") from error
    except ValueError as error:  # raised for an invalid date
        raise raises(f"{file}: invalid YAML: invalid date or number") from error


# Parser messages for a text that begins with one of YAML's special characters.
_UNQUOTED: Final = re.compile(
    r"character '[@`%]' that cannot start|expected the node content|alias|anchor|\btag\b"
    r"|indentation indicators|flow|not allowed here|quoted scalar|but found '<scalar>'"
)
_REMEDY: Final = (
    "quote a text that begins with one of @ ` % * & ! | > , [ ] { } ' \" or has a colon and a blank"
)
_OF_A_VALUE: Final = re.compile(r"\b(alias|anchor|tag) (['\"]).+\2", re.DOTALL)


def explain_yaml(error: yaml.YAMLError) -> str:
    """Return the description and position of a mistake, without quoting any part of the file."""
    if not isinstance(error, yaml.MarkedYAMLError):
        return " ".join(str(error).split())
    mistake = ": ".join(filter(None, (error.context, error.problem)))
    mistake = " ".join(_OF_A_VALUE.sub(rf"\1 {MASK}", mistake).split())
    mark = error.problem_mark or error.context_mark
    if mark:
        mistake = f"{mistake} (line {mark.line + 1}, column {mark.column + 1})"
    return f"{mistake}; {_REMEDY}" if _UNQUOTED.search(mistake) else mistake
