"""Leaves out of an MPI launcher's messages what hvdliterun says itself, in one line: that a rank died.

Everything else (an unknown option, a fabric's warning, an MPI that cannot start) reaches the user.
"""

from __future__ import annotations

import re

_OPEN_MPI_DEATHS = (
    "MPI_ABORT was invoked on rank",
    "has exited due to process rank",
    "noticed that process rank",
    "detected that one or more processes exited with non-zero",
    "Primary job  terminated normally",
    "noticed that the job aborted, but has no info",
)
_RULE = r"-{60,}\n"
_BLOCK = re.compile(rf"{_RULE}((?:(?!{_RULE}).*\n)*){_RULE}")
_HYDRA_DEATH = re.compile(
    r"\n?={60,}\n=\s+BAD TERMINATION(?:.*\n)*?={60,}\n"
    r"(?:YOUR APPLICATION TERMINATED.*\n|This typically refers.*\n|Please see the FAQ.*\n)*"
)
_LINES = re.compile(
    r"^(?:Ctrl-C caught.*|\[.*\] (?:Sending Ctrl-C|Press Ctrl-C).*"
    r"|\[warn\] Epoll .* failed.*"  # libevent inside prterun, when it closes a dead rank's pipe
    r"|\[[^\]]*\] pmix_ptl_base: send_msg: write failed.*"  # prterun, when it answers a rank that is gone
    r"|\[proxy.*|\[mpiexec@.*"
    r"|srun: (?:error: \S+: tasks? \S+: (?:Exited|Terminated|Killed)|launch/slurm: _step_signal|Job step aborted).*"
    r"|(?:\s*\d+: )?slurmstepd\S*: error: \*\*\* STEP .*"
    r"|srun: (?:cluster configuration lacks support for cpu binding|Terminating).*)\n",
    re.MULTILINE,
)


def without_deaths(text: str) -> str:
    """`text` less Open MPI's and Hydra's reports of a rank's end."""
    text = _BLOCK.sub(_keep_block, text)
    text = _LINES.sub("", _HYDRA_DEATH.sub("", text))
    return text if text.strip() else ""


def _keep_block(block: re.Match[str]) -> str:
    flat = re.sub(r"\s+", " ", block[1])
    return "" if any(re.sub(r"\s+", " ", death) in flat for death in _OPEN_MPI_DEATHS) else block[0]
