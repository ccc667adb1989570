"""The exceptions under the name of Horovod's module."""

from hvdlite.errors import HorovodInternalError, HostsUpdatedInterrupt

__all__ = ["HorovodInternalError", "HostsUpdatedInterrupt"]
