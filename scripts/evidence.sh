#!/usr/bin/env bash
# The experiment on sampling distribution replay, small enough for two cores: arms that differ in one setting, over several seeds, all
# from one starting policy. Writes a table and a report. When it is called again, it skips finished runs and resumes interrupted ones.
#
#   bash scripts/evidence.sh                               # arms a to e
#   bash scripts/evidence.sh --arms a,c --seeds 1 --steps 40 --folder runs/quick
#   bash scripts/evidence.sh --arms c,f,g,h --folder runs/nvfp4        # NVFP4
#
#   --arms    a  full sampling, top_p = 1
#             b  top_p < 1, the trainer normalises over the full vocabulary
#             c  top_p < 1, the trainer normalises over the recorded keep-sets
#             d  (c) with Muon
#             e  (c) without routing replay
#             f  (c) with NVFP4 weights on the servers and quantisation-aware training
#             g  (c) with NVFP4 weights on the servers alone
#             h  (f) with the experts' weights alone in NVFP4
#   --seeds   of prompts and sampling; each seed runs all arms before the next one begins
#   --steps   of each run
#   --jobs    runs at a time; a run keeps about one core busy
#   --folder  runs are in FOLDER/ARM-seedN, the table in FOLDER/table.md, the report in FOLDER/report.html
set -euo pipefail
((BASH_VERSINFO[0] * 100 + BASH_VERSINFO[1] >= 501)) || { echo "evidence: bash $BASH_VERSION; 5.1 or later is needed (wait -n -p)" >&2; exit 2; }
cd "$(dirname "${BASH_SOURCE[0]}")/.."

arms=a,b,c,d,e seeds=1,2,3 steps=160 jobs=2 folder=runs/evidence
usage() { sed -n '2,/^set /{s/^# \{0,1\}//;/^set /!p}' scripts/evidence.sh; }
while (($#)); do
    case $1 in
        --arms | --seeds | --steps | --jobs | --folder)
            (($# > 1)) || { echo "evidence: $1 needs a value" >&2; exit 2; }
            printf -v "${1#--}" %s "$2"; shift 2 ;;
        -h | --help) usage; exit 0 ;;
        *) echo "evidence: unknown option $1; see bash scripts/evidence.sh --help" >&2; exit 2 ;;
    esac
done
[[ $arms =~ ^[a-h](,[a-h])*$ ]] || { echo "evidence: --arms $arms: must be letters from a to h, separated by commas" >&2; exit 2; }
[[ $seeds =~ ^[0-9]{1,9}(,[0-9]{1,9})*$ ]] || { echo "evidence: --seeds $seeds: must be integers, separated by commas" >&2; exit 2; }
for option in arms seeds; do
    twice=$(tr , '\n' <<<"${!option}" | sort | uniq -d)
    [[ -z $twice ]] || { echo "evidence: --$option ${!option}: $twice is given twice" >&2; exit 2; }
done
[[ $steps =~ ^[1-9][0-9]{0,6}$ ]] || { echo "evidence: --steps $steps: must be an integer above 0" >&2; exit 2; }
[[ $jobs =~ ^[1-9][0-9]{0,2}$ ]] || { echo "evidence: --jobs $jobs: must be an integer above 0" >&2; exit 2; }

bash scripts/setup.sh
bin=${VENV:-.venv}/bin
config=model_configs/evidence-cpu.toml

overrides_of() {
    case $1 in
        a) echo --rollouts.top_p 1.0 --rollouts.top_k 0 ;;
        b) echo --objective.keep_set_replay false ;;
        c) ;;
        d) echo --optimizer.name muon ;;
        e) echo --objective.routing_replay false ;;
        f) echo --precision.training qat --precision.rollouts nvfp4 ;;
        g) echo --precision.rollouts nvfp4 --weight_sync.probe_tolerance 100.0 ;; # the probes differ: this arm shows by how much
        h) echo "--precision.training qat --precision.rollouts nvfp4 --precision.modules=[\"experts\"]" ;;
    esac
}
# A run that ends, finished or stopped, leaves its number of steps in summary.json.
steps_done() { sed -n 's/.*"steps": \([0-9]*\).*/\1/p' "$folder/$1/summary.json" 2>/dev/null || true; }
finished() { [[ $(steps_done "$1") -ge $2 ]]; }

