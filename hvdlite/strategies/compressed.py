"""Averages of arrays that travel compressed: rounds of a list of variables, as Keras' gradients are (`gradients/`)."""

from __future__ import annotations

from collections.abc import Sequence

from hvdlite.arrays import Array, is_float, is_host
from hvdlite.compression.store import Store
from hvdlite.gradients.compression import NoneCompressor, lossy_of
from hvdlite.gradients.exchange import Contents, Exchange
from hvdlite.gradients.plan import Spec
from hvdlite.gradients.settings import Arguments
from hvdlite.gradients.traffic import traffic_of
from hvdlite.gradients.use import Use
from hvdlite.gradients.wire import dtype_on_wire
from hvdlite.lanes.gpu_side import gpu_of
from hvdlite.strategies import Site
from hvdlite.strategies.averaging import present


class CompressedAverages:
    """Averages of the same list of arrays, again and again. What a lossy compressor leaves out is sent later.

    Attributes:
        site: The optimizer.
        name: Names the operations.
        exchange: Does the rounds, on a lane of its own.
    """

    def __init__(self, site: Site, name: str, names: Sequence[str], like: Sequence[Array], compression: object) -> None:
        """Collective; waits for all ranks.

        Args:
            site: The optimizer.
            name: Names the operations.
            names: The arrays' names in messages.
            like: Arrays of the shapes and dtypes to come, all on the host or all on one GPU.
            compression: The user's compressor.

        Raises:
            ValueError: It is no compressor of hvdlite's that casts, and no lossy one.
            NotImplementedError: It is lossy, and the arrays lie on a GPU.
        """
        self.site, self.name = site, name
        arguments = Arguments(compression=compression, process_set=site.process_set, replica_check="off")
        settings = arguments.checked(str)
        how = lossy_of(settings.compression)
        if how is None and settings.compression is not NoneCompressor and settings.compression.wire is None:
            raise ValueError(f"hvd.DiLoCo: compression={compression!r} must be one of hvd.Compression")
        gpu = None if is_host(like[0]) else gpu_of(like[0])
        specs = tuple(
            Spec(its, each.shape, dtype_on_wire(settings.compression, each.dtype.name, is_float(each.dtype)),
                 "host" if gpu is None else "cuda")
            for its, each in zip(names, like, strict=True)
        )  # fmt: skip
        store = Store(how, lambda: 1.0) if how else None
        keys = tuple(f"{index} {its}" for index, its in enumerate(names))
        contents = Contents(0, specs, settings, gpu, store, keys)
        lane = site.group.new_lane(name, self, site.title)
        self.exchange = Exchange(contents, lane, name, [Use.DENSE] * len(specs), owner=self)

    @property
    def sent_bytes(self) -> float:
        """The bytes that this rank has sent to other hosts in the last round."""
        traffic = traffic_of(self.exchange.working)
        return traffic.exact + traffic.lossy

    def average_(self, arrays: Sequence[Array]) -> None:
        """Replace arrays by their averages over the ranks that have not joined. Waits for all ranks."""
        exchange = self.exchange
        exchange.begin()
        for index, array in enumerate(arrays):
            exchange.put(index, array)
        exchange.finish()
        share = present(self.site.group, f"{self.name} ranks")
        for index, array in enumerate(arrays):
            array[...] = exchange.result(index).astype(array.dtype) / share
