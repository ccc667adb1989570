"""Checkpoints: a main file, which rank 0 writes and reads, and parts of other ranks; all ranks get the same state.

Belongs here: what `hvd.save` and `hvd.load` do for every framework, and the files of Keras, TensorFlow and NumPy. Not
here: the files of PyTorch (`torch/checkpoints`).

    files        replaces all files of a checkpoint, or none
    checkpoint   what ranks agree on, and who reads and writes; the Protocols of a framework's format
    archive      the format of Keras, TensorFlow and NumPy
"""
