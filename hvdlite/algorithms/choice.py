"""The choice of an algorithm: a pure function of facts that all ranks share, so that all ranks choose the same.

The model is Hockney's, for an all-reduce of S bytes over p ranks, L on each of h hosts. Its time is the sum of three:
the number of steps times the latency a; the bytes that a host's network card sends, divided by its bandwidth B; and the
number of passes over the host's L buffers in memory, each taking L S / M. A host copies M bytes per second.

                        steps       bytes per card     passes
    ring                2(p-1)      2S (p-1)/p         6           each message is copied in, copied out, added
    halving-doubling    2 log2(p)   2S (h-1)/h         6(L-1)/L    near ranks first: far messages are short
    doubling            log2(p)     S L log2(h)        3 log2(L)
    shared two-shot     1           0                  2
    hierarchical        1 + those   2S (h-1)/h         2           those: of the algorithm between hosts

In the hierarchical algorithm, each host has d drivers. All drivers send at once, and each reduces S/d bytes between
hosts.

Arrays in an arena are reduced in shared memory; on several hosts, by the hierarchical algorithm. Other arrays use
doubling up to 2 KiB and halving-doubling up to 8 KiB. Longer ones pass through the staging arena. If no ranks share
memory, longer arrays use a ring on one host, and on several hosts what drivers use. A user's setting overrides the
choice.

Between hosts, drivers use doubling, halving-doubling or a ring. Halving-doubling needs fewer steps than a ring. But its
messages cross distant links, which many hosts share; a ring's go only to neighbours. So a ring is chosen once each of
its messages is longer than 4aB. With a = 12 us (Python takes 10 of them) and B = 12 GB/s that is about 512 KiB. If h is
no power of two, halving-doubling sends two buffers more, and the limit is aB.

16-bit floats are added in float32. Only a ring sends them in 16 bits (see `direct`), and halving-doubling sends
float32, 2S bytes more. Halving-doubling is chosen if its fewer steps save more time: below aB (p - 1 - log2(p)).

`python -m hvdlite.bench model` prints and plots this model for 8 to 4096 ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

from hvdlite.arrays import DType, is_small_float

TINY_BYTES, SMALL_BYTES = 2 * 1024, 8 * 1024
"""On one host, arrays up to these sizes use `doubling` and `halving_doubling`: for them the number of steps counts."""
STEP_BYTES, FOLDED_STEP_BYTES = 512 * 1024, 128 * 1024
"""Over a network, the shortest messages for which a ring is chosen: for powers of two of ranks, and other numbers."""


@dataclass(frozen=True)
class Place:
    """The facts about a lane's ranks that the choice depends on. They are equal on all these ranks.

    Attributes:
        size: The number of ranks.
        shares_memory: Whether some host has several ranks, and these can share memory.
        forced: The algorithm that the user has set, or "auto".
        hosts: The ranks on each host; empty if all are on one.
        forced_on_gpu: `forced` for arrays on a GPU.
        cuda_aware: Whether the MPI takes device pointers, if the user has said so.
    """

    size: int
    shares_memory: bool
    forced: str = "auto"
    hosts: tuple[tuple[int, ...], ...] = ()
    forced_on_gpu: str = "auto"
    cuda_aware: bool | None = None

    @property
    def one_host(self) -> bool:
        """Whether all ranks are on one host."""
        return len(self.hosts) < 2

    @property
    def in_memory(self) -> bool:
        """Whether reductions use the memory that a host's ranks share."""
        return self.shares_memory and self.forced in ("auto", "shared", "hierarchical")


def choose(place: Place, nbytes: int, dtype: DType, in_arena: bool) -> str:
    """The name of the algorithm for one all-reduce.

    Arrays outside an arena are copied to the staging arena and back, which takes less time than messages.

    Args:
        place: The facts about the ranks.
        nbytes: The array's size.
        dtype: The array's dtype.
        in_arena: Whether all ranks of a host can reach every buffer.

    Returns:
        A key of `MESSAGES`, "shared" or "hierarchical".
    """
    together = "shared" if place.one_host else "hierarchical"
    can_share = in_arena or place.shares_memory
    if place.forced == "native" and not adds_as_we_do(dtype):
        return "ring"
    if place.forced == "nccl" and (dtype.kind in "bc" or (dtype.kind in "iu" and dtype.itemsize == 2)):
        return "ring"  # NCCL cannot add these dtypes
    if place.forced in ("shared", "hierarchical"):
        return together if can_share else "ring"
    if place.forced != "auto":
        return place.forced
    if in_arena:
        return together
    if nbytes <= TINY_BYTES:
        return "doubling"
    if nbytes <= SMALL_BYTES:
        return "halving_doubling"
    if can_share:
        return together
    return "ring" if place.one_host else across(place.size, nbytes, dtype)


def adds_as_we_do(dtype: DType) -> bool:
    """Whether every MPI's own all-reduce of this dtype gives hvdlite's result.

    Many MPIs do not know float16. In Open MPI 5, sums of 8 and 16 bits saturate in some parts of an array and wrap in
    others.
    """
    return dtype.kind in "fiu" and dtype.itemsize in (4, 8)


def across(ranks: int, nbytes: int, dtype: DType) -> str:
    """The name of the algorithm between hosts, by messages of one rank on each."""
    if nbytes <= TINY_BYTES:
        return "doubling"
    if is_small_float(dtype):
        least = FOLDED_STEP_BYTES * (ranks - ranks.bit_length())
        return "halving_doubling" if nbytes < least else "ring"
    step = STEP_BYTES if ranks & (ranks - 1) == 0 else FOLDED_STEP_BYTES
    return "halving_doubling" if nbytes < ranks * step else "ring"
