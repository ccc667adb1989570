"""`DistributedOptimizer(..., strategy=...)` for Keras on TensorFlow and PyTorch.

    apply()    update_begins | before_update, if due | the class's own | update_ends | after_update, if due

The optimizer stays the same object, and `attachment` calls `steps` where it would reduce gradients otherwise. That is
around the outer apply(): a LossScaleOptimizer decides on each rank alone whether it skips a step. Skipped steps count,
so that all ranks have equal counts. Passes of Keras' gradient accumulation that move no weights do not count.

    steps            one optimizer's strategy: counts updates, and gives the strategy its arrays
    reach            averages gradients in the updates in which the strategy asks for it
    check            compares weights that should be equal
    terms            what strategies can be combined with
    outside          changes of weights from outside of updates
    on_tensorflow    variables and gradients as arrays, eagerly and in tf.function
    on_torch         the same on PyTorch
    average          `hvd.average_parameters`
"""
