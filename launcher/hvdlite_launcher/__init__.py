"""`hvdliterun`: starts a training script on N ranks over the MPI that is already there.

This package imports nothing of `hvdlite`, no framework and no MPI: it must start fast, work when
the training environment is broken, and be able to say why. The way of a job:

    cli -> hosts, probe -> command (pure) -> run -> mpirun -> keeper (one per rank) -> the command
                                              |-> janitor (outlives everything, leaves nothing behind)
"""
