"""Requests to Linux, glibc and Python, and what launchers tell a process.

Belongs here: one module for each feature, which knows no lanes, operations or gradients. Not here: definitions of
settings (`config`), and files that ranks and launcher exchange (`job/folder`).
"""
