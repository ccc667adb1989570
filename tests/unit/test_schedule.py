"""The best schedule of gradients during backward."""

from __future__ import annotations

import pytest

from hvdlite.bench.schedule import least_exposed

MB = 1_000_000


@pytest.mark.parametrize(("nbytes", "arrivals", "communication", "seconds"), [
    ([MB], [1.0], 0.5, 0.5),  # one gradient is always the last
    ([MB, 3 * MB], [2.0, 1.0], 1.0, 0.25),  # 3 MB from 1.0 to 1.75, then the wire waits
    ([MB, 3 * MB], [2.0, 1.0], 4.0, 3.0),  # 3 MB from 1.0 to 4.0, 1 MB until 5.0
    ([2 * MB, MB, MB], [1.0, 1.0, 0.5], 4.0, 3.5),  # from 0.5 on without a pause
])  # fmt: skip
def test_what_is_sent_after_the_last_gradient_is_seen(
    nbytes: list[int], arrivals: list[float], communication: float, seconds: float
) -> None:
    assert least_exposed(nbytes, arrivals, communication) == pytest.approx(seconds)
