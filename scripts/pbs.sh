#!/bin/bash
#PBS -N oktopk
#PBS -l select=2:system=polaris
#PBS -l place=scatter
#PBS -l filesystems=home:eagle
#PBS -l walltime=00:15:00
#PBS -q debug
#PBS -j oe
#
# Trains lstman4 with the reducer COMPRESSOR at the size CONFIG: see scripts/README.md.
# The values above are those of CONFIG=debug.
set -euo pipefail

COMPRESSOR=${COMPRESSOR:-oktopk}
CONFIG=${CONFIG:-debug}
known="dense|topkA|topkA2|topkAopt|topkDSA|gtopk|gaussiank|gaussiankconcat|gaussiankSA|oktopk|auto"
if [[ ! $COMPRESSOR =~ ^($known)$ ]]; then
  echo "COMPRESSOR='$COMPRESSOR': unknown; choose from ${known//|/ }" >&2
  exit 2
fi
# 128 dense steps, the trainer's default, are more than these runs have on so many workers.
case $CONFIG in
  debug) NODES=2 warmup_steps=4 ;;
  extended) NODES=4 warmup_steps=16 ;;
  *)
    echo "CONFIG='$CONFIG': unknown; choose from debug extended" >&2
    exit 2
    ;;
esac

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

if [[ -r "${PBS_NODEFILE:-}" ]]; then
  NODES=$(sort -u "$PBS_NODEFILE" | wc -l)
fi
RANKS_PER_NODE=${RANKS_PER_NODE:-4} # Polaris has four GPUs in a node
launcher=(mpiexec -n $((NODES * RANKS_PER_NODE)) --ppn "$RANKS_PER_NODE")

arguments=(train "lstm_$CONFIG" --reducer "$COMPRESSOR" --name "${COMPRESSOR}_$CONFIG")
arguments+=(--warmup-steps "$warmup_steps" --quiet True)
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
