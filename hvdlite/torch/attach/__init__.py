"""What is attached to a torch optimizer: hooks that reduce gradients at the end of each backward.

Belongs here: the state of one attached optimizer. Not here: torch's collectives (the folder above), and what other
frameworks need as well (`gradients/`).
"""
