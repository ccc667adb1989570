"""What hvdlite attaches to a torch optimizer: hooks that reduce its gradients at the end of each backward().

Belongs here: the state of one attached optimizer. Not here: torch's collectives (the folder above), and code that other
frameworks need as well (`gradients/`).

The words:

    plan      which gradient lies where. It is the same on all ranks, and is replaced when the parameters change.
    bucket    several gradients in one flat array, reduced by one operation
    arena     the memory of all buckets. If the ranks run on one host, each rank reads the arenas of the others.
    view      a gradient's place in its bucket, as a tensor that only hvdlite keeps
    alias     a second tensor on the memory of a view. It becomes p.grad, so users read results where they lie.
    round     one reduction of all gradients. It usually begins and ends with a backward().
    lane      the queue of the optimizer's operations, which all ranks run in the same order

The walk of a gradient:

    autograd has added to p.grad
      on_gradient        attachment.py          The hook of a parameter. The first hook of a backward() continues with
                                                begin_backward.
      begin_backward     attachment.py          Opens the round (round.py), and asks autograd to call end_backward when
                                                the backward() ends (backward.py). Gradients that users keep will stay
                                                the tensors that they are (slots.py).
      note               attachment.py          Runs if buckets leave early, or if gradients are large in total. About
                                                each MiB, packing.py copies gradients into their views. If buckets leave
                                                early, the reducer sends each full one.
    the backward() has ended
      end_backward       attachment.py          Finishes the rounds of all optimizers of this backward(), in the order
                                                in which they were attached (several.py).
      finish_round       attachment.py          Makes another plan if the parameters have changed (layout.py).
      pack_rest          packing.py             Copies the remaining gradients into their views. Of a large gradient it
                                                copies only the part that other ranks read.
      finish_round       gradients/reducer.py   Sends the remaining buckets, and waits for all.
      begin              lanes/lane.py          The ranks agree that the same bucket is next (lanes/roll_call.py).
      reduce             gradients/bucket.py    The ranks add up: in each other's memory, or by messages (algorithms/).
      hand_over          packing.py             The views hold the results now, and the aliases become p.grad.
      give               gradients.py           Handles other results: sparse, compressed, or copied into a gradient
                                                that a user keeps.
    step()
      before             steps.py               Reduces gradients that no backward() has reduced: usually none.

A round is in one of the states of round.py. Its docstring lists all transitions.
"""
