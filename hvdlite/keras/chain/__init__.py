"""`hvd.keras.Chain`: a Keras model in parts on different ranks (ChainerMN's MultiNodeChainList).

    rank 0:  x -> part 0 -> send              receive gradient -> gradients of part 0 -> apply
                             |                  ^
    rank 1:               receive -> part 1 -> loss -> gradients of part 1 and of its input -> send, apply

Every rank calls the same fit(). In a step all ranks take part in each operation, in one order: the comparison of
batches, one message for each border between parts forth and back, the labels, the metrics. So a rank that raises an
error can always tell the others. Weights change after the last operation, when every rank has its gradients.
Rejected: messages as differentiable operations. Ranks without a loss would need a loss in appearance, and the order of
messages would depend on the order in which a framework runs gradients.

    model          `Chain`: what Keras calls
    relay          one rank's part of a step: outputs travel forth, gradients travel back
    lockstep       the operations that all ranks run in one order
    parts          which rank has which parts, and what these take and return
    backend        what a backend of Keras does for a chain; `torch_backend`, and `tensorflow_graph.chain`
"""

from hvdlite.keras.chain.model import Chain

__all__ = ["Chain"]
