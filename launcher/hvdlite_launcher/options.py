"""hvdliterun's command line: horovodrun's flags, with their names and meanings."""

import argparse
import re
from collections.abc import Collection, Sequence
from importlib import metadata
from typing import Any, NoReturn

from hvdlite_launcher import UsageError, slips, tunables
from hvdlite_launcher.prefixes import Style
from hvdlite_launcher.templates import Scheduler
from hvdlite_launcher.times import HOST_TIMEOUT, START_HOST_TIMEOUT

USAGE = "hvdliterun -np N [-H server1:N,server2:N] [options] python train.py [arguments]"
_EXAMPLES = """\
examples:
  hvdliterun -np 4 python train.py --epochs 3       4 ranks on this machine
  hvdliterun -H server1:4,server2:4 python train.py 8 ranks on two machines, reached by ssh
  hvdliterun python train.py                        in a job of Slurm, LSF, PBS or Flux: on all its hosts
  hvdliterun -np 2 -v python train.py               show the exact command, the MPI and the start-up times
  hvdliterun -np 2 --dry-run python train.py        print that command, and start nothing
  hvdliterun -np 2 -x LR=0.1 python train.py        set a variable for all ranks
  hvdliterun -np 2 --mpi-args="--mca btl tcp,self" python train.py
  hvdliterun --template slurm -np 8 python train.py write a job script for sbatch, and start nothing
  hvdliterun --check                                what is installed here, and what it is ready for
  hvdliterun --check -H server1:4,server2:4         the same on two machines; --json: for programs

Every line of output carries its rank (--prefix): in pipes and files [2]<stdout>:text, on a terminal 2|text,
and 2:text on stderr, coloured unless NO_COLOR is set or TERM=dumb. In a pipe or a file a progress bar takes
one line a second at most. On a terminal it stays below the lines of other ranks. There hvdliterun sets
COLUMNS and LINES for the ranks, and TTY_COMPATIBLE=1 for rank 0, with which rich draws its bars (not with
--output-filename or --prefix none; -x TTY_COMPATIBLE=0 prevents it).

The first rank that fails ends the job, and its exit code is that of hvdliterun: 128 + n if signal n killed
it. OMPI_MCA_*, OMP_NUM_THREADS and other variables that you have set are left as they are. The page
docs/diagnose/errors.md explains messages that end with a code such as [HVD012].

The command that --dry-run and -v show is the MPI's. Started by hand, it lacks what hvdliterun does itself:
prefixes, progress bars and files of output, the summary, one line about the rank that failed, the end of all
ranks and of what they leave behind, a check of all hosts, and the values of secrets, shown as "...".
"""
_ELASTIC = (
    "--min-np", "--min-num-proc", "--max-np", "--max-num-proc", "--slots-per-host", "--slots", "--elastic-timeout",
    "--reset-limit", "--blacklist-cooldown-range", "--host-discovery-script",
)  # fmt: skip


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Raise UsageError with a short message; argparse's begins with "argument -np/-n/--num-proc: "."""
        found = re.fullmatch(r"argument ([^:/]+)[^:]*: (.*)", message, re.DOTALL)
        if found is None:
            raise UsageError(message)
        flag, said = found.groups()
        if said.startswith("expected"):
            raise UsageError(f"{flag}: needs a value")
        if said.startswith("ignored explicit argument"):
            raise UsageError(f"{flag}: takes no value")
        if said.startswith("not allowed with argument"):
            raise UsageError(f"{flag}: cannot be given together with {said.rpartition(' ')[2]}")
        raise UsageError(f"{flag} {said}")

    def _get_option_tuples(self, option_string: str) -> Any:
        """The flag that this word abbreviates. argparse asks this for words of the user's command, too, and would
        refuse a word that abbreviates several flags (-host): such a word abbreviates none."""
        found = super()._get_option_tuples(option_string)
        return found if len(found) == 1 else []


