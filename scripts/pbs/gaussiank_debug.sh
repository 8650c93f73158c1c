#!/bin/bash
#PBS -N gaussiank_debug
#PBS -l select=2:system=polaris
#PBS -l place=scatter
#PBS -l filesystems=home:eagle
#PBS -l walltime=00:15:00
#PBS -q debug
#PBS -j oe
#
# gaussiank, debug: see scripts/README.md.
# Made from scripts/job.sh.in by scripts/make_jobs.py: change those, not this.
set -euo pipefail

print=false
if [[ ${1:-} == --print ]]; then
  print=true
  shift
fi

cd "${PBS_O_WORKDIR:-.}" # PBS starts jobs in the home folder
oktopk=oktopk
if [[ -x .venv/bin/oktopk ]]; then
  oktopk=$PWD/.venv/bin/oktopk
fi

NODES=2
if [[ -r "${PBS_NODEFILE:-}" ]]; then
  NODES=$(sort -u "$PBS_NODEFILE" | wc -l)
fi
RANKS_PER_NODE=${RANKS_PER_NODE:-4}
launcher=(mpiexec -n $((NODES * RANKS_PER_NODE)) --ppn "$RANKS_PER_NODE")

# 128 dense steps, the default, are more than these runs have on so many workers.
arguments=(train lstm_debug --compressor gaussiank --name gaussiank_debug --warmup-steps 4 --quiet True)
if [[ -n ${DATA_DIR:-} ]]; then
  arguments+=(--data-dir "$DATA_DIR")
fi
# qsub passes no arguments on: EXTRA takes them, split at blanks
read -r -a extra <<<"${EXTRA:-}"

command=("${launcher[@]}" "$oktopk" "${arguments[@]}" "${extra[@]}" "$@")
printf -v line '%q ' "${command[@]}"
echo "${line% }"
if [[ $print == true ]]; then
  exit 0
fi
exec "${command[@]}"
