"""Process groups of torch.distributed's backend "hvdlite": any ranks in any order, beside hvdlite, made again and again."""

from __future__ import annotations

import os
import random
import threading
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import hvdlite as hvd
import hvdlite.torch
from tests.parallel.common import at_sizes, last, require_error
from tests.parallel.distributed_common import grouped, joined

SIZES = (2, 4)


def sum_of_ranks(group: dist.ProcessGroup | None = None) -> int:
    """The sum of the members' numbers in the job, by an all-reduce of the group."""
    tensor = torch.tensor([hvd.rank()])
    dist.all_reduce(tensor, group=group)
    return int(tensor.item())


@grouped
def check_the_default_group() -> None:
    assert dist.get_rank() == hvd.rank() and dist.get_world_size() == hvd.size()
    assert dist.get_backend() == "hvdlite" and dist.is_initialized()
    group = dist.group.WORLD
    assert group is not None and group.size() == hvd.size() and group.rank() == hvd.rank()
    assert dist.get_process_group_ranks(group) == list(range(hvd.size()))
    assert hvd.rank() == int(os.environ["RANK"]) and hvd.size() == int(os.environ["WORLD_SIZE"])
    assert hvd.local_rank() == int(os.environ["LOCAL_RANK"]) and dist.get_node_local_rank() == hvd.local_rank()
    assert hvd.local_size() == int(os.environ["LOCAL_WORLD_SIZE"])


def check_again_and_again() -> None:
    for number in range(5):
        with joined():
            tensor = torch.full((3,), float(number))
            dist.all_reduce(tensor)
            assert (tensor == number * hvd.size()).all()
        assert not dist.is_initialized()
        assert hvdlite.torch.allreduce(torch.ones(1), op=hvd.Sum) == hvd.size()


def check_ways_to_meet() -> None:
    for options in (
        {"backend": "hvdlite"}, {"backend": "hvdlite", "init_method": "mpi://"},
        {"backend": "hvdlite", "init_method": "env://"}, {"backend": "cpu:hvdlite"}, {"backend": "cpu:gloo,cuda:hvdlite"},
        {"backend": "hvdlite", "init_method": "mpi://", "rank": hvd.rank(), "world_size": hvd.size()},
        {"backend": "hvdlite", "rank": hvd.rank(), "world_size": hvd.size()},
        {"backend": "gloo"}, {"backend": "gloo", "init_method": "mpi://"},
    ):  # fmt: skip
        dist.init_process_group(**options)
        assert dist.get_rank() == hvd.rank() and sum_of_ranks() == sum(range(hvd.size())), options
        dist.destroy_process_group()


def check_explicit_variables_keep_their_meaning() -> None:
    """With MASTER_ADDR and MASTER_PORT, env:// meets there by TCP, with RANK and WORLD_SIZE as they are set."""
    port = hvd.broadcast_object(free_port(), 0)
    before = dict(os.environ)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(hvd.size() - 1 - hvd.rank()))
    try:
        with joined():
            assert dist.get_rank() == hvd.size() - 1 - hvd.rank()
            store = dist.distributed_c10d._get_default_store()
            while isinstance(store, dist.PrefixStore):
                store = store.underlying_store
            assert isinstance(store, dist.TCPStore) and store.port == port
            found: list[object] = [None] * hvd.size()
            dist.all_gather_object(found, hvd.rank())
            assert found == list(reversed(range(hvd.size())))
            tensor = torch.tensor([hvd.rank()])
            dist.broadcast(tensor, 0)
            assert tensor == hvd.size() - 1
    finally:
        os.environ.clear()
        os.environ.update(before)


def check_a_store_of_the_user() -> None:
    port = hvd.broadcast_object(free_port(), 0)
    store = dist.TCPStore("127.0.0.1", port, hvd.size(), hvd.rank() == 0)
    dist.init_process_group("hvdlite", store=store, rank=hvd.rank(), world_size=hvd.size())
    assert sum_of_ranks() == sum(range(hvd.size()))
    dist.destroy_process_group()


def free_port() -> int:
    """A port that nobody listens to."""
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def check_a_world_size_of_others_is_refused() -> None:
    require_error(
        (ValueError, hvd.HvdliteError),
        lambda: dist.init_process_group("hvdlite", init_method="mpi://", rank=hvd.rank(), world_size=hvd.size() + 1),
        str(hvd.size() + 1), str(hvd.size()),
    )  # fmt: skip
    with joined():
        assert sum_of_ranks() == sum(range(hvd.size()))


