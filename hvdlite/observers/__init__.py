"""Observers look at lanes from outside and change nothing.

The timeline is an `Observer` (`lanes.observer`), which lanes inform of each request. The stall watch is not informed:
from a thread of its own it looks at what is pending, a few times per second. Belongs here: what shows or judges a
running job. Not here: anything that an operation needs.
"""
