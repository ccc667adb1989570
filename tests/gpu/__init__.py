"""Checks of arrays on a GPU. Each job runs on a real GPU or on the pretend one."""
