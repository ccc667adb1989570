"""Checkpoints: one file that rank 0 writes and reads, and the same state on every rank.

Belongs here: what `hvd.save` and `hvd.load` do for every framework. Not here: how a framework's objects become a state
(`torch/checkpoints`, `keras/`).
"""
