"""Checks that every rank of a job runs. A module's `check_*` functions run in order; SIZES limits the job's sizes."""
