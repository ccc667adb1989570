"""Verdicts and their texts: pure functions of all ranks' queues."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from hvdlite.algorithms.reduction import Reduction
from hvdlite.errors import MismatchError, ShutdownError
from hvdlite.lanes import calls, matching
from hvdlite.lanes.matching import LONGEST_DIFF, Verdicts, ranks
from hvdlite.lanes.request import Request
from hvdlite.lanes.signature import LEAVE, UNKNOWN, Round, Signature


def match(everyone: Sequence[Sequence[Signature]]) -> Verdicts:
    """The verdict for the queues of ranks 0, 1, 2, ..."""
    return matching.match(everyone, range(len(everyone)))


def allreduce(name: str, shape: tuple[int, ...] = (3,), dtype: str = "float32", **more: object) -> Signature:
    return Signature("allreduce", name, (("dtype", dtype), ("shape", shape), *more.items()))


def gather(name: str) -> Signature:
    return Signature("allgather", name, (("dtype", "float32"),))


def broadcast(name: str, root: int) -> Signature:
    return Signature("broadcast", name, (("root rank", root),))


A, B, C = (allreduce(name) for name in "abc")
SECOND: dict[str, Any] = {"shape of tensor 1": (2,)}


def test_what_all_have_runs_in_the_order_of_rank_0() -> None:
    verdicts = match([[C, A, B], [A, B, C], [B, C, A]])
    assert list(verdicts) == [C.key, A.key, B.key]
    assert all(verdict is None for verdict in verdicts.values())


def test_what_one_lacks_waits() -> None:
    assert list(match([[A, B], [B], [A, B]])) == [B.key]
    assert match([[A], [B], []]) == {}
    assert match([[], [], []]) == {}


def test_what_a_rank_does_not_know_agrees_with_what_others_do() -> None:
    one, other, none = (allreduce("x", (3,), shape_of_all=shape) for shape in ((4, 2), (9, 2), UNKNOWN))
    assert match([[one], [none], [one]]) == match([[none], [none], [one]]) == {one.key: None}
    error = match([[none], [one], [other]])[one.key]
    assert error and "shape_of_all" in str(error) and "(4, 2)" in str(error) and "(9, 2)" in str(error)
    assert match([[none], [allreduce("x", (4,), shape_of_all=(4, 2))]])[one.key]
    assert match([[one], [allreduce("x")]])[one.key]


def model(*lines: str, **more: object) -> Signature:
    return Signature(
        "plan", "p", (("parameters", tuple(f"{line}: float32[2] on host" for line in lines)), *more.items())
    )


def test_a_model_that_one_rank_has_loaded_is_the_same() -> None:
    """On that rank the variables' names lack everything before their own layer."""
    rest = ("adam/net_time_dense_kernel_m", "w"), ("adam/dense_kernel_m", "w")
    built, loaded = model("net/time/dense/kernel", *rest[0]), model("dense/kernel", *rest[1])
    assert match([[built], [loaded], [model("time/dense/kernel", *rest[0])]]) == {built.key: None}
    for other in ("dense/bias", "net/kernel", "my_dense/kernel", "kernel", "dense/recurrent_kernel"):
        error = match([[built], [loaded], [model(other, *rest[1])]])[built.key]
        assert error and str(error).count("\n+") == 2 and f"\n+{other}" in str(error) and "+++ rank 2" in str(error), (
            other
        )


@pytest.mark.parametrize(("mine", "theirs"), [
    (["encoder/dense/kernel"], ["decoder/dense/kernel"]),
    (["adam/encoder_dense_kernel_m"], ["adam/decoder_dense_kernel_m"]),
    (["adam/net_dense_kernel_m"], ["sgd/dense_kernel_m"]),
    (["cell/kernel", "cell/recurrent_kernel"], ["cell/recurrent_kernel", "cell/kernel"]),
    (["net/a/w", "a/w"], ["a/w", "net/a/w"]),
    (["weight"], ["my_weight"]),
    (["net/w"], ["w"]),
    (["a/w"], ["a/w", "a/w"]),
])  # fmt: skip
def test_other_models_are_not_the_same(mine: list[str], theirs: list[str]) -> None:
    error = match([[model(*mine)], [model(*theirs)]])[model().key]
    assert error and "parameters differ" in str(error) and any(f"+{name}" in str(error) for name in theirs)


