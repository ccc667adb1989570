"""Mailboxes on threads as ranks: letters of any length, the end, and errors, which reach all ranks."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from hvdlite.algorithms import Place
from hvdlite.errors import HvdliteError, ShutdownError
from hvdlite.job.groups import Group, leave
from hvdlite.lanes import mailbox as module
from hvdlite.lanes.mailbox import FIRST_KIND, LEAVE, Letter, Mailbox
from hvdlite.transports.threads import ThreadTransport, run_ranks

SIZES = (1, 2, 3, 4)
QUESTION, REPLY = FIRST_KIND, FIRST_KIND + 1


class Book:
    """Keeps all letters, and answers questions with the question's body and clock + 1."""

    def __init__(self) -> None:
        self.letters: list[Letter] = []

    def receive(self, mailbox: Mailbox, letter: Letter) -> None:
        self.letters.append(letter)
        if letter.kind == QUESTION:
            mailbox.post(letter.source, letter._replace(kind=REPLY, clock=letter.clock + 1))

    def before_waiting(self) -> None:
        """Nobody waits for this rank."""

    def of(self, kind: int) -> list[Letter]:
        return [letter for letter in self.letters if letter.kind == kind]


def on_groups(size: int, function: Callable[[Group], Any], ends: bool = True) -> list[Any]:
    """Run function(group) on `size` ranks at once, and leave all groups."""

    def rank_main(transport: ThreadTransport) -> Any:
        group = Group(tuple(range(size)), transport, Place(size, False), (), lambda: [group.eager])
        result = function(group)
        if ends:
            leave([group])
        return result

    return run_ranks(size, rank_main)


