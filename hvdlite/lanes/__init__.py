"""Who agrees, and in which order: requests of all ranks meet here before any data moves.

A lane runs one request after another on a communicator of its own. Belongs here: what ranks must agree on, how they
agree, and what happens when they differ. Not here: what a request does (`ops/`, `gradients/`), and how bytes travel
(`transports/`).
"""
