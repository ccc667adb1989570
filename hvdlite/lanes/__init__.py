"""Lanes: all ranks agree on each operation and on the order of operations, before any data move.

A lane runs one request after another on a private communicator. Belongs here: what ranks must agree on, how they agree,
and what happens if they differ. Not here: what a request does (`ops/`, `gradients/`), and how bytes travel
(`transports/`).
"""