def mailbox_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "hvdlite-mailbox"]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("piece", [100, 1 << 30])
def test_letters_of_any_length_arrive_in_order(size: int, piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PIECE", piece)

    def rank_main(group: Group) -> None:
        book = Book()
        mailbox, mine = group.new_mailbox("letters", book), random.Random(group.rank)
        lengths = [mine.choice((0, 1, 36, 37, 1000)) for _ in range(40)]
        for number, length in enumerate(lengths):
            for dest in range(size):
                body = np.full(length, group.rank + number, np.float64)
                mailbox.post(dest, Letter(QUESTION, -5, 1 << 61, number, length, 8, body))
        mailbox.wait(lambda: len(book.of(REPLY)) == 40 * size, "replies", lambda: group.rank)
        for source in range(size):
            replies = [letter for letter in book.of(REPLY) if letter.source == source]
            assert [(letter.clock, letter.note) for letter in replies] == [(n + 1, k) for n, k in enumerate(lengths)]
            for number, letter in enumerate(replies):
                assert (letter.plan, letter.era, letter.width) == (-5, 1 << 61, 8)
                assert letter.body.view(np.float64).tolist() == [group.rank + number] * letter.note

    on_groups(size, rank_main)
    assert not mailbox_threads()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("by_itself", [True, False])
def test_a_rank_that_ends_early_goes_on_answering(size: int, by_itself: bool) -> None:
    """Rank 0 leaves at once. The others ask it for a while. by_itself: `close` alone, and not when the group ends."""

    def rank_main(group: Group) -> None:
        book = Book()
        mailbox = group.new_mailbox("letters", book)
        for number in range(30 if group.rank else 0):
            mailbox.post(0, Letter(QUESTION, clock=number))
            mailbox.wait(lambda: len(book.of(REPLY)) == number + 1, "reply", lambda: 0)
            time.sleep(0.002)
        if by_itself:
            group.close_mailbox(mailbox)
            assert not group.mailboxes and len(book.of(LEAVE)) == size
            assert mailbox.thread is None or not mailbox.thread.is_alive()

    on_groups(size, rank_main)
    assert not mailbox_threads()


def test_the_thread_ends_only_when_all_letters_are_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 ends last, and is slow to send: its thread reads all ranks' LEAVE meanwhile."""

    def slow(self: Mailbox, dest: int, letter: Letter) -> None:
        if self.transport.rank == 1:
            time.sleep(0.05)
        send(self, dest, letter)

    def rank_main(group: Group) -> None:
        mailbox = group.new_mailbox("letters", Book())
        if group.rank == 1:
            time.sleep(0.1)
        group.close_mailbox(mailbox)

    send = Mailbox.send
    monkeypatch.setattr(Mailbox, "send", slow)
    on_groups(3, rank_main)
    assert not mailbox_threads()


@pytest.mark.parametrize("kind", [ZeroDivisionError, HvdliteError])
def test_an_error_in_the_thread_reaches_all_ranks(kind: type[Exception]) -> None:
    """Rank 1's reader raises an error. All ranks get it: those that wait for an answer, and those in a lane."""

    class Bad(Book):
        def receive(self, mailbox: Mailbox, letter: Letter) -> None:
            if letter.kind == QUESTION and mailbox.transport.rank == 1:
                raise kind("the reader is broken")

    def rank_main(group: Group) -> str:
        mailbox = group.new_mailbox("a fine thing", Bad())
        group.transport.barrier()
        if group.rank == 0:
            mailbox.post(1, Letter(QUESTION))
        with pytest.raises(HvdliteError) as caught:
            if group.rank == 3:
                group.new_mailbox("another", Bad())  # a lane
            else:
                mailbox.wait(lambda: False, "the answer", lambda: 1)
        with pytest.raises(HvdliteError):
            mailbox.post(0, Letter(QUESTION))
        assert mailbox.thread is not None
        mailbox.thread.join(5)
        assert not mailbox.thread.is_alive()
        return str(caught.value)

    began = time.monotonic()
    for text in on_groups(4, rank_main, ends=False):
        assert "the reader is broken" in text
        if kind is ZeroDivisionError:
            assert "a fine thing failed on rank 1 (ZeroDivisionError" in text
    assert time.monotonic() - began < 5


def test_a_wait_notices_that_communication_broke() -> None:
    def rank_main(group: Group) -> None:
        mailbox = group.new_mailbox("letters", Book())
        timer = threading.Timer(0.2, group.eager.break_off, (HvdliteError("torn"),))
        timer.start()
        with pytest.raises(HvdliteError, match="torn"):
            mailbox.wait(lambda: False, "nothing", lambda: 0)
        assert mailbox.thread is not None
        mailbox.thread.join(5)
        assert not mailbox.thread.is_alive()

    on_groups(2, rank_main, ends=False)


def test_after_the_end_a_post_is_an_error() -> None:
    def rank_main(group: Group) -> None:
        mailbox = group.new_mailbox("letters", Book())
        leave([group])
        with pytest.raises(ShutdownError):
            group.new_mailbox("late", Book())
        with pytest.raises(HvdliteError):
            mailbox.post(1 - group.rank, Letter(QUESTION))

    on_groups(2, rank_main, ends=False)


def test_the_stall_watch_sees_a_long_wait() -> None:
    """After a second the wait is a pending request on the lane between both ranks; afterwards it is gone."""

    def rank_main(group: Group) -> None:
        book = Book()
        mailbox = group.new_mailbox("letters", book)
        if group.rank == 0:
            pending: list[str] = []

            def look() -> None:
                until = time.monotonic() + 20
                while not pending and time.monotonic() < until:
                    lanes = list(group.post.lanes.values())
                    pending.extend(each.title() for lane in lanes for each in list(lane.queue.pending.values()))
                    time.sleep(0.05)
                mailbox.post(0, Letter(REPLY))

            thread = threading.Thread(target=look)
            thread.start()
            began = time.monotonic()
            mailbox.wait(lambda: bool(book.of(REPLY)), "update 7 of the optimizer", lambda: 1)
            assert time.monotonic() - began > module.SHOWN_AFTER
            thread.join()
            assert pending == ["update 7 of the optimizer"] and not group.post.lanes[1].queue.pending

    on_groups(2, rank_main)
