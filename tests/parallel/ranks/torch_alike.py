"""The comparison of weights: a difference is an error after the first backward(), and a warning later."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch

import hvdlite.torch as hvd
from hvdlite.gradients import replica_check
from tests.parallel.common import last, logged, require_error, require_mismatch, require_same_bits, restart


def model(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Conv2d(3, 5, 3), torch.nn.Flatten(), torch.nn.Linear(5, 3))


def attach(net: torch.nn.Module, optimizer: torch.optim.Optimizer | None = None) -> Any:
    optimizer = optimizer or torch.optim.SGD(net.parameters(), lr=0.1)
    return hvd.DistributedOptimizer(optimizer, net.named_parameters())


def backward(net: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    net(torch.ones(2, 3, 3, 3) * 0.1 * (hvd.rank() + 1)).square().mean().backward()


def step(net: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    backward(net, optimizer)
    optimizer.step()


def refused(call: Callable[[], object], *words: str) -> None:
    """The call fails on every rank, with the same words; or does not, on a rank that is alone."""
    if hvd.size() == 1:
        call()
    else:
        require_mismatch(call, *words)


def check_broadcast_forgotten() -> None:
    """Told after the first backward, as often as that is tried; after the broadcast training goes on."""
    for layout in (torch.contiguous_format, torch.channels_last):
        net = model(seed=hvd.rank()).to(memory_format=layout)
        optimizer = attach(net)
        for _ in range(2):
            refused(
                lambda: backward(net, optimizer), "weights: 0.weight and 3 more", "broadcast_parameters", "[HVD301]"
            )
        hvd.broadcast_parameters(net.state_dict(), root_rank=0)
        for _ in range(2):
            step(net, optimizer)
        require_same_bits(list(net.parameters()))


def check_one_element() -> None:
    """The last element of one tensor on the last rank, of every size and dtype."""
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64):
        for length in (1, 2, 3, 1001):
            trained, p = torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(length, dtype=dtype), False)
            attached = hvd.DistributedOptimizer(torch.optim.SGD([trained, p], lr=1.0), [("trained", trained), ("p", p)])
            with torch.no_grad():
                p[-1] += last()
            refused(lambda: trained.sum().backward(), "p differs between", f"rank {hvd.size() - 1}")
            attached.zero_grad()


def check_state_and_settings() -> None:
    """A checkpoint loaded on rank 0 only; a learning rate that is each rank's own."""
    net = model()
    before = attach(net, torch.optim.Adam(net.parameters()))
    step(net, before)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.001 if hvd.rank() else 0.5)
    if hvd.rank() == 0:
        state = before.state_dict()
        state["param_groups"][0]["lr"] = 0.5
        optimizer.load_state_dict(state)
    attach(net, optimizer)
    refused(lambda: backward(net, optimizer), "state: step of 0.weight and 11 more differ between rank 0 and",
            "lr of param_groups[0] is 0.5 on rank 0, 0.001 on", "broadcast_optimizer_state")  # fmt: skip
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    for _ in range(2):
        step(net, optimizer)
    require_same_bits(list(net.parameters()))


def check_weights_moved_for_a_while() -> None:
    """By each rank's own gradients, as by SAM: they are compared when they are back."""
    for apart in (False, True):
        net = model(seed=hvd.rank() if apart else 0)
        optimizer = attach(net)

        def sharpness_aware() -> None:
            with optimizer.no_sync():
                backward(net, optimizer)
            here = {p: p.detach().clone() for p in net.parameters()}
            for p in here:
                p.data.add_(p.grad, alpha=0.1)
            backward(net, optimizer)
            for p, value in here.items():
                p.data.copy_(value)
            optimizer.step()

        if apart:
            refused(sharpness_aware, "weights: 0.weight and 3 more", "broadcast_parameters")
        else:
            for _ in range(3):
                sharpness_aware()