def test_what_differs_is_named_among_names_that_do_not_matter() -> None:
    many = [f"dense/kernel_{number}" for number in range(30)]
    mine, theirs = model(*(f"net/{name}" for name in many), "net/dense/bias"), model(*many, "dense/scale")
    error = match([[mine], [theirs]])[mine.key]
    assert error and "-net/dense/bias" in str(error) and "+dense/scale" in str(error) and "kernel" not in str(error)
    other = [model("net/a/w", reduction="sum"), model("a/w", reduction="average")]
    error = match([[each] for each in other])[mine.key]
    assert error and "reduction differs" in str(error)


def test_one_name_for_two_kinds() -> None:
    """Requests of the same kind find each other in any order."""
    verdicts = match([[allreduce("x"), gather("x")], [gather("x"), allreduce("x")]])
    assert list(verdicts) == ["allreduce 'x'", "allgather 'x'"]
    assert all(verdict is None for verdict in verdicts.values())


def test_another_kind_may_still_come_unless_all_are_stuck() -> None:
    """Another thread, or a later asynchronous call, may use the name for another kind."""
    queues = [[allreduce("x"), gather("x")], [gather("x")]], [[allreduce("x")], [gather("x")]]
    for everyone, found in zip(queues, ({gather("x").key: None}, {}), strict=True):
        verdicts = matching.match(everyone, range(2), stuck=False)
        assert verdicts == found
    assert list(match(queues[0])) == [gather("x").key]
    assert len(match(queues[1])) == 2


def message(*signatures: Signature) -> str:
    """The error of these ranks for one name, which is in all of their keys."""
    verdicts = match([[signature] for signature in signatures])
    assert {signature.key for signature in signatures} == set(verdicts)
    errors = list(verdicts.values())
    assert all(isinstance(error, MismatchError) for error in errors)
    return str(errors[0])


@pytest.mark.parametrize(("signatures", "words"), [
    ([A, A, allreduce("a", (10,))],
     "allreduce 'a': shape differs: rank 2 has (10,), ranks 0-1 have (3,). Every rank must pass the same shape; pad, or"),
    ([allreduce("a", dtype="float16"), A, A, A],
     "dtype differs: rank 0 has float16, ranks 1-3 have float32. Every rank must pass the same dtype; cast"),
    ([A, allreduce("a", (1,)), A, allreduce("a", (1,))], "ranks 0, 2 have (3,), ranks 1, 3 have (1,)"),
    ([broadcast("w", 0), broadcast("w", 1)], "broadcast 'w': root rank differs: rank 0 has 0, rank 1 has 1. Every rank must"),
    ([A, gather("a")], "kind differs: rank 0 has allreduce, rank 1 has allgather. Every rank must call the same function"),
    ([allreduce("a", operation="Sum"), allreduce("a", operation="Min")], "operation differs: rank 0 has Sum, rank 1 has Min"),
    ([A, allreduce("a", (3,), **SECOND)],
     "shape of tensor 1 differs: rank 0 has none, rank 1 has (2,). Every rank must pass the same shape"),
    ([allreduce("a", (3,), **SECOND), A], "rank 0 has (2,), rank 1 has none"),
    ([allreduce("a", (3,), "int8"), allreduce("a", (3, 1), "int16")], "dtype differs"),
])  # fmt: skip
def test_messages_name_both_sides_and_the_cure(signatures: list[Signature], words: str) -> None:
    assert words in message(*signatures)


def plan(*lines: str) -> Signature:
    return Signature("plan", "optimizer.1", (("parameters", lines),))


def test_plans_differ_by_a_diff() -> None:
    text = message(plan("w: f[3]", "b: f[1]"), plan("w: f[3]", "b: f[1]"), plan("w: f[3]", "b: f[2]"))
    for words in ("--- ranks 0-1", "+++ rank 2", "-b: f[1]", "+b: f[2]", "Build the same model"):
        assert words in text
    assert "w: f[3]" not in text


def test_a_long_diff_is_cut() -> None:
    text = message(plan(*(f"a{i}" for i in range(100))), plan(*(f"b{i}" for i in range(100))))
    half = LONGEST_DIFF // 2
    for sign, side in ("-a", "+b"):
        assert f"{sign}{side}{half - 1}\n{sign}... and {100 - half} more" in text and f"{sign}{side}{half}" not in text


