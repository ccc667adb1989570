"""Checkpoints: rank 0 writes and reads one file, and all ranks get the same state.

Belongs here: what `hvd.save` and `hvd.load` do for every framework. Not here: how a framework's objects become a state
(`torch/checkpoints`, `keras/`).
"""
