"""A pretend GPU for machines without one: it proves order and reach, not speed, and runs no kernel of CuPy's.

`cupy` stands in for CuPy: what is issued to a stream happens only when someone waits for that stream, so a wait that
is missing reads stale data, every time. `cuda.c` stands in for the driver's library: its device memory faults when
the host touches it, so a CUDA-aware Open MPI must take the path that it takes on a GPU. With this folder on
PYTHONPATH, `import cupy` finds the one; with PRETEND_CUDA_DRIVER=1 it uses the other.
"""
