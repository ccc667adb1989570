"""horovodrun's settings for the ranks: makes environment variables of flags, and of keys of its YAML file.

A flag sets `HOROVOD_X`, which scripts may read, and `HVDLITE_X`, which wins in hvdlite. A setting without a meaning in
hvdlite is accepted, so that command lines for Horovod work, and explained in one line. Unknown keys of the YAML file
have no effect, as in Horovod; hvdliterun names them.
"""

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hvdlite_launcher import UsageError

LEVELS = ("TRACE", "DEBUG", "INFO", "WARNING", "ERROR", "FATAL")


@dataclass(frozen=True)
class Tunable:
    """One setting.

    flag: its name on the command line. variable: X in HOROVOD_X. key: its section and name in the YAML file. read:
    makes the variable's value of the flag's, and raises ValueError; None for a switch. inverse: the flag that switches
    it off. no_effect: why it has no meaning in hvdlite, or None. older: the earlier names of both flags in Horovod.
    """

    flag: str
    variable: str
    key: tuple[str, str]
    help: str = ""
    read: Callable[[str], str] | None = None
    inverse: str | None = None
    no_effect: str | None = None
    older: tuple[str, str] = ("", "")

    @property
    def name(self) -> str:
        """The attribute in argparse's result."""
        return self.flag.removeprefix("--").replace("-", "_")


def _count(text: str) -> str:
    if not text.isdecimal():
        raise ValueError("must be a whole number, 0 or more")
    return text


def _amount(text: str) -> str:
    return _at_most(text, float("inf"), "must be a number, 0 or more")


def _fraction(text: str) -> str:
    return _at_most(text, 1, "must be a number between 0 and 1")


def _at_most(text: str, most: float, rule: str) -> str:
    try:
        fine = 0 <= float(text) <= most
    except ValueError:
        fine = False
    if not fine:
        raise ValueError(rule)
    return text


def _switch(given: object) -> str:
    """The value of a switch. A text is refused, because the YAML file's "no" in quotes would be true."""
    if given not in (True, False):  # 1 and 0 are equal to these
        raise ValueError("must be true or false, without quotes")
    return str(int(bool(given)))


def _bytes(text: str) -> str:
    return str(int(_count(text)) << 20)


def _level(text: str) -> str:
    if text.upper() not in LEVELS:
        raise ValueError(f"must be one of {', '.join(LEVELS)}")
    return text.upper()


