"""Progress bars: on a terminal they stay below other ranks' lines; in a pipe or a file they take a line a second."""

from __future__ import annotations

import io
import os
import random
import re
from collections.abc import Callable, Iterator

import pytest
from hvdlite_launcher import output, places, terminal
from hvdlite_launcher.live import columns
from hvdlite_launcher.output import Printer, Source
from hvdlite_launcher.places import Lines, Screen
from hvdlite_launcher.prefixes import Prefixes, Style
from rich.console import Console
from rich.progress import Progress

from tests.launcher.grids import Grid

WIDTH = 60
ZERO, ONE = b"[0]<stdout>:", b"[1]<stdout>:"


class Recorded:
    """What is written, and the time."""

    def __init__(self) -> None:
        self.data = b""
        self.now = 100.0

    def write(self, destination: int, data: memoryview) -> int:
        self.data += bytes(data)
        return len(data)

    def lines(self) -> list[bytes]:
        return self.data.split(b"\n")


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Recorded:
    found = Recorded()
    monkeypatch.setattr(os, "write", found.write)
    monkeypatch.setattr("time.monotonic", lambda: found.now)
    monkeypatch.setattr(places, "size", lambda *destinations: (WIDTH, 24))
    return found


def pipe() -> Printer:
    """A printer into a pipe, as pytest's stdout is."""
    made = Printer(Prefixes(Style.FULL, ranks=2))
    out = Lines(made.prefixes.of)
    made._places.update({1: out, 2: out})
    return made


def screen(style: Style = Style.SHORT) -> Printer:
    """A printer to a terminal for both streams."""
    made = Printer(Prefixes(style, ranks=2))
    out = Screen(made.prefixes.of)
    made._places.update({1: out, 2: out})
    return made


def test_a_progress_bar_in_a_file_takes_a_line_a_second(recorded: Recorded) -> None:
    """100 refreshes in ten seconds, as tqdm writes them: one at once, then one a second, and the last one."""
    printer, source = pipe(), Source(0, 2)
    for number in range(100):
        printer.feed(source, f"\r{number}%".encode())
        recorded.now += 0.1
        printer.flush(source, older_than=0.1)
    printer.feed(source, b"\r100%\n")
    shown = [line.removeprefix(b"[0]<stderr>:") for line in recorded.lines()]
    numbers = [int(line[:-1]) for line in shown if line]
    assert numbers[-1] == 100 and numbers == sorted(set(numbers))
    assert 10 <= len(numbers) <= 12
    assert b"\r" not in recorded.data


def test_a_refresh_that_is_not_replaced_appears(recorded: Recorded) -> None:
    """Also one of a bar that ends its text with a carriage return, while the job runs."""
    for text in (b"1%\r2%\r", b"\r1%\r2%"):
        recorded.data, printer, source = b"", pipe(), Source(0, 1)
        printer.feed(source, text[:3])
        printer.flush(source, older_than=0.1)
        printer.feed(source, text[3:])
        recorded.now += 1.0
        printer.flush(source, older_than=0.1)
        assert recorded.lines()[-1] == ZERO + b"2%"


@pytest.mark.parametrize(("text", "last"), [
    (b"\r1%\r2%", b"2%"),
    (b"\r1%\r2%\r", b"2%"),
    (b"\r1%\r2%\r   \r", b"2%"),  # tqdm(leave=False) clears its line
    (b"\r1%\r\x1b[2K2%\r\x1b[2K", b"2%"),
    (b"\r1%\r2%\n", b"2%"),
    (b"\r1%\r2%\r\n", b"2%"),
    (b"\r1%\r2%\r   \r\n", b"2%"),
    (b"\r1%" + b"\b" * 2 + b"\r2%" + b"\b" * 2 + b"\r3%\n", b"3%"),  # as Keras
])  # fmt: skip
def test_the_last_state_always_appears(recorded: Recorded, text: bytes, last: bytes) -> None:
    printer, source = pipe(), Source(0, 1)
    for at in range(len(text)):
        printer.feed(source, text[at : at + 1])
        if at == 3:
            printer.flush(source)  # 1% is shown, and its second has begun
    printer.flush(source)
    printer.end_lines()
    assert recorded.lines()[-2:] == [ZERO + last, b""]


