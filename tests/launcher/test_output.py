"""What hvdliterun prints: labels, unfinished lines, and which messages of MPIs it leaves out."""

from __future__ import annotations

import os

import pytest
from hvdlite_launcher.notices import without_deaths, without_harmless
from hvdlite_launcher.output import Printer, Source
from hvdlite_launcher.prefixes import Prefixes, Style
from hvdlite_launcher.streams import Streams

ZERO, ONE = b"[0]<stdout>:", b"[1]<stdout>:"


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """All bytes that are written, as one growing list."""
    texts: list[bytes] = []

    def write(destination: int, data: memoryview) -> int:
        texts.append(bytes(data))
        return len(data)

    monkeypatch.setattr(os, "write", write)
    return texts


@pytest.mark.parametrize(
    ("chunks", "shown"),
    [
        ([b"a\nb\n"], ZERO + b"a\n" + ZERO + b"b\n"),
        ([b"a", b"b\n"], ZERO + b"ab\n"),
        ([b"\n\n"], ZERO + b"\n" + ZERO + b"\n"),
        ([b"a\r", b"\nb\r\n"], ZERO + b"a\r\n" + ZERO + b"b\r\n"),
        ([b"a\r\n\r\nb\n"], ZERO + b"a\r\n" + ZERO + b"\r\n" + ZERO + b"b\n"),
        ([b"10%\r20%\r30%\n"], ZERO + b"30%\n"),
        ([b"\r10%", b"\r20%\n"], ZERO + b"20%\n"),
        ([b"\xff\x00\n"], ZERO + b"\xff\x00\n"),
    ],
)
def test_every_line_carries_its_label(written: list[bytes], chunks: list[bytes], shown: bytes) -> None:
    printer, source = Printer(), Source(0, 1)
    for chunk in chunks:
        printer.feed(source, chunk)
    assert b"".join(written) == shown


def test_an_unfinished_line_shows_after_a_while_and_goes_on(written: list[bytes]) -> None:
    printer, source = Printer(), Source(0, 1)
    printer.feed(source, b"loading")
    printer.flush(source, older_than=10.0)
    assert written == []
    printer.flush(source)
    printer.feed(source, b" done\n")
    assert b"".join(written) == ZERO + b"loading done\n"


def test_a_line_that_goes_on_and_on_is_not_held_back(written: list[bytes]) -> None:
    """A line that grows all the time is printed. A long line is not searched again for each piece."""
    printer, source = Printer(), Source(0, 1)
    printer.feed(source, b".")
    began = source.since
    printer.feed(source, b".")
    assert source.since == began and written == []
    for _ in range(30):
        printer.feed(source, b"x" * 100000)
        assert len(source.rest) < 1200000
    printer.feed(source, b"\n")
    assert b"".join(written) == ZERO + b".." + b"x" * 3000000 + b"\n"


def test_long_lines_of_several_ranks_are_whole(written: list[bytes]) -> None:
    """For example lines of JSON; they come in pieces."""
    printer, zero, one = Printer(), Source(0, 1), Source(1, 1)
    for _ in range(16):
        printer.feed(zero, b"x" * 65536)
        printer.feed(one, b"y" * 65536)
    for source in (zero, one):
        printer.feed(source, b"\n")
    assert b"".join(written) == ZERO + b"x" * (1 << 20) + b"\n" + ONE + b"y" * (1 << 20) + b"\n"


def test_nobody_writes_into_the_unfinished_line_of_another(written: list[bytes]) -> None:
    printer, zero, one = Printer(), Source(0, 1), Source(1, 1)
    printer.feed(zero, b"loading")
    printer.flush(zero)
    printer.feed(one, b"hello\n")
    printer.feed(zero, b" done\n")
    assert b"".join(written) == ZERO + b"loading\n" + ONE + b"hello\n" + ZERO + b" done\n"


def test_without_prefix_bytes_pass_unchanged(written: list[bytes]) -> None:
    printer, source = Printer(Prefixes(Style.NONE)), Source(0, 1)
    for chunk in (b"a\rb", b"c\n\n"):
        printer.feed(source, chunk)
    assert b"".join(written) == b"a\rbc\n\n"


