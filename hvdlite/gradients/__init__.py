"""Gradients: all gradients of a model, planned once and reduced in buckets, for any framework.

Belongs here: planning, packing, compression, reduction and checks of gradients. Not here: collectives on single arrays
(`ops/`), and a framework's own tensors and hooks (`torch/`, `keras/`, `tensorflow/`).

Once, when an optimizer is attached or its first step runs:

    settings      the user's arguments, checked, in one vocabulary (`terms`, `groups`, `compression`)
    plan          the place of each gradient in a bucket; `policy` chooses the size of buckets
    reducer       compares the plan with all ranks, and allocates the buckets in an arena

In every step a gradient walks through these modules:

    PyTorch                             Keras, TensorFlow
    a hook calls the attachment         the optimizer or tape calls `lists`
      |                                   |   wire        compresses the gradient
      |                                   |   exchange    puts it into its round
      v                                   v
    reducer    marks the gradient in its bucket (`progress`); `departure` and `overlap_trial` decide whether a full
      |        bucket leaves during backward
    bucket     all-reduces on the lane, once all ranks agree
      |
    results    lie in views of the buckets; `use` tells which parameters had a gradient on any rank

Beside that walk: `sparse` gathers rows instead of reducing. `accumulator` adds up several passes. `replica_check`
compares weights between ranks, for Keras and TensorFlow through `watched`. `attaching` has the rules for attaching an
optimizer again. `registry` keeps a process' record of variables and reductions. `framework`, `tensors` and `variables`
are what this room knows of a framework.

Where something new goes:

A compressor is a class with `compress` and `decompress` in `compression`. If it only casts, `caster` makes it.

A compressor with state (error feedback, or a low-rank basis) keeps the state by variable. `wire.Packed` gives it the
variable of each gradient; for PyTorch, `torch/attach/gradients.py` does. `Gradients.renew` drops the state, like the
sums of earlier passes.

Sharded gradients: each bucket is reduced to one rank instead of all. `terms` gets the operation, and `bucket` the
reduce-scatter. `sharding/` divides parameters and gathers them after the step.

A framework that computes all gradients and then applies them is one module with the functions of
`framework.Framework`, and an adapter that calls `Gradients.reduce`. A framework with gradients that come one by one, as
in PyTorch, has hooks that call `Reducer.mark_ready` and, when backward ends, `Reducer.finish_round`.
"""
