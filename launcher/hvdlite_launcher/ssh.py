"""How other hosts are reached: the words of an ssh command. Pure.

Without questions (BatchMode) and with a limit on connecting: a host that wants a password is a host that is not
ready. A host seen for the first time is accepted, as `horovodrun` does, unless ssh's configuration says otherwise; one
whose key has changed is not.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

SSH_AGENTS = ("PRTE_MCA_plm_ssh_agent", "OMPI_MCA_plm_rsh_agent")  # name another program for Open MPI, and for us


@dataclass(frozen=True)
class Ssh:
    """port, key: as given by the user. connect_timeout: seconds.

    program: another program in ssh's place (`OMPI_MCA_plm_rsh_agent`, as Kubernetes operators set it); it is given
    the host and the command and nothing else. csh: whether our login shell is of that kind, in which Open MPI would
    write to all hosts. has_own_rule: whether ssh's configuration says which host keys are accepted; our option would
    overrule it.
    """

    port: int | None = None
    key: str | None = None
    connect_timeout: int = 10
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
            "ForwardAgent": "no",  # else whoever rules a host could log in elsewhere by our agent, or see our screen
            "ForwardX11": "no",
            "ClearAllForwardings": "yes",  # of the user's configuration, whose ports a second connection finds taken
        }
        return (*given, *(word for name, value in settings.items() for word in ("-o", f"{name}={value}")))

    def command(self, host: str, command: Sequence[str]) -> list[str]:
        """What to execute here so that `command` runs there, through the login shell."""
        program = shlex.split(self.program) if self.program else ["ssh", "-T"]
        return [*program, *self.options, host, shlex.join(command)]

    def for_open_mpi(self, modern: bool, hosts: int, bourne: Sequence[str]) -> dict[str, str]:
        """The variables for it. All daemons are started from here, as our own connections are: hosts need not reach
        each other by ssh. bourne: what stands before ssh, so that login shells may be others than Open MPI believes."""
        plm = "PRTE_MCA_plm_ssh" if modern else "OMPI_MCA_plm_rsh"
        how = {f"{plm}_no_tree_spawn": "1", f"{plm}_num_concurrent": str(max(hosts, 128))}
        if self.program:
            return {f"{plm}_agent": self.program, **how}
        how[f"{plm}_args"] = " ".join(self.options)
        if self.csh:
            how[f"{plm}_assume_same_shell"] = "0"  # it asks each host
        elif bourne and not re.search(r"[\s:]", "".join(bourne)):  # it cuts the text there
            how[f"{plm}_agent"] = " ".join(bourne)
        return how