def test_what_ends_with_a_newline_is_never_dropped(recorded: Recorded) -> None:
    """Random text of two ranks, in pieces, with random flushes: each rank's lines come out in order."""
    chance = random.Random(7)
    for _ in range(300):
        recorded.data, printer, sources = b"", pipe(), (Source(0, 1), Source(1, 1))
        kept: dict[int, list[bytes]] = {0: [], 1: []}
        for number in range(20):
            rank = chance.randrange(2)
            ends = b"" if chance.random() < 0.5 else b"%d%%\r" % number
            text = b"\r" * chance.randrange(2) + ends + b"r%d-%d\n" % (rank, number)
            kept[rank].append(b"r%d-%d" % (rank, number))
            cut = chance.randrange(len(text))
            for piece in filter(None, (text[:cut], text[cut:])):
                printer.feed(sources[rank], piece)
                recorded.now += chance.random()
                if chance.random() < 0.3:
                    printer.flush(sources[rank], older_than=0.1)
        lines = recorded.lines()
        for rank, wanted in kept.items():
            found = [line.rpartition(b":")[2] for line in lines if line.startswith(b"[%d]" % rank)]
            assert [line for line in found if b"-" in line and b"%" not in line] == wanted


def test_another_ranks_line_ends_a_refresh(recorded: Recorded) -> None:
    printer, zero, one = pipe(), Source(0, 1), Source(1, 1)
    printer.feed(zero, b"\r10%")
    printer.flush(zero)
    printer.feed(one, b"hello\n")
    printer.feed(zero, b"\r20%\n")
    assert recorded.data == ZERO + b"10%\n" + ONE + b"hello\n" + ZERO + b"20%\n"


def test_dots_after_a_carriage_return_go_on_in_their_line(recorded: Recorded) -> None:
    printer, source = pipe(), Source(0, 1)
    for piece in (b"\rloading", b".", b".", b" done\n"):
        printer.feed(source, piece)
        recorded.now += 2.0
        printer.flush(source, older_than=0.1)
    assert recorded.data == ZERO + b"loading.. done\n"


def test_keras_bar_in_a_file(recorded: Recorded) -> None:
    """Its backspaces are left out, also if they come alone."""
    printer, source = pipe(), Source(0, 1)
    for piece in keras():
        printer.feed(source, piece)
        printer.flush(source, older_than=0.1)
        for more in (b"", b"\b" * 9 + b"\r"):
            printer.feed(source, b"" if piece.endswith(b"\n") else more)
            recorded.now += 1.0
            printer.flush(source, older_than=0.1)
    lines = [Grid().feed(line.removeprefix(ZERO)).seen for line in recorded.lines() if line]
    assert lines == [["Epoch 1/2"], ["1/3  loss: 0.5000 long"], ["2/3 ━ loss: 0.25"], ["3/3 ━━ loss: 0.1250"]]
    assert b"\b" not in recorded.data


def tqdm(steps: int = 5) -> Iterator[bytes]:
    """As tqdm writes: a bar, and a last refresh with a newline."""
    for step in range(steps):
        yield f"\r{step * 20:3d}%|{'█' * step:5}| {step}/5".encode()
    yield f"\r100%|{'█' * 5}| 5/5\n".encode()


def nested() -> Iterator[bytes]:
    """As tqdm writes two bars, one below the other; the inner one is cleared at its end."""
    for epoch in range(2):
        yield f"\repochs {epoch}/2".encode()
        for step in range(4):
            yield b"\n"
            yield f"\rsteps  {step}/4".encode()
            yield b"\x1b[A"
        yield b"\n\r" + b" " * 20 + b"\r\x1b[A"
    yield b"\repochs 2/2\n"


