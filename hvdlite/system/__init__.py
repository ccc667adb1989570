"""Requests to Linux, glibc and Python.

Belongs here: one file for each feature of the system, without knowledge of ranks or gradients. Not here: settings
(`config`), and files that ranks and launcher exchange (`job/folder`).
"""
