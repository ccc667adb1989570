"""Pure functions that match the ranks' queued requests by name, and explain the differences.

Common rounds use them. All ranks compute the same verdicts from the same lists.
"""

from __future__ import annotations

import difflib
from collections.abc import Container, Sequence
from itertools import combinations
from typing import Any, TypeAlias, TypeVar

from hvdlite.errors import HvdliteError, MismatchError, ShutdownError
from hvdlite.lanes.calls import COLLECTIVE, GRADIENTS
from hvdlite.lanes.signature import END, JOIN, LEAVE, UNEVEN, UNKNOWN, Signature

V = TypeVar("V")
CHANGES = "add_param_group or requires_grad in torch, trainable in Keras, a tape's sources"
"""The user's actions that change the parameter list of an attached optimizer or tape."""
CURES = {
    "shape": "Every rank must pass the same shape; pad, or use allgather where sizes differ. [HVD201]",
    "dtype": "Every rank must pass the same dtype; cast before the call. [HVD202]",
    "number": "Every rank must pass the same number of tensors. [HVD205]",
    "operation": "Every rank must ask for the same reduction. [HVD205]",
    "root rank": "Every rank must name the same root_rank. [HVD205]",
    "parameters": "Build the same model on every rank; optimizers attached to it must have the same parameter groups "
                  "and compression=. [HVD204]",
    "reduction": "Give the same op= and gradient_predivide_factor= on every rank. [HVD205]",
    "terms": "Give the same op= and gradient_predivide_factor= on every rank. [HVD205]",
    "buckets": "Give the same groups= on every rank. [HVD205]",
    "replica_check": "Give the same replica_check= on every rank. [HVD205]",
    "round": "Every rank must call backward() and step() equally often. Where ranks have different numbers of batches: "
             "drop the remainder, or call hvd.join() on those that are done. [HVD310]",
    "ranks": "Every rank of the job must name the same ranks, members or not, in the same order of calls. [HVD205]",
    "metrics": "Give the same names on every rank: (0, 0) for a metric without samples on a rank. [HVD318]",
    "topology": "Every rank must use the same topology. [HVD205]",
    "messages": "Where rank a lists rank b in dst_weights, rank b must list rank a in src_weights. [HVD205]",
    "kind": "Every rank must call the same function under one name; give different operations different names. "
            "[HVD203]",
}  # fmt: skip
CURES_WHILE_JOINED = {
    "plan": f"Parameters may change ({CHANGES}) where a backward of all ranks follows before any joins, or after all "
            "have; so may the first sparse gradient come, unless the optimizer was attached with sparse_as_dense=True.",
    "new lane": "Attach optimizers (hvd.DistributedOptimizer) before any rank joins, or after all have.",
}  # fmt: skip
KINDS = {
    "plan": "a new list of parameters", "new lane": "a new optimizer", "weights": "a comparison of weights",
    "uses": "gradients that other ranks may lack", "order": "the order of gradients", "overlap": "times of gradients",
    "stepped": "a step() of a sharded optimizer",
}  # fmt: skip
"""Words for the kinds of operation that users do not call by name."""
LONGEST_DIFF = 20
"""The number of lines of a diff that are shown, half of them for each side."""
Verdicts: TypeAlias = dict[str, HvdliteError | None]
"""By request key, the error with which the request fails; None to run it."""


def match(everyone: Sequence[Sequence[Signature]], members: Sequence[int], stuck: bool = True) -> Verdicts:
    """Decide which requests run, and which fail.

    A request that some rank lacks gets no verdict, and waits. There are two exceptions: that rank has shut down, or all
    ranks are stuck and that rank has another kind of request of the same name. A rank that has joined can take part in
    all requests, but LEAVE waits for it.

    Args:
        everyone: Each rank's `visible` queue.
        members: The global ranks, in the same order.
        stuck: Whether all ranks wait, so that none will call another request.

    Returns:
        Verdicts in the order in which the requests run.
    """
    live = [place for place, queue in enumerate(everyone) if not has_joined(queue)]
    known = [{signature.key: signature for signature in queue} for queue in everyone]
    verdicts: Verdicts = {}
    for wanted in everyone[live[0]] if live else ():
        found = [known[place].get(wanted.key) for place in live]
        if wanted != LEAVE or len(live) == len(everyone):
            verdicts |= verdict(found, [members[place] for place in live])
    if not verdicts and stuck and live:
        verdicts = clashes([everyone[place] for place in live], [members[place] for place in live])
    if not verdicts or LEAVE.key in verdicts:
        verdicts.update(forsaken(everyone, members, verdicts))
    return verdicts


def verdict(found: Sequence[Signature | None], members: Sequence[int]) -> Verdicts:
    """One verdict for all members' requests; none if a member lacks the request."""
    signatures = [signature for signature in found if signature is not None]
    if len(signatures) < len(found):
        return {}
    error = None if agree(signatures) else MismatchError(explain(signatures, members))
    return {signature.key: error for signature in signatures}


