"""torch.compile: what it must not compile."""

from __future__ import annotations

import sys

_told = False


def pass_over() -> None:
    """Have dynamo run hvdlite's functions as they are, if it is in use: it would trace them wherever it meets them (in
    a compiled step even those that autograd calls), again and again, for they find other numbers each time."""
    global _told
    if _told:
        return
    rules = getattr(sys.modules.get("torch._dynamo"), "trace_rules", None)  # to import it takes seconds
    if rules is not None:
        _told = True
        rules.add("hvdlite")
