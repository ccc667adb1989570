"""Scripts of torch.distributed that do not mention hvdlite, but for the backend's name, under mpirun and hvdliterun."""

from __future__ import annotations

import socket
import subprocess
import sys

import pytest

from tests.parallel import jobs

SCRIPT = """
import os
import torch, torch.distributed as dist
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
said = [int(os.environ[name]) for name in names]
dist.init_process_group("hvdlite")
assert said == [dist.get_rank(), dist.get_world_size()] * 2, said
tensor = torch.tensor([dist.get_rank() + 1.0])
dist.all_reduce(tensor)
assert dist.get_node_local_rank() == dist.get_rank()
print(f"the sum is {tensor.item():g}", flush=True)
"""
DESTROY = "dist.destroy_process_group()\n"


@pytest.mark.parametrize("end", ["", DESTROY], ids=["left_open", "destroyed"])
def test_a_script_under_mpirun(end: str) -> None:
    """Rank, size and rendezvous come from MPI, and a script that forgets destroy_process_group ends well, too."""
    result = jobs.run(2, ["-c", SCRIPT + end])
    assert result.code == 0 and result.output.count("the sum is 3") == 2, result.output


def test_a_script_under_hvdliterun() -> None:
    launch = [
        sys.executable,
        "-m",
        "hvdlite_launcher.cli",
        "--no-prefix",
        "-np",
        "2",
        sys.executable,
        "-c",
        SCRIPT + DESTROY,
    ]
    path = f"{jobs.ROOT}:{jobs.ROOT / 'launcher'}"
    done = subprocess.run(launch, env=jobs.environment({"PYTHONPATH": path}), cwd=jobs.ROOT, capture_output=True,
                          text=True, timeout=120, check=False)  # fmt: skip
    assert done.returncode == 0 and done.stdout.count("the sum is 3") == 2, done.stdout + done.stderr


def test_hvdlite_begins_after_torch_distributed() -> None:
    code = (
        SCRIPT
        + """
import hvdlite.torch as hvd
hvd.init()
assert hvd.rank() == dist.get_rank() and hvd.allreduce(torch.ones(1), op=hvd.Sum) == 2
dist.all_reduce(tensor)
dist.destroy_process_group()
assert hvd.allreduce(torch.ones(1), op=hvd.Sum) == 2
"""
    )
    result = jobs.run(2, ["-c", code])
    assert result.code == 0, result.output


def test_a_group_of_a_part_needs_a_job() -> None:
    """Under a default group of gloo that met by TCP, a group of some ranks cannot begin the job: the error says how."""
    code = """
import os
os.environ["MASTER_PORT"] = "{}"
import torch.distributed as dist
dist.init_process_group("gloo")
try:
    dist.new_group([0], backend="hvdlite")
except Exception as error:
    print("refused:", error, flush=True)
dist.barrier()
"""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    result = jobs.run(2, ["-c", code.format(port)], {"MASTER_ADDR": "127.0.0.1"})
    assert result.code == 0 and "refused:" in result.output and "call hvd.init() on every rank" in result.output, (
        result.output
    )


def test_one_process_without_a_launcher() -> None:
    """As torch's own backends: env:// wants its variables, and mpi:// is a job of one rank."""
    code = """
import torch, torch.distributed as dist
dist.init_process_group("hvdlite", init_method="{}")
assert dist.get_world_size() == 1
tensor = torch.ones(2)
dist.all_reduce(tensor)
assert tensor.sum() == 2
dist.destroy_process_group()
"""
    assert (result := jobs.run(0, ["-c", code.format("mpi://")])).code == 0, result.output
    result = jobs.run(0, ["-c", code.format("env://")])
    assert result.code == 1 and "RANK" in result.output


def test_a_process_that_a_library_has_started_is_no_rank() -> None:
    """Lightning starts a second process itself, if no launcher has: each is an MPI job of its own."""
    code = "dist.init_process_group('hvdlite', store=dist.HashStore(), rank=0, world_size=2)"
    result = jobs.run(0, ["-c", f"import torch.distributed as dist; {code}"])
    assert result.code == 1 and "has 2 ranks, but the MPI job of this process has 1" in result.output, result.output


def test_a_rank_that_fails_ends_the_job() -> None:
    """Ranks that wait in a collective do not wait for ever, and the error of the rank is in the output."""
    code = (
        SCRIPT
        + """
if dist.get_rank() == 1:
    raise ValueError("on purpose")
dist.all_reduce(tensor)
"""
    )
    result = jobs.run(2, ["-c", code])
    assert result.code not in (0, None) and "on purpose" in result.output, result.output
