"""Tests under MPI: `ranks/` holds the checks, run by `runner` on every rank; `jobs` starts them from pytest."""
