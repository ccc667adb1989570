"""Tests without MPI."""
