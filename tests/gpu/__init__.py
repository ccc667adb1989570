"""Checks on device arrays, each job on a GPU or on a pretend one."""
