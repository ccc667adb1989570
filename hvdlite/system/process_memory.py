"""What Linux knows of this process' memory. A page that several processes share counts in equal parts (PSS)."""

from __future__ import annotations

import re

_PAGES = re.compile(r"^Pss:\s+(\d+) kB", re.MULTILINE)
_DATA = re.compile(r"^Pss_(?:Anon|Shmem):\s+(\d+) kB", re.MULTILINE)
_MAPPING = re.compile(r"^[0-9a-f]+-[0-9a-f]+ ")


def proportional_bytes(name: str = "") -> int:
    """Return this process' part of its memory in bytes; 0 if Linux does not say.

    Args:
        name: Only mappings whose file has this in its name. Empty: all memory.
    """
    try:
        with open(
            "/proc/self/smaps" if name else "/proc/self/smaps_rollup", encoding="utf-8", errors="replace"
        ) as file:
            text = file.read()
    except OSError:
        return 0
    if not name:
        return sum(1024 * int(pages) for pages in _PAGES.findall(text))
    found, inside = 0, False
    for line in text.splitlines():
        if _MAPPING.match(line):
            inside = name in line
        elif inside and (pages := _PAGES.match(line)):
            found += 1024 * int(pages[1])
    return found


def data_bytes() -> int:
    """Return this process' part of its memory in bytes, without pages of files; 0 if Linux does not say.

    Pages of files are mostly libraries, and a process' part of these changes as other processes begin and end.
    """
    try:
        with open("/proc/self/smaps_rollup", encoding="utf-8") as file:
            return sum(1024 * int(pages) for pages in _DATA.findall(file.read()))
    except OSError:
        return 0


def reset_peak() -> bool:
    """Make `resident_bytes` look for the peak from now on. Returns whether Linux allows it."""
    try:
        with open("/proc/self/clear_refs", "w", encoding="ascii") as file:
            file.write("5")
    except OSError:
        return False
    return True


def resident_bytes() -> tuple[int, int]:
    """Return the bytes that this process has in memory now, and the peak. Shared pages count fully. 0: not known."""
    try:
        with open("/proc/self/status", encoding="utf-8", errors="replace") as file:
            found = {line.partition(":")[0]: line.split()[1] for line in file if line.startswith(("VmRSS", "VmHWM"))}
    except OSError:
        return 0, 0
    return 1024 * int(found.get("VmRSS", 0)), 1024 * int(found.get("VmHWM", 0))
