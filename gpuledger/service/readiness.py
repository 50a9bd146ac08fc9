"""Whether a deployable can do its work now, as named checks. Nothing here serves them."""

from dataclasses import dataclass, field


@dataclass
class Check:
    """One thing that has to be so; it has failed until it is said to be ok."""

    is_ok: bool = False
    detail: str = "starting"

    def ok(self, detail: str = "") -> None:
        """Say that it is so."""
        self.is_ok, self.detail = True, detail

    def failed(self, detail: str) -> None:
        """Say that it is not so, and why."""
        self.is_ok, self.detail = False, detail


@dataclass
class Readiness:
    """The checks of a deployable; it is ready when there is one and all are ok."""

    _checks: dict[str, Check] = field(default_factory=dict)

    def check(self, name: str) -> Check:
        """Give the check of that name; the first call makes it."""
        return self._checks.setdefault(name, Check())

    def is_ready(self) -> bool:
        """Tell whether all checks are ok; without any check nothing is known to be ready."""
        return bool(self._checks) and all(check.is_ok for check in self._checks.values())

    def report(self) -> dict[str, object]:
        """Give what `/readyz` shows: `{ready, checks: {name: {ok, detail}}}`."""
        checks = {
            name: {"ok": check.is_ok, "detail": check.detail}
            for name, check in self._checks.items()
        }
        return {"ready": self.is_ready(), "checks": checks}