def check_hvdlite_ends_and_begins_beside_a_group() -> None:
    """hvd.shutdown() ends the groups' lanes; with hvd.init() and init_process_group, in either order, all is back."""
    hvd.shutdown()
    dist.init_process_group("hvdlite")
    assert hvd.is_initialized() and sum_of_ranks() == sum(range(hvd.size()))
    hvd.init()
    assert hvdlite.torch.allreduce(torch.ones(1), op=hvd.Sum) == hvd.size()
    dist.destroy_process_group()
    assert hvdlite.torch.allreduce(torch.ones(1), op=hvd.Sum) == hvd.size()
    hvd.shutdown()
    hvd.init()
    with joined():
        assert sum_of_ranks() == sum(range(hvd.size()))


def check_a_shutdown_under_a_group_is_a_clear_error() -> None:
    dist.init_process_group("hvdlite")
    hvd.shutdown()
    require_error(hvd.HvdliteError, lambda: dist.all_reduce(torch.ones(1)))
    dist.destroy_process_group()
    hvd.init()
    with joined():
        assert sum_of_ranks() == sum(range(hvd.size()))


@grouped
def check_new_groups() -> None:
    p, r = hvd.size(), hvd.rank()
    for members in ([0], [p - 1], [0, p - 1], list(range(p)), list(range(1, p))):
        group = dist.new_group(members)
        if r in members:
            assert dist.get_rank(group) == members.index(r) and dist.get_world_size(group) == len(members)
            assert sum_of_ranks(group) == sum(members) and dist.get_process_group_ranks(group) == members
            dist.barrier(group)
        else:
            assert group == dist.GroupMember.NON_GROUP_MEMBER and dist.get_rank(group) == -1
    assert sum_of_ranks() == sum(range(p))


@grouped
def check_groups_in_another_order() -> None:
    """torch sorts the ranks; with local synchronization only members call, each in its own order of groups."""
    p, r = hvd.size(), hvd.rank()
    group = dist.new_group([*reversed(range(p))])
    assert dist.get_rank(group) == r
    tensor = torch.tensor([r])
    dist.broadcast(tensor, p - 1, group=group)
    assert tensor == p - 1
    for partner in range(1, p):
        other = r ^ partner  # torch's names of such groups hold how many groups a rank has: pairs of equally many
        group = dist.new_group([max(r, other), min(r, other)], use_local_synchronization=True)
        assert sum_of_ranks(group) == r + other


@at_sizes(4)
@grouped
def check_groups_made_by_members_at_other_times() -> None:
    """Two disjoint groups: their members neither wait for the others nor make as many groups."""
    half = [0, 1] if hvd.rank() < 2 else [2, 3]
    for number in range(3 if hvd.rank() < 2 else 7):
        group = dist.new_group(half, use_local_synchronization=True)
        assert sum_of_ranks(group) == sum(half), number
    dist.barrier()


@at_sizes(4)
@grouped
def check_subgroups() -> None:
    mine, groups = dist.new_subgroups(2)
    assert len(groups) == 2 and sum_of_ranks(mine) == (1 if hvd.rank() < 2 else 5)
    mine, _ = dist.new_subgroups_by_enumeration([[0, 2], [3, 1]])
    assert sum_of_ranks(mine) == (2 if hvd.rank() in (0, 2) else 4)


@grouped
def check_meshes() -> None:
    p, r = hvd.size(), hvd.rank()
    mesh = init_device_mesh("cpu", (p,), mesh_dim_names=("dp",))
    assert mesh.get_rank() == r and sum_of_ranks(mesh.get_group()) == sum(range(p))
    backwards = DeviceMesh("cpu", [*reversed(range(p))])
    coordinate = backwards.get_coordinate()
    assert coordinate is not None and coordinate[0] == p - 1 - r
    assert sum_of_ranks(backwards.get_group()) == sum(range(p))
    if p == 4:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        assert sum_of_ranks(mesh["tp"].get_group()) == (1 if r < 2 else 5)
        assert sum_of_ranks(mesh["dp"].get_group()) == (2 if r % 2 == 0 else 4)
        flat = mesh._flatten("all")
        assert sum_of_ranks(flat.get_group()) == 6


def check_a_mesh_begins_torch_distributed() -> None:
    """init_device_mesh makes the default group itself, with gloo for CPUs: hvdlite's plug-in is its rendezvous."""
    mesh = init_device_mesh("cpu", (hvd.size(),))
    assert sum_of_ranks(mesh.get_group()) == sum(range(hvd.size()))
    dist.destroy_process_group()