_NO_TUNING = "algorithms are chosen by a cost model from size and place, with nothing to tune"
TUNABLES = (
    Tunable("--fusion-threshold-mb", "FUSION_THRESHOLD", ("params", "fusion_threshold_mb"),
            "size of a gradient bucket in MiB (default: 25)", _bytes),
    Tunable("--cycle-time-ms", "CYCLE_TIME", ("params", "cycle_time_ms"), read=_amount,
            no_effect="there are no cycles: a bucket leaves when it is full"),
    Tunable("--cache-capacity", "CACHE_CAPACITY", ("params", "cache_capacity"), read=_count,
            no_effect="there is no response cache: a model's parameters are compared once"),
    Tunable("--hierarchical-allreduce", "HIERARCHICAL_ALLREDUCE", ("params", "hierarchical_allreduce"),
            "in memory within a host, then between hosts (or --no-hierarchical-allreduce: one ring)",
            inverse="--no-hierarchical-allreduce"),
    Tunable("--hierarchical-allgather", "HIERARCHICAL_ALLGATHER", ("params", "hierarchical_allgather"),
            inverse="--no-hierarchical-allgather", no_effect="there is one way to gather"),
    Tunable("--torus-allreduce", "TORUS_ALLREDUCE", ("params", "torus_allreduce"),
            inverse="--no-torus-allreduce", no_effect="the hierarchical all-reduce uses all of a host's links"),
    Tunable("--autotune", "AUTOTUNE", ("autotune", "enabled"), inverse="--no-autotune", no_effect=_NO_TUNING),
    Tunable("--autotune-log-file", "AUTOTUNE_LOG", ("autotune", "log_file"), read=str, no_effect=_NO_TUNING),
    Tunable("--autotune-warmup-samples", "AUTOTUNE_WARMUP_SAMPLES", ("autotune", "warmup_samples"), read=_count,
            no_effect=_NO_TUNING),
    Tunable("--autotune-steps-per-sample", "AUTOTUNE_STEPS_PER_SAMPLE", ("autotune", "steps_per_sample"),
            read=_count, no_effect=_NO_TUNING),
    Tunable("--autotune-bayes-opt-max-samples", "AUTOTUNE_BAYES_OPT_MAX_SAMPLES",
            ("autotune", "bayes_opt_max_samples"), read=_count, no_effect=_NO_TUNING),
    Tunable("--autotune-gaussian-process-noise", "AUTOTUNE_GAUSSIAN_PROCESS_NOISE",
            ("autotune", "gaussian_process_noise"), read=_fraction, no_effect=_NO_TUNING),
    Tunable("--timeline-filename", "TIMELINE", ("timeline", "filename"), "write a trace there", str),
    Tunable("--timeline-mark-cycles", "TIMELINE_MARK_CYCLES", ("timeline", "mark_cycles"),
            "mark rounds in the trace", inverse="--no-timeline-mark-cycles"),
    Tunable("--no-stall-check", "STALL_CHECK_DISABLE", ("stall_check", "enabled"), "do not watch for stalls",
            inverse="--stall-check"),
    Tunable("--stall-check-warning-time-seconds", "STALL_CHECK_TIME_SECONDS",
            ("stall_check", "warning_time_seconds"), "warn of a rank that keeps others waiting (60)", _count),
    Tunable("--stall-check-shutdown-time-seconds", "STALL_SHUTDOWN_TIME_SECONDS",
            ("stall_check", "shutdown_time_seconds"), "end it after so many seconds (0: never)", _count),
    Tunable("--mpi-threads-disable", "MPI_THREADS_DISABLE", ("library_options", "mpi_threads_disable"),
            inverse="--no-mpi-threads-disable", no_effect="communication runs in threads of its own"),
    Tunable("--num-nccl-streams", "NUM_NCCL_STREAMS", ("library_options", "num_nccl_streams"), read=_count,
            no_effect="hvdlite chooses its CUDA streams itself"),
    Tunable("--thread-affinity", "THREAD_AFFINITY", ("library_options", "thread_affinity"), read=_count,
            no_effect="bind whole ranks with --binding-args"),
    Tunable("--gloo-timeout-seconds", "GLOO_TIMEOUT_SECONDS", ("library_options", "gloo_timeout_seconds"),
            read=_count, no_effect="there is no gloo"),
    Tunable("--log-level", "LOG_LEVEL", ("logging", "level"), f"{', '.join(LEVELS)} (WARNING)", _level),
    Tunable("--log-without-timestamp", "LOG_HIDE_TIME", ("logging", "with_timestamp"), "no times in the log",
            inverse="--log-with-timestamp", older=("--log-hide-timestamp", "--no-log-hide-timestamp")),
)  # fmt: skip
_INVERTED = ("STALL_CHECK_DISABLE", "LOG_HIDE_TIME")  # the YAML key means the opposite of the variable


def add_to(parser: argparse._ArgumentGroup) -> None:
    """Add all flags. The value of a flag that is not given is None."""
    for tunable in TUNABLES:
        shown = argparse.SUPPRESS if tunable.no_effect else tunable.help
        if tunable.read:
            parser.add_argument(tunable.flag, metavar="VALUE", help=shown)
        else:
            pair = parser.add_mutually_exclusive_group()
            pair.add_argument(tunable.flag, action="store_true", default=None, dest=tunable.name, help=shown)
            for flags, action in (
                ([tunable.older[0]], "store_true"), ([str(tunable.inverse), tunable.older[1]], "store_false")
            ):  # fmt: skip
                if named := [flag for flag in flags if flag]:
                    pair.add_argument(*named, action=action, default=None, dest=tunable.name, help=argparse.SUPPRESS)