def test_without_prefix_lines_stay_whole(written: list[bytes]) -> None:
    """A rank writes a line in pieces, as `print` does if Python does not buffer."""
    printer, zero, one = Printer(Prefixes(Style.NONE)), Source(0, 1), Source(1, 1)
    for source, chunk in ((zero, b"a"), (one, b"b"), (one, b"\n"), (zero, b"\n"), (zero, b"> ")):
        printer.feed(source, chunk)
    printer.flush(zero)
    assert b"".join(written) == b"b\na\n> "


def test_what_a_scheduler_has_labelled(capfd: pytest.CaptureFixture[str]) -> None:
    """Lines without a label and messages of the scheduler's daemons are the scheduler's. An unfinished last line is
    printed. The last state of a progress bar belongs to the rank in its label."""
    with Printer() as printer:
        streams = Streams(printer)
        end = streams.open_labelled(1)
        os.write(end, b"0: a\n 1: b: c\n3: 10%\r20%\nsrun: error: x\n2: slurmstepd: error: y\n1: the end")
        os.close(end)
        streams.drain(explained=False)
    out, err = capfd.readouterr()
    assert sorted(out.split("\n")) == sorted(["[0]<stdout>:a", "[1]<stdout>:b: c", BAR, "[1]<stdout>:the end", ""])
    assert err == "srun: error: x\n2: slurmstepd: error: y\n"


BAR = "[3]<stdout>:20%"
RULE = "-" * 74 + "\n"
DEATH = f"{RULE}prterun noticed that process rank 1 with PID 3160 on node vm exited on\nsignal 9 (Killed).\n{RULE}"
WARNING = f"{RULE}There are not enough slots available in the system\n{RULE}"
HYDRA = (
    f"\n{'=' * 83}\n=   BAD TERMINATION OF ONE OF YOUR APPLICATION PROCESSES\n=   EXIT CODE: 9\n{'=' * 83}\n"
    "YOUR APPLICATION TERMINATED WITH THE EXIT STRING: Killed (signal 9)\n"
    "This typically refers to a problem with your application.\n"
    "Please see the FAQ page for debugging suggestions\n"
)


LOST = (
    "[hostb:00000] *** An error occurred in Socket closed\n[hostb:00000] *** reported by process [4010475521,3]\n"
    "[hostb:00000] *** on a NULL communicator\n[hostb:00000] *** Unknown error\n"
    "[hostb:00000] *** MPI_ERRORS_ARE_FATAL (processes in this communicator will now abort,\n"
    "[hostb:00000] ***    and MPI will try to terminate your MPI job as well)\n"
)
CRASH = (
    "\n[hosta:00025] *** Process received signal ***\n[hosta:00025] Signal: Segmentation fault (11)\n"
    "[hosta:00025] [ 0] /lib/libc.so.6(+0x3c050)[0x7f]\n[hosta:00025] *** End of error message ***\n"
)


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        (DEATH, ""),
        (LOST + DEATH + LOST, ""),
        (LOST.replace("Socket closed", "MPI_Send"), LOST.replace("Socket closed", "MPI_Send")),
        ("mpirun.openmpi: abort is already in progress...hit ctrl-c again to forcibly terminate\n" + CRASH, ""),
        ("[hosta:17] PMIX ERROR: PMIX_ERR_UNREACH in file base/x.c at line 1\n", ""),
        (HYDRA, ""),
        (WARNING, WARNING),
        (DEATH + WARNING, WARNING),
        (WARNING + DEATH, WARNING),
        ("mpirun: unknown option\n", "mpirun: unknown option\n"),
        ("[warn] Epoll MOD(1) on fd 20 failed. Bad file descriptor\n", ""),
        ("[node:01909] pmix_ptl_base: send_msg: write failed: Bad file descriptor (9) [sd = -1]\n", ""),
    ],
)
def test_only_reports_of_deaths_are_left_out(text: str, kept: str) -> None:
    assert without_deaths(text) == kept


def test_what_good_jobs_say_is_left_out_always() -> None:
    text = "[hosta:17] plm:ssh: Warning: setpgid(18,18) failed in parent with errno=Permission denied(13)\n"
    assert without_harmless(text + WARNING) == WARNING