def keras() -> Iterator[bytes]:
    """As Keras' Progbar writes: backspaces over the last text, a carriage return, blanks over its rest."""
    yield b"Epoch 1/2\n"
    width = 0
    for step, text in enumerate(("loss: 0.5000 long", "loss: 0.25", "loss: 0.1250")):
        bar = f"\x1b[1m{step + 1}/3\x1b[0m \x1b[32m{'━' * step}\x1b[0m {text}"
        shown = 4 + step + 1 + len(text)
        yield b"\b" * width + b"\r" + bar.encode() + b" " * max(0, width - shown)
        width = shown
    yield b"\n"


def rich(transient: bool = False) -> Iterator[bytes]:
    """What rich itself writes for two bars, with lines above them."""
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=WIDTH - 2, legacy_windows=False)

    def written() -> bytes:
        text = file.getvalue().encode()
        file.seek(0)
        file.truncate()
        return text

    with Progress(console=console, auto_refresh=False, transient=transient) as progress:
        tasks = [progress.add_task(name, total=4) for name in ("epochs", "batches")]
        for step in range(4):
            for task in tasks:
                progress.advance(task)
            progress.refresh()
            yield written()
            if step % 2:
                console.print(f"step [red]{step}[/]")
                yield written()
    yield written()
    console.print("the end")
    yield written()


def spinner() -> Iterator[bytes]:
    yield b"working |"
    yield b"\b/"
    yield b"\b- 1"
    yield b"\b\b\b"
    yield b"| 2"
    yield b"done\n"


def shell() -> Iterator[bytes]:
    yield b"Do you agree? "
    yield b"[y/n] "
    yield b"yes\nthank you\n"


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("whole", [True, False])
def test_an_inner_bar_in_a_file_takes_a_line_a_second(recorded: Recorded, depth: int, whole: bool) -> None:
    """As tqdm writes bars below each other: down, the inner bar, up. A log has no moves up, which would make a terminal
    that shows the log write over its lines. Lines that end are all there."""
    printer, source = pipe(), Source(0, 2)
    down, up = b"\n" * depth, b"\x1b[A" * depth
    for epoch in range(2):
        pieces = [b"\repochs %d/2" % epoch]
        for step in range(101):
            pieces += [down, b"\rsteps %d/100" % step, up]
        pieces += [down, b"\r" + b" " * 20, b"\r", up, b"\repoch %d ends  \n" % epoch]
        text = b"".join(pieces)
        fed = pieces if whole else [text[at : at + 1] for at in range(len(text))]
        for piece in fed:
            printer.feed(source, piece)
            recorded.now += 10.0 / len(fed)
            printer.flush(source, older_than=0.1)
    printer.feed(source, b"the end\n")
    shown = [line.removeprefix(b"[0]<stderr>:").rstrip() for line in recorded.lines()]
    assert b"\x1b" not in recorded.data and b"\r" not in recorded.data
    assert 15 <= sum(line.startswith(b"steps") for line in shown) <= 24, "ten seconds an epoch"
    assert [line for line in shown if line.startswith(b"epoch ") or line == b"the end"] == [
        b"epoch 0 ends", b"epoch 1 ends", b"the end",
    ]  # fmt: skip
    assert shown.count(b"") == 1 + 2 * (depth - 1), "what follows the last newline, and rows that the bars skip"


def test_after_an_inner_bar_newlines_end_lines_again(recorded: Recorded) -> None:
    printer, source = pipe(), Source(0, 1)
    printer.feed(source, b"\repochs\n\rsteps\x1b[A\n\r     \r\x1b[A\repochs done\n")
    recorded.data = b""
    printer.feed(source, b"\n30%\x1b[A\n\r5%\r  \r\n")
    assert recorded.data == ZERO + b"\n" + ZERO + b"30%\x1b[A\n" + ZERO + b"5%\n"


