"""`horovod.common`: the names that scripts import from there.

Belongs here: Horovod's module names, and names that exist only there. Not here: anything else than imports and a few
lines.
"""
