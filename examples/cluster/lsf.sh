#!/bin/bash
# A job for LSF, written by `hvdliterun --template lsf`. Submit it with: bsub < lsf.sh
# Its lines follow the scheduler's manual. hvdlite's developers have never run it on such a cluster.
#BSUB -J train
#BSUB -n 8
#BSUB -R "span[ptile=4]"
# The job has -n ranks, ptile of them on each node. Change them above, and nowhere else. Where jsrun starts ranks, ask
# for nodes instead (-nnodes 2), and write hvdliterun -np 8.
##BSUB -gpu "num=4"
##BSUB -q NAME
#BSUB -W 01:00
#BSUB -o train-%J.out
# Two minutes before its time is up, the job gets SIGTERM. hvdliterun passes it on to the ranks.
#BSUB -wt 2
#BSUB -wa TERM
# To queue the job again then (hvdliterun's exit code is 143):
##BSUB -Q 143

# Load here what a shell on a compute node lacks:
# module load openmpi
# source ~/venv/bin/activate

hvdliterun python train.py
