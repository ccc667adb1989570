"""Memory that ranks share: arenas on a host, CUDA IPC on GPUs, and the memory that a lane keeps.

Belongs here: allocating, sharing and releasing memory. Not here: the arithmetic on it (`algorithms/`).
"""