def check_later() -> None:
    """Rank 0 warns of a rank whose learning rate changes, once of that and once of its weights. Training goes on."""
    rounds, replica_check.ROUNDS = replica_check.ROUNDS, 5
    net = model()
    optimizer = attach(net)
    with logged() as told:
        for _ in range(7):
            step(net, optimizer)
        assert not told
        if last():
            optimizer.param_groups[0]["lr"] = 0.01
        for _ in range(12):
            step(net, optimizer)
    replica_check.ROUNDS = rounds
    assert len(told) == 2 * (hvd.size() > 1 and hvd.rank() == 0), told
    for text in told:
        assert "lr of param_groups[0] is" in text and f"0.01 on rank {hvd.size() - 1}" in text, text
    require_told(told, "DistributedOptimizer(SGD): after 8 steps")
    assert not told or "after 13 steps the ranks train different models:\n  weights: 0.weight" in told[1], told


def steps(count: int, lr: Callable[[int], float], last_look: bool = True) -> list[str]:
    """What is logged over so many steps, and at the shutdown. lr: by the step, on the last rank; 0.1 on others."""
    net = model()
    optimizer = attach(net)
    with logged() as told:
        for number in range(count):
            optimizer.param_groups[0]["lr"] = lr(number) if last() else 0.1
            step(net, optimizer)
        if last_look:
            hvd.shutdown()
    hvd.init()
    return told


def require_told(told: list[str], *words: str) -> None:
    """The first of several ranks warns in these words, and once more where weights follow; others never do."""
    assert bool(told) == (hvd.size() > 1 and hvd.rank() == 0), told
    assert all(word in text for text in told[:1] for word in words), told
    assert not told[1:] or (len(told) == 2 and "weights: " in told[1] and "weights: " not in told[0]), told


def check_soon() -> None:
    """Within twice as many steps as it took the ranks to come apart."""
    for number, found in ((1, 2), (2, 4), (9, 16)):
        told = steps(20, lambda step: 0.01 if step >= number else 0.1)
        require_told(told, f"after {found} steps the ranks train different models", "lr of param_groups[0] is ",
                     f"0.01 on rank {hvd.size() - 1}", "hvd.allreduce(loss)")  # fmt: skip
        hvd.init()


def check_rare_after_a_while() -> None:
    """Steps 1, 2, 4, ..., 256, 512, and every 500th after that."""
    compared, looks = replica_check.compared, list[int]()
    net = model()
    optimizer = attach(net)

    def count(*given: Any) -> Any:
        looks.append(optimizer._hvdlite.alike.rounds)
        return compared(*given)

    replica_check.compared = count  # type: ignore[assignment]
    try:
        for _ in range(1100):
            optimizer._hvdlite.alike.look() if hvd.size() > 1 else None
    finally:
        replica_check.compared = compared
    assert looks == ([1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1012] if hvd.size() > 1 else []), looks


def check_plateaus_of_each_ranks_own() -> None:
    """A scheduler that follows the rank's own loss."""
    net = model()
    optimizer = attach(net)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=2)
    with logged() as told:
        for number in range(20):
            step(net, optimizer)
            scheduler.step(1.0 if last() else -float(number))
    require_told(told, "after 8 steps", "lr of param_groups[0] is", f"on rank {hvd.size() - 1}")


