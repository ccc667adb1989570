"""Writes job scripts for clusters: `hvdliterun --template slurm|pbs|lsf|flux|k8s python train.py`. Nothing is started.

A script asks the scheduler for nodes, and calls hvdliterun, which takes the hosts and the number of ranks from the
scheduler. So each number stands in one place. The Slurm script also passes on the warning that the job's time is nearly
up, and queues the job again. `examples/cluster/` has what the templates make of `python train.py`.
"""

import argparse
import enum
import math
import os
import re
import shlex
from collections.abc import Sequence
from string import Template

from hvdlite_launcher import UsageError
from hvdlite_launcher.hosts import parse_hostfile, parse_hosts, total_slots, used

PER_NODE = 4  # ranks, if -H does not say how many
DEFAULT_NODES = 2  # if neither -np nor -H is given
_LONGEST_NAME = 15  # PBS takes no longer one
_HEAD = """\
#!/bin/bash
# A job for $scheduler, written by `hvdliterun --template $key`. Submit it with: $submit
"""
_NEVER_RUN = "# Its lines follow the scheduler's manual. hvdlite's developers have never run it on such a cluster.\n"
_SETUP = """
# Load here what a shell on a compute node lacks:
# module load openmpi
# source ~/venv/bin/activate
"""
_SLURM = f"""\
{_HEAD}#SBATCH --job-name=$name
#SBATCH --nodes=$nodes
#SBATCH --ntasks-per-node=$slots
# The job has nodes x ntasks-per-node ranks. Change them above, and nowhere else.
##SBATCH --cpus-per-task=8
##SBATCH --gpus-per-node=$slots
##SBATCH --partition=NAME
#SBATCH --time=01:00:00
#SBATCH --output=%x-%j.out
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=B:TERM@120
{_SETUP}
# 120 seconds before its time is up, Slurm sends SIGTERM to this script, which passes it on to hvdliterun. The ranks of
# the first node get SIGTERM, and let the others know, for example by an all-reduce after each step. All ranks have
# 5 seconds to save their work. Then the job is queued again. It must begin with loading its checkpoint, if there is
# one. A job that fails or is cancelled is not queued again.
most_restarts=20

trap 'interrupted=yes; kill -TERM $$(jobs -p)' TERM
$command &
run=$$!
interrupted=yes
while [ "$$interrupted" = yes ]; do # a signal ends `wait` early
    interrupted=no
    wait "$$run"
    code=$$?
done

state=$$(squeue --noheader --format=%T --jobs="$$SLURM_JOB_ID")
if [ "$$code" -eq 143 ] && [ "$$state" = RUNNING ] && [ "$${{SLURM_RESTART_COUNT:-0}}" -lt "$$most_restarts" ]; then
    scontrol requeue "$$SLURM_JOB_ID"
fi
exit "$$code"
"""
_PBS = f"""\
{_HEAD}{_NEVER_RUN}#PBS -N $name
#PBS -l select=$nodes:ncpus=$slots:mpiprocs=$slots
#PBS -l place=scatter
# The job has select x mpiprocs ranks. Change them above, and nowhere else. With GPUs: add :ngpus=$slots.
##PBS -q NAME
#PBS -l walltime=01:00:00
#PBS -j oe
#PBS -r y
$kept{_SETUP}
cd "$$PBS_O_WORKDIR" || exit
$command
"""
_LSF = f"""\
{_HEAD}{_NEVER_RUN}#BSUB -J $name
#BSUB -n $ranks
#BSUB -R "span[ptile=$slots]"
# The job has -n ranks, ptile of them on each node. Change them above, and nowhere else. Where jsrun starts ranks, ask
# for nodes instead (-nnodes $nodes), and write hvdliterun -np $ranks.
##BSUB -gpu "num=$slots"
##BSUB -q NAME
#BSUB -W 01:00
#BSUB -o $name-%J.out
# Two minutes before its time is up, the job gets SIGTERM. hvdliterun passes it on to the ranks.
#BSUB -wt 2
#BSUB -wa TERM
# To queue the job again then (hvdliterun's exit code is 143):
##BSUB -Q 143
{_SETUP}
$command
"""
_FLUX = f"""\
{_HEAD}{_NEVER_RUN}# flux: --job-name=$name
# flux: -N $nodes
# flux: -n $ranks
# The job has -n ranks on -N nodes. If you change -n, change -np below, too. With GPUs: add a line with -g 1.
# flux: -t 60m
# flux: --output=$name-{{{{id}}}}.out
{_SETUP}
$command
"""
_K8S = """\
# A job for Kubernetes with Kubeflow's MPI Operator, written by `hvdliterun --template k8s`. Submit it with:
# kubectl apply -f mpijob.yaml
# Its lines follow the operator's manual. hvdlite's developers have never run it on such a cluster.
apiVersion: kubeflow.org/v2beta1
kind: MPIJob
metadata:
  name: "$name"
spec:
  # The job has slotsPerWorker x Worker.replicas ranks. Change them here and below.
  slotsPerWorker: $slots
  launcherCreationPolicy: WaitForWorkersReady
  runPolicy:
    cleanPodPolicy: Running
    backoffLimit: 3 # starts after a failure; the script must begin with loading its checkpoint, if there is one
  mpiReplicaSpecs:
    Launcher:
      replicas: 1
      restartPolicy: OnFailure
      template:
        spec:
          containers:
            - name: launcher
              image: IMAGE # with your script, hvdlite, an MPI and sshd; the same as the workers'
              command:
$command
    Worker:
      replicas: $nodes
      template:
        spec:
          containers:
            - name: worker
              image: IMAGE
              resources:
                limits:
                  cpu: $slots
                  # nvidia.com/gpu: $slots
              volumeMounts:
                - name: shared-memory
                  mountPath: /dev/shm
          volumes:
            - name: shared-memory # the MPI and DataLoaders need more than the usual 64 MB
              emptyDir:
                medium: Memory
"""
_HOSTFILE = "/etc/mpi/hostfile"  # the operator's, in the launcher's container


