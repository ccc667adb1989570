"""Wrong use of hvdliterun, or of a machine that lacks something: one line for the user, and an exit code."""

from __future__ import annotations


class UsageError(Exception):
    """What the user must change, and the exit code that says so."""

    def __init__(self, message: str, code: int = 2) -> None:
        super().__init__(message)
        self.code = code
