"""DDP's buckets over torch.distributed's backend "hvdlite" lie in memory that ranks share, and give the same bits."""

import gc
import os
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import hvdlite as hvd
from hvdlite.memory import arena
from hvdlite.system.user_warnings import say_once
from hvdlite.torch import private_api
from hvdlite.torch.distributed import arenas
from hvdlite.torch.distributed.process_group import MpiProcessGroup
from tests.parallel.common import logged, require_same_bits
from tests.parallel.distributed_common import grouped, joined
from tests.parallel.distributed_models import data, loss_of, mine, train

SIZES = (2, 3)


def wide() -> nn.Module:
    """A network, equal on all ranks, whose gradients fill two buckets of 640 KB and a short one."""
    torch.manual_seed(0)
    layers = [nn.Linear(6, 400), *(nn.Linear(400, 400) for _ in range(2)), nn.Linear(400, 4)]
    return nn.Sequential(*(each for layer in layers for each in (layer, nn.Tanh())))


def in_ddp(view: bool = True) -> DistributedDataParallel:
    return DistributedDataParallel(wide(), bucket_cap_mb=0.5, gradient_as_bucket_view=view)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def known() -> arenas.Arenas:
    """The arenas of the default group."""
    group = dist.group.WORLD
    assert isinstance(group, MpiProcessGroup)
    return group._arenas


def shared() -> int:
    """The number of storages that have moved, and whose files all ranks have mapped."""
    return sum(moved.shared is not None for moved in known().moved.values())


