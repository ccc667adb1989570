"""join() with attached optimizers. The gradients of rank r are r+1 everywhere, or absent, so the weights are known."""

from __future__ import annotations

import itertools

import torch

import hvdlite.torch as hvd
from hvdlite.gradients import replica_check
from tests.parallel.common import require_error, require_same_bits, restart


def weights() -> list[torch.nn.Parameter]:
    """The last one's gradient is large: each rank reads a part of it where it lies."""
    return [torch.nn.Parameter(torch.zeros(shape)) for shape in ((3, 4), (5,), (), (700, 800))]


def train(params: list[torch.nn.Parameter], optimizer: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        (sum(p.sum() for p in params) * (hvd.rank() + 1)).backward()
        optimizer.step()


def moved(steps: list[int], mine: int) -> float:
    """How far a rank's weights have gone after `mine` steps with learning rate 1: the average of those who step."""
    return -sum(sum(r + 1 for r, n in enumerate(steps) if n > i) for i in range(mine)) / len(steps)


def require_weights(params: list[torch.nn.Parameter], value: float) -> None:
    for p in params:
        torch.testing.assert_close(p.detach(), torch.full_like(p, value), rtol=1e-6, atol=0)


def check_uneven_steps() -> None:
    """Rank r makes r steps, then p-1-r, then r: twice in a row, zero batches among them."""
    p, r = hvd.size(), hvd.rank()
    for settings in ({}, {"SHARED_MEMORY": "0"}, {"OVERLAP": "1", "BUCKET_MB": "0.00001"}):
        restart(**settings)
        params = weights()
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(params, lr=1.0))
        expected = 0.0
        for steps in (list(range(p)), [p - 1 - o for o in range(p)], [2 * o for o in range(p)]):
            train(params, optimizer, steps[r])
            require_weights(params, expected + moved(steps, steps[r]))
            last = hvd.join()
            assert steps[last] == max(steps)
            hvd.broadcast_parameters(params, last)
            require_same_bits([w.detach() for w in params])
            expected += moved(steps, max(steps))
            require_weights(params, expected)
    restart()


def check_two_join_while_one_goes_on() -> None:
    """With an optimizer attached, twice in a row, each rank in turn; then all train on together."""
    p, r = hvd.size(), hvd.rank()
    params = weights()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(params, lr=1.0))
    expected = 0.0
    for one in (*range(p), *range(p)):
        steps = [3 if o == one else 1 for o in range(p)]
        train(params, optimizer, steps[r])
        assert hvd.join() == one
        hvd.broadcast_parameters(params, one)
        expected += moved(steps, 3)
        require_weights(params, expected)
    train(params, optimizer, 2)
    require_weights(params, expected + moved([2] * p, 2))


def check_gradients_of_a_rank_that_waits_are_its_own() -> None:
    """p.grad after join() is what it was before."""
    p, r = hvd.size(), hvd.rank()
    params = weights()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(params, lr=1.0))
    train(params, optimizer, 1)
    before = [w.grad.clone() for w in params]
    if r == p - 1:
        train(params, optimizer, 2)
        before = [w.grad.clone() for w in params]
    hvd.join()
    assert all(torch.equal(w.grad, b) for w, b in zip(params, before, strict=True))


def check_several_passes_per_step_and_unused_parameters() -> None:
    """Accumulation of two backwards; a parameter that no live rank uses keeps grad None."""
    p, r = hvd.size(), hvd.rank()
    used, unused = torch.nn.Parameter(torch.zeros(3)), torch.nn.Parameter(torch.ones(2))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD([used, unused], lr=1.0, weight_decay=0.5), backward_passes_per_step=2
    )
    for _ in range(2 if r == 0 else 0):
        optimizer.zero_grad()
        for _ in range(2):
            (used.sum() * 0.25).backward()
        optimizer.step()
        assert unused.grad is None
    assert hvd.join() == 0
    if r == 0:
        step = 0.5 / p
        torch.testing.assert_close(used.detach(), torch.full((3,), -step * 1.5), rtol=1e-6, atol=0)
    assert (unused == 1).all()


def check_two_optimizers() -> None:
    """join() waits on the lanes of both."""
    p, r = hvd.size(), hvd.rank()
    first, second = weights(), weights()
    a = hvd.DistributedOptimizer(torch.optim.SGD(first, lr=1.0))
    b = hvd.DistributedOptimizer(torch.optim.SGD(second, lr=1.0))
    for steps in ([o % 2 for o in range(p)], list(range(p))):
        start = float(first[0].detach()[0, 0])
        for _ in range(steps[r]):
            train(first, a, 1)
            train(second, b, 1)
        last = hvd.join()
        hvd.broadcast_parameters([*first, *second], last)
        require_weights(first, start + moved(steps, max(steps)))
        require_weights(second, start + moved(steps, max(steps)))


