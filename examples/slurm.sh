#!/bin/bash
# Trains train_gpt.py on the nodes of a Slurm allocation, one worker a node. Call it where all nodes see the files, with
# elasticd in PATH: examples/slurm.sh --steps 2000
#
# elasticd.sbatch needs no service and no root: it starts an elasticd on every node and an etcd on the first, and ends
# them with the job. Twenty minutes are up: the job saves a checkpoint, is requeued and goes on. See docs/slurm.md.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
sbatch --nodes 2 --time 20 "$here/../deploy/slurm/elasticd.sbatch" --workers 1 "$here/train_gpt.py" "$@"
