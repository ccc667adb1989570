"""Slurm on the test hosts: munge, a controller on the first host, a daemon on each host. It ends with the hosts."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

from tests.multihost.hosts import Hosts

TOOLS = ("slurmctld", "slurmd", "srun", "salloc", "munged")
_CONF = """\
ClusterName=test
SlurmctldHost=hosta
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=cred_expire=10
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
ReturnToService=2
StateSaveLocation=/tmp/slurmctld
SlurmdSpoolDir=/tmp/slurmd
SlurmctldPidFile=/run/slurmctld.pid
SlurmdPidFile=/run/slurmd.pid
SlurmctldLogFile=/tmp/slurmctld.log
SlurmdLogFile=/tmp/slurmd.log
SlurmdParameters=config_overrides
JobAcctGatherType=jobacct_gather/none
SchedulerParameters=sched_interval=1
NodeName=hosta,hostb CPUs=4 RealMemory=100
PartitionName=main Nodes=ALL Default=YES State=UP
"""
_START = """\
set -e
mkdir -p /run/munge /tmp/slurmctld /tmp/slurmd
chmod 755 /run /run/munge
munged --force --key-file={folder}/munge.key --socket=/run/munge/munge.socket.2 \
    --pid-file=/run/munge/pid --log-file=/tmp/munged.log --seed-file=/run/munge/seed
export SLURM_CONF={folder}/slurm.conf
[ $(hostname) != hosta ] || slurmctld
slurmd
"""


def missing() -> str | None:
    """Why this machine cannot run Slurm, or None."""
    absent = [tool for tool in TOOLS if not (shutil.which(tool) or Path("/usr/sbin", tool).exists())]
    packages = "slurmctld slurmd slurm-client munge libpmix-dev"
    return f"Slurm needs {', '.join(absent)} (apt-get install {packages})" if absent else None


def start(pair: Hosts) -> dict[str, str]:
    """Start Slurm. Returns the variables that its commands need."""
    folder = pair.folder
    (folder / "slurm.conf").write_text(_CONF)
    (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
    key = folder / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o600)
    (folder / "slurm.sh").write_text(_START.format(folder=folder))
    for machine in pair.machines:
        machine.run("sh", str(folder / "slurm.sh"))
    env = {"SLURM_CONF": f"{folder}/slurm.conf"}
    deadline = time.monotonic() + 20
    wanted = "\n".join(["idle"] * len(pair.machines))
    while pair[0].run("env", *(f"{k}={v}" for k, v in env.items()), "sinfo", "-hN", "-o%T").strip() != wanted:
        if time.monotonic() > deadline:
            raise TimeoutError(pair[0].run("cat", "/tmp/slurmctld.log"))
        time.sleep(0.2)
    return env
