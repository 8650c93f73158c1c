#!/bin/bash
#SBATCH --job-name=topkDSA_extended
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=4
#SBATCH --cpus-per-task=8
#SBATCH --time=01:00:00
#SBATCH --output=%x-%j.out
#
# topkDSA, extended: see scripts/README.md.
# Made from scripts/job.sh.in by scripts/make_jobs.py: change those, not this.
set -euo pipefail

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

# 128 dense steps, the default, are more than these runs have on so many workers.
arguments=(train lstm_extended --compressor topkDSA --name topkDSA_extended --warmup-steps 16 --quiet True)
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
