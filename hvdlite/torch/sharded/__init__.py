"""`DistributedOptimizer(..., sharded=True)` for torch: each rank steps its pieces, and keeps their state only.

    backward()   p.grad is the average on every rank, as without sharding
    step()       narrow: each parameter becomes its piece | the optimizer's own step | widen | all ranks get all pieces

With sharded="gradients", p.grad is a `PartOfGradient` (`attach/part`): the average on the owner of a piece only.

The optimizer's groups and the keys of its state stay the user's own. Rejected: flat shards in place of the parameters,
because schedulers, param_groups and checkpoints would see other parameters. Rejected: to narrow in the hooks around
step() alone, because torch calls no hook after a step() that has raised, and a forward with pieces crashes.

    kinds      which optimizers can be cut
    pieces     narrow and widen; the state's pieces
    steps      the optimizer's step()
    shard      one optimizer's cuts, pieces and gathers
    states     state_dict(), and the whole state on one rank
    parts      checkpoints in which each rank writes its pieces
    zero       torch's name for it: ZeroRedundancyOptimizer
"""