def load(path: str, over_mpi: bool = False) -> dict[str, Any]:
    """The file's sections. Raises UsageError if the file cannot be read, or asks for another controller than MPI.

    over_mpi: whether the command line asks for MPI, which wins.
    """
    import yaml

    try:
        with open(path, encoding="utf-8") as file:
            config = yaml.safe_load(file)
    except (OSError, ValueError, yaml.YAMLError) as error:  # ValueError: no UTF-8; a date or number that cannot be
        reason = " ".join(str(getattr(error, "strerror", None) or error).split())
        raise UsageError(f"cannot read the settings in {path}: {reason}") from error
    if config is None:
        return {}
    if not isinstance(config, dict):
        raise UsageError(f"cannot read the settings in {path}: sections were expected, such as `params:`")
    if not over_mpi and str(config.get("controller", "mpi")).lower() != "mpi":
        raise UsageError(
            f"{path}: controller {config['controller']!r} is not supported: write mpi, or leave the line out"
        )
    return config


def chosen(options: argparse.Namespace, config: Mapping[str, Any]) -> Iterator[tuple[Tunable, str]]:
    """The settings that were given, and the values of their variables. Flags win over the YAML file's `config`.

    Raises UsageError for an impossible value.
    """
    for tunable in TUNABLES:
        given = getattr(options, tunable.name)
        section = config.get(tunable.key[0])
        where = tunable.flag
        if not isinstance(section, Mapping | None):
            raise UsageError(f"{options.config_file}: {tunable.key[0]} must be a section, with lines `name: value`")
        if given is None and section and section.get(tunable.key[1]) is not None:
            given, where = section[tunable.key[1]], f"{options.config_file}: {tunable.key[0]}.{tunable.key[1]}"
            if tunable.variable in _INVERTED and given in (True, False):
                given = not given
        if given is not None:
            try:
                value = tunable.read(str(given)) if tunable.read else _switch(given)
            except ValueError as error:
                raise UsageError(f"{where} {given}: {error}") from error
            yield tunable, value


def unknown(config: Mapping[str, Any]) -> list[str]:
    """The parts of the YAML file's `config` that are no settings: SECTION or SECTION.NAME."""
    known = {tunable.key for tunable in TUNABLES}
    sections, found = {section for section, _ in known}, []
    for section, values in config.items():
        if section in sections:
            found += [f"{section}.{name}" for name in values or () if (section, name) not in known]
        elif section != "controller":
            found.append(str(section))
    return found


def variables(settings: Sequence[tuple[Tunable, str]]) -> dict[str, str]:
    """The environment that carries these settings to the ranks."""
    env: dict[str, str] = {}
    for tunable, value in settings:
        env |= {f"HOROVOD_{tunable.variable}": value, f"HVDLITE_{tunable.variable}": value}
        if tunable.variable == "FUSION_THRESHOLD":
            env["HVDLITE_BUCKET_MB"] = str(int(value) >> 20)
        if tunable.variable == "HIERARCHICAL_ALLREDUCE":
            env["HVDLITE_ALGORITHM"] = "hierarchical" if value == "1" else "ring"
    return env


def explanations(settings: Sequence[tuple[Tunable, str]]) -> list[str]:
    """One line about each setting that was given and has no effect."""
    given = [(tunable.flag, tunable.no_effect) for tunable, _ in settings if tunable.no_effect]
    reasons = dict.fromkeys(reason for _, reason in given)
    return [f"{', '.join(flag for flag, why in given if why == reason)}: no effect, {reason}" for reason in reasons]
