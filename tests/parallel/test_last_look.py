"""The last comparison of ranks, at the end of a script without hvd.shutdown().

Differences are reported. If a rank ends with an error, only the error is reported.
"""

from __future__ import annotations

import pytest

from tests.parallel import jobs

SCRIPT = """
import sys
import torch
import hvdlite.torch as hvd

hvd.init()
model = torch.nn.Linear(2, 1)
with torch.no_grad():
    model.weight.fill_(1.0)
    model.bias.fill_(1.0)
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
for step in range(400):
    if step == 300 and hvd.rank() == 1:
        optimizer.param_groups[0]["lr"] = 0.01
    optimizer.zero_grad()
    model(torch.ones(1, 2)).square().sum().backward()
    optimizer.step()
if hvd.rank() == 1:
    END
"""


@pytest.mark.parametrize(("end", "code", "reported"), [
    ("pass", 0, True),
    ("del optimizer, model", 0, False),
    ("sys.exit(3)", 3, False),
    ("raise KeyError('of a user')", 1, False),
])  # fmt: skip
def test_last_look(end: str, code: int, reported: bool) -> None:
    result = jobs.run(2, ["-c", SCRIPT.replace("END", end)])
    assert result.code == code, result.output
    assert ("when the job ended, after 400 steps, the ranks had different models" in result.output) == reported
    assert ("lr of param_groups[0] is 0.1 on rank 0, 0.01 on rank 1" in result.output) == reported, result.output
