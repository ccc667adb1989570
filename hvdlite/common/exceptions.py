"""`horovod.common.exceptions`: Horovod's exceptions."""

from hvdlite.errors import HorovodInternalError, HostsUpdatedInterrupt


class HorovodVersionMismatchError(ImportError):
    """Exists for scripts that catch it. hvdlite never raises it, because it is not built against a framework."""

    def __init__(self, name: str, version: str, installed_version: str) -> None:
        super().__init__(f"{name} is {installed_version}, not {version}")
        self.name, self.version, self.installed_version = name, version, installed_version


__all__ = ["HorovodInternalError", "HorovodVersionMismatchError", "HostsUpdatedInterrupt"]
