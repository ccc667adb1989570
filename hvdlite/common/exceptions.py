"""The exceptions under the name of Horovod's module."""

from hvdlite.errors import HorovodInternalError, HostsUpdatedInterrupt


class HorovodVersionMismatchError(ImportError):
    """For scripts that catch it: nothing is built against one version of a framework, so it is never raised."""

    def __init__(self, name: str, version: str, installed_version: str) -> None:
        super().__init__(f"{name} is {installed_version}, not {version}")
        self.name, self.version, self.installed_version = name, version, installed_version


__all__ = ["HorovodInternalError", "HorovodVersionMismatchError", "HostsUpdatedInterrupt"]
