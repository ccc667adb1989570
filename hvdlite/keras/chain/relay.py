"""One rank's part in a step of a `Chain`: outputs travel forth through the parts, and gradients travel back.

All ranks call the same methods in one order, which wait for all ranks. On TensorFlow they add nodes to the step that
Keras compiles.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import keras
from keras import ops as K

from hvdlite.algorithms import label
from hvdlite.arrays import Array, dtype_name
from hvdlite.errors import HvdliteError
from hvdlite.gradients.tensors import Gradient, Tensor, Variable
from hvdlite.keras.chain.backend import Backend, Tape
from hvdlite.keras.chain.lockstep import Act, Lockstep
from hvdlite.keras.chain.parts import Signature, Spec, spec_of
from hvdlite.lanes.workplace import Workplace

Nested: TypeAlias = "Tensor | Sequence[Nested] | Mapping[str, Nested] | None"
"""Tensors in any structure, as Keras gives them to a step."""
Tensors: TypeAlias = dict[int, Tensor]
"""Tensors by the number of the part that takes or returns them."""


@dataclass(frozen=True)
class Relay:
    """One rank's parts, and the tensors that travel between them and other ranks' parts.

    Attributes:
        parts: This rank's parts, by number.
        signatures: What each part takes and returns.
        lockstep: The operations of all ranks.
        backend: Keras' backend.
    """

    parts: Mapping[int, keras.Model]
    signatures: Sequence[Signature]
    lockstep: Lockstep
    backend: Backend

    @property
    def last(self) -> int:
        """The number of the last part."""
        return len(self.signatures) - 1

    @property
    def has_last(self) -> bool:
        """Whether this rank has the last part, and so the loss."""
        return self.last in self.parts

    def begin(self, act: Act, x: Nested, labels: Nested) -> None:
        """Compare with all ranks what this step does, and the number of its rows."""

        def work(rows: Array) -> list[Array]:
            self.lockstep.agree(act, int(rows.item()), len(leaves(labels)))
            return []

        self.backend.call(work, [K.convert_to_tensor(rows_of(x))], [])

    def forth(self, x: Nested, training: bool, tape: Tape | None = None) -> tuple[Tensors, Tensors]:
        """Run this rank's parts. Returns their inputs, but for part 0, and their outputs. tape: records, for `back`."""
        inputs, outputs = Tensors(), Tensors()
        arrived: list[Tensor] = []
        for number, signature in enumerate(self.signatures):
            if number in self.parts:
                if number > 0:
                    inputs[number] = tape.leaf(arrived[0]) if tape else arrived[0]
                outputs[number] = self.parts[number](inputs.get(number, x), training=training)
                arrived = [outputs[number]]
                if not signature.output.fits(found := spec_of(arrived[0])):
                    raise HvdliteError(
                        f"hvd.Chain: part {number} returns {found}, but has said to return {signature.output}. If a "
                        "Lambda layer with output_shape= returns something else, have it return that"
                    )
            if number < self.last:
                arrived = self.move(f"output of part {number}", number, [number + 1], arrived, [signature.output])
        return inputs, outputs

    def labels(self, y: Nested, weights: Nested) -> tuple[Nested, Nested]:
        """Return the labels and weights of the first part's rank on the last part's rank; on others, their own."""
        flat, given = keras.tree.flatten((y, weights)), leaves((y, weights))
        found = iter(self.move("labels", 0, [self.last], given, [spec_of(each) for each in given]) if given else [])
        return keras.tree.pack_sequence_as((y, weights), [None if each is None else next(found) for each in flat])  # type: ignore[no-any-return]

    def back(
        self, tape: Tape, inputs: Tensors, outputs: Tensors, loss: Gradient, variables: Sequence[Variable]
    ) -> list[Gradient]:
        """Let gradients travel back through this rank's parts, and return those of the variables.

        tape, inputs, outputs: As of `forth`. loss: this rank's loss; None if it has none.
        """
        sources = [*inputs.values(), *variables]
        sums: list[Gradient] = [None] * len(sources)

        def pull(target: Tensor, gradient: Gradient) -> None:
            for i, found in enumerate(tape.pull(target, gradient, sources)):
                sums[i] = found if sums[i] is None else sums[i] if found is None else K.add(sums[i], found)

        if loss is not None:
            pull(loss, None)
        for number in reversed(range(self.last)):
            gradients: list[Tensor] = []
            if number + 1 in self.parts:
                found = sums[list(inputs).index(number + 1)]
                gradients = [K.zeros_like(inputs[number + 1]) if found is None else found]
            specs = [self.signatures[number].output]
            gradients = self.move(f"gradient of part {number}'s output", number + 1, [number], gradients, specs)
            if number in self.parts:
                pull(outputs[number], gradients[0])
        return sums[len(inputs) :]

    def predictions(self, outputs: Tensors) -> Tensor:
        """Return the last part's output on every rank of the column."""
        mine, specs = list(outputs.values())[-1:], [self.signatures[-1].output]
        return self.move("predictions", self.last, range(self.last), mine, specs)[0]

    def blank(self, rows: int) -> Tensor:
        """Return zeros of the shape of the last part's output. Does not wait."""
        shape, dtype = self.signatures[-1].output
        zeros: Tensor = K.zeros((rows, *(size or 1 for size in shape[1:])), dtype)
        return zeros

    def move(
        self, what: str, source: int, dests: Sequence[int], tensors: list[Tensor], specs: Sequence[Spec]
    ) -> list[Tensor]:
        """Return the tensors of one part on the ranks of others, and the given ones elsewhere.

        Args:
            what: The tensors' name in messages.
            source: The number of the part that has them.
            dests: The numbers of the parts that get them.
            tensors: The tensors. Not read on ranks that get them.
            specs: What they are.

        Raises:
            HvdliteError: Other tensors have arrived.
        """
        step = self.lockstep
        sender, rank = step.column[source], step.rank
        takers = sorted({step.column[dest] for dest in dests} - {sender})
        if not takers:
            return tensors

        def work(*arrays: Array) -> list[Array]:
            labels = [label.encode(each.shape, each.dtype) for each in arrays]

            def moved(at: Workplace) -> list[Array]:
                for taker in takers if rank == sender else ():
                    for head, array in zip(labels, arrays, strict=True):
                        at.transport.send(head, taker)
                        at.transport.send(array, taker)
                return [label.receive(at.transport, sender)[0] for _ in (specs if rank in takers else ())]

            found = step.run(what, moved)
            for array, spec in zip(found, specs, strict=bool(found)):
                if not spec.fits(there := Spec(array.shape, dtype_name(array.dtype))):
                    raise HvdliteError(
                        f"hvd.Chain: the {what} on rank {sender} are {there}, those on rank {rank} {spec}. Give fit() "
                        "and evaluate() arrays of the same shapes and dtypes on every rank"
                    )
            return found

        found = self.backend.call(work, tensors if rank == sender else [], specs if rank in takers else [])
        return found if rank in takers else tensors


def leaves(nested: Nested) -> list[Tensor]:
    """Return the tensors in a structure."""
    return [each for each in keras.tree.flatten(nested) if each is not None]


def rows_of(x: Nested) -> int | Tensor:
    """Return the number of rows of a batch; a tensor if it is unknown while TensorFlow compiles the step."""
    return K.shape(leaves(x)[0])[0]  # type: ignore[no-any-return]
