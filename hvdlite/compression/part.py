"""One driver's part of a bucket: error feedback around an exchange between hosts, in every round.

    values   = the host's sum of gradients + scale * residual
    result   = the exchange's sum over hosts; `sent` is this host's contribution to it
    residual = (values - sent) / scale

Error feedback: Karimireddy et al. 2019, arXiv:1901.09847. Under loss scaling, gradients are `scale` times too large and
the scale changes. Residuals have no scale, so that they can be added to later gradients.

Momentum correction (Lin et al. 2018, arXiv:1712.01887) sums up gradients in a velocity: velocity = momentum * velocity
+ gradient, and adds the velocity in the gradient's place. The velocity of elements that were sent becomes zero. The
optimizer itself has no momentum then. With `clip`, one host's sum of gradients for one parameter has at most this norm.

If any host's values are not finite, no host exchanges them: the whole part of the result becomes NaN on all hosts. A
loss scaler then leaves out the step, and the round is not committed.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from hvdlite.algorithms.reduction import Reduction, assign, widened
from hvdlite.arrays import Array, DType, is_small_float
from hvdlite.compression import Compressor, Exchange, Piece, RoundMemory, gaps_between
from hvdlite.compression.column import Column
from hvdlite.compression.saved import Kept
from hvdlite.compression.store import Store

Phases: TypeAlias = list[tuple[str, float]]
"""What a round has done: names, and the times at which each began."""


@dataclass(frozen=True)
class Section:
    """A driver's section of a bucket, and how it is reduced.

    Attributes:
        pieces: The parameters in it.
        values: Their memory: the host's sum before a round, the result after it.
        how: The scaling of the result.
        unit: A host's sum of gradients is multiplied by this before the exchange, apart from the loss scale.
        phases: What the last round has done, for the timeline.
    """

    pieces: Sequence[Piece]
    values: Array
    how: Reduction
    unit: float
    phases: Phases


class Part:
    """One driver's part of one bucket.

    Attributes:
        store: The host's memory.
        column: One driver of each host.
        section: The parameters, and their memory.
        exchange: The compressor's messages.
        dtype: The dtype of all arithmetic: float32 or float64.
        norm: The norm of this host's sum of gradients in the last round, without a loss scale.
        sent_bytes: The bytes that this rank has sent in the last round.
        gaps: What lies between the pieces: zeros, whatever the compressor makes of them.
    """

    def __init__(self, store: Store, column: Column, section: Section) -> None:
        self.store, self.column, self.section = store, column, section
        self.values = np.asarray(section.values)
        self.dtype = kept_as(self.values.dtype)
        self.norm, self.sent_bytes = 0.0, 0
        self.exchange: Exchange = store.compressor.prepare(column, section.pieces, self.values.size, self.dtype)
        self.gaps = gaps_between(section.pieces, self.values.size)

    def __call__(self) -> None:
        """Replace the part by its sum over hosts. Collective over the column."""
        store, part, pieces = self.store, self.values, self.section.pieces
        if not pieces:
            return
        began, sent_before = time.monotonic(), self.column.sent_bytes
        total = store.scratch.get("values", part.size, self.dtype.name)
        sent = store.scratch.get("sent", part.size, self.dtype.name)
        before = [store.before(piece.name).of(piece) for piece in pieces]
        after = [store.after(piece.name).of(piece) for piece in pieces]
        scale = store.scale() * self.section.unit
        total[...] = part
        self.clear_gaps(total)  # they are NaN after a round with NaN
        self.norm = float(np.linalg.norm(total)) / scale
        for piece, old, new in zip(pieces, before, after, strict=True):
            add_kept(total[piece.here], old, new, scale, store.compressor)
        if self.column.any(not is_finite(total)):
            part[...] = np.nan
        else:
            self.column.transport.restart()
            now = RoundMemory(store.rounds, [each.extra for each in before], [each.extra for each in after])
            self.exchange(total, sent, now)
            for piece, new in zip(pieces, after, strict=True):
                keep_rest(sent[piece.here], new, scale)
            self.section.how.postscale(total)
            self.clear_gaps(total)
            assign(part, total)
            if not is_finite(part):
                part[...] = np.nan
            self.note_phases(began)
        self.sent_bytes = self.column.sent_bytes - sent_before

    @property
    def unsent(self) -> float | None:
        """The norm of the residuals, divided by `norm`; None without error feedback, and before the first round."""
        if not self.store.compressor.error_feedback or not self.norm:
            return None
        kept = (self.store.before(piece.name).of(piece).residual for piece in self.section.pieces)
        return float(np.linalg.norm([float(np.linalg.norm(each)) for each in kept])) / self.norm

    def note_phases(self, began: float) -> None:
        """Note what the round has done."""
        first, last = self.column.transport.first, self.column.transport.last
        self.section.phases[:] = [("COMPRESS", began), ("SEND", first), ("DECOMPRESS", last), ("", time.monotonic())]

    def clear_gaps(self, values: np.ndarray) -> None:
        """Set what lies between the pieces to zero."""
        for gap in self.gaps:
            values[gap] = 0


def add_kept(values: np.ndarray, old: Kept, new: Kept, scale: float, how: Compressor) -> None:
    """Add what earlier rounds have kept to a piece's values, in place. `new` remembers the values until `keep_rest`."""
    if how.clip:
        norm = float(np.linalg.norm(np.asarray(values, np.float64))) / scale
        if how.clip < norm < np.inf:
            values *= how.clip / norm
    if how.momentum:
        np.multiply(old.velocity, how.momentum * scale, out=new.velocity)
        values += new.velocity
        np.divide(values, scale, out=new.velocity)
    if how.error_feedback:
        np.multiply(old.residual, scale, out=new.residual)
        values += new.residual
        new.residual[...] = values


def keep_rest(sent: np.ndarray, new: Kept, scale: float) -> None:
    """Keep what was not sent. new: the piece's arrays, with all values in place of the residual."""
    residual = new.residual
    if residual.size:
        residual -= sent
        if scale != 1.0:
            residual /= scale
    if new.velocity.size:
        new.velocity[sent != 0] = 0


def is_finite(values: np.ndarray) -> bool:
    """Whether all values are finite. An empty array is."""
    if not values.size:
        return True
    wide = np.asarray(widened(values)) if is_small_float(values.dtype) else values
    return bool(np.isfinite(wide.min()) and np.isfinite(wide.max()))


def kept_as(dtype: DType) -> DType:
    """The dtype of residuals and arithmetic: float64 for float64, float32 for all others."""
    return np.dtype(np.float64 if dtype == np.float64 else np.float32)