BARS: list[Callable[[], Iterator[bytes]]] = [tqdm, nested, keras, rich, lambda: rich(transient=True), spinner, shell]


@pytest.mark.parametrize("bar", BARS)
@pytest.mark.parametrize("flushed", [True, False])
def test_a_progress_bar_passes_undamaged(recorded: Recorded, bar: Callable[[], Iterator[bytes]], flushed: bool) -> None:
    """While only rank 0 writes, the terminal shows after each step what it would show without hvdliterun."""
    printer, source, alone = screen(Style.AUTO), Source(0, 1), Grid()
    shown = Grid()
    for piece in bar():
        alone.feed(piece)
        printer.feed(source, piece)
        if flushed:
            printer.flush(source)
            shown.feed(recorded.data)
            recorded.data = b""
            assert shown.seen == alone.seen
    printer.flush(source)
    printer.end_lines()
    assert shown.feed(recorded.data).seen == alone.seen
    assert shown.cursor


@pytest.mark.parametrize("cut", [0, 1, 2, 3])
def test_no_row_of_rich_waits_for_the_next_refresh(recorded: Recorded, cut: int) -> None:
    """The last one has no newline. rich draws again before unfinished lines are shown, and erases that row first.

    cut: bytes of the next piece that come with a piece. They may be a part of a control sequence.
    """
    printer, source, alone = screen(Style.AUTO), Source(0, 1), Grid()
    pieces = list(rich())
    for number, piece in enumerate(pieces):
        alone.feed(piece)
        following = b"".join(pieces[number + 1 : number + 2])[:cut]
        printer.feed(source, piece[cut if number else 0 :] + following)
        if b"\x1b[1A" in piece and following in (b"", b"\r", b"\r\x1b", b"\r\x1b["):
            assert Grid().feed(recorded.data).seen == alone.seen
    assert any(b"\x1b[1A" in piece for piece in pieces)


@pytest.mark.parametrize("bar", [tqdm, keras, rich, lambda: rich(transient=True), shell])
def test_other_ranks_lines_damage_no_progress_bar(recorded: Recorded, bar: Callable[[], Iterator[bytes]]) -> None:
    """Rank 1 writes a line after each refresh. Without its lines, the terminal shows what it would show without it."""
    printer, zero, one, alone = screen(), Source(0, 1), Source(1, 1), Grid()
    lines = 0
    for number, piece in enumerate(bar()):
        alone.feed(piece)
        printer.feed(zero, piece)
        printer.flush(zero)
        if number not in (0, 1):  # rich's bars have two rows once they have been drawn twice
            printer.feed(one, f"line {number}\nanother\n".encode())
            lines += 2
        if number > 1 and alone.rows[-1].strip():
            shown = Grid().feed(recorded.data).seen
            assert shown[-1].removeprefix("0|") == alone.rows[-1].rstrip(), "the bar stays the last line"
    printer.end_lines()
    shown = Grid().feed(recorded.data).seen
    theirs = [row for row in shown if row.startswith("1|")]
    assert theirs == [row for row in theirs if row.startswith(("1|line ", "1|another"))] and len(theirs) == lines
    assert [row.removeprefix("0|") for row in shown if not row.startswith("1|")] == alone.seen