def check_uneven_inputs() -> None:
    """The context joins, and gives all ranks the newest weights and optimizer state."""
    p, r = hvd.size(), hvd.rank()
    model = torch.nn.Linear(4, 2)
    hvd.broadcast_parameters(model.state_dict(), 0)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    for _ in range(2):
        with hvd.uneven_inputs(model, optimizer):
            for _ in range(r):
                optimizer.zero_grad()
                model(torch.randn(3, 4)).sum().backward()
                optimizer.step()
        require_same_bits(list(model.state_dict().values()))
        if p > 1:
            require_same_bits([state["momentum_buffer"] for state in optimizer.state_dict()["state"].values()])
    try:
        with hvd.uneven_inputs(model):
            raise KeyError("lost")
    except KeyError:
        pass
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum) == p


def check_what_cannot_go_on() -> None:
    """A gather while a rank has joined, with an optimizer attached: an error; training and joining go on."""
    p, r = hvd.size(), hvd.rank()
    params = weights()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(params, lr=1.0))
    if r != 0:
        require_error(hvd.HorovodInternalError, lambda: hvd.allgather(torch.ones(1)), "rank 0 has joined")
        train(params, optimizer, 1)
        require_error(
            hvd.HorovodInternalError, lambda: hvd.DistributedOptimizer(torch.optim.SGD(weights(), lr=1.0)), "joined"
        )
    hvd.join()
    train(weights(), optimizer, 0)
    other = weights()
    train(other, hvd.DistributedOptimizer(torch.optim.SGD(other, lr=1.0)), 1)
    require_weights(other, moved([1] * p, 1))


def check_sparse_gradients_go_on() -> None:
    """Rank r looks up row r; row r moves by (r + 1) / p at each of rank r's steps. Ranks that have joined add no rows."""
    p, r = hvd.size(), hvd.rank()
    table = torch.nn.Embedding(p, 3, sparse=True)
    torch.nn.init.zeros_(table.weight)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(table.parameters(), lr=1.0))
    done = [0] * p
    for steps in ([2] * p, list(range(p)), [p - o for o in range(p)]):
        for _ in range(steps[r]):
            optimizer.zero_grad()
            (table(torch.tensor([r])).sum() * (r + 1)).backward()
            optimizer.step()
        last = hvd.join()
        hvd.broadcast_parameters(table.state_dict(), last)
        done = [before + more for before, more in zip(done, steps, strict=True)]
        expected = torch.tensor([-n * (o + 1) / p for o, n in enumerate(done)])
        torch.testing.assert_close(table.weight.detach(), expected[:, None].expand(-1, 3))


def check_sums_of_sparse_tensors_go_on() -> None:
    p, r = hvd.size(), hvd.rank()
    for i in range(r):
        mine = torch.sparse_coo_tensor(torch.tensor([[r]]), [1.0], (p,))
        total = hvd.sparse_allreduce_async(mine, f"row {i}", hvd.Sum)().to_dense()
        assert total.tolist() == [float(o > i) for o in range(p)]
    hvd.join()


def check_a_change_of_parameters_says_when_it_can_be() -> None:
    """New ones, and the first sparse gradient (which makes a new plan, too): an error, after which training goes on."""
    p, r = hvd.size(), hvd.rank()
    params, late = weights(), torch.nn.Parameter(torch.zeros(2))
    table = torch.nn.Embedding(p, 3, sparse=True)
    torch.nn.init.zeros_(table.weight)
    dense = hvd.DistributedOptimizer(torch.optim.SGD(params, lr=1.0))
    sparse = hvd.DistributedOptimizer(torch.optim.SGD(table.parameters(), lr=1.0))
    easy = hvd.DistributedOptimizer(torch.optim.SGD([late], lr=1.0), sparse_as_dense=True)
    train(params, dense, 1)
    if r != 0:
        late.requires_grad = False
        table(torch.tensor([r])).sum().backward()
        sparse.zero_grad()
        require_error(hvd.HorovodInternalError, lambda: table(torch.tensor([r])).sum().backward(), "rank 0 has joined",
                      "sparse_as_dense=True", "a backward of all ranks")  # fmt: skip
        table.weight.grad = None
        dense.add_param_group({"params": [torch.nn.Parameter(torch.zeros(2))]})
        require_error(hvd.HorovodInternalError, lambda: train(params, dense, 1), "rank 0 has joined", "add_param_group",
                      "a backward of all ranks")  # fmt: skip
        del dense.param_groups[-1]
        train(params, dense, 1)
        late.requires_grad = True
        easy.zero_grad()
    last = hvd.join()
    if p > 1:
        require_error(hvd.HorovodInternalError, lambda: train(params, dense, 1), "parameter.0 and 3 more",
                      "root_rank=(the rank that hvd.join() returned)")  # fmt: skip
    hvd.broadcast_parameters(params, last)
    train(params, dense, 1)
    require_same_bits(params)