def test_arithmetic_and_groups_differ() -> None:
    def plan(divisor: int, buckets: int) -> Signature:
        facts = (("parameters", ("w",)), ("buckets", buckets), ("reduction", Reduction(divisor=divisor, after=2.0)))
        return Signature("plan", "optimizer.1", facts)

    text = message(plan(3, 1), plan(1, 1), plan(3, 1))
    assert "rank 1 has sum, postscale 2, ranks 0, 2 have average, postscale 2. Give the same op=" in text
    text = message(plan(3, 1), plan(3, 1), plan(3, 2))
    assert "the groups of tensors (groups=) on rank 2 differ from the others'. Give the same groups=" in text


def test_a_plan_against_a_round() -> None:
    text = message(plan("w"), Signature("gradients", "optimizer.1", round="step 2, backward 1, attempt 1"))
    assert "rank 0 has a new list of parameters, rank 1 has gradients" in text
    assert all(words in text for words in ("requires_grad in torch", "trainable in Keras", "a tape's sources"))


def test_variables_of_a_broadcast_need_no_optimizer() -> None:
    """The cure depends on the calls that gave different lists: broadcasts, optimizers, tapes."""
    lists = [Signature("broadcast", "variables.1", (("parameters", lines),)) for lines in (("w: f[3]",), ("w: f[2]",))]
    assert "Build the same model on every rank; optimizers attached to it" in message(*lists)


def test_leaving_alone_is_agreed_on() -> None:
    assert match([[LEAVE], [LEAVE]])[LEAVE.key] is None
    assert match([[LEAVE], []]) == {}


def test_what_a_leaving_rank_lacks_fails() -> None:
    """It fails on the ranks that have called it. The leaving rank goes on waiting until they leave."""
    verdicts = match([[A, B], [LEAVE], [B]])
    assert set(verdicts) == {A.key, B.key}
    for key, verdict in verdicts.items():
        assert isinstance(verdict, ShutdownError)
        assert f"{key}: rank 1 shut down" in str(verdict)


def test_what_a_leaving_rank_lacks_is_named_as_the_user_called_it() -> None:
    """The message has the cure for that call. Ranks may have used different calls, and agree all the same."""
    load = Signature("new lane", "optimizer.2 (2)", called="hvd.load_model('best.keras')")
    backward = Signature("gradients", "optimizer.2 bucket 0", called="gradients of DistributedOptimizer(SGD)")
    letter = Signature("message", "noname.1 from rank 0 to rank 1")
    texts = [str(match([[each], [LEAVE]])[each.key]) for each in (load, backward, letter)]
    assert texts[0].startswith("hvd.load_model('best.keras'): rank 1 shut down")
    assert texts[0].endswith("without calling it. It is collective: every rank must call it. [HVD910]")
    assert (
        texts[1].startswith("gradients of DistributedOptimizer(SGD): rank 1 shut down")
        and "hvd.uneven_inputs" in texts[1]
    )
    assert (
        texts[2].startswith("message 1 from rank 0 to rank 1: rank 1 shut down")
        and "Each send needs a recv" in texts[2]
    )
    assert match([[load], [load._replace(called="hvd.load_model('other.keras')")]]) == {load.key: None}


def test_ranks_that_called_one_thing_differently_are_named() -> None:
    one, other = (
        Signature("new lane", "optimizer.2 (2)", (("lists", n),), called=f"hvd.{n}") for n in ("load_model", "run")
    )
    assert message(one, one, other).startswith("hvd.run on rank 2, hvd.load_model on ranks 0-1: lists differ")


@pytest.mark.parametrize(("kind", "name", "call", "user", "words"), [
    ("allreduce", "loss", "", "", "allreduce 'loss'"),
    ("allreduce", "noname.3", "", "", "allreduce (unnamed call 3)"),
    ("broadcast", "object.1.sz", "hvd.broadcast_object", "", "hvd.broadcast_object"),
    ("plan", "optimizer.1 bucket 0", "hvd.DistributedOptimizer(SGD)", "DistributedOptimizer(SGD)", "hvd.DistributedOptimizer(SGD)"),
    ("gradients", "optimizer.1 bucket 0", "", "DistributedOptimizer(SGD)", "gradients of DistributedOptimizer(SGD)"),
    ("message", "loss from rank 0 to rank 1", "", "", "message 'loss from rank 0 to rank 1'"),
    ("message", "noname.2 from rank 0 to rank 1", "", "", "message 2 from rank 0 to rank 1"),
])  # fmt: skip
def test_titles(kind: str, name: str, call: str, user: str, words: str) -> None:
    assert calls.title(kind, name, call, user) == words


