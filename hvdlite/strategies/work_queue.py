"""A queue of batches: each rank takes the next one when it is ready, so that all ranks end an epoch together.

With equal shares (`DistributedSampler`) an epoch ends with the slowest rank. Here the thread of the first rank's
mailbox counts the batches that are dealt. Only a batch's number travels: each rank shuffles the indices alike.

Price: a message to the first rank and back for each batch, about a millisecond.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sized

import numpy as np

from hvdlite.job import runtime
from hvdlite.job.process_sets import ProcessSet
from hvdlite.lanes.mailbox import FIRST_KIND, Letter, Mailbox
from hvdlite.strategies.staleness import Worker

ASK, DEAL = FIRST_KIND, FIRST_KIND + 1
DEALER = 0


class WorkQueue:
    """Deals batches of indices to whichever rank asks. One `for` loop over it is one epoch on this rank.

        queue = hvd.WorkQueue(dataset, batch_size=32)
        for epoch in range(10):
            for indices in queue:
                ...

    In each epoch each index is dealt exactly once, to one of the ranks. Ranks get different numbers of batches: use
    `BoundedStaleness`, or `hvd.join()` after the loop. Ranks end an epoch within one batch of each other. A rank that
    leaves a loop early leaves the rest of the epoch to the others. PyTorch's `DataLoader(dataset, batch_sampler=queue)`
    works, too. With `num_workers` it asks for several batches ahead.

    After its loop a rank with `BoundedStaleness` does not hold the others back, until its next update. Call
    `hvd.average_parameters(model)` after each epoch: with `clock=`, all ranks count their updates from 0 again.
    """

    def __init__(
        self,
        dataset: Sized | int,
        batch_size: int,
        shuffle: bool = True,
        seed: int = 0,
        process_set: ProcessSet | None = None,
    ) -> None:
        """Make a queue. Collective; waits for all ranks of the process set.

        Args:
            dataset: Anything with a length, or the number of indices; equal on all ranks.
            batch_size: The number of indices in a batch. The last batch may have fewer.
            shuffle: Whether each epoch has another random order. Else batches are dealt in order.
            seed: The seed of the order.
            process_set: The ranks that share the work. None: all.

        Raises:
            ValueError: A size is impossible.
            MismatchError: The arguments differ between ranks.
        """
        self._count = dataset if isinstance(dataset, int) else len(dataset)
        if self._count < 0 or batch_size < 1:
            raise ValueError(f"WorkQueue({self._count}, batch_size={batch_size}): a batch needs at least one index")
        self._batch_size, self._shuffle, self._seed = batch_size, shuffle, seed
        self._epoch = 0
        self._dealt = Counter[int]()
        self._answers: list[int] = []
        self._group = runtime.group_of(process_set)
        facts = (("length", self._count), ("batch_size", batch_size), ("shuffle", shuffle), ("seed", seed))
        self._mailbox = self._group.new_mailbox("hvd.WorkQueue", self, facts)

    def __len__(self) -> int:
        """The number of batches in an epoch, of all ranks together."""
        return -(-self._count // self._batch_size)

    def __iter__(self) -> Iterator[list[int]]:
        """Begin the next epoch on this rank. Each step waits for the first rank's thread.

        Yields:
            The indices of a batch.
        """
        self._epoch += 1
        epoch = self._epoch
        order = np.random.default_rng((self._seed, epoch)).permutation(self._count) if self._shuffle else None
        while (number := self._next(epoch)) < len(self):
            rows = range(number * self._batch_size, min((number + 1) * self._batch_size, self._count))
            yield list(rows) if order is None else order[rows.start : rows.stop].tolist()
        self._rest()

    def _next(self, epoch: int) -> int:
        """The number of the next batch, which is this rank's; from `len(self)` on if there is none."""
        self._mailbox.post(DEALER, Letter(ASK, era=epoch))
        self._mailbox.wait(lambda: bool(self._answers), "the next batch of hvd.WorkQueue", lambda: DEALER)
        return self._answers.pop()

    def _rest(self) -> None:
        """The epoch has ended on this rank: do not hold back ranks that still compute."""
        for mailbox in self._group.mailboxes:
            if isinstance(mailbox.reader, Worker):
                mailbox.reader.pause()

    def before_waiting(self) -> None:
        """Do nothing: nobody waits for this rank here."""

    def receive(self, mailbox: Mailbox, letter: Letter) -> None:
        """Deal a batch, or take one. The mailbox's thread calls it.

        Args:
            mailbox: The queue's mailbox.
            letter: What has come.
        """
        if letter.kind == ASK:
            number = min(self._dealt[letter.era], len(self))
            self._dealt[letter.era] = number + 1
            mailbox.post(letter.source, Letter(DEAL, note=number))
        elif letter.kind == DEAL:
            self._answers.append(letter.note)

    def close(self) -> None:
        """Release the queue. Collective; waits for all ranks. `hvd.shutdown()` does it, too."""
        self._group.close_mailbox(self._mailbox)
