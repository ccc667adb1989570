"""send and recv: every shape and dtype, any order of names, and gradients through a model on two ranks."""

from __future__ import annotations

import time

import numpy as np
import torch

import hvdlite
import hvdlite.torch as hvd
from tests.parallel.common import require_error

SIZES = (2, 3, 4)


def neighbours() -> tuple[int, int]:
    """The ranks before and after this one in a ring."""
    return (hvd.rank() - 1) % hvd.size(), (hvd.rank() + 1) % hvd.size()


def check_every_dtype_and_shape_around_a_ring() -> None:
    before, after = neighbours()
    for dtype in (
        torch.float32,
        torch.float64,
        torch.float16,
        torch.bfloat16,
        torch.int8,
        torch.int64,
        torch.uint8,
        torch.bool,
    ):
        for shape in ((), (0,), (3,), (2, 0, 4), (2, 3, 4), (300_000,)):
            handle = hvd.send_async(torch.full(shape, hvd.rank() % 2, dtype=dtype), after)
            got = hvd.recv(before)
            assert got.dtype == dtype and got.shape == shape and (got == before % 2).all()
            assert hvd.synchronize(handle) is None
    strided = torch.arange(12.0).reshape(3, 4).t()
    handle = hvd.send_async(strided, after)
    assert torch.equal(hvd.synchronize(hvd.recv_async(before)), strided)
    hvd.synchronize(handle)


def check_names_in_any_order() -> None:
    """Rank 0 sends a, b, c to all; they receive in orders of their own."""
    r = hvd.rank()
    if r == 0:
        handles = [hvd.send_async(torch.tensor(ord(name) + dest), dest, name=name)
                   for dest in range(1, hvd.size()) for name in "abc"]  # fmt: skip
        for handle in handles:
            hvd.synchronize(handle)
    else:
        for name in "cab" if r % 2 else "bca":
            assert hvd.recv(0, name=name) == ord(name) + r
    hvd.barrier()


def check_the_same_name_both_ways() -> None:
    before, after = neighbours()
    handles = [hvd.send_async(torch.tensor(hvd.rank()), to, name="x") for to in {before, after}]
    assert [int(hvd.recv(other, name="x")) for other in sorted({before, after})] == sorted({before, after})
    for handle in handles:
        hvd.synchronize(handle)


def check_unnamed_messages_of_several_senders() -> None:
    """They are numbered each way, whomever the receiver has heard before."""
    r, p = hvd.rank(), hvd.size()
    if r == 0:
        assert [int(hvd.recv(source)) for source in (*range(1, p), *range(1, p))] == [*range(1, p)] * 2
    else:
        for _ in range(2):
            hvd.send(torch.tensor(r), 0)
    hvd.barrier()


def check_refusals() -> None:
    r, p = hvd.rank(), hvd.size()
    for call in (lambda to: hvd.send(torch.ones(1), to), hvd.recv, hvd.recv_async):
        require_error(ValueError, lambda: call(r), "this rank itself")
        require_error(ValueError, lambda: call(p), f"rank {p} is not one of")
    require_error(ValueError, lambda: hvd.send(torch.ones(2, dtype=torch.float8_e4m3fn), (r + 1) % p), "float8_e4m3fn")
    hvd.barrier()


def check_a_model_in_two_parts() -> None:
    """y = w2 * (w1 * x), loss = sum(y): dL/dw1 = w2 x, dL/dw2 = w1 x, as if it were on one rank."""
    x = torch.arange(1.0, 4.0)
    for _ in range(3):
        if hvd.rank() == 0:
            w = torch.tensor(2.0, requires_grad=True)
            sent = hvd.send(w * x, dest=1)
            assert sent == 0 and sent.requires_grad
            sent.backward()
            assert w.grad == 3 * x.sum()
        elif hvd.rank() == 1:
            w = torch.tensor(3.0, requires_grad=True)
            hidden = hvd.recv(source=0)
            assert torch.equal(hidden, 2 * x) and hidden.requires_grad
            (w * hidden).sum().backward()
            assert w.grad == 2 * x.sum()
    hvd.barrier()


def check_there_and_back() -> None:
    """Rank 1 squares what rank 0 sends, and sends it back: the gradient of the sum is 2x, in one backward()."""
    if hvd.rank() == 0:
        x = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
        sent = hvd.send(x, dest=1, name="x")
        squares = hvd.recv(source=1, name="squares", after=sent)
        squares.sum().backward()
        assert torch.equal(x.grad, 2 * x.detach())
    elif hvd.rank() == 1:
        got = hvd.recv(source=0, name="x")
        hvd.send(got * got, dest=0, name="squares").backward()
    hvd.barrier()


