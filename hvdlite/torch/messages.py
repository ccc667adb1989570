"""Messages between two ranks, with gradients: a model in two parts, each on a rank of its own.

    rank 0:  hidden = first(x)                        rank 1:  hidden = hvd.recv(source=0)
             sent = hvd.send(hidden, dest=1)                   loss = criterion(second(hidden), y)
             sent.backward()                                   loss.backward()

The receiver's `backward()` sends the gradient of the received tensor back. The sender's `backward()` of the result of
`send` waits for that gradient.
"""

from __future__ import annotations

from typing import Protocol

import torch

from hvdlite import ops
from hvdlite.job.process_sets import ProcessSet, global_process_set
from hvdlite.ops.handles import remember
from hvdlite.ops.messages import Letter
from hvdlite.torch.tensors import readable, to_tensor

Everyone = global_process_set
WANTS_GRADIENT = 1
"""The note to the receiver that the sender waits for a gradient."""


class Context(Protocol):
    """autograd's context of one message."""

    letter: Letter
    device: torch.device


class SendFunction(torch.autograd.Function):
    """Sends a tensor. Its gradient is the one that the receiver sends back."""

    @staticmethod
    def forward(ctx: Context, tensor: torch.Tensor, letter: Letter) -> torch.Tensor:
        ctx.letter, ctx.device = letter, tensor.device
        letter.send(readable(tensor), WANTS_GRADIENT)
        return tensor.new_zeros(())

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Context, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        array, _ = ctx.letter.answer("gradient").receive()
        return to_tensor(array).to(ctx.device), None


class ReceiveFunction(torch.autograd.Function):
    """Returns a received tensor, and sends its gradient back."""

    @staticmethod
    def forward(ctx: Context, chain: torch.Tensor, received: torch.Tensor, letter: Letter) -> torch.Tensor:
        ctx.letter = letter
        return received

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Context, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        ctx.letter.answer("gradient").send(readable(grads[0]))
        return torch.zeros(()), None, None


def send(tensor: torch.Tensor, dest: int, name: str | None = None, process_set: ProcessSet = Everyone) -> torch.Tensor:
    """Send a tensor to a rank that calls `recv`, and wait until it has received the tensor. Differentiable.

    If two ranks both send first and receive then, they wait for each other for ever: let one of them use `send_async`.

    Args:
        tensor: The tensor.
        dest: The global rank that receives it.
        name: Equal on both sides. Messages without a name are matched in their order, by pair of ranks.
        process_set: A set with both ranks.

    Returns:
        A scalar 0 that stands for the message. If the tensor requires a gradient, `backward()` of this scalar waits for
        the gradient from the receiver.

    Raises:
        ValueError: `dest` is this rank, or not a member of the process set.
        ShutdownError: The other rank has shut down.
    """
    array = readable(tensor)  # first: if this raises, the message takes no number
    letter = ops.letter_to(dest, name, process_set)
    if tensor.requires_grad and torch.is_grad_enabled():
        return SendFunction.apply(tensor, letter)  # type: ignore[no-any-return, no-untyped-call]
    letter.send(array)
    return tensor.new_zeros(())


def recv(
    source: int, name: str | None = None, process_set: ProcessSet = Everyone, after: torch.Tensor | None = None
) -> torch.Tensor:
    """Wait for a tensor that another rank sends here. Differentiable.

    Args:
        source: The global rank that sends it.
        name: Equal on both sides, as for `send`.
        process_set: A set with both ranks.
        after: The result of an earlier `send`, if the received tensor depends on the sent one. One backward() then goes
            through both.

    Returns:
        The tensor, a new one on the CPU. If the sender's tensor requires a gradient, this one does, too, and
        `backward()` sends its gradient back.

    Raises:
        ValueError: `source` is this rank, or not a member of the process set.
        ShutdownError: The other rank has shut down.
    """
    letter = ops.letter_from(source, name, process_set)
    array, note = letter.receive()
    received = to_tensor(array)
    if note != WANTS_GRADIENT or not torch.is_grad_enabled():
        return received
    chain = torch.zeros((), requires_grad=True) if after is None else after
    return ReceiveFunction.apply(chain, received, letter)  # type: ignore[no-any-return, no-untyped-call]


def send_async(tensor: torch.Tensor, dest: int, name: str | None = None, process_set: ProcessSet = Everyone) -> int:
    """Start to send a tensor. Waits for nobody. Not differentiable.

    Args:
        tensor: The tensor. It must not change before `synchronize(handle)`.
        dest: The global rank that receives it.
        name: Equal on both sides, as for `send`.
        process_set: A set with both ranks.

    Returns:
        A handle: `synchronize(handle)` waits until the tensor is received, and returns None.

    Raises:
        ValueError: `dest` is this rank, or not a member of the process set.
    """
    array = readable(tensor)
    return remember(ops.letter_to(dest, name, process_set).start_send(array))


def recv_async(source: int, name: str | None = None, process_set: ProcessSet = Everyone) -> int:
    """Start to receive a tensor. Waits for nobody. Not differentiable.

    Args:
        source: The global rank that sends it.
        name: Equal on both sides, as for `send`.
        process_set: A set with both ranks.

    Returns:
        A handle: `synchronize(handle)` waits for the tensor, and returns it, a new one on the CPU.

    Raises:
        ValueError: `source` is this rank, or not a member of the process set.
    """
    return remember(ops.letter_from(source, name, process_set).start_receive(), lambda result: to_tensor(result[0]))
