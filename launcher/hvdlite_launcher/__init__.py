"""`hvdliterun`: starts a training script on N ranks over the MPI that is already there.

This package imports nothing of `hvdlite`, no framework and no MPI. It must start fast, work when the training
environment is broken, and be able to say why.

Who starts whom (-->), and who reports to whom (==>), on hvdliterun's own host and on every other one:

    hvdliterun --> mpirun --> (the MPI's daemon on each host) --> keeper --> the user's command, a rank
         ^                                                          |
         |                                                          | files and named pipes in the job's folder
         +========================== agent <========================+

hvdliterun  Reads the command line (`cli`, `options`, `settings`), finds the MPI (`probe`), composes the command
            (`command`), runs the job (`run`) and decides how it ends (`ending`). It touches no rank.
job         One run of the user's command: an id, and a folder that has the same name on all hosts (`job_folder`).
keeper      The parent of one rank's command. It notes in the job's folder how the command began and ended.
agent       The process that watches over one host's ranks: it reads their output, reports how they begin and end,
            signals them, and finally leaves no process and no file of the job. It outlives hvdliterun.
step        A start of the ranks by srun, jsrun or flux instead of mpirun. Then only hvdliterun's host has an agent.
team        hvdliterun's list of the hosts that have an agent: a child process on its own host, ssh to the others.
"""


class UsageError(Exception):
    """Wrong use of hvdliterun, or a machine that lacks something: what the user must change, and the exit code."""

    def __init__(self, message: str, code: int = 2) -> None:
        super().__init__(message)
        self.code = code