@grouped
def check_groups_of_two_backends() -> None:
    p = hvd.size()
    gloo = dist.new_group(range(p), backend="gloo")
    assert sum_of_ranks(gloo) == sum(range(p)) == sum_of_ranks()
    dist.monitored_barrier(gloo)
    assert dist.get_backend(gloo) == "gloo"
    dist.destroy_process_group(gloo)
    assert sum_of_ranks() == sum(range(p))
    dist.destroy_process_group()
    dist.init_process_group("gloo")
    ours = dist.new_group(range(p), backend="hvdlite")
    assert sum_of_ranks(ours) == sum(range(p)) == sum_of_ranks() and dist.get_backend(ours) == "hvdlite"
    part = dist.new_group([p - 1], backend="hvdlite")
    assert not last() or sum_of_ranks(part) == p - 1


@grouped
def check_hundreds_of_groups() -> None:
    """More than MPIs have communicators, if they were not used again: 2,300 in Open MPI's and MPICH's cases."""
    p = hvd.size()
    members = list(range(p))
    lanes = len(hvd_lanes())
    for number in range(200):
        group = dist.new_group(members if number % 2 else [0, p - 1])
        if number % 2 or hvd.rank() in (0, p - 1):
            assert sum_of_ranks(group) == (sum(members) if number % 2 else p - 1)
            dist.destroy_process_group(group)
    assert len(hvd_lanes()) <= lanes + 6


def hvd_lanes() -> list[object]:
    """The lanes that exist now."""
    from hvdlite.job import runtime

    return [*runtime.current().groups.lanes()]


@grouped
def check_groups_that_had_messages_are_used_again() -> None:
    """A group whose messages have all arrived is as good as new."""
    p, r = hvd.size(), hvd.rank()
    lanes = len(hvd_lanes())
    for number in range(60):
        group = dist.new_group(range(p))
        work = dist.isend(torch.tensor([float(number)]), (r + 1) % p, group=group)
        tensor = torch.zeros(1)
        dist.recv(tensor, (r - 1) % p, group=group)
        work.wait()
        assert tensor == number
        dist.destroy_process_group(group)
    assert len(hvd_lanes()) <= lanes + 6


@grouped
def check_an_old_message_does_not_reach_a_new_group() -> None:
    """A message that nobody has received stays in its group, which is destroyed."""
    p, r = hvd.size(), hvd.rank()
    for _ in range(3):
        group = dist.new_group(range(p))
        dist.isend(torch.tensor([-1.0]), (r + 1) % p, group=group)
        dist.barrier(group)
        dist.destroy_process_group(group)
        group = dist.new_group(range(p))
        work = dist.isend(torch.tensor([5.0]), (r + 1) % p, group=group)
        tensor = torch.zeros(1)
        dist.recv(tensor, (r - 1) % p, group=group)
        work.wait()
        assert tensor == 5
        dist.destroy_process_group(group)


@grouped
def check_many_groups_at_once() -> None:
    """50 groups live, and their calls are under way at the same time."""
    p = hvd.size()
    groups = [dist.new_group(range(p)) for _ in range(50)]
    tensors = [torch.tensor([float(number)]) for number in range(50)]
    works = [dist.all_reduce(tensor, group=group, async_op=True) for tensor, group in zip(tensors, groups, strict=True)]
    for work in reversed(works):
        work.wait()
    assert [tensor.item() for tensor in tensors] == [number * p for number in range(50)]


@grouped
def check_calls_in_two_groups_in_different_orders() -> None:
    """Asynchronous calls match within their group: ranks may begin the groups' calls in different orders."""
    p = hvd.size()
    groups = [dist.new_group(range(p)) for _ in range(5)]
    order = list(range(5))
    random.Random(hvd.rank()).shuffle(order)
    tensors = [torch.tensor([float(number)]) for number in range(5)]
    works = [dist.all_reduce(tensors[number], group=groups[number], async_op=True) for number in order]
    for work in works:
        work.wait()
    assert [tensor.item() for tensor in tensors] == [number * p for number in range(5)]


@grouped
def check_threads_with_groups_of_their_own() -> None:
    p = hvd.size()
    groups = [dist.new_group(range(p)) for _ in range(3)]
    found: list[list[int]] = [[] for _ in groups]

    def work(number: int) -> None:
        for _ in range(30):
            found[number].append(sum_of_ranks(groups[number]))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [[sum(range(p))] * 30] * 3