def test_lines_of_many_ranks_are_whole_and_in_order(recorded: Recorded) -> None:
    """Random lines of four streams, some wider than the terminal, in pieces that show before their line ends."""
    chance = random.Random(5)
    for _ in range(40):
        recorded.data, printer = b"", screen()
        sources = [Source(rank, destination) for rank in (0, 1) for destination in (1, 2)]
        wanted: dict[str, list[str]] = {}
        left = dict.fromkeys(range(len(sources)), b"")
        for number in range(150):
            which = chance.randrange(len(sources))
            source = sources[which]
            if not left[which]:
                label = f"{source.rank}{'|' if source.destination == 1 else ':'}"
                line = f"{label}{number} " + "x" * chance.choice((0, 10, 40, 80, 150))
                wanted.setdefault(label, []).append(line.rstrip())
                left[which] = chance.choice((b"", b"\r", b"old text\r")) + line[2:].encode() + b"\n"
            cut = chance.randrange(len(left[which])) + 1
            printer.feed(source, left[which][:cut])
            left[which] = left[which][cut:]
            if chance.random() < 0.7:
                printer.flush(source)
        for source, rest in zip(sources, left.values(), strict=True):
            printer.feed(source, rest)
        printer.end_lines()
        seen = "\n".join(Grid().feed(recorded.data).rows)
        folded = re.sub(r"(?<=x)\n(?=x+ *(\n|$))", "", seen)  # a wide line takes several rows
        for label, lines in wanted.items():
            assert [row.rstrip() for row in folded.split("\n") if row.startswith(label)] == lines


def test_nested_bars_of_one_rank_may_leave_a_row_but_no_line_is_mixed(recorded: Recorded) -> None:
    """Another rank's line may come between the pieces of one refresh."""
    printer, zero, one = screen(), Source(0, 2), Source(1, 1)
    for number, piece in enumerate(nested()):
        printer.feed(zero, piece)
        printer.flush(zero)
        printer.feed(one, f"line {number}\n".encode())
    printer.end_lines()
    rows = Grid().feed(recorded.data).seen
    assert [row for row in rows if row.startswith("1|")] == [f"1|line {number}" for number in range(number + 1)]
    assert all(row[2:] in ("", "epochs 0/2", "epochs 1/2", "epochs 2/2") or row[2:].startswith(("steps", "line"))
               for row in rows)  # fmt: skip


def test_after_its_bars_a_rank_goes_on_below_them(recorded: Recorded) -> None:
    """Its bars were on stderr."""
    printer, out, err = screen(), Source(0, 1), Source(0, 2)
    for piece in nested():
        printer.feed(err, piece)
        printer.flush(err)
    printer.feed(out, b"the end\n")
    assert Grid().feed(recorded.data).seen == ["0:epochs 2/2", "0|the end"]


def test_rows_that_came_in_several_pieces_are_drawn_again(recorded: Recorded) -> None:
    printer, zero, one = screen(), Source(0, 1), Source(1, 1)
    for piece in (b"a\n", b"b\n", b"c\n", b"d", b"\r\x1b[2AB\nC\nD"):
        printer.feed(zero, piece)
        printer.flush(zero)
    printer.feed(one, b"hello\n")
    assert Grid().feed(recorded.data).seen == ["0|a", "1|hello", "0|B", "0|C", "0|D"]


def test_bars_of_two_ranks_stand_below_each_other(recorded: Recorded) -> None:
    printer, zero, one = screen(), Source(0, 2), Source(1, 2)
    for first, second in zip(tqdm(), tqdm(), strict=True):
        printer.feed(zero, first)
        printer.feed(one, second)
        for source in (zero, one):
            printer.flush(source)
        assert len(Grid().feed(recorded.data).seen) == 2
    assert Grid().feed(recorded.data).seen == [f"{rank}:100%|█████| 5/5" for rank in (0, 1)]


def test_a_line_that_is_wider_than_the_terminal(recorded: Recorded) -> None:
    """It takes several rows, which are all drawn again."""
    printer, zero, one = screen(), Source(0, 1), Source(1, 1)
    printer.feed(zero, b"\r" + b"x" * 150)
    printer.flush(zero)
    printer.feed(one, b"hello\n")
    printer.feed(zero, b"\ry\n")
    assert Grid().feed(recorded.data).seen == ["1|hello", "0|y"]


