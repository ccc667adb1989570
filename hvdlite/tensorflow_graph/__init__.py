"""How TensorFlow's tensors, graphs and sessions reach the core. `keras/` and `tensorflow/` both use it.

Belongs here: calling Python from a graph, tensors on a GPU, the private TensorFlow API. Not here: public functions.
"""
