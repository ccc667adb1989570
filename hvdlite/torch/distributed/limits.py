"""Errors for what torch does in C++ only, so that no process group in Python can take part."""

from __future__ import annotations

from functools import cache, wraps

from torch._C._distributed_c10d import BuiltinCommHookType
from torch.nn.parallel import DistributedDataParallel

from hvdlite.torch.distributed.process_group import MpiProcessGroup
from hvdlite.torch.private_api import BUILTIN_HOOK

NO_COMPRESSION = (
    "the built-in hook FP16_COMPRESS works with torch's own backends only. Use "
    "model.register_comm_hook(None, torch.distributed.algorithms.ddp_comm_hooks.default_hooks.fp16_compress_hook)"
)


@cache
def refuse_builtin_compression() -> None:
    """Have DistributedDataParallel's built-in FP16_COMPRESS raise an error that names the way round.

    C++ reads its result as a C++ list of tensors, which Python's futures do not hold.
    """
    register = getattr(DistributedDataParallel, BUILTIN_HOOK, None)
    if register is None:  # nobody can register one
        return

    @wraps(register)
    def checked(self: DistributedDataParallel, comm_hook_type: BuiltinCommHookType) -> None:
        compresses = comm_hook_type == BuiltinCommHookType.FP16_COMPRESS
        if compresses and isinstance(self.process_group, MpiProcessGroup):
            raise NotImplementedError(NO_COMPRESSION)
        register(self, comm_hook_type)

    setattr(DistributedDataParallel, BUILTIN_HOOK, checked)
