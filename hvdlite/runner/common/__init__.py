"""Horovod's `horovod.runner.common`, as far as scripts import from it."""
