"""torch.compile: what it must not compile."""

from __future__ import annotations

import sys

AUTOGRAD = "torch._dynamo.compiled_autograd"
"""The module, where it has been imported."""
told = False


def pass_over() -> None:
    """Have dynamo run hvdlite's functions as they are, if it is in use: it would trace them wherever it meets them (in
    a compiled step even those that autograd calls), again and again, for they find other numbers each time."""
    global told
    if told:
        return
    rules = getattr(sys.modules.get("torch._dynamo"), "trace_rules", None)  # to import it takes seconds
    if rules is not None:
        told = True
        rules.add("hvdlite")


def refuse_autograd() -> None:
    """Raise RuntimeError under compiled autograd: it drops what is to be called when a backward ends, so that clipping
    would see gradients that are not reduced."""
    if getattr(sys.modules.get(AUTOGRAD), "in_compiled_autograd_region", False):
        raise RuntimeError(
            "hvd.DistributedOptimizer and compiled autograd do not go together: it does not tell when a backward has "
            "ended, and gradients would not be averaged then. Set torch._dynamo.config.compiled_autograd = False (the "
            "backward of a compiled model is compiled without it, too)"
        )
