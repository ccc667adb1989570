"""From `hvd.init()` to `hvd.shutdown()`: connecting, ranks and hosts, process sets, the end of a process.

Belongs here: the state of this process as a member of a job. It is the one place with global state. Not here:
operations (`ops/`), and how ranks agree on them (`lanes/`).
"""