def check_scheduler_restored_on_one_rank() -> None:
    """The rest of the checkpoint was broadcast."""
    net = model()
    optimizer = attach(net)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.9**epoch)
    if hvd.rank() == 0:
        scheduler.load_state_dict({**scheduler.state_dict(), "last_epoch": 20})
    hvd.broadcast_parameters(net.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    with logged() as told:
        for _ in range(3):
            step(net, optimizer)
            scheduler.step()
    require_told(told, "after 2 steps", "lr of param_groups[0] is", "scheduler loaded on one rank")


def check_when_the_job_ends() -> None:
    """What came apart after the last comparison; also in weights that no step has used yet."""
    told = steps(40, lambda step: 0.01 if step >= 35 else 0.1)
    require_told(
        told, "when the job ended, after 40 steps, the ranks had", "weights: 0.weight and 3", "lr of param_groups"
    )
    net = model()
    optimizer = attach(net)
    step(net, optimizer)
    with torch.no_grad():
        net[0].bias += last()
    with logged() as told:
        hvd.shutdown()
    hvd.init()
    require_told(told, "when the job ended, after 1 steps", "weights: 0.bias differs between")
    if hvd.size() in (2, 4):
        combined = hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), op=hvd.Adasum)
        hvd.broadcast_parameters(net.state_dict(), root_rank=0)
        step(net, combined)
        combined.param_groups[0]["lr"] += last()
        with logged() as told:
            hvd.shutdown()
        hvd.init()
        require_told(told, "when the job ended", "lr of param_groups[0] is")


def check_no_look_when_the_job_ends() -> None:
    """Where training has not begun, the rank is on its way out with an error, its optimizer is no more, or ranks have
    joined with different weights."""

    def ends(prepare: Callable[[list[torch.optim.Optimizer]], object], failing: bool = False) -> None:
        net = model()
        optimizers = [attach(net)]
        step(net, optimizers[0])
        optimizers[0].param_groups[0]["lr"] += last()
        prepare(optimizers)
        with logged() as told:
            try:
                if failing and last():
                    raise KeyError("of a user's own")
            except KeyError:
                hvd.shutdown()
            hvd.shutdown()
        hvd.init()
        assert not told, told

    def drop(optimizers: list[torch.optim.Optimizer]) -> None:
        if last():
            optimizers.clear()
            gc.collect()

    ends(lambda optimizers: hvd.join())
    ends(drop)
    ends(lambda optimizers: None, failing=True)
    net = model(seed=hvd.rank())
    attached = attach(net)
    with logged() as told:
        hvd.shutdown()
    hvd.init()
    assert not told and attached


def check_warned_instead() -> None:
    """By an argument or a setting; and never compared."""
    for given, setting in (("warn", None), (None, "warn"), ("off", None), (None, "off"), ("off", "error")):
        restart(**{} if setting is None else {"REPLICA_CHECK": setting})
        net = model(seed=hvd.rank())
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        optimizer = hvd.DistributedOptimizer(optimizer, net.named_parameters(), replica_check=given)
        with logged() as told:
            for _ in range(5):
                step(net, optimizer)
            hvd.shutdown()
        hvd.init()
        if "off" in (given, setting):
            assert not told, told
        else:
            require_told(told, "the ranks train different models", "weights: 0.weight and 3 more differ between rank")
    restart()


def check_other_words_than_others() -> None:
    """For what happens where ranks differ: no rank waits for the others."""
    net = model()
    for op in (hvd.Average, *((hvd.Adasum,) if hvd.size() in (2, 4) else ())):
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        refused(
            lambda: hvd.DistributedOptimizer(optimizer, op=op, replica_check="off" if last() else "warn"),
            "replica_check differs", "has off", "Give the same replica_check=",
        )  # fmt: skip
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    wrong: Any
    for wrong in ("", "loud", True, 0):
        words = f"replica_check={wrong!r} must be one of", '"error", "warn", "off"'
        require_error(ValueError, lambda: hvd.DistributedOptimizer(optimizer, replica_check=wrong), *words)


