"""Memory that ranks share: arenas on a host, CUDA IPC handles on GPUs, and what a lane keeps to work with.

Belongs here: allocating, sharing and releasing memory. Not here: what is written into it (`algorithms/`).
"""
