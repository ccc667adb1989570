"""Requests to Linux, glibc and Python.

Belongs here: one module for each feature of the system, which knows nothing of ranks or gradients. Not here: settings
(`config`), and files that ranks and launcher exchange (`job/folder`).
"""
