"""Benchmarks that users can run themselves: `hvdliterun -np 2 python -m hvdlite.bench allreduce` (or `step`).

Every number comes from contenders that take turns in one run, so that a slow minute of the machine is charged to all
of them alike. Exempt from the import rules: it knows MPI and torch, since it compares with them.
"""