def test_what_is_higher_than_the_terminal_is_finished(recorded: Recorded) -> None:
    printer, zero, one = screen(), Source(0, 1), Source(1, 1)
    printer.feed(zero, b"x" * WIDTH * 30)
    printer.flush(zero)
    printer.feed(one, b"hello\n")
    printer.feed(zero, b"y\n")
    seen = Grid().feed(recorded.data).seen
    assert "".join(seen).count("x") == WIDTH * 30 and seen[-2:] == ["1|hello", "0|y"]


def test_binary_output_ends_no_job(recorded: Recorded) -> None:
    """Random bytes with control sequences; a count has more digits than Python converts."""
    chance = random.Random(3)
    parts = [b"\x1b[", b"\r", b"\n", b"\b", b"2", b"9" * 5000, b"A", b"D", b"F", b"G", b"J", b"K", b"m", b";"]
    for made in (pipe, screen):
        for _ in range(8):
            printer, sources = made(), (Source(0, 1), Source(1, 2))
            for _ in range(20):
                source = chance.choice(sources)
                printer.feed(source, b"".join(chance.choices([*parts, chance.randbytes(1)], k=10)))
                if chance.random() < 0.5:
                    printer.flush(source)
            printer.end_lines()
            printer.feed(Source(2, 1), b"still there\n")
            assert recorded.data.endswith(b"still there\n")


def test_an_answer_that_was_typed_is_not_erased(recorded: Recorded) -> None:
    printer, zero = screen(), Source(0, 1)
    printer.feed(zero, b"name? ")
    printer.flush(zero)
    recorded.data += b"Ann\n"  # by the terminal
    printer.feed(zero, b"hello\n")
    assert Grid().feed(recorded.data).seen == ["0|name? Ann", "hello"]


def test_messages_of_hvdliterun_stand_above_a_bar(recorded: Recorded) -> None:
    printer, zero = screen(), Source(0, 1)
    printer.feed(zero, b"\r\x1b[?25l\x1b[31m10%")
    printer.flush(zero)
    printer.tell("hvdliterun: host b is silent\n")
    assert Grid().feed(recorded.data).seen == ["hvdliterun: host b is silent", "0|10%"]
    assert not Grid().feed(recorded.data).cursor
    printer.end_lines()
    assert recorded.data.endswith(b"\x1b[0m\n\x1b[?25h"), "a rank that is killed leaves the terminal in order"


def test_widths_of_rows() -> None:
    """Colours take no column, Chinese letters take two, accents none."""
    found = [columns(row.encode()) for row in ("abc", "\x1b[1;31mabc\x1b[0m", "█中é", "e\u0301", "\ta")]
    assert found == [3, 3, 4, 1, 9]


@pytest.mark.parametrize(("term", "no_color", "redraws", "coloured"), [
    ("xterm", "", True, True), ("xterm", "1", True, False), ("dumb", "", False, False), ("", "", False, False),
])  # fmt: skip
def test_what_a_terminal_can(
    monkeypatch: pytest.MonkeyPatch, term: str, no_color: str, redraws: bool, coloured: bool
) -> None:
    monkeypatch.setattr(os, "isatty", lambda destination: destination == 1)
    environ = {"TERM": term, "NO_COLOR": no_color}
    assert terminal.can_redraw(1, environ) is redraws and terminal.has_colours(1, environ) is coloured
    assert not terminal.can_redraw(2, environ)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    prefixes = Prefixes(ranks=12)
    colour = (b"\x1b[0;35m", b"\x1b[0m") if coloured else (b"", b"")
    assert prefixes.of((2, 1)) == colour[0] + b" 2|" + colour[1]
    assert prefixes.of((2, 2)) == b"[2]<stderr>:", "stderr is no terminal"
    kinds = [type(place) for place in Printer(prefixes)._places.values()]
    assert kinds == [Screen if redraws else Lines, Lines]


