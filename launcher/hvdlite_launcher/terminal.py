"""hvdliterun's own stdout and stderr: whether they are terminals, and what ranks have to know about that.

A rank writes to a pipe, so its progress bars find no terminal. If hvdliterun itself has one, ranks get the variables by
which programs learn of it. A variable that the user has set is left as it is. Rejected: a pseudo-terminal for rank 0.
The terminal would change its bytes, and files of --output-filename would differ from what the script has written.
"""

import contextlib
import os
from collections.abc import Mapping

JOB_TERMINAL = "HVDLITE_JOB_TERMINAL"
"""Tells rank 0's keeper that hvdliterun draws progress bars on a terminal."""
_DUMB = ("", "dumb", "unknown")


def is_terminal(destination: int) -> bool:
    """Whether the descriptor is a terminal."""
    with contextlib.suppress(OSError):
        return os.isatty(destination)
    return False


def can_redraw(destination: int, environ: Mapping[str, str]) -> bool:
    """Whether it is a terminal whose cursor can be moved. TERM=dumb, or no TERM, means that it cannot."""
    return is_terminal(destination) and environ.get("TERM", "") not in _DUMB


def has_colours(destination: int, environ: Mapping[str, str]) -> bool:
    """Whether colours are shown there, and the user has not set NO_COLOR."""
    return can_redraw(destination, environ) and not environ.get("NO_COLOR")


def size(*destinations: int) -> tuple[int, int] | None:
    """Columns and lines of the first of these that is a terminal; None without one."""
    for destination in destinations:
        with contextlib.suppress(OSError):
            found = os.get_terminal_size(destination)
            if found.columns and found.lines:
                return found.columns, found.lines
    return None


def variables(environ: Mapping[str, str], taken: int, live: bool) -> dict[str, str]:
    """Variables for ranks whose output goes to hvdliterun's terminal; empty without one.

    COLUMNS and LINES tell rich and tqdm how wide a bar may be; tqdm needs both. HVDLITE_JOB_TERMINAL makes the keeper
    of rank 0 set TTY_COMPATIBLE=1, with which rich draws its bars. That needs both streams on a terminal: rich does not
    ask which one it writes to.

    Args:
        environ: The user's variables, which win.
        taken: Columns that the prefix takes.
        live: Whether hvdliterun draws unfinished lines again below the lines of other ranks.
    """
    found = size(1, 2)
    if found is None:
        return {}
    made = {}
    if not {"COLUMNS", "LINES"} & environ.keys():
        made = {"COLUMNS": str(max(20, found[0] - taken)), "LINES": str(found[1])}
    if live and can_redraw(1, environ) and can_redraw(2, environ) and "TTY_COMPATIBLE" not in environ:
        made[JOB_TERMINAL] = "1"
    return made
