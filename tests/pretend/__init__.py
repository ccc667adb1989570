"""A pretend GPU for machines without one. It checks order and addresses, not speed, and runs none of CuPy's kernels.

`cupy` replaces CuPy. Work issued to a stream runs only when something waits for that stream. So if a wait is missing,
the test always reads old data. `cuda.c` replaces the driver's library. Its device memory faults when the host accesses
it, so a CUDA-aware Open MPI must take the same path as on a GPU. With this folder on PYTHONPATH, `import cupy` finds the
replacement. With PRETEND_CUDA_DRIVER=1 its memory is that of `cuda.c`.
"""