def test_colours_of_ranks_and_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neighbours differ, and stderr is dim."""
    monkeypatch.setattr(os, "isatty", lambda destination: True)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    prefixes = Prefixes(ranks=4)
    assert len({prefixes.of((rank, 1)).partition(b"m")[0] for rank in range(4)}) == 4
    assert prefixes.of((0, 2)) == b"\x1b[0;2;36m0:\x1b[0m"


@pytest.mark.parametrize(("style", "stdout", "stderr"), [
    (Style.SHORT, b"10|", b"10:"),
    (Style.FULL, b"[10]<stdout>:", b"[10]<stderr>:"),
    (None, b"[10]<stdout>:", b"[10]<stderr>:"),
    (Style.NONE, b"", b""),
])  # fmt: skip
@pytest.mark.parametrize("timestamps", [False, True])
def test_styles_in_a_pipe(
    monkeypatch: pytest.MonkeyPatch, style: Style | None, stdout: bytes, stderr: bytes, timestamps: bool
) -> None:
    """With times the time comes first. No prefix is wider than its announced width."""
    monkeypatch.setattr(os, "isatty", lambda destination: False)
    monkeypatch.setattr("time.strftime", lambda form: "12:34:56 ")
    monkeypatch.setattr("time.asctime", lambda: "Sun Nov 29 22:36:58 2026")
    long = style in (Style.FULL, None)
    time = (b"Sun Nov 29 22:36:58 2026" if long else b"12:34:56 ") if timestamps else b""
    prefixes = Prefixes(style, timestamps, ranks=11)
    found = prefixes.of((10, 1)), prefixes.of((10, 2))
    assert found == (time + stdout, time + stderr)
    assert [len(each) for each in found] == [prefixes.width(1), prefixes.width(2)]


def test_auto_shows_no_prefix_until_another_rank_writes(recorded: Recorded) -> None:
    printer, zero, one = Printer(Prefixes(Style.AUTO, ranks=2)), Source(0, 1), Source(1, 1)
    printer.feed(zero, b"hello\n")
    printer.feed(one, b"I, too\n")
    printer.feed(zero, b"who is it?\n")
    assert recorded.lines() == [b"hello", ONE + b"I, too", ZERO + b"who is it?", b""]


@pytest.mark.parametrize(("environ", "live", "terminals", "found"), [
    ({}, True, (1, 2), {"COLUMNS": "58", "LINES": "24", "HVDLITE_JOB_TERMINAL": "1"}),
    ({}, False, (1, 2), {"COLUMNS": "58", "LINES": "24"}),
    ({}, True, (1,), {"COLUMNS": "58", "LINES": "24"}),
    ({}, True, (2,), {"COLUMNS": "58", "LINES": "24"}),
    ({}, True, (), {}),
    ({"COLUMNS": "100"}, True, (1, 2), {"HVDLITE_JOB_TERMINAL": "1"}),
    ({"TTY_COMPATIBLE": "0"}, True, (1, 2), {"COLUMNS": "58", "LINES": "24"}),
])  # fmt: skip
def test_what_ranks_learn_of_the_terminal(
    monkeypatch: pytest.MonkeyPatch,
    environ: dict[str, str],
    live: bool,
    terminals: tuple[int, ...],
    found: dict[str, str],
) -> None:
    monkeypatch.setattr(os, "isatty", lambda destination: destination in terminals)

    def size(destination: int) -> os.terminal_size:
        if destination not in terminals:
            raise OSError
        return os.terminal_size((60, 24))

    monkeypatch.setattr(os, "get_terminal_size", size)
    assert terminal.variables({"TERM": "xterm", **environ}, 2, live) == found


def test_a_printer_has_one_place_for_one_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """With `2>&1` both streams end each other's unfinished lines."""
    monkeypatch.setattr(output, "_same_file", lambda one, other: True)
    first, second = Printer()._places.values()
    assert first is second
