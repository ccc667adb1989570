"""When this process began, according to Linux."""

from __future__ import annotations

import os
import time


def seconds_since_start() -> float:
    """Return the seconds since this process began; 0.0 if Linux does not say."""
    try:
        with open("/proc/self/stat", encoding="utf-8", errors="replace") as file:
            after_name = file.read().rpartition(")")[2].split()  # the name may contain spaces
        ticks = int(after_name[19])
    except (OSError, IndexError, ValueError):
        return 0.0
    return max(time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK"), 0.0)
