"""Messages between two ranks, with gradients: a model in two parts, each on a rank of its own.

    rank 0:  hidden = first(x)                        rank 1:  hidden = hvd.recv(source=0)
             sent = hvd.send(hidden, dest=1)                   loss = criterion(second(hidden), y)
             sent.backward()                                   loss.backward()

`backward()` of what was received sends its gradient back, and `backward()` of what `send` returned waits for it.
"""

from __future__ import annotations

from typing import Any

import torch

from hvdlite import ops
from hvdlite.job.process_sets import ProcessSet, global_process_set
from hvdlite.ops.handles import remember
from hvdlite.ops.messages import Letter
from hvdlite.torch.tensors import readable, to_tensor

Everyone = global_process_set
WANTS_GRADIENT = 1


class SendFunction(torch.autograd.Function):
    """The gradient of what is sent is what the receiver sends back."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, letter: Letter) -> torch.Tensor:
        ctx.letter, ctx.device = letter, tensor.device
        letter.send(readable(tensor), WANTS_GRADIENT)
        return tensor.new_zeros(())

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        array, _ = ctx.letter.answer("gradient").receive()
        return to_tensor(array).to(ctx.device), None


class ReceiveFunction(torch.autograd.Function):
    """What was received hands its gradient to the sender."""

    @staticmethod
    def forward(ctx: Any, chain: torch.Tensor, received: torch.Tensor, letter: Letter) -> torch.Tensor:
        ctx.letter = letter
        return received

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        ctx.letter.answer("gradient").send(readable(grads[0]))
        return torch.zeros(()), None, None


def send(
    tensor: torch.Tensor, dest: int, name: str | None = None, process_set: ProcessSet = Everyone
) -> torch.Tensor:
    """Send a tensor to a rank that calls recv; waits until it has.

    dest: a global rank. name: equal on both sides; without one, messages each way are numbered. Returns a scalar 0
    that stands for the message: where tensor requires a gradient, its `backward()` waits for the receiver's. Two ranks
    that both send first and receive then wait for each other for ever: let one of them use send_async. Raises
    ValueError for a rank that is no member of the set or this one, ShutdownError where the other has shut down.
    """
    array = readable(tensor)  # which may refuse it: only then a number is taken
    letter = ops.letter_to(dest, name, process_set)
    if tensor.requires_grad and torch.is_grad_enabled():
        return SendFunction.apply(tensor, letter)  # type: ignore[no-any-return, no-untyped-call]
    letter.send(array)
    return tensor.new_zeros(())


def recv(
    source: int, name: str | None = None, process_set: ProcessSet = Everyone, after: torch.Tensor | None = None
) -> torch.Tensor:
    """The tensor that global rank `source` sends here, on the CPU.

    Where the sender's requires a gradient, so does this one, and its gradient goes back to the sender in backward().
    after: what `send` returned, where the received tensor depends on what was sent: then one backward() goes through
    both. Arguments and errors as for `send`.
    """
    letter = ops.letter_from(source, name, process_set)
    array, note = letter.receive()
    received = to_tensor(array)
    if note != WANTS_GRADIENT or not torch.is_grad_enabled():
        return received
    chain = torch.zeros((), requires_grad=True) if after is None else after
    return ReceiveFunction.apply(chain, received, letter)  # type: ignore[no-any-return, no-untyped-call]


def send_async(tensor: torch.Tensor, dest: int, name: str | None = None, process_set: ProcessSet = Everyone) -> int:
    """Start to send a tensor, which must not change before `synchronize(handle)`; returns the handle. No gradient."""
    array = readable(tensor)
    return remember(ops.letter_to(dest, name, process_set).start_send(array))


def recv_async(source: int, name: str | None = None, process_set: ProcessSet = Everyone) -> int:
    """Start to receive a tensor, which `synchronize(handle)` returns; returns the handle. No gradient."""
    return remember(ops.letter_from(source, name, process_set).start_receive(), lambda result: to_tensor(result[0]))
