"""send and recv of torch.distributed's backend "hvdlite": tags, order, any source, and many messages at once."""

from __future__ import annotations

import gc
import time
from datetime import timedelta

import torch
import torch.distributed as dist

import hvdlite as hvd
from tests.parallel.common import at_sizes, last, require_error
from tests.parallel.distributed_common import DTYPES, FLOAT8, grouped, require_equal, seeded

SIZES = (2, 4)


def neighbours() -> tuple[int, int]:
    """The ranks before and after this rank in the ring."""
    return (hvd.rank() - 1) % hvd.size(), (hvd.rank() + 1) % hvd.size()


@grouped
def check_send_and_recv() -> None:
    for dtype in (*DTYPES, *FLOAT8):
        for shape in ((), (0,), (5,), (2, 3)):
            for source in range(hvd.size()):
                dest = (source + 1) % hvd.size()
                sent = seeded(source, shape, dtype)
                if hvd.rank() == source:
                    dist.send(sent, dest)
                elif hvd.rank() == dest:
                    tensor = torch.zeros_like(sent)
                    assert dist.recv(tensor, source) == source
                    require_equal(tensor, sent, dtype)


@grouped
def check_isend_and_irecv_around_the_ring() -> None:
    before, after = neighbours()
    tensor = torch.zeros(3)
    works = [dist.irecv(tensor, before), dist.isend(torch.full((3,), float(hvd.rank())), after)]
    for work in works:
        work.wait()
        assert work.is_completed() and work.exception() is None
    assert (tensor == before).all()
    sent = dist.isend(tensor, group_dst=after)
    got = torch.zeros(3)
    dist.recv(got, group_src=before)
    sent.wait()
    assert (got == (before - 1) % hvd.size()).all()


@grouped
def check_tags_choose_messages() -> None:
    """Messages are received by tag, whatever the order in which they were sent; of one tag, in order."""
    before, after = neighbours()
    sends = [dist.isend(torch.tensor([tag, 100 * hvd.rank()]), after, tag=tag) for tag in (3, 1, 2, 1)]
    found = {tag: torch.zeros(2, dtype=torch.int64) for tag in (2, 1, 3)}
    for tag, tensor in found.items():
        dist.recv(tensor, before, tag=tag)
        assert tensor.tolist() == [tag, 100 * before]
    again = torch.zeros(2, dtype=torch.int64)
    dist.recv(again, before, tag=1)
    assert again.tolist() == [1, 100 * before]
    for send in sends:
        send.wait()
    for number in range(20):
        dist.isend(torch.tensor([number]), after, tag=7)
    for number in range(20):
        tensor = torch.tensor([-1])
        dist.recv(tensor, before, tag=7)
        assert tensor.item() == number


@grouped
def check_any_source() -> None:
    if hvd.rank() == 0:
        found = []
        for _ in range(1, hvd.size()):
            tensor = torch.zeros(1)
            source = dist.recv(tensor)
            assert tensor.item() == source
            found.append(source)
        assert sorted(found) == list(range(1, hvd.size()))
        tensors = [torch.zeros(1) for _ in range(1, hvd.size())]
        works = [dist.irecv(tensor, tag=5) for tensor in tensors]
        for work in works:
            work.wait()
        assert sorted(work._source_rank() for work in works) == list(range(1, hvd.size()))
        assert sorted(tensor.item() for tensor in tensors) == list(range(1, hvd.size()))
    else:
        dist.send(torch.tensor([float(hvd.rank())]), 0)
        dist.send(torch.tensor([float(hvd.rank())]), 0, tag=5)


@grouped
def check_layouts_of_messages() -> None:
    """A message has the values in the order of the indices, whatever the strides on each side."""
    before, after = neighbours()
    shape = (2, 3, 4, 5)
    sent = seeded(hvd.rank(), shape, torch.float32).to(memory_format=torch.channels_last)
    tensor = torch.zeros(5, 4, 3, 2).permute(3, 2, 1, 0)
    work = dist.isend(sent, after)
    dist.recv(tensor, before)
    work.wait()
    require_equal(tensor, seeded(before, shape, torch.float32))
    table = torch.zeros(4, 6)
    work = dist.isend(torch.arange(8.0)[::2], after)
    dist.recv(table[:, 1], before)
    work.wait()
    assert table[:, 1].tolist() == [0, 2, 4, 6] and table.sum() == 12