class Scheduler(enum.Enum):
    """Schedulers for which there is a template."""

    SLURM = "slurm"
    PBS = "pbs"
    LSF = "lsf"
    FLUX = "flux"
    K8S = "k8s"


TEMPLATES = {
    Scheduler.SLURM: ("Slurm", "sbatch slurm.sh", _SLURM),
    Scheduler.PBS: ("PBS", "qsub pbs.sh", _PBS),
    Scheduler.LSF: ("LSF", "bsub < lsf.sh", _LSF),
    Scheduler.FLUX: ("Flux", "flux batch flux.sh", _FLUX),
    Scheduler.K8S: ("Kubernetes", "kubectl apply -f mpijob.yaml", _K8S),
}


def script(options: argparse.Namespace, flags: Sequence[str]) -> str:
    """The job script that the command line asks for. flags: of hvdliterun, without those about ranks and hosts.

    Raises UsageError.
    """
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    if not command:
        raise UsageError(f"--template {options.template.value}: no command given: write it last, as in python train.py")
    nodes, slots = _shape(options)
    words = ["hvdliterun", *flags]
    if options.template is Scheduler.FLUX:
        words += ["-np", str(nodes * slots)]
    if options.template is Scheduler.K8S:
        words += _for_kubernetes(options)
    words += command
    kept = ",".join(text for text in options.env if "=" not in text)  # PBS keeps no variables by itself
    scheduler, submit, text = TEMPLATES[options.template]
    return Template(text).substitute(
        scheduler=scheduler,
        key=options.template.value,
        submit=submit,
        name=job_name(command),
        nodes=nodes,
        slots=slots,
        ranks=nodes * slots,
        kept=f"#PBS -v {kept}\n" if kept else "",
        command=_yaml_list(words) if options.template is Scheduler.K8S else " ".join(map(quoted, words)),
    )


def _for_kubernetes(options: argparse.Namespace) -> list[str]:
    """The flags with which hvdliterun finds the workers."""
    for text in options.env:
        if "=" not in text:
            cure = f"write -x {text}=VALUE, or leave it out and set it for the pods"
            raise UsageError(f"-x {text}: the pods do not have your variables: {cure}")
    patience = [] if options.start_timeout else ["--start-timeout", "60"]
    return [*patience, "--hostfile", _HOSTFILE]


def _shape(options: argparse.Namespace) -> tuple[int, int]:
    """The number of nodes, and of ranks on each. Raises UsageError if nodes would have different numbers of ranks."""
    ranks = options.ranks
    if ranks is not None and ranks < 1:
        raise UsageError(f"-np {ranks}: needs at least 1 rank")
    if options.hosts is not None and options.hostfile is not None:
        raise UsageError("give either -H or --hostfile, not both")
    if options.hosts is None and options.hostfile is None:
        ranks = ranks or DEFAULT_NODES * PER_NODE
        nodes = math.ceil(ranks / PER_NODE)
        if ranks % nodes:
            cure = f"name the ranks of each node, as in -H node1:{ranks}"
            raise UsageError(f"-np {ranks}: {nodes} nodes cannot have equally many ranks: {cure}")
        return nodes, ranks // nodes
    hosts = parse_hosts(options.hosts) if options.hosts is not None else parse_hostfile(options.hostfile)
    if ranks is not None and ranks > total_slots(hosts):
        raise UsageError(
            f"-np {ranks}: the hosts have slots for {total_slots(hosts)} only: lower -np, or raise the slots [HVD002]"
        )
    hosts = used(hosts, ranks or total_slots(hosts))
    slots = {host.slots for host in hosts}
    if len(slots) > 1 or (ranks and ranks != total_slots(hosts)):
        raise UsageError("--template: the nodes of -H need equally many ranks each: say -H node1:4,node2:4")
    return len(hosts), slots.pop()


def job_name(command: Sequence[str]) -> str:
    """A name that all schedulers take: that of the Python script, or of the program."""
    word = next((word for word in command if word.endswith(".py")), command[0])
    stem = os.path.splitext(os.path.basename(word))[0].lower()
    name = re.sub("[^a-z0-9]+", "-", stem).strip("-")
    return (name if name[:1].isalpha() else f"job-{name}")[:_LONGEST_NAME].strip("-")


def quoted(word: str) -> str:
    """The word for bash, on one line: a line of its own might look like one for the scheduler."""
    if word.isprintable():
        return shlex.quote(word)
    letters = {"\\": "\\\\", "'": "\\'", "\n": "\\n", "\t": "\\t"}
    return "$'" + "".join(letters.get(each) or _escaped(each) for each in word) + "'"


def _escaped(letter: str) -> str:
    return letter if letter.isprintable() else "".join(f"\\x{byte:02x}" for byte in os.fsencode(letter))


def _yaml_list(words: Sequence[str]) -> str:
    """The words as lines of a YAML list. Kubernetes would replace $(NAME), and reads $$ as one dollar sign.

    Raises UsageError for bytes that are no text.
    """
    import yaml

    lines = []
    for word in words:
        try:
            word.encode()
        except UnicodeEncodeError as error:
            raise UsageError(f"{os.fsencode(word)!r}: YAML takes text only") from error
        text = word.replace("$", "$$")
        lines.append(yaml.safe_dump(text, default_style='"', width=math.inf, allow_unicode=True).rstrip("\n"))
    return "\n".join(f"                - {line}" for line in lines)