@grouped
def check_calls_on_a_destroyed_group() -> None:
    group = dist.new_group(range(hvd.size()))
    assert group is not None
    dist.destroy_process_group(group)
    require_error((ValueError, RuntimeError, hvd.HvdliteError), lambda: dist.all_reduce(torch.ones(1), group=group))
    require_error(hvd.HvdliteError, lambda: group.allreduce([torch.ones(1)]), "destroyed", "destroy_process_group")
    require_error(hvd.HvdliteError, lambda: group.send([torch.ones(1)], 0, 0), "destroyed")
    assert sum_of_ranks() == sum(range(hvd.size()))


@grouped
def check_beside_process_sets_and_optimizers() -> None:
    """hvdlite's own collectives between torch.distributed's."""
    p = hvd.size()
    weight = torch.nn.Parameter(torch.full((3,), float(hvd.rank())))
    optimizer = hvdlite.torch.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), [("weight", weight)])
    for _ in range(3):
        handle = hvdlite.torch.allreduce_async(torch.ones(2), op=hvd.Sum)
        work = dist.all_reduce(weight.detach(), dist.ReduceOp.MAX, async_op=True)
        work.wait()
        weight.sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        assert (hvdlite.torch.synchronize(handle) == p).all()
    assert (weight == p - 4).all(), weight


# Time limits


def check_a_late_rank_is_an_error_of_those_that_wait() -> None:
    """Each waiting rank's error names the call, the seconds and the ranks; other groups go on."""
    with joined():
        other = dist.new_group(range(hvd.size()))
        hasty = dist.new_group(range(hvd.size()), timeout=timedelta(seconds=0.5))
        if last():
            time.sleep(1.5)
        else:
            began = time.monotonic()
            text = require_error(hvd.HvdliteError, lambda: dist.all_reduce(torch.ones(1), group=hasty), "all_reduce")
            assert time.monotonic() - began < 1.4 and f"for rank {hvd.size() - 1}" in text, text
        assert sum_of_ranks(other) == sum(range(hvd.size()))
        if last():
            dist.all_reduce(torch.ones(1), group=hasty)  # the late rank's call ends what the others began
        assert sum_of_ranks(hasty) == sum(range(hvd.size()))


def check_the_error_names_the_missing_ranks() -> None:
    with joined():
        hasty = dist.new_group(range(hvd.size()), timeout=timedelta(seconds=0.5))
        if last():
            time.sleep(1.0)
            dist.barrier(hasty)
        else:
            require_error(hvd.HvdliteError, lambda: dist.barrier(hasty), "barrier", f"for rank {hvd.size() - 1}")
        dist.barrier()


def check_time_limits_of_calls() -> None:
    """Work.wait(timeout), dist.barrier and the group's timeout; a later wait finds the result."""
    with joined():
        group = dist.group.WORLD
        assert group is not None
        if not last():
            tensor = torch.ones(1)
            work = dist.all_reduce(tensor, async_op=True)
            require_error(hvd.HvdliteError, lambda: work.wait(timedelta(seconds=0.3)), "0.3 s")
            options = dist.BarrierOptions()
            options.timeout = timedelta(seconds=0.3)
            barrier = group.barrier(options)
            require_error(hvd.HvdliteError, barrier.wait, "0.3 s", "barrier")
            assert work.wait() and tensor == hvd.size() and barrier.wait(timedelta(seconds=30))
        else:
            time.sleep(1.5)
            tensor = torch.ones(1)
            dist.all_reduce(tensor)
            dist.barrier()
        group.set_timeout(timedelta(seconds=0.4))
        if not last():
            require_error(hvd.HvdliteError, lambda: dist.broadcast(tensor, 0), "0.4 s")
        else:
            time.sleep(1.0)
            dist.broadcast(tensor, 0)


def check_a_rank_that_does_not_make_the_group() -> None:
    """new_group with a time limit ends with an error, and the job goes on with other groups."""
    with joined():
        if not last():
            began = time.monotonic()
            require_error(
                (hvd.HvdliteError, RuntimeError),
                lambda: dist.new_group(
                    [0, hvd.size() - 1] if hvd.rank() == 0 else [hvd.rank(), hvd.size() - 1],
                    timeout=timedelta(seconds=0.5), use_local_synchronization=True,
                ),
            )  # fmt: skip
            assert time.monotonic() - began < 5
        hvd.barrier()
        assert sum_of_ranks() == sum(range(hvd.size()))
