"""Many gradients, one plan: buckets, their reduction, and what all frameworks' optimizers share.

Belongs here: how gradients are planned, packed, compressed, reduced and checked, for any framework. Not here:
collectives on single arrays (`ops/`), and what a framework does with its own tensors and hooks (`torch/`, `keras/`,
`tensorflow/`).
"""