def agree(signatures: Sequence[Signature]) -> bool:
    """Whether the signatures are equal, apart from UNKNOWN values."""
    names = {each._replace(facts=tuple((what, None) for what, _ in each.facts), called="") for each in signatures}
    everyones = zip(*(signature.facts for signature in signatures), strict=True) if len(names) == 1 else ()
    return len(names) == 1 and all(same_fact(facts[0][0], [value for _, value in facts]) for facts in everyones)


def same_fact(what: str, values: Sequence[Any]) -> bool:
    """Whether the known values of the fact `what` are equal. Lists of parameters are compared line by line."""
    known = {value for value in values if value != UNKNOWN}
    if len(known) <= 1 or what != "parameters" or None in known or len(set(map(len, known))) > 1:
        return len(known) <= 1
    moved = len({tuple(sorted(value)) for value in known}) < len(known)  # the same lines, reordered
    return not moved and all(map(same_variable, zip(*known, strict=True)))


def same_variable(lines: Sequence[str]) -> bool:
    """Whether these lines name the same variable, apart from outer layers.

    Keras omits outer layers from names when it loads a model from a file: net/dense/kernel becomes dense/kernel, and
    adam/net_dense_kernel_m becomes adam/dense_kernel_m.
    """
    longest = max(lines, key=len)
    return all(line == longest or is_end_of(line, longest) for line in lines)


def is_end_of(line: str, longest: str) -> bool:
    """Whether `line` is the end of `longest`.

    The end has at least a layer's name and a weight's name. For an optimizer's state it also has the kind of state.
    """
    outer, slash, rest = line.rpartition("/")
    state = rest.count("_") > 1 and longest.rpartition("/")[0] == outer and longest.endswith(f"_{rest}")
    return bool(slash) and (state or longest.endswith(f"/{line}"))


def clashes(queues: Sequence[Sequence[Signature]], members: Sequence[int]) -> Verdicts:
    """Errors for different kinds of operation under one name."""
    named = [{signature.name: signature for signature in reversed(queue) if signature != LEAVE} for queue in queues]
    verdicts: Verdicts = {}
    for wanted in queues[0]:
        verdicts |= verdict([found.get(wanted.name) for found in named], members) if wanted != LEAVE else {}
    return verdicts


def has_joined(queue: Sequence[Signature]) -> bool:
    """Whether the rank with this queue has joined."""
    return bool(queue) and queue[0] == JOIN


def forsaken(everyone: Sequence[Sequence[Signature]], members: Sequence[int], settled: Container[str]) -> Verdicts:
    """Errors for requests that some rank will never call, because it has shut down. settled: keys with a verdict."""
    verdicts: Verdicts = {}
    gone = [(place, {signature.key for signature in queue}) for place, queue in enumerate(everyone) if LEAVE in queue]
    for signature in (signature for queue in everyone for signature in queue):
        lacking = [members[place] for place, called in gone if signature.key not in called]
        if lacking and signature != LEAVE and signature.key not in settled:
            said = f"{signature.title}: {ranks(lacking)} shut down, ended, or removed the process set"
            verdicts[signature.key] = ShutdownError(f"{said}, {forsaking(signature)}", by_another=True)
    return verdicts


def forsaking(signature: Signature) -> str:
    """The end of the error for an operation that ranks have left without calling it, and the cure."""
    if signature.title.startswith(GRADIENTS):
        return f"without this backward(). {UNEVEN} [HVD910]"
    cure = "Each send needs a recv on the other rank." if signature.kind == "message" else COLLECTIVE
    return f"without calling it. {cure} [HVD910]"


def refusal(signature: Signature, joined: Sequence[int]) -> MismatchError:
    """The error for a request that cannot run while these ranks have joined."""
    have = "has" if len(joined) == 1 else "have"
    cure = CURES_WHILE_JOINED.get(signature.kind, "Call it before any rank joins, or after all have.")
    return MismatchError(
        f"{signature.title}: {ranks(joined)} {have} joined (hvd.join()), and joined ranks take part only in "
        f"all-reduces. {cure} [HVD206]"
    )


