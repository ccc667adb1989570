"""Writes the MPI's command for people and for a shell: one variable or argument a line, joined by backslashes."""

import shlex
from collections.abc import Iterator, Sequence

from hvdlite_launcher.command import Command, Job, Settings
from hvdlite_launcher.environment import is_secret

_NEXT = " \\\n  "


def command(command: Command, wanted: Settings, job: Job) -> str:
    """The command as lines for a shell. They make the folder in shared memory: without it MPIs use the network."""
    own = len(command.argv) - len(wanted.command) - len(job.keeper)
    launcher, *options = command.argv[:own]
    values = {name: "..." if is_secret(name) else value for name, value in command.env.items()}
    plain = all(name.isidentifier() for name in values)  # else only the program `env` can set them
    lines = [
        *([f"mkdir -m 700 {shlex.quote(job.shared)} &&"] if job.shared in command.env.values() and job.shared else []),
        *([] if plain else ["env"]),
        *(f"{name if plain else shlex.quote(name)}={shlex.quote(value)}" for name, value in sorted(values.items())),
        shlex.quote(launcher),
        *_by_flags(options),
        shlex.join(job.keeper),
        *_by_flags(command.argv[own + len(job.keeper) :]),
    ]
    return _NEXT.join(lines)


def _by_flags(words: Sequence[str]) -> Iterator[str]:
    """The words, a flag together with the values after it. Words before the first flag are together, too."""
    line: list[str] = []
    for word in words:
        if word.startswith("-") and line:
            yield shlex.join(line)
            line = []
        line.append(word)
    if line:
        yield shlex.join(line)
