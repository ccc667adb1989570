"""Reads Horovod's YAML file of settings. Unknown keys have no effect, as in Horovod; hvdliterun names them."""

from __future__ import annotations

from typing import Any

from hvdlite_launcher.usage import UsageError


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
        raise UsageError(f"{path}: controller {config['controller']!r} is not there: hvdlite communicates over MPI")
    return config
