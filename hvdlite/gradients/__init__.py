"""Many gradients, one plan: buckets, their reduction, and what all frameworks' optimizers share.

Belongs here: how gradients are planned, packed, compressed, reduced and checked, for any framework. Not here:
collectives on single arrays (`ops/`), and what a framework does with its own tensors and hooks (`torch/`, `keras/`,
`tensorflow/`).

What a user asks for is a `settings.Settings`, in all frameworks. A gradient then goes through these modules:

    wire          compress, before it is sent; decompress, what comes back
    plan          which gradient lies where, in which bucket; `policy` says how large buckets are
    reducer       one round: buckets are filled, leave, and are waited for; `bucket` all-reduces one
    sparse        row numbers and values of sparse gradients are gathered instead
    exchange      a list of variables' rounds, for frameworks that compute all gradients and then apply them; `lists`
                  keeps the exchanges of an optimizer, `watched` compares its variables between ranks
    replica_check compares weights between ranks
    registry      what a process remembers about variables and reductions

Where something new goes. A compressor is a class with `compress` and `decompress` in `compression`; if it only casts,
`caster` makes it. A compressor with state (error feedback, or a low-rank basis) keeps that state by variable, and takes
it from `wire.Packed` (PyTorch: from `torch/attach/gradients.py`), the two places that know which variable a gradient
belongs to; its state is dropped in `Gradients.renew`, like the sums of earlier passes. A sharded optimizer reduces each
bucket to one rank instead of all: `terms` gets the operation, `bucket` the reduce-scatter, and a module of its own here
the all-gather of parameters after the step. A framework that computes all gradients and then applies them is one module
with the functions of `framework.Framework`, and an adapter that calls `Gradients.reduce`. A framework whose gradients
arrive one by one, as PyTorch's, has hooks that call `Reducer.mark_ready`.
"""
