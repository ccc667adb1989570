"""Rules for torch.compile: dynamo skips hvdlite's functions, and compiled autograd is refused.

The attachment calls `pass_over` before each round, and `refuse_autograd` when a backward() begins. Compiled autograd
would drop the callback at the end of backward().
"""

from __future__ import annotations

from hvdlite.torch.private_api import in_compiled_autograd, leave_out, rules_of_dynamo

_told: object = None
"""The rules of dynamo that exclude hvdlite already."""


def pass_over() -> None:
    """Have dynamo run hvdlite's functions as they are, if dynamo is in use.

    Otherwise dynamo traces these functions wherever it meets them, and again at each call, since their numbers change.
    """
    global _told
    rules = rules_of_dynamo()
    if rules is not _told:
        _told = rules
        if rules is not None:
            leave_out(rules, "hvdlite")


def refuse_autograd() -> None:
    """Raise RuntimeError under compiled autograd.

    It drops the callback for the end of a backward(), so that clipping would see gradients that are not reduced.
    """
    if in_compiled_autograd():
        raise RuntimeError(
            "hvd.DistributedOptimizer does not work with compiled autograd, which does not report the end of a "
            "backward(): gradients would not be averaged then. Set torch._dynamo.config.compiled_autograd = False. "
            "The backward() of a compiled model is compiled without it as well"
        )
