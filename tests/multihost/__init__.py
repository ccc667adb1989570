"""Tests that need several hosts, and the hosts."""
