"""What the API server answers when it cannot do what it was asked: `Status` objects.

Here live the errors with their codes and reasons as a real API server words them.
"""

from typing import Any


class ApiError(Exception):
    """An answer of kind `Status`."""

    def __init__(self, *, code: int, reason: str, message: str, details: Any = None) -> None:  # noqa: ANN401  # any JSON
        super().__init__(message)
        self.code = code
        self.status = {
            "kind": "Status",
            "apiVersion": "v1",
            "metadata": {},
            "status": "Failure",
            "message": message,
            "reason": reason,
            **({"details": details} if details else {}),
            "code": code,
        }


def not_found(plural: str, name: str) -> ApiError:
    """404 for an object that is not there."""
    message = f'{plural} "{name}" not found'
    details = {"name": name, "kind": plural}
    return ApiError(code=404, reason="NotFound", message=message, details=details)


def already_exists(plural: str, name: str) -> ApiError:
    """409 for an object that is there already."""
    message = f'{plural} "{name}" already exists'
    details = {"name": name, "kind": plural}
    return ApiError(code=409, reason="AlreadyExists", message=message, details=details)


def expired(message: str) -> ApiError:
    """410 for a version that is no longer kept."""
    return ApiError(code=410, reason="Expired", message=message)


def too_new(asked: int, current: int) -> ApiError:
    """504 for a version that is not there yet."""
    return ApiError(
        code=504,
        reason="Timeout",
        message=f"Timeout: Too large resource version: {asked}, current: {current}",
        details={
            "causes": [
                {"reason": "ResourceVersionTooLarge", "message": "Too large resource version"}
            ],
            "retryAfterSeconds": 1,
        },
    )


def bad_request(message: str) -> ApiError:
    """400 for a parameter that makes no sense."""
    return ApiError(code=400, reason="BadRequest", message=message)


def unworded(message: str) -> ApiError:
    """500 without a reason, as a real server answers what it did not foresee."""
    return ApiError(code=500, reason="", message=message)


def invalid(message: str) -> ApiError:
    """422 for an object or options that break a rule."""
    return ApiError(code=422, reason="Invalid", message=message)
