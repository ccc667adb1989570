"""torch.compile: what it must not compile."""

from __future__ import annotations

from hvdlite.torch.private_api import in_compiled_autograd, leave_out, rules_of_dynamo

_told: object = None
"""The rules of dynamo that have been told to leave hvdlite out."""


def pass_over() -> None:
    """Have dynamo run hvdlite's functions as they are, if it is in use: it would trace them wherever it meets them (in
    a compiled step even those that autograd calls), again and again, for they find other numbers each time."""
    global _told
    rules = rules_of_dynamo()
    if rules is not _told:
        _told = rules
        if rules is not None:
            leave_out(rules, "hvdlite")


def refuse_autograd() -> None:
    """Raise RuntimeError under compiled autograd: it drops what is to be called when a backward ends, so that clipping
    would see gradients that are not reduced."""
    if in_compiled_autograd():
        raise RuntimeError(
            "hvd.DistributedOptimizer and compiled autograd do not go together: it does not tell when a backward has "
            "ended, and gradients would not be averaged then. Set torch._dynamo.config.compiled_autograd = False (the "
            "backward of a compiled model is compiled without it, too)"
        )