def explain(signatures: Sequence[Signature], members: Sequence[int]) -> str:
    """The error's text for requests of one name that differ: each side's value, and the cure.

    signatures: one for each member.
    """
    if END in (kinds := {signature.kind for signature in signatures}) and len(kinds) > 1:
        return explain_end(signatures, members)
    facts = [{"kind": s.kind, "round": s.round, **dict(s.facts)} for s in signatures]
    named = dict.fromkeys(name for fact in facts for name in fact)  # in order; a rank may lack some facts
    what = next((name for name in named if not same_fact(name, [f.get(name) for f in facts])), "arguments")
    values = [f.get(what, "none") for f in facts]
    if what == "parameters":
        said = f"parameters differ:\n{difference(values, members)}\n"
    elif what == "metrics":
        said = f"the metrics differ: {lacking(values, members)}. "
    elif what == "buckets":
        said = f"the groups of tensors (groups=) on {ranks(sides(values, members)[0][1])} differ from the others'. "
    else:
        several = what.partition(" of ")[0].endswith("s")
        shown = [KINDS.get(str(value), value) for value in values] if what == "kind" else values
        said = f"{what} {'differ' if several else 'differs'}: {said_by(shown, members)}. "
    cure = CURES.get(what.partition(" of ")[0], "Every rank must pass the same. [HVD205]")
    if what == "kind" and set(values) == {"plan", "gradients"}:
        cure = f"The parameters changed ({CHANGES}) on some ranks only: change them on every rank. [HVD204]"
    if what == "kind" and "stepped" in values:
        cure = "Every rank must call backward() and step() equally often, with equally many batches. [HVD310]"
    return f"{title_of(signatures, members)}: {said}{cure}"


def title_of(signatures: Sequence[Signature], members: Sequence[int]) -> str:
    """The operation's name in messages. If users' calls differ between ranks, each call with its ranks."""
    parties = sides([signature.title for signature in signatures], members)
    if len(parties) == 1 or len({signature.kind for signature in signatures}) > 1:
        return signatures[0].title
    return ", ".join(f"{title} on {ranks(who)}" for title, who in parties)


def explain_end(signatures: Sequence[Signature], members: Sequence[int]) -> str:
    """The error's text if some ranks have ended an epoch, and others have begun another batch."""
    ended = [member for member, s in zip(members, signatures, strict=True) if s.kind == END]
    others = [member for member in members if member not in ended]
    what = next(signature.round for signature in signatures if signature.kind == END)
    return (
        f"fit(): {ranks(ended)} came to {what}, while {ranks(others)} went on with the next batch. A callback that "
        "sets model.stop_training within an epoch (TerminateOnNaN) must do so on all ranks after the same batch. All "
        "ranks must have the same number of batches: use dataset.take(n) or steps_per_epoch= [HVD311]"
    )


def sides(values: Sequence[V], members: Sequence[int]) -> list[tuple[V, list[int]]]:
    """Each value with the ranks that have it, the smallest group first."""
    groups: dict[V, list[int]] = {}
    for rank, value in zip(members, values, strict=True):
        groups.setdefault(value, []).append(rank)
    return sorted(groups.items(), key=lambda item: (len(item[1]), item[1]))


def said_by(values: Sequence[object], members: Sequence[int]) -> str:
    """Each rank's value in words: 'rank 1 has 3, ranks 0, 2 have 4'."""
    parties = sides(values, members)
    return ", ".join(f"{ranks(who)} {'has' if len(who) == 1 else 'have'} {value}" for value, who in parties)


def lacking(values: Sequence[Any], members: Sequence[int]) -> str:
    """The names that each side lacks of all sides' names: 'rank 1 lacks accuracy, ranks 0, 2 lack loss'."""
    every = sorted({name for names in values for name in names})
    found = [
        f"{ranks(who)} {'lacks' if len(who) == 1 else 'lack'} {', '.join(missing)}"
        for names, who in sides(values, members)
        if (missing := [name for name in every if name not in names])
    ]
    return ", ".join(found)


def difference(values: Sequence[Any], members: Sequence[int]) -> str:
    """A diff of the parameter lists of the first two ranks that differ. It names all ranks with either list."""
    first, other = next(pair for pair in combinations(values, 2) if not same_fact("parameters", pair))

    def who(said: object) -> str:
        return ranks([member for member, value in zip(members, values, strict=True) if value == said])

    names = who(first), who(other)
    if len(first) == len(other) and sorted(first) != sorted(other):
        other = [a if same_variable((a, b)) else b for a, b in zip(first, other, strict=True)]
    lines = list(difflib.unified_diff(first, other, *names, lineterm="", n=0))
    if len(lines) <= LONGEST_DIFF:
        return "\n".join(lines)
    cut = lines[:2]
    for sign in "-+":
        side = [line for line in lines[2:] if line[0] == sign]
        cut += side[: LONGEST_DIFF // 2]
        cut += [f"{sign}... and {len(side) - LONGEST_DIFF // 2} more"] if len(side) > LONGEST_DIFF // 2 else []
    return "\n".join(cut)


def ranks(members: Sequence[int]) -> str:
    """Ranks in words: 'rank 3', 'ranks 0-2', 'ranks 0, 2'."""
    if len(members) == 1:
        return f"rank {members[0]}"
    run = list(members) == list(range(members[0], members[-1] + 1))
    return f"ranks {members[0]}-{members[-1]}" if run else "ranks " + ", ".join(map(str, members))