def check_what_horovods_tests_do() -> None:
    """Models that each rank makes by its own chance, trained and then broadcast; two that are switched on and off in
    turn; a sparse embedding. Each goes on where differences are only warned of."""
    restart(REPLICA_CHECK="warn")
    for make in (torch.optim.SGD, torch.optim.Adam, torch.optim.RMSprop):
        net = model(seed=hvd.rank())
        step(net, attach(net, make(net.parameters(), lr=0.1 * (1 + hvd.rank()))))
        saved = attach(net, make(net.parameters(), lr=0.1 * (1 + hvd.rank())))
        step(net, saved)
        hvd.broadcast_parameters(net.state_dict(), root_rank=0)
        hvd.broadcast_optimizer_state(saved, root_rank=0)
        step(net, saved)
        require_same_bits(list(net.parameters()))
        assert saved.param_groups[0]["lr"] == 0.1
    torch.manual_seed(hvd.rank())
    maker, judge = torch.nn.Linear(3, 4), torch.nn.Linear(4, 1)
    theirs = attach(maker), attach(judge)
    for turn in (0, 1, 0, 1):
        for number, part in enumerate((maker, judge)):
            part.requires_grad_(number == turn)
            theirs[number].zero_grad()
        judge(maker(torch.rand(2, 3))).sum().backward()
        theirs[turn].step()
        require_same_bits([p.grad for p in (maker, judge)[turn].parameters()])
        assert all(p.grad is None for p in (maker, judge)[1 - turn].parameters())
    for dense in (False, True):
        table = torch.nn.Embedding(10, 3, sparse=True)
        optimizer = torch.optim.SGD(table.parameters(), lr=0.1)
        optimizer = hvd.DistributedOptimizer(optimizer, table.named_parameters(), sparse_as_dense=dense)
        for _ in range(3):
            optimizer.zero_grad()
            table(torch.tensor([hvd.rank(), 9])).sum().backward()
            before = table.weight.detach().clone()
            optimizer.step()
            moved = (table.weight - before)[:, 0].detach()
            expected = torch.zeros(10)
            expected[: hvd.size()] = -0.1 / hvd.size()
            expected[9] = -0.1
            torch.testing.assert_close(moved, expected)
    restart()


def check_settings_alone() -> None:
    """They may be meant to differ: a warning when training begins. How a step is made may differ without a word."""
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0 + last(), foreach=last())
    attach(net, optimizer)
    with logged() as told:
        step(net, optimizer)
        step(net, optimizer)
    require_told(told, "the ranks train different models", "lr of param_groups[0] is")
    assert not any("foreach" in text for text in told)


def check_what_cannot_be_read() -> None:
    """On one rank, once: nothing is compared. In kinds of tensors that have no bits to add: those are not."""
    net = model(seed=hvd.rank())
    optimizer = attach(net)
    attachment = optimizer._hvdlite
    readable = attachment.alike.values
    if last():
        attachment.alike.values = lambda begins: 1 / 0
    step(net, optimizer)
    attachment.alike.values = readable
    strided = torch.nn.Parameter(torch.ones(4, 3)[:, 0])
    odd = [torch.nn.Parameter(torch.ones(3, device="meta"), False), torch.nn.Parameter(torch.ones(1).expand(3), False)]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([strided, *odd], lr=1.0))
    strided.sum().backward()


def check_other_optimizers() -> None:
    """The frozen weights of one are compared, too; those combined by Adasum; and those of a set's members only."""
    net = model()
    net[0].requires_grad_(False)
    optimizer = attach(net)
    with torch.no_grad():
        net[0].bias += last()
    refused(lambda: backward(net, optimizer), "weights: 0.bias differs")
    if hvd.size() in (2, 4):
        net = model(seed=hvd.rank())
        combined = hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), op=hvd.Adasum)
        backward(net, combined)
        refused(combined.step, "weights: parameter.0 and 3 more")
    if hvd.size() > 2:
        net = model(seed=hvd.rank() > 1)
        members = hvd.ProcessSet([0, 1])
        hvd.shutdown()
        hvd.init(process_sets=[members])
        theirs = hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), process_set=members)
        step(net, theirs)
        net = model(seed=hvd.rank())
        theirs = hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), process_set=members)
        if members.included():
            require_error(hvd.HorovodInternalError, lambda: step(net, theirs), "between rank 0 and rank 1\n")
        hvd.shutdown()
        hvd.init()
