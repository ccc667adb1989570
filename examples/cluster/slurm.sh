#!/bin/bash
# A job for Slurm, written by `hvdliterun --template slurm`. Submit it with: sbatch slurm.sh
#SBATCH --job-name=train
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
# The job has nodes x ntasks-per-node ranks. Change them above, and nowhere else.
##SBATCH --cpus-per-task=8
##SBATCH --gpus-per-node=4
##SBATCH --partition=NAME
#SBATCH --time=01:00:00
#SBATCH --output=%x-%j.out
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=B:TERM@120

# Load here what a shell on a compute node lacks:
# module load openmpi
# source ~/venv/bin/activate

# 120 seconds before its time is up, Slurm sends SIGTERM to this script, which passes it on to hvdliterun. The ranks of
# the first node get SIGTERM, and let the others know, for example by an all-reduce after each step. All ranks have
# 5 seconds to save their work. Then the job is queued again. It must begin with loading its checkpoint, if there is
# one. A job that fails or is cancelled is not queued again.
most_restarts=20

trap 'interrupted=yes; kill -TERM $(jobs -p)' TERM
hvdliterun python train.py &
run=$!
interrupted=yes
while [ "$interrupted" = yes ]; do # a signal ends `wait` early
    interrupted=no
    wait "$run"
    code=$?
done

state=$(squeue --noheader --format=%T --jobs="$SLURM_JOB_ID")
if [ "$code" -eq 143 ] && [ "$state" = RUNNING ] && [ "${SLURM_RESTART_COUNT:-0}" -lt "$most_restarts" ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