def files() -> tuple[int, int]:
    """The number of hvdlite's memory files that this process has mapped, and of those that are open."""
    with open("/proc/self/maps") as maps:
        mapped = sum("memfd:hvdlite" in line for line in maps)
    links = (f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd"))
    return mapped, sum("memfd:hvdlite" in os.readlink(link) for link in links if os.path.islink(link))


def file_at(address: int) -> str:
    """The name of what is mapped at an address; "" for private memory."""
    with open("/proc/self/maps") as maps:
        for line in maps:
            begin, end = (int(edge, 16) for edge in line.split()[0].split("-"))
            if begin <= address < end:
                return " ".join(line.split()[5:])
    raise AssertionError(f"nothing is mapped at {address:x}")


def require_values_of_the_usual_way(model: DistributedDataParallel) -> None:
    """Check that a model trained by `train` has the bits of one whose buckets did not move."""
    least, arenas.LEAST_BYTES = arenas.LEAST_BYTES, 1 << 60
    other = in_ddp()
    train(other, sgd(other))
    arenas.LEAST_BYTES = least
    for name, value in other.state_dict().items():
        assert value.equal(model.state_dict()[name]), name
    require_same_bits([*model.parameters()])


def require_in_files(number: int) -> set[int]:
    """Check that so many storages lie in files that all ranks have mapped. Returns their addresses."""
    assert shared() == number, list(known().moved.values())
    for storage, moved in known().moved.items():
        assert moved.file and "memfd:hvdlite" in file_at(storage.data_ptr())
        in_file = os.pread(moved.file.card.descriptor, storage.nbytes(), 0)
        assert in_file == arenas.memory_of(storage).tobytes()  # torch.multiprocessing sends the descriptor
    return {storage.data_ptr() for storage in known().moved}


@grouped
def check_buckets_move_and_give_the_same_bits() -> None:
    for view in (False, True):
        model = in_ddp(view)
        train(model, sgd(model))
        inside = require_in_files(2)
        gradients = {p.grad.untyped_storage().data_ptr() for p in model.parameters()}
        assert (inside <= gradients) if view else not inside & gradients
        require_values_of_the_usual_way(model)
        del model
        gc.collect()


def moved() -> tuple[DistributedDataParallel, tuple[int, int]]:
    """A model whose buckets have moved, and `files()` from before it."""
    train(first := in_ddp(), sgd(first))  # now the lane has its own arenas
    del first
    gc.collect()
    before = files()
    model = in_ddp()
    train(model, sgd(model))
    assert shared() == 2 and files() > before
    return model, before


def check_destroy_makes_the_memory_private() -> None:
    """Values stay, no file is left mapped or open, and the gradients can be used."""
    with joined():
        model, before = moved()
        gradients = [p.grad for p in model.parameters()]
        values, addresses = [each.clone() for each in gradients], [each.data_ptr() for each in gradients]
    assert files() == before, (files(), before)
    assert {file_at(address) for address in addresses} <= {"", "[heap]"}
    for gradient, value, address in zip(gradients, values, addresses, strict=True):
        assert gradient.equal(value) and gradient.data_ptr() == address
    hvd.barrier()
    for gradient in gradients:
        gradient.fill_(hvd.rank())
    hvd.barrier()
    assert all((gradient == hvd.rank()).all() for gradient in gradients)  # no other rank has written there
    with open("/proc/self/maps") as maps:
        assert "/dev/shm/torch_" not in maps.read()


@grouped
def check_arenas_end_with_their_model() -> None:
    model, before = moved()
    del model
    until = time.monotonic() + 5  # threads that complete futures may keep the last call for a moment
    while (known().moved or files() != before) and time.monotonic() < until:
        gc.collect()
    assert not known().moved and files() == before, (files(), before)


@contextmanager
def short_files() -> Iterator[None]:
    """Files of this rank have at most 1 KiB, those in shared memory too."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@grouped
def check_without_room_in_shared_memory_buckets_stay() -> None:
    """One rank has no room in /dev/shm, or for a memory file: one line in its log, and no rank waits for it."""
    poor = hvd.rank() == hvd.size() - 1
    to_own_mapping, create = private_api.to_own_mapping, arena.SharedFile.create

    def short_mapping(storage: torch.UntypedStorage) -> int:
        with short_files():
            return to_own_mapping(storage)

    def short_create(nbytes: int) -> arena.SharedFile | None:
        with short_files():
            return create(nbytes)

    train(in_ddp(), sgd(nn.Linear(1, 1)), steps=1)  # the lane makes its own arenas first
    for what in ("mapping", "file"):
        dist.destroy_process_group()
        dist.init_process_group("hvdlite")
        if poor and what == "mapping":
            private_api.to_own_mapping = short_mapping
        if poor and what == "file":
            arena.SharedFile.create = short_create
        say_once.cache_clear()
        model = in_ddp()
        with logged() as lines:
            train(model, sgd(model))
        private_api.to_own_mapping, arena.SharedFile.create = to_own_mapping, create
        assert not shared() and len(known().moved) == (0 if poor else 2)
        found = [line for line in lines if "no room in shared memory" in line]
        assert len(found) == poor and (not poor or f"rank {hvd.rank()} has" in found[0]), lines
        require_values_of_the_usual_way(model)


@grouped
def check_buckets_that_a_peer_cannot_map_stay_in_use() -> None:
    """All ranks go the usual way, and do not try again."""
    train(in_ddp(), sgd(nn.Linear(1, 1)), steps=1)
    attach, tries = arena.attach, []

    def closed(card: arena.Card | None) -> None:
        tries.append(card)

    if hvd.rank() == hvd.size() - 1:
        arena.attach = closed
    model = in_ddp()
    optimizer = sgd(model)
    train(model, optimizer)
    arena.attach = attach
    assert not shared() and len(known().moved) in (1, 2)  # the second bucket may have left before the first one's try
    assert len(tries) <= 2 * (hvd.size() - 1), tries
    require_values_of_the_usual_way(model)


@grouped
def check_a_bucket_that_has_moved_on_one_rank_alone() -> None:
    """Ranks whose buckets move at other steps go the usual way until all have, and whenever one rank does not."""
    model = in_ddp()
    optimizer = sgd(model)
    inputs, targets = data(0)
    for step in range(8):
        usual = step < 2 * hvd.rank() or (step == 6 and hvd.rank() == 0)
        least, arenas.LEAST_BYTES = arenas.LEAST_BYTES, 1 << 60 if usual else arenas.LEAST_BYTES
        optimizer.zero_grad()
        loss_of(model, mine(inputs), mine(targets)).backward()
        optimizer.step()
        arenas.LEAST_BYTES = least
        require_same_bits([p.grad for p in model.parameters()])
        if step == 2:
            assert len(known().moved) == (0 if hvd.rank() else 2) and not shared()
        assert step < 5 or shared() == 2


@grouped
def check_other_tensors_never_move() -> None:
    """Tensors of users, of hooks in Python, and of FSDP, which resizes its storages."""
    p, whole = hvd.size(), torch.ones(100_000)
    address = whole.data_ptr()

    def reduce_again(gradient: torch.Tensor) -> None:
        whole.fill_(1)
        dist.group.WORLD.allreduce([whole]).wait()

    leaf = torch.ones(3, requires_grad=True)
    leaf.register_hook(reduce_again)
    for _ in range(4):
        leaf.sum().backward()
        assert (whole == p).all()
        dist.all_reduce(whole)
    assert whole.data_ptr() == address
    model = in_ddp()
    model.register_comm_hook(None, default_hooks.allreduce_hook)
    train(model, sgd(model))
    layers = wide()
    for layer in (*(each for each in layers if isinstance(each, nn.Linear)), layers):  # type: ignore[attr-defined]
        fully_shard(layer)
    train(layers, sgd(layers))
    assert not known().moved and not known().seen