def check_what_was_left_undone_is_forgotten() -> None:
    """By the last rank, before it joined: a pass of two, a backward without a step, one that has failed. Then all have
    the same again: in the next backward, and for gradients set by hand."""
    p, r = hvd.size(), hvd.rank()
    if p == 1:
        return

    def backward() -> None:
        optimizer.zero_grad()
        (sum(w.sum() for w in params) * (r + 1)).backward()

    def failing() -> None:
        def fail(w: torch.Tensor) -> None:
            raise ArithmeticError

        hook = params[0].register_post_accumulate_grad_hook(fail)
        require_error(ArithmeticError, backward)
        hook.remove()

    for passes, undone, by_hand in (
        (2, backward, False),
        (1, backward, False),
        (1, backward, True),
        (1, failing, False),
    ):
        restart(OVERLAP="1", BUCKET_MB="0.00001")
        params = weights()
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(params, lr=1.0), backward_passes_per_step=passes)
        if r == p - 1:
            undone()
        hvd.join()
        optimizer.zero_grad()
        if by_hand:
            for w in params:
                w.grad = torch.full_like(w, r + 1.0)
        for _ in range(passes if not by_hand else 0):
            (sum(w.sum() for w in params) * (r + 1) / passes).backward()
        optimizer.step()
        require_weights(params, -(p + 1) / 2)
    restart()


def check_a_failed_backward_before_join_is_no_part_of_the_others() -> None:
    """The last rank's raises when most of its gradients have left, and it joins: the others' round with these is void,
    and the next one, with zeros from it, is right."""
    p, r = hvd.size(), hvd.rank()
    if p == 1:
        return
    restart(OVERLAP="1", BUCKET_MB="0.00001")
    params = weights()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(params, lr=1.0))
    train(params, optimizer, 1)

    def fail(w: torch.Tensor) -> None:
        raise ArithmeticError

    if r == p - 1:
        params[0].register_post_accumulate_grad_hook(fail)
        require_error(ArithmeticError, lambda: train(params, optimizer, 1))
    else:
        require_error(hvd.HorovodInternalError, lambda: train(params, optimizer, 1), f"rank {p - 1} raised after")
        train(params, optimizer, 1)
        require_weights(params, moved([2] * (p - 1) + [1], 2))
    hvd.join()
    restart()


def check_a_failed_backward_before_join_keeps_nobody_waiting() -> None:
    """It has gone through two optimizers, of which the others train one, both, or do something else, before they come
    to the round that is void: they get the last rank's zeros for the rest."""
    p, r = hvd.size(), hvd.rank()
    if p == 1:
        return
    for failing, then in itertools.product((0, 1), ((0,), (1,), (0, 1), (), None)):
        restart(OVERLAP="1", BUCKET_MB="0.00001")
        models = [weights(), weights()]
        optimizers = [hvd.DistributedOptimizer(torch.optim.SGD(params, lr=1.0)) for params in models]

        def step(chosen: tuple[int, ...]) -> None:
            for optimizer in optimizers:
                optimizer.zero_grad()
            (sum(w.sum() for number in chosen for w in models[number]) * (r + 1)).backward()
            for number in chosen:
                optimizers[number].step()

        def fail(w: torch.Tensor) -> None:
            raise ArithmeticError

        step((0, 1))
        if r == p - 1:
            hook = models[failing][0].register_post_accumulate_grad_hook(fail)
            require_error(ArithmeticError, lambda: step((0, 1)))
            hook.remove()
        elif then is None:
            require_error(hvd.HorovodInternalError, lambda: step((0, 1)), f"rank {p - 1} raised after")
        elif then:
            while True:
                try:
                    step(then)
                    break
                except hvd.HorovodInternalError as error:
                    assert f"rank {p - 1} raised after" in str(error), error
        else:
            assert hvd.allreduce(torch.ones(1), op=hvd.Sum) == p - 1
        hvd.join()
        for params, optimizer in zip(models, optimizers, strict=True):
            hvd.broadcast_parameters(params, root_rank=0)
            before = float(params[0][0, 0])
            optimizer.zero_grad()
            (sum(w.sum() for w in params) * (r + 1)).backward()
            optimizer.step()
            require_weights(params, before - (p + 1) / 2)
    restart()


def check_ranks_are_compared_in_the_same_rounds_afterwards() -> None:
    """Though some have made more."""
    usual, replica_check.ROUNDS = replica_check.ROUNDS, 3
    try:
        params = weights()
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(params, lr=1.0))
        train(params, optimizer, hvd.rank())
        hvd.broadcast_parameters(params, hvd.join())
        train(params, optimizer, 7)
    finally:
        replica_check.ROUNDS = usual
    require_same_bits([w.detach() for w in params])
