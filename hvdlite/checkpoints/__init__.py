"""Checkpoints: rank 0 writes and reads one file, and all ranks get the same state.

Belongs here: what `hvd.save` and `hvd.load` do for every framework, and the files of Keras, TensorFlow and NumPy. Not
here: the files of PyTorch (`torch/checkpoints`).
"""
