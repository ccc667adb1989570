"""All waiting times of the launcher, in seconds. `tests/launcher/test_times.py` checks how they depend on each other.

A rank fails. Names in brackets are times of the failing rank itself, in `hvdlite/job/exits.py`:

    0      0.1                         0.8          1.2              1.6
    |------|---------------------------|------------|----------------|
    fails  notes that in the job's     aborts MPI   mpirun gets      the agents kill
           folder [_NOTICE], and runs  at the       SIGTERM, unless  what is left:
           Python's exit functions     latest       it has ended:    MPIRUN_GRACE later
           [_GOODBYE]                               FAILURE_GRACE

Several hosts: a failure is the job's first when no host has reported an earlier one within OTHER_NEWS, or, if it looks
like the consequence of another failure, within CAUSE_NEWS. A rank waits for that decision in `hvdlite/job/folder.py`.

hvdliterun receives SIGINT, SIGTERM or SIGHUP:

    0                       5.0, or when     0.4 later
    |                       no rank runs     |
    |-----------------------|----------------|
    the agents send SIGINT  mpirun gets      the agents kill
    or SIGTERM to the       SIGTERM:         what is left:
    ranks, which save       SIGNAL_GRACE     MPIRUN_GRACE
    their work

Meanwhile the keeper of a rank that has ended stays for KEEPER_STAYS more, unless it is killed: if it left at once, the
MPI would kill ranks that still save their work.

The job ends, on each host:

    0                       3.0                     6.0
    |-----------------------|-----------------------|
    the agent kills all     killed processes are    helpers that tidy up (Python's resource
    processes with the      gone at the latest:     tracker) have ended, or are killed:
    job's mark              KILLED_ARE_GONE         HELPERS_TIDY

Another host is silent:

    0      1.0     2.0     3.5                  5.0                   60
    |------|-------|-------|--------------------|---------------------|
    a sign of life each    the host is lost if  hvdliterun prints     the host is lost:
    BEAT is missing        no rank has started  a line: SILENCE_TOLD  HOST_TIMEOUT
                           there:
                           START_HOST_TIMEOUT

A rank ends and never calls hvd.init(), where others wait for it: hvdliterun believes that it has ended after
ABSENCE_SETTLED, and ends the job when the others have waited for INIT_PATIENCE.
"""

BEAT = 1.0  # between two signs of life of an agent, and of hvdliterun
START_HOST_TIMEOUT = 3.5  # of silence after which the other side counts as lost, until a rank has started on the host
HOST_TIMEOUT = 60.0  # the same afterwards: a network may pause, and a job of days must outlive that
CLOSING_TIMEOUT = 5.0  # the same at the job's end, when an agent is busy killing
STANDSTILL = 2.0  # without a look at the clock: the machine has stood still, and silence is counted from now on
SILENCE_TOLD = 5.0  # of silence after which hvdliterun prints a line
PAUSE_SENT = 0.5  # for telling all agents that hvdliterun is being suspended

SIGNAL_GRACE = 5.0  # for ranks to end after a signal, as with Horovod
FAILURE_GRACE = 1.2  # for mpirun to end a job after a failure; Open MPI 4's crashes if told to end meanwhile
MPIRUN_GRACE = 0.4  # from mpirun's SIGTERM to killing
KEEPER_STAYS = 8.0  # that a keeper outlives its rank while a signal ends the job
LEAVER_FIRST = 0.5  # that a keeper leaves to the rank whose shutdown has stopped its own
KILLED_ARE_GONE = 3.0
HELPERS_TIDY = 6.0
LATE_DAEMON = 3.0  # in which an MPI's daemon may still come to a host whose job has ended
SUCCESSOR = 3.0  # for the successor of an agent that was killed to clean up

OTHER_NEWS = 0.2
CAUSE_NEWS = 1.0
ABSENCE_SETTLED = 2.5
INIT_PATIENCE = 5.0

START_TIMEOUT = 10.0  # for ssh to connect to all hosts (--start-timeout)
AFTER_SSH = 3.0  # more, until hvdliterun gives up: ssh's own message comes first
FIRST_RANK = 3  # times (START_TIMEOUT + AFTER_SSH) until the first rank must have started on several hosts

MPI_ANSWERS = 20.0  # for `mpirun --version`
SRUN_ANSWERS = 10.0  # for `srun --mpi=list`
LIBRARY_ANSWERS = 30.0  # for a child process that loads the MPI library (-v)
CHECK_ANSWERS = 150.0  # for one host's report (--check)

SEGMENTS_SOON = 0.05  # between an agent's looks for MPICH's shared memory, once a rank has started; they get rarer
SEGMENTS_SETTLED = 10.0  # after all ranks have met, when MPIs make no more of it
SEGMENTS_SELDOM = 5.0  # between these looks at most
POLL = 0.05  # between an agent's looks for new files, if the kernel does not report them
LOOP = 0.25  # that hvdliterun's loop waits for events at most
UNFINISHED_LINE = 0.1  # that the beginning of a line is held back
MPIS_MESSAGES = 5.0  # that messages of mpirun are held back: most repeat what hvdliterun says in one line