def test_the_outermost_call_counts_in_its_thread() -> None:
    def inner() -> Request:
        with calls.calling("hvd.DistributedOptimizer(SGD)"):
            return Request(A, lambda lane: None)

    with calls.calling("hvd.load_model('best.keras')"):
        assert inner().title() == "hvd.load_model('best.keras')"
        with ThreadPoolExecutor() as pool:
            assert pool.submit(inner).result().title() == "hvd.DistributedOptimizer(SGD)"
    assert (
        inner().title() == "hvd.DistributedOptimizer(SGD)" and Request(A, lambda lane: None).title() == "allreduce 'a'"
    )


def test_a_call_is_no_part_of_what_ranks_compare() -> None:
    with calls.calling("hvd.load_model('best.0.keras')"):
        mine = Request(A, lambda lane: None)
    assert mine.identity.digest == Request(A, lambda lane: None).identity.digest and mine.key == A.key
    assert Request(LEAVE, lambda lane: None).call("DistributedOptimizer(SGD)").signature == LEAVE


def test_what_a_leaving_rank_has_waits_for_the_others() -> None:
    """Rank 0 called A, did not wait, and leaves. Rank 1 is about to call A."""
    assert match([[A, LEAVE], [], [A]]) == {}
    assert set(match([[A, LEAVE], [B], [A]])) == {B.key}
    assert list(match([[A, LEAVE], [A], [A]])) == [A.key]


def test_what_only_some_have_fails_before_all_leave() -> None:
    verdicts = match([[A, LEAVE], [B, LEAVE], [B, LEAVE]])
    assert "rank 0 shut down" in str(verdicts[B.key]) and "ranks 1-2 shut down" in str(verdicts[A.key])
    assert verdicts[LEAVE.key] is None


def test_what_all_have_runs_before_anyone_leaves() -> None:
    verdicts = match([[LEAVE, A], [A, LEAVE]])
    assert verdicts[A.key] is None


def test_a_tensor_may_have_any_name() -> None:
    """Even the name that leaving uses internally is possible."""
    impostor = allreduce(LEAVE.name)
    verdicts = match([[impostor], [LEAVE]])
    assert list(verdicts) == [impostor.key] and isinstance(verdicts[impostor.key], ShutdownError)


@pytest.mark.parametrize(("members", "text"), [([3], "rank 3"), ([0, 1, 2], "ranks 0-2"), ([0, 2], "ranks 0, 2")])
def test_names_of_ranks(members: list[int], text: str) -> None:
    assert ranks(members) == text


def test_digests() -> None:
    """Equal signatures have equal digests, any difference changes the digest, and -h fits too: a digest has 62 bits."""
    different = [
        A,
        B,
        allreduce("a", (4,)),
        allreduce("a", dtype="int8"),
        gather("a"),
        broadcast("a", 0),
        broadcast("a", 1),
        LEAVE,
        A._replace(round="step 1"),
        A._replace(round="step 2"),
    ]
    digests = [signature.digest() for signature in different]
    assert len(set(digests)) == len(different) and all(0 <= digest < 2**62 for digest in digests)
    assert allreduce("a").digest() == A.digest()


def test_a_request_that_is_used_again_agrees_with_a_new_one() -> None:
    words = "step {}, backward {}"
    again = Request(Signature("gradients", "a", (), Round(words, (1, 1))), lambda lane: None, flag=3)
    for numbers in ((2, 1), (2, 2), (1, 1), (10**6, 0)):
        new = Request(Signature("gradients", "a", (), Round(words, numbers)), lambda lane: None, flag=0)
        assert again.again(Round(words, numbers), 0) is again
        assert (again.signature, again.identity.digest, again.key, again.flag) == (
            new.signature,
            new.identity.digest,
            new.key,
            0,
        )


def test_members_of_a_set_go_by_their_global_ranks() -> None:
    found = matching.match([[A], [allreduce("a", (4,))]], [3, 7])
    assert "rank 3 has (3,), rank 7 has (4,)" in str(found[A.key])
    found = matching.match([[plan("w")], [plan("b")]], [3, 7])
    assert "--- rank 3" in (text := str(next(iter(found.values())))) and "+++ rank 7" in text
    found = matching.match([[A], [LEAVE]], [3, 7])
    assert "rank 7 shut down" in str(found[A.key])
