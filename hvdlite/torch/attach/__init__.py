"""What is attached to a torch optimizer: hooks that reduce gradients at the end of each backward.

Belongs here: the state of one attached optimizer. Not here: torch's collectives (the folder above), and what other
frameworks need as well (`gradients/`).

The walk of a gradient:

    autograd has added to p.grad
      on_gradient        attachment.py          a parameter's hook
      begin_backward     attachment.py          the first hook of a backward(): opens a round (round.py), notes which
                                                gradients are users' own (slots.py), and asks autograd to call when
                                                the backward() ends (backward.py)
      note               attachment.py          only where buckets leave during backward, or gradients are many:
                                                packing.py copies some into their views, and the reducer sends buckets
    the backward() ends
      end_backward       attachment.py          all optimizers of this backward(), in order: several.py
      finish_round       attachment.py          makes another plan where the parameters have changed (layout.py)
      pack_rest          packing.py             copies all gradients into their views, or lends large ones
      finish_round       gradients/reducer.py   every bucket leaves
      begin              lanes/lane.py          the ranks agree (lanes/roll_call.py)
      reduce             gradients/bucket.py    the ranks add up, in each other's memory or by messages (algorithms/)
      hand_over          packing.py             the views, which hold the results, become p.grad
      give               gradients.py           unusual results: sparse, compressed, copied into a user's tensor
    step()
      before             steps.py               reduces what no backward() has; usually nothing is left to do

The rounds of an optimizer are in one of the states of round.py, which has the table of all transitions.
"""
