"""The error for wrong use of hvdliterun, and for machines that lack something."""

from __future__ import annotations


class UsageError(Exception):
    """What the user must change, and the exit code that says so."""

    def __init__(self, message: str, code: int = 2) -> None:
        super().__init__(message)
        self.code = code