@grouped
def check_batches() -> None:
    p, r = hvd.size(), hvd.rank()
    outputs = {rank: torch.zeros(4) for rank in range(p) if rank != r}
    operations = [dist.P2POp(dist.isend, torch.full((4,), 10.0 * r + rank), rank) for rank in outputs]
    operations += [dist.P2POp(dist.irecv, tensor, rank) for rank, tensor in outputs.items()]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    for rank, tensor in outputs.items():
        assert (tensor == 10 * rank + r).all()
    before, after = neighbours()
    tensors = [torch.zeros(2) for _ in range(3)]
    operations = [dist.P2POp(dist.irecv, tensor, before, tag=tag) for tag, tensor in enumerate(tensors)]
    operations += [dist.P2POp(dist.isend, torch.full((2,), float(tag)), after, tag=tag) for tag in (2, 0, 1)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    assert [tensor[0].item() for tensor in tensors] == [0, 1, 2]


@grouped
def check_messages_to_oneself() -> None:
    """isend and irecv reach this rank itself; send and recv would wait for ever, and torch refuses them."""
    require_error(ValueError, lambda: dist.send(torch.ones(1), hvd.rank()), "same as")
    tensor = torch.zeros(2)
    operations = [dist.P2POp(dist.isend, torch.full((2,), 3.0), hvd.rank()), dist.P2POp(dist.irecv, tensor, hvd.rank())]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    assert (tensor == 3).all()
    group = dist.group.WORLD
    assert group is not None
    found = torch.zeros(3)
    works = [group.recv([found], hvd.rank(), 4), group.send([torch.full((3,), 7.0)], hvd.rank(), 4)]
    for work in works:
        work.wait()
    assert (found == 7).all()


@grouped
def check_a_wrong_length_is_an_error_of_the_receiver() -> None:
    """A shorter and a longer message; the next ones arrive."""
    before, after = neighbours()
    for length, said in ((2, "8 bytes"), (5, "more than 12 bytes")):
        send = dist.isend(torch.ones(length), after)
        tensor = torch.zeros(3)
        require_error(hvd.HvdliteError, lambda: dist.recv(tensor, before), f"rank {before}", said, "12")
        send.wait()
    send = dist.isend(torch.full((3,), 2.0), after)
    dist.recv(tensor, before)
    send.wait()
    assert (tensor == 2).all()


@grouped
def check_many_in_flight() -> None:
    before, after = neighbours()
    count = 300
    tensors = [torch.zeros(17) for _ in range(count)]
    receives = [dist.irecv(tensor, before, tag=number) for number, tensor in enumerate(tensors)]
    sends = [dist.isend(torch.full((17,), float(number)), after, tag=number) for number in reversed(range(count))]
    for work in (*sends, *receives):
        work.wait()
    assert [tensor[-1].item() for tensor in tensors] == list(range(count))


@grouped
def check_large_messages_both_ways() -> None:
    """Larger than what MPI sends before the receiver is ready: both ranks send first."""
    before, after = neighbours()
    for count in (2**14, 2**20, 2**22):
        send = dist.isend(torch.full((count,), float(hvd.rank())), after)
        tensor = torch.zeros(count)
        dist.recv(tensor, before)
        send.wait()
        assert (tensor == before).all()


@grouped
def check_dropped_sends_arrive() -> None:
    """Nobody keeps the Work or the tensor, and the receiver is late."""
    before, after = neighbours()
    for number in range(20):
        dist.isend(torch.full((50_000,), float(number)), after, tag=number)
    gc.collect()
    rubbish = [torch.full((50_000,), -1.0) for _ in range(20)]
    dist.barrier()
    for number in range(20):
        tensor = torch.zeros(50_000)
        dist.recv(tensor, before, tag=number)
        assert (tensor == number).all()
    assert rubbish


@grouped
def check_messages_beside_collectives() -> None:
    """A receive that waits does not keep collectives from going on."""
    before, after = neighbours()
    tensor, ones = torch.zeros(1), torch.ones(1)
    receive = dist.irecv(tensor, before, tag=9)
    for _ in range(5):
        dist.all_reduce(ones)
    assert not receive.is_completed() and ones == hvd.size() ** 5
    dist.barrier()
    dist.send(torch.tensor([4.0]), after, tag=9)
    receive.wait()
    assert tensor == 4


@grouped
def check_messages_of_groups_are_apart() -> None:
    """Equal tags in two groups of the same ranks."""
    before, after = neighbours()
    other = dist.new_group(range(hvd.size()))
    dist.isend(torch.tensor([1.0]), after, tag=3)
    dist.isend(torch.tensor([2.0]), after, group=other, tag=3)
    tensor = torch.zeros(1)
    dist.recv(tensor, before, group=other, tag=3)
    assert tensor == 2
    dist.recv(tensor, before, tag=3)
    assert tensor == 1


@at_sizes(4)
@grouped
def check_messages_of_a_group_in_another_order() -> None:
    """Ranks of a sub-group have other numbers; dst and src are global, group_dst and group_src are the group's."""
    members = [1, 3]
    group = dist.new_group(members)
    if hvd.rank() not in members:
        return
    other = members[1 - members.index(hvd.rank())]
    tensor = torch.zeros(1)
    work = dist.isend(torch.tensor([float(hvd.rank())]), other, group=group)
    assert dist.recv(tensor, group=group) == other and tensor == other
    work.wait()
    work = dist.isend(torch.tensor([float(hvd.rank())]), group_dst=1 - dist.get_rank(group), group=group)
    dist.recv(tensor, group_src=1 - dist.get_rank(group), group=group)
    work.wait()
    assert tensor == other


@grouped
def check_futures_of_messages() -> None:
    before, after = neighbours()
    tensor = torch.zeros(2)
    found = dist.irecv(tensor, before).get_future().then(lambda done: done.value()[0] + 1)
    dist.send(torch.full((2,), float(hvd.rank())), after)
    assert (found.wait() == before + 1).all()


@grouped
def check_a_receive_that_waits_too_long() -> None:
    """The error names the rank that has not sent; the message that comes later is not lost for a later receive."""
    before, after = neighbours()
    began = time.monotonic()
    work = dist.irecv(torch.zeros(1), before, tag=1)
    require_error(hvd.HvdliteError, lambda: work.wait(timedelta(seconds=0.3)), f"rank {before}", "0.3 s", "tag 1")
    assert time.monotonic() - began < 5
    ones = torch.ones(1)
    dist.all_reduce(ones)
    assert ones == hvd.size()
    dist.send(torch.tensor([5.0]), after, tag=1)
    work.wait()
    assert work.result()[0] == 5


@grouped
def check_bad_arguments_of_messages() -> None:
    errors = (ValueError, TypeError, RuntimeError)
    require_error(errors, lambda: dist.send(torch.ones(1), hvd.size() + 1), str(hvd.size() + 1))
    require_error(errors, lambda: dist.recv(torch.ones(1), hvd.size() + 1), str(hvd.size() + 1))
    require_error(errors, lambda: dist.send(torch.eye(2).to_sparse(), neighbours()[1]))
    require_error(errors, lambda: dist.send(torch.ones(1), neighbours()[1], tag=-5), "-5")
    require_error(errors, lambda: dist.recv(torch.ones(1), neighbours()[0], tag=2**40), str(2**40))
    before, after = neighbours()
    send = dist.isend(torch.ones(1), after, tag=32_000)
    dist.recv(torch.zeros(1), before, tag=32_000)
    send.wait()


@grouped
def check_pending_receives_end_with_the_group() -> None:
    group = dist.new_group(range(hvd.size()))
    work = dist.irecv(torch.zeros(1), neighbours()[0], group=group, tag=2)
    dist.destroy_process_group(group)
    require_error(hvd.HvdliteError, work.wait, "destroyed")
    assert last() in (True, False)
