"""Sharding: each rank steps a part of the parameters, and keeps the optimizer's state of that part only (ZeRO-1).

Belongs here: which rank owns which part, and how all ranks get the stepped parts, for any framework. Not here: how an
optimizer is made to step a part (`torch/sharded`, `keras/sharded`).

    kinds      whether an optimizer's parameters may be cut
    cuts       divides the parameters among the ranks; pure
    gather     gives every rank the parts that others have stepped; runs on the lane
    slots      variables of an optimizer's state that are a rank's part of a whole value
    moves      which old piece fills which new one, if another number of ranks loads a checkpoint; pure

S. Rajbhandari et al., ZeRO: Memory Optimizations Toward Training Trillion Parameter Models, 2020: its stage 1. Price
per step: the gradients' all-reduce, 2n(p-1)/p elements sent per rank, as without sharding, plus n(p-1)/p for the
parameters. State: 1/p per rank. With sharded="gradients" ranks get their parts of averages only (stage 2's messages):
half of the all-reduce's elements, so an all-reduce's in all.
"""
