"""How other hosts are reached: the words of an ssh command. Pure.

Without questions (BatchMode) and with a limit on connecting: a host that wants a password is a host that is not
ready. A host seen for the first time is accepted, as `horovodrun` does; one whose key has changed is not.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass

SSH_AGENTS = ("PRTE_MCA_plm_ssh_agent", "OMPI_MCA_plm_rsh_agent")  # name another program for Open MPI, and for us


@dataclass(frozen=True)
class Ssh:
    """port, key: as given by the user. connect_timeout: seconds.

    program: another program in ssh's place (`OMPI_MCA_plm_rsh_agent`, as Kubernetes operators set it); it is given
    the host and the command and nothing else.
    """

    port: int | None = None
    key: str | None = None
    connect_timeout: int = 10
    program: str | None = None

    @property
    def options(self) -> tuple[str, ...]:
        """The options, without the program."""
        if self.program:
            return ()
        given = (*(("-p", str(self.port)) if self.port else ()), *(("-i", self.key) if self.key else ()))
        settings = {
            "BatchMode": "yes",
            "ConnectTimeout": str(self.connect_timeout),
            "StrictHostKeyChecking": "accept-new",
            "LogLevel": "ERROR",
            "ClearAllForwardings": "yes",  # of the user's configuration, whose ports a second connection finds taken
        }
        return (*given, *(word for name, value in settings.items() for word in ("-o", f"{name}={value}")))

    def command(self, host: str, command: Sequence[str]) -> list[str]:
        """What to execute here so that `command` runs there, through the login shell."""
        program = shlex.split(self.program) if self.program else ["ssh", "-T"]
        return [*program, *self.options, host, shlex.join(command)]
