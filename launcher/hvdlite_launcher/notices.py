"""Removes messages from the output of an MPI's launcher.

`without_deaths` removes reports about dead ranks, because hvdliterun reports a death in one line. `without_harmless`
removes warnings of healthy jobs. `streams` prints everything else: an unknown option, an MPI that cannot start.
"""

import re

_OPEN_MPI_DEATHS = (
    "MPI_ABORT was invoked on rank",
    "has exited due to process rank",
    "noticed that process rank",
    "detected that one or more processes exited with non-zero",
    "Primary job  terminated normally",
    "noticed that the job aborted, but has no info",
    "MPI communication peer process has unexpectedly disconnected",
)
_CRASH = re.compile(  # Open MPI 4's mpirun gets SIGTERM while it ends a job
    r"\n?\[\S+:\d+\] \*\*\* Process received signal \*\*\*\n(?:\[\S+:\d+\] .*\n)*?"
    r"\[\S+:\d+\] \*\*\* End of error message \*\*\*\n"
)
_LOST_PEER = re.compile(r"\[\S+:\d+\] \*\*\* An error occurred in Socket closed\n(?:\[\S+:\d+\] \*\*\* .*\n){,5}")
_RULE = r"-{60,}\n"
_BLOCK = re.compile(rf"{_RULE}((?:(?!{_RULE}).*\n)*){_RULE}")
_HYDRA_DEATH = re.compile(
    r"\n?={60,}\n=\s+BAD TERMINATION(?:.*\n)*?={60,}\n"
    r"(?:YOUR APPLICATION TERMINATED.*\n|This typically refers.*\n|Please see the FAQ.*\n)*"
)
_LINES = re.compile(
    r"^(?:Ctrl-C caught.*|mpirun\S*: abort is already in progress.*|\[.*\] (?:Sending Ctrl-C|Press Ctrl-C).*"
    r"|\[warn\] Epoll .* failed.*"  # prterun closes a dead rank's pipe
    r"|\[[^\]]*\] pmix_ptl_base: send_msg: write failed.*"  # prterun answers a rank that is gone
    r"|\[[^\]]*\] PMIX ERROR: PMIX_ERR_(?:NOT_FOUND|UNREACH) in file .*"  # prterun tells other hosts about it
    r"|\[proxy.*|\[mpiexec@.*"
    r"|srun: (?:error: \S+: tasks? \S+: (?:Exited|Terminated|Killed)|launch/slurm: _step_signal|Job step aborted).*"
    r"|(?:\s*\d+: )?slurmstepd\S*: error: \*\*\* STEP .*"
    r"|srun: (?:cluster configuration lacks support for cpu binding|Terminating).*)\n",
    re.MULTILINE,
)
_HARMLESS = re.compile(r"^\[.*\] plm:(?:ssh|rsh): Warning: setpgid\(.*\n", re.MULTILINE)  # ssh has a group already


def without_harmless(text: str) -> str:
    """`text` without messages that appear in healthy jobs."""
    return _HARMLESS.sub("", text)


def without_deaths(text: str) -> str:
    """`text` without reports of Open MPI, Hydra and Slurm about the end of a rank."""
    text = _BLOCK.sub(_keep_block, text)
    for report in (_LOST_PEER, _CRASH, _HYDRA_DEATH, _LINES):
        text = report.sub("", text)
    return text if text.strip() else ""


def _keep_block(block: re.Match[str]) -> str:
    flat = re.sub(r"\s+", " ", block[1])
    return "" if any(re.sub(r"\s+", " ", death) in flat for death in _OPEN_MPI_DEATHS) else block[0]