# train NAME STEPS OVERRIDES...: starts the run, or resumes it where it was interrupted. Its output goes to FOLDER/NAME.log. It runs in its own
# session: Ctrl-C reaches this script alone, which signals each run once; a run that is signalled twice stops without saving.
train() {
    local name=$1 last=$2 from=$config resume=()
    shift 2
    if [[ -f $folder/$name/config.toml ]]; then from=$folder/$name/config.toml resume=(--resume); fi
    exec setsid "$bin/megatron-rl" train "$from" "${resume[@]}" --run.folder "$folder" --run.name "$name" --run.steps "$last" "$@" >>"$folder/$name.log" 2>&1
}

declare -A running=() # process id -> name
stop() {
    kill -TERM "${!running[@]}" 2>/dev/null || true
    wait
    echo "evidence: stopped; the same command resumes the runs"
    exit 130
}
trap stop INT TERM HUP

# Runs are resumed with the configuration that they started with; runs of another experiment must not be in the same table.
mkdir -p "$folder"
if [[ -f $folder/experiment.toml ]]; then
    cmp -s "$config" "$folder/experiment.toml" || { echo "evidence: $folder was started with another version of $config (its experiment.toml); give another --folder" >&2; exit 2; }
elif [[ -d $folder/start ]]; then
    echo "evidence: $folder holds runs of an earlier experiment; give another --folder" >&2; exit 2
else
    cp "$config" "$folder/experiment.toml"
fi

# One starting policy for all runs: the supervised start of a run that ends after its first step.
if ! finished start 1; then
    echo "evidence: the starting policy, about two minutes"
    train start 1 &
    running[$!]=start
    wait $! || { tail -n 15 "$folder/start.log" >&2; echo "evidence: the starting policy could not be trained; the log: $folder/start.log" >&2; exit 1; }
    running=()
fi

names=()
for seed in ${seeds//,/ }; do for arm in ${arms//,/ }; do names+=("$arm-seed$seed"); done; done
left=()
for name in "${names[@]}"; do finished "$name" "$steps" || left+=("$name"); done
echo "evidence: ${#left[@]} of ${#names[@]} runs to do, about $(( ${#left[@]} * 2 * steps / jobs / 60 )) minutes at 2 s a step, as measured with two runs at a time on two idle cores"

done_here=0
await_one() {
    local pid status=0 name
    wait -n -p pid "${!running[@]}" || status=$?
    name=${running[$pid]}
    unset "running[$pid]"
    if ((status == 0)); then
        done_here=$((done_here + 1))
        echo "evidence: $name done; at this pace $(( (${#left[@]} - done_here) * SECONDS / done_here / 60 )) minutes are left"
    else
        echo "evidence: $name FAILED, see $folder/$name.log:"
        tail -n 3 "$folder/$name.log"
    fi
}
SECONDS=0
for name in "${left[@]}"; do
    if ((${#running[@]} == jobs)); then await_one; fi
    # shellcheck disable=SC2046 # overrides are words without blanks
    train "$name" "$steps" --run.seed "${name##*seed}" --model.architecture none --model.path "$folder/start/supervised" --supervised.steps 0 \
        $(overrides_of "${name%%-*}") &
    running[$!]=$name
done
while ((${#running[@]})); do await_one; done

status=0
"$bin/python" scripts/evidence_table.py "$folder" --arms "$arms" --seeds "$seeds" --steps "$steps" | tee "$folder/table.md" || status=$?
done_runs=()
for name in "${names[@]}"; do if finished "$name" "$steps"; then done_runs+=("$folder/$name"); fi; done
if ((${#done_runs[@]})); then "$bin/megatron-rl" report "${done_runs[@]}" --out "$folder/report.html"; fi
exit "$status"