class _Refuse(argparse.Action):
    """A flag of horovodrun that hvdlite cannot serve. const: the reason."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> NoReturn:
        raise UsageError(f"{option_string}: {self.const}")


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The options of this command line; `flags` are the words before the command. Raises UsageError."""
    parser = command_parser()
    options, unknown = parser.parse_known_args(arguments)
    if unknown:
        raise UsageError(_unknown(parser, list(arguments), unknown[0]))
    options.flags = list(arguments[: len(arguments) - len(options.command)])
    if options.json and not options.check:
        raise UsageError("--json: goes with --check only")
    if options.dry_run and options.check:
        raise UsageError("--dry-run: cannot be given together with --check")
    if options.template and (options.check or options.dry_run):
        raise UsageError(f"--template: cannot be given together with --{'check' if options.check else 'dry-run'}")
    if options.no_prefix:
        if options.prefix not in (None, Style.NONE):
            raise UsageError(f"--no-prefix: cannot be given together with --prefix {options.prefix.value}")
        options.prefix = Style.NONE
    return options


def written(options: argparse.Namespace, leave_out: Collection[str]) -> list[str]:
    """The flags of a parsed command line, in the order of --help. leave_out: names of options in `options`."""
    words: list[str] = []
    for action in command_parser()._actions:
        value = getattr(options, action.dest, None)
        if not action.option_strings or action.dest in leave_out or value is None or value == action.default:
            continue
        short, long = action.option_strings[0], action.option_strings[-1]
        if action.nargs == 0:
            words += [short] if value == action.const else []
            continue
        for each in value if isinstance(value, list) else [value]:
            text = str(each.value if isinstance(each, Style) else each)
            words += [f"{long}={text}"] if text.startswith("-") else [short, text]
    return words


def _unknown(parser: argparse.ArgumentParser, arguments: list[str], word: str) -> str:
    """The message about a word that is no flag."""
    shown = {flag for action in parser._actions if action.help != argparse.SUPPRESS for flag in action.option_strings}
    advice, instead = slips.unknown_flag(word, sorted(shown))
    if instead:
        place = arguments.index(word)
        line = slips.line(_mended([*arguments[:place], *instead, *arguments[place + 1 :]]))
        advice = f"did you mean: {line}" + (f" ({advice})" if advice else "")
    return f"{word.partition('=')[0]}: no such option" + (f": {advice}" if advice else "")


def _mended(arguments: list[str]) -> list[str]:
    """The command line, with an interpreter before a script that needs one."""
    try:
        options = parse(arguments)
    except UsageError:
        return arguments
    return [*options.flags, *slips.with_interpreter(options.command)]


