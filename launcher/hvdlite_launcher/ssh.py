"""The ssh commands with which other hosts are reached.

ssh asks no questions (BatchMode) and has a time limit: a host that wants a password is not ready. ssh accepts the key
of a new host, as with horovodrun, unless ssh's configuration has a rule. It refuses a key that has changed.
"""

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from hvdlite_launcher.times import START_TIMEOUT

SSH_AGENTS = ("PRTE_MCA_plm_ssh_agent", "OMPI_MCA_plm_rsh_agent")  # name another program for Open MPI


@dataclass(frozen=True)
class Ssh:
    """How to reach other hosts.

    port, key: the user's, or None. connect_timeout: seconds. program: another program instead of ssh, or None
    (Kubernetes operators set OMPI_MCA_plm_rsh_agent). Its arguments are the host and the command. csh: whether the
    login shell on this host is csh or tcsh; Open MPI would write its commands for csh, on all hosts. has_own_rule:
    whether ssh's configuration has a rule for host keys; hvdliterun's option would overrule it.
    """

    port: int | None = None
    key: str | None = None
    connect_timeout: int = round(START_TIMEOUT)
    program: str | None = None
    csh: bool = False
    has_own_rule: bool = False

    @property
    def options(self) -> tuple[str, ...]:
        """The options, without the program."""
        if self.program:
            return ()
        given = (*(("-p", str(self.port)) if self.port else ()), *(("-i", self.key) if self.key else ()))
        settings = {
            "BatchMode": "yes",
            "ConnectTimeout": str(self.connect_timeout),
            **({} if self.has_own_rule else {"StrictHostKeyChecking": "accept-new"}),
            "LogLevel": "ERROR",
            "ForwardAgent": "no",  # else root on that host could use the user's ssh agent, or see the user's screen
            "ForwardX11": "no",
            "ClearAllForwardings": "yes",  # a second connection could not open the same ports
        }
        return (*given, *(word for name, value in settings.items() for word in ("-o", f"{name}={value}")))

    def command(self, host: str, command: Sequence[str]) -> list[str]:
        """The command here that runs `command` on the host, through its login shell."""
        program = shlex.split(self.program) if self.program else ["ssh", "-T"]
        return [*program, *self.options, host, shlex.join(command)]

    def missing(self, program: str, host: str) -> str:
        """The problem that this machine lacks the program that reaches a host."""
        cure = "put it on PATH" if self.program else "install OpenSSH's client"
        return f"no {program} here, by which {host} is reached: {cure}"

    def for_open_mpi(self, modern: bool, hosts: int, bourne: Sequence[str]) -> dict[str, str]:
        """Variables for Open MPI. It starts all daemons from this host, so hosts need not reach each other by ssh.

        modern: version 5 or later. hosts: their number. bourne: the command before ssh (`bourne`).
        """
        plm = "PRTE_MCA_plm_ssh" if modern else "OMPI_MCA_plm_rsh"
        how = {f"{plm}_no_tree_spawn": "1", f"{plm}_num_concurrent": str(max(hosts, 128))}
        if self.program:
            return {f"{plm}_agent": self.program, **how}
        how[f"{plm}_args"] = " ".join(self.options)
        if self.csh:
            how[f"{plm}_assume_same_shell"] = "0"  # Open MPI asks each host for its shell
        elif bourne and not re.search(r"[\s:]", "".join(bourne)):  # Open MPI splits the text there
            how[f"{plm}_agent"] = " ".join(bourne)
        return how