def check_the_next_message_is_asked_for_before_the_gradient_goes_back() -> None:
    """Under the same name, which is free again."""
    x = torch.ones(3, requires_grad=True)
    if hvd.rank() == 0:
        hvd.send(x * 2, dest=1, name="hidden").backward()
        assert torch.equal(x.grad, torch.full((3,), 6.0))
        hvd.send(torch.full((3,), 7.0), dest=1, name="hidden")
    elif hvd.rank() == 1:
        hidden = hvd.recv(source=0, name="hidden")
        following = hvd.recv_async(source=0, name="hidden")
        time.sleep(0.2)  # until the other waits for the gradient
        (hidden * 3).sum().backward()
        assert torch.equal(hvd.synchronize(following), torch.full((3,), 7.0))
    hvd.barrier()


def check_without_gradients() -> None:
    """What needs no gradient comes without, and nothing is sent back."""
    if hvd.rank() == 0:
        assert not hvd.send(torch.ones(2), 1).requires_grad
        with torch.no_grad():
            hvd.send(torch.ones(2, requires_grad=True), 1)
        hvd.send(torch.ones(2, dtype=torch.int64), 1)
    elif hvd.rank() == 1:
        assert not any(hvd.recv(0).requires_grad for _ in range(3))
    hvd.barrier()


def check_within_a_process_set() -> None:
    """Ranks are global; the set's messages are its own."""
    hvd.shutdown()
    p, r = hvd.size() if hvd.is_initialized() else 0, 0
    hvd.init()
    p, r = hvd.size(), hvd.rank()
    hvd.shutdown()
    s = hvd.ProcessSet([0, p - 1])
    hvd.init(process_sets=[s] if p > 2 else [])
    s = s if p > 2 else hvd.global_process_set
    if r == 0:
        hvd.send(torch.tensor(5), p - 1, process_set=s)
        hvd.send(torch.tensor(6), p - 1)
    elif r == p - 1:
        assert hvd.recv(0, process_set=s) == 5 and hvd.recv(0) == 6
        if p > 2:
            require_error(ValueError, lambda: hvd.recv(1, process_set=s), "rank 1 is not one of the ranks 0, ")
    hvd.barrier()
    hvd.shutdown()
    hvd.init()


def check_a_receiver_whose_sender_shuts_down() -> None:
    """It is told who, even where the two have never talked before."""
    p, r = hvd.size(), hvd.rank()
    for turn in range(2):
        hvd.shutdown()
        hvd.init()
        if turn == 1 and r < 2:
            handle = hvd.send_async(torch.ones(1), 1 - r)
            hvd.recv(1 - r)
            hvd.synchronize(handle)
        if r == p - 1:
            require_error(hvd.HorovodInternalError, lambda: hvd.recv(0, name="late"), "late", "rank 0 shut down")
    hvd.shutdown()
    hvd.init()


def check_a_sender_in_a_process_set_that_shuts_down() -> None:
    """It is told by its global rank."""
    p, r = hvd.size(), hvd.rank()
    hvd.shutdown()
    process_set = hvd.ProcessSet([1, p - 1])
    hvd.init(process_sets=[process_set] if p > 2 else [])
    if p > 2 and r == p - 1:
        call = lambda: hvd.recv(1, process_set=process_set)  # noqa: E731
        require_error(hvd.HorovodInternalError, call, "rank 1 shut down")
    hvd.shutdown()
    hvd.init()


def check_a_message_that_nobody_takes() -> None:
    """shutdown() on both sides ends it with an error on the sender."""
    hvd.shutdown()
    hvd.init()
    r, p = hvd.rank(), hvd.size()
    handle = hvd.send_async(torch.ones(1), p - 1, name="unwanted") if r == 0 else None
    hvd.shutdown()
    if handle is not None:
        require_error(hvd.HorovodInternalError, lambda: hvd.synchronize(handle), "unwanted", f"rank {p - 1} shut down")
    hvd.init()


def check_numpy_arrays() -> None:
    before, after = neighbours()
    if hvd.rank() == 0:  # what is refused is not counted
        require_error(ValueError, lambda: hvdlite.send(np.array(["text"]), after), "cannot be sent")
    handle = hvdlite.send_async(np.full((2, 3), hvd.rank(), np.int16), after)
    got = hvdlite.recv(before)
    assert got.dtype == np.int16 and got.shape == (2, 3) and (got == before).all()
    hvdlite.synchronize(handle)