def command_parser() -> argparse.ArgumentParser:
    """The parser of hvdliterun's command line, whose texts the documentation shows, too."""
    parser = _Parser(
        prog="hvdliterun",
        usage=USAGE,
        description="Start a training script on N ranks over the MPI or the scheduler that is there.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("-np", "-n", "--num-proc", dest="ranks", type=_ranks, metavar="N", help="ranks (default: all slots named)")
    add("-x", "--env", action="append", default=[], metavar="NAME[=VALUE]", help="a variable for all ranks")
    add("-v", "--verbose", action="store_true",
        help="show the command, the MPI, start-up times, hvdlite's log, and a --summary")  # fmt: skip
    add("--dry-run", action="store_true",
        help="print the MPI's command for a shell, and start nothing; see below for what it lacks")  # fmt: skip
    add("--template", type=_scheduler, metavar="SCHEDULER",
        help="write a job script to stdout, and start nothing: slurm, pbs, lsf, flux, k8s (an MPIJob of Kubeflow); "
             "nodes and ranks as in -H (default: 4 ranks a node)")  # fmt: skip
    add("--version", action="version", version=f"hvdliterun {version()}")
    add("-cb", "--check-build", "--check", dest="check", action="store_true",
        help="show what is installed here, or on the hosts of -H; exit code 1 if nothing is ready")  # fmt: skip
    add("--json", action="store_true", help="with --check: the report as JSON, for programs")
    add("--config-file", metavar="FILE", help="settings in YAML, with Horovod's sections; flags win")
    add("command", nargs=argparse.REMAINDER, help="the command and its arguments")
    _add_hosts(parser.add_argument_group("hosts"))
    _add_output(parser.add_argument_group("output"))
    tunables.add_to(parser.add_argument_group("settings of hvdlite"))
    _add_refused(parser)
    return parser


def _style(text: str) -> Style:
    try:
        return Style(text)
    except ValueError:
        styles = ", ".join(each.value for each in Style)
        open_mpis = f'; Open MPI\'s option is --mpi-args="--prefix {text}"' if "/" in text else ""
        raise argparse.ArgumentTypeError(f"{text}: must be one of {styles}{open_mpis}") from None


def _scheduler(text: str) -> Scheduler:
    try:
        return Scheduler(text)
    except ValueError:
        names = ", ".join(each.value for each in Scheduler)
        raise argparse.ArgumentTypeError(f"{text}: must be one of {names}") from None


def _ranks(text: str) -> int:
    if re.fullmatch(r"p\d+", text):
        raise UsageError(f"-n{text}: write -np {text[1:]}")
    _check_whole_flag(f"-n{text}")
    return _whole(text, "must be a whole number of ranks, as in -np 4")


def _port(text: str) -> int:
    _check_whole_flag(f"-p{text}")
    return _whole(text, "must be the number of a port, as in -p 22")


def _check_whole_flag(word: str) -> None:
    """Raise UsageError for other launchers' -nproc and -ppn, which argparse reads as -n and -p with a value."""
    advice, instead = slips.unknown_flag(word, ())
    if advice or instead:
        raise UsageError(f"{word}: no such option: {advice or f'write {instead[0]}'}")


def _whole(text: str, rule: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text}: {rule}") from None


def seconds(text: str) -> float:
    """A time above 0. Raises ArgumentTypeError."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < 1e6:
        raise argparse.ArgumentTypeError(f"{text}: must be a number of seconds above 0, below a million")
    return seconds


def _add_hosts(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("-H", "--hosts", metavar="NAME:SLOTS,...", help="hosts and their slots (default: this one, with -np)")
    add("-hostfile", "--hostfile", metavar="FILE", help="the same from a file, one host per line")
    add("-p", "--ssh-port", type=_port, metavar="PORT", help="the other hosts' SSH port")
    add("-i", "--ssh-identity-file", metavar="FILE", help="the key to log in to other hosts with")
    add("--start-timeout", type=seconds, metavar="SECONDS",
        help="for all hosts to be ready (default: HOROVOD_START_TIMEOUT, or 10)")  # fmt: skip
    add("--host-timeout", type=seconds, metavar="SECONDS",
        help="of silence after which a host counts as lost, and the job ends "
             f"(default: {START_HOST_TIMEOUT} until ranks have started, then {HOST_TIMEOUT:.0f})")  # fmt: skip
    add("--network-interfaces", metavar="NAME,...", help="networks to use between hosts (default: MPI's choice)")
    add("--network-interface", action="append", default=[], help=argparse.SUPPRESS)
    add("--tcp", action="store_true", help="use no network but TCP")
    add("--mpi", action="store_true", help="in a scheduler's job: start ranks by the MPI's launcher, over ssh")
    add("--binding-args", metavar="ARGS", help="the MPI launcher's options for placing and binding ranks")
    add("--mpi-args", action="append", default=[], metavar="ARGS", help="more options for the MPI's launcher")
    add("--disable-cache", action="store_true", help="nothing to disable: hosts are checked at every start")


def _add_output(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--prefix", type=_style, metavar="STYLE",
        help="how lines begin: short (2|text), full ([2]<stdout>:text), auto (none while only rank 0 writes), or "
             "none (the ranks' bytes as they are); default: short on a terminal, else full")  # fmt: skip
    add("--no-prefix", action="store_true", help="the same as --prefix none")
    add("-prefix-timestamp", "--prefix-output-with-timestamp", dest="timestamps", action="store_true",
        help="begin each line with the time")  # fmt: skip
    add("--summary", action="store_true",
        help="print a summary of the training at the end: sets HVDLITE_SUMMARY for the ranks")  # fmt: skip
    add("--output-filename", metavar="FOLDER", help="write FOLDER/rank.N/stdout and stderr too")


def _add_refused(parser: argparse.ArgumentParser) -> None:
    hidden = argparse.SUPPRESS
    add = parser.add_argument
    add("--gloo", action=_Refuse, nargs=0, const="hvdlite communicates over MPI only; leave it out", help=hidden)
    add("--jsrun", action="store_true", help=hidden)
    elastic = "ranks cannot come and go yet; start again from a checkpoint"
    add(*_ELASTIC, action=_Refuse, const=elastic, dest="elastic", help=hidden)


def version() -> str:
    """The installed version, or "unknown"."""
    try:
        return metadata.version("hvdlite")
    except metadata.PackageNotFoundError:
        return "unknown"
