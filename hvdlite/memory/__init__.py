"""Memory that ranks share (arenas on a host, CUDA IPC on GPUs), and memory that a lane keeps between requests.

Belongs here: allocating, sharing and releasing memory. Not here: the arithmetic on it (`algorithms/`).
"""
