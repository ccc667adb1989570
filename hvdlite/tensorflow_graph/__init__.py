"""How hvdlite handles TensorFlow's tensors, graphs and sessions. `keras/` and `tensorflow/` both use this room.

Belongs here: calls of Python from a graph, tensors on a GPU, TensorFlow's private names. Not here: public functions.
"""
