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
from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np

from hvdlite.algorithms.reduction import Reduction, assign, widened
from hvdlite.arrays import Array, DType, is_small_float
from hvdlite.compression import Compressor, Exchange, Piece, Round
from hvdlite.compression.column import Column
from hvdlite.compression.store import Kept, Store

Phases: TypeAlias = list[tuple[str, float]]
"""What a round has done: names, and the times at which each began."""


class Part:
    """One driver's part of one bucket.

    Attributes:
        store: The host's memory.
        column: One driver of each host.
        pieces: The parameters in the part.
        values: The part, in shared memory: the host's sum before a round, the result after it.
        how: The scaling of the result.
        exchange: The compressor's messages.
        dtype: The dtype of all arithmetic: float32 or float64.
        rounds: The number of rounds so far.
        phases: What the last round has done, for the timeline.
    """

    def __init__(
        self, store: Store, column: Column, pieces: Sequence[Piece], values: Array, how: Reduction, phases: Phases
    ) -> None:
        self.store, self.column, self.pieces = store, column, pieces
        self.values, self.how = np.asarray(values), how
        self.dtype = kept_as(values.dtype)
        self.rounds, self.phases = 0, phases
        self.exchange: Exchange = store.compressor.prepare(column, pieces, values.size, self.dtype)

    def __call__(self) -> None:
        """Replace the part by its sum over hosts. Collective over the column."""
        store, part = self.store, self.values
        began = time.monotonic()
        self.rounds += 1
        total = store.scratch.get("values", part.size, self.dtype.name)
        sent = store.scratch.get("sent", part.size, self.dtype.name)
        before = [store.before(piece.name).of(piece) for piece in self.pieces]
        after = [store.after(piece.name).of(piece) for piece in self.pieces]
        scale = store.scale()
        total[...] = part
        for piece, old, new in zip(self.pieces, before, after, strict=True):
            add_kept(total[piece.here], old, new, scale, store.compressor)
        if self.column.any(not is_finite(total)):
            part[...] = np.nan
            return
        self.column.transport.restart()
        now = Round(store.rounds, [each.extra for each in before], [each.extra for each in after])
        self.exchange(total, sent, now)
        for piece, new in zip(self.pieces, after, strict=True):
            keep_rest(sent[piece.here], new, scale)
        self.how.postscale(total)
        assign(part, total)
        if not is_finite(part):
            part[...] = np.nan
        self.note_phases(began)

    def note_phases(self, began: float) -> None:
        """Note what the round has done."""
        first, last = self.column.transport.first, self.column.transport.last
        self.phases[:] = [("COMPRESS", began), ("SEND", first), ("DECOMPRESS", last), ("", time.monotonic())]

    def keep(self, chosen: Callable[[str], bool] = lambda name: True) -> None:
        """Leave the residuals of these parameters as the last committed round has left them."""
        for piece in self.pieces:
            if chosen(piece.name):
                self.store.after(piece.name).of(piece).take(self.store.before(piece.name).of(piece))


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
