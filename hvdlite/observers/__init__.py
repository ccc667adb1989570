"""Observers look at lanes from outside, and change nothing until a stall ends the job.

The timeline is an `Observer` (`lanes.observer`): lanes call it for each request. The stall watch has a thread, which
looks at pending requests a few times per second. Belongs here: what shows or judges a running job. Not here: anything
that an operation needs.
"""
