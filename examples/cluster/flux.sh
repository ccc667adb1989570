#!/bin/bash
# A job for Flux, written by `hvdliterun --template flux`. Submit it with: flux batch flux.sh
# Its lines follow the scheduler's manual. hvdlite's developers have never run it on such a cluster.
# flux: --job-name=train
# flux: -N 2
# flux: -n 8
# The job has -n ranks on -N nodes. If you change -n, change -np below, too. With GPUs: add a line with -g 1.
# flux: -t 60m
# flux: --output=train-{{id}}.out

# Load here what a shell on a compute node lacks:
# module load openmpi
# source ~/venv/bin/activate

hvdliterun -np 8 python train.py
