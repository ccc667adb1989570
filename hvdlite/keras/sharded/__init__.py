"""`DistributedOptimizer(..., sharded=True)` for Keras on TensorFlow and PyTorch: a part of the state on each rank.

    build()    the class's own, on a stand-in for each variable    slots follow the stand-ins
    apply()    reduce | clip whole gradients | the class's own, on this rank's stand-ins | all ranks get all pieces

A variable that this rank owns alone stands for itself. A `StandIn` of one dimension stands for a variable that this
rank owns a part of; there are two at most. An empty one stands for a variable of other ranks. So an optimizer has as
many variables as without sharding, in the same order, and the parts of one slot lie on the ranks in their order.

The optimizer stays the same object. Rejected: stand-ins for this rank's variables alone, because a checkpoint then
needs a table of slots, and a rank that owns nothing would not count its iterations.

    kinds            which optimizers can be cut
    stand_ins        variables in place of the model's
    shard            one optimizer's stand-ins, and its steps
    slots            the optimizer's state: whole values and parts of it
    on_tensorflow    all ranks get all pieces, on TensorFlow
    on_torch         the same on PyTorch
    saving           Keras' own files have no state of a sharded optimizer
"""
