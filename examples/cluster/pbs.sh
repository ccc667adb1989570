#!/bin/bash
# A job for PBS, written by `hvdliterun --template pbs`. Submit it with: qsub pbs.sh
# Its lines follow the scheduler's manual. hvdlite's developers have never run it on such a cluster.
#PBS -N train
#PBS -l select=2:ncpus=4:mpiprocs=4
#PBS -l place=scatter
# The job has select x mpiprocs ranks. Change them above, and nowhere else. With GPUs: add :ngpus=4.
##PBS -q NAME
#PBS -l walltime=01:00:00
#PBS -j oe
#PBS -r y

# Load here what a shell on a compute node lacks:
# module load openmpi
# source ~/venv/bin/activate

cd "$PBS_O_WORKDIR" || exit
hvdliterun python train.py
