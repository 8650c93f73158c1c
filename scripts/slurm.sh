#!/bin/bash
#SBATCH --job-name=oktopk
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --cpus-per-task=8
#SBATCH --time=00:15:00
#SBATCH --output=%x-%j.out
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
  debug) warmup_steps=4 ;;
  extended) warmup_steps=16 ;;
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

oktopk=oktopk
if [[ -x .venv/bin/oktopk ]]; then
  oktopk=$PWD/.venv/bin/oktopk
fi

launcher=(srun --kill-on-bad-exit=1 --cpus-per-task="${SLURM_CPUS_PER_TASK:-8}")

arguments=(train "lstm_$CONFIG" --reducer "$COMPRESSOR" --name "${COMPRESSOR}_$CONFIG")
arguments+=(--warmup-steps "$warmup_steps" --quiet True)
if [[ -n ${DATA_DIR:-} ]]; then
  arguments+=(--data-dir "$DATA_DIR")
fi
read -r -a extra <<<"${EXTRA:-}" # more settings, split at blanks

command=("${launcher[@]}" "$oktopk" "${arguments[@]}" "${extra[@]}" "$@")
printf -v line '%q ' "${command[@]}"
echo "${line% }"
if [[ $print == true ]]; then
  exit 0
fi
exec "${command[@]}"
