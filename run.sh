#!/usr/bin/env bash
# bash run.sh [MODE] [NAME=VALUE ...]
#
#   (no mode)   trains with the constants of train_dflash.py when their devices exist, else runs the demo
#   train       trains with the constants, never falls back
#   node        the same on several machines, one call on each with the same NAME=VALUE:
#                   NNODES=2 NODE_RANK=0 MASTER_ADDR=10.0.0.1 bash run.sh node ...   on 10.0.0.1
#                   NNODES=2 NODE_RANK=1 MASTER_ADDR=10.0.0.1 bash run.sh node ...   on the other
#               machine 0 holds OUT; MASTER_PORT, 29500, is open there. ROWS_PER_STEP is each machine's
#   demo        a small real run: target, training, one held-out prompt decoded; minutes on 2 CPU cores
#   test        the tests: those that take seconds, test_smoke.py, then all of tests/ (about twelve minutes)
#   lint        ruff, with the rules of pyproject.toml
#   bench       dev/bench.py
#   inspect [N] what is in DATA, with N conversations shown
#   eval        tau of CKPT on EVAL_DATA        generate    one PROMPT decoded with CKPT
#   tools/NAME.py, dev/NAME.py   one of the programs there; --help says what it does
#
# NAME=VALUE overrides a constant of train_dflash.py, or of the program. Python 3.11 or newer. Packages go to
# .venv, made on the first call; PYTHON=/path/to/python bash run.sh ... uses an environment that has them.
set -euo pipefail
cd "$(dirname "$0")"

die() { echo "run.sh: $*" >&2; exit 1; }
usage() { sed -n '2,/^set/{/^#/p}' "$0"; }
misused() { usage >&2; echo "run.sh: $*" >&2; exit 2; }

# the lowest Python that transformers and the trainer run on
check_version() {
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
        die "$1 is $("$1" -V 2>&1), 3.11 or newer is needed: PYTHON=/path/to/python bash run.sh"
}

make_venv() {
    command -v python3 >/dev/null || die "python3 is missing (Debian: apt install python3 python3-venv)"
    check_version python3
    python3 -c 'import ensurepip, venv' 2>/dev/null ||
        die "python3 cannot make .venv, the Debian package python3-venv is missing: apt install python3-venv"
    echo "run.sh: making .venv"
    python3 -m venv --clear .venv
}

# The stamp, a copy of requirements.txt, is written last: an install that was cut short is done again.
environment() {
    if [[ -n "${PYTHON:-}" ]]; then
        command -v "$PYTHON" >/dev/null || die "PYTHON=$PYTHON is not a program"
        check_version "$PYTHON"
        "$PYTHON" -c 'import torch, transformers, safetensors' 2>/dev/null ||
            die "PYTHON=$PYTHON cannot import torch, transformers and safetensors (see requirements.txt)"
        return
    fi
    PYTHON=.venv/bin/python
    "$PYTHON" -m pip --version >/dev/null 2>&1 || make_venv
    check_version "$PYTHON"
    if ! cmp -s requirements.txt .venv/installed.txt; then
        echo "run.sh: installing requirements.txt into .venv"
        "$PYTHON" -m pip install -r requirements.txt || die "pip could not install them (see above)"
        cp requirements.txt .venv/installed.txt
    fi
}

# need PACKAGE [PIP_OPTION...]: one that only the demo or the tests use, as requirements-test.txt has it
need() {
    "$PYTHON" -c "import importlib.util as u, sys; sys.exit(u.find_spec('$1') is None)" && return
    local pinned
    pinned=$(grep "^$1==" requirements-test.txt)
    "$PYTHON" -m pip install "${@:2}" "$pinned" || die "pip could not install $pinned (see above)"
}

# setting NAME DEFAULT "$@": the value of the last NAME=VALUE, else the default
setting() {
    local name=$1 value=$2 word
    for word in "${@:3}"; do [[ $word != "$name="* ]] || value=${word#*=}; done
    echo "$value"
}

# forwarding COMMAND...: a signal to this shell goes to the command, which saves before it ends
forwarding() {
    local pid rc=0
    set -m   # else bash starts it deaf to Ctrl-C
    "$@" & pid=$!
    trap 'kill -TERM "$pid"' TERM
    trap 'kill -INT "$pid"' INT
    trap 'kill -HUP "$pid"' HUP
    wait "$pid" || rc=$?
    while kill -0 "$pid" 2>/dev/null; do rc=0; wait "$pid" || rc=$?; done   # a signal ends the wait alone
    trap - TERM INT HUP
    set +m
    return "$rc"
}

# A row of data/demo_eval.jsonl: never trained on.
held_out_prompt="Can you provide a code snippet in Python to generate a random 6-sided die roll?"

demo() {
    local out target
    out=$(setting OUT out/demo "$@") target=$(setting TARGET "" "$@")
    if [[ -z $target ]]; then
        need gguf
        target=$("$PYTHON" tools/demo_target.py | tail -n 1)
    fi
    forwarding "$PYTHON" train_dflash.py demo "$@" "TARGET=$target" "OUT=$out"
    "$PYTHON" train_dflash.py generate TARGET_DEVICES=cpu MAX_NEW_TOKENS=64 "$@" "TARGET=$target" \
        "CKPT=$out/latest" "PROMPT=$held_out_prompt"
    echo "run.sh: try bash run.sh generate TARGET=$target TARGET_DEVICES=cpu CKPT=$out/latest PROMPT='...'"
}

# One process a machine, its threads do the rest. After a signal the last save gets ten minutes, not 30 s.
node() {
    local name
    for name in NNODES NODE_RANK MASTER_ADDR; do
        [[ -n ${!name:-} ]] || die "node: $name is not set; see bash run.sh help"
    done
    export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-600}
    exec "$PYTHON" -m torch.distributed.run --nproc_per_node=1 --nnodes="$NNODES" --node_rank="$NODE_RANK" \
        --master_addr="$MASTER_ADDR" --master_port="${MASTER_PORT:-29500}" train_dflash.py "$@"
}

tests() {
    local quick=(tests/test_arrows.py tests/test_settings.py tests/test_mask.py)
    need pytest
    need hypothesis
    need gguf
    need dflash --no-deps   # of its requirements the tests use what is there already
    echo "run.sh: 1 of 3, seconds: ${quick[*]}"
    "$PYTHON" -m pytest -q "${quick[@]}"
    echo "run.sh: 2 of 3, a minute: test_smoke.py, small real runs"
    "$PYTHON" test_smoke.py
    echo "run.sh: 3 of 3, about eleven minutes on two cores: tests/"
    "$PYTHON" -m pytest -q tests "${quick[@]/#/--ignore=}" "$@"
}

lint() {
    need ruff
    "$PYTHON" -m ruff check .
}

programs() { grep -l '^if __name__ == "__main__"' tools/*.py dev/*.py; }

run() { exec "$PYTHON" "$@"; }

# Trains where the devices of the constants exist, else shows the demo.
either() {
    local rc=0
    forwarding "$PYTHON" train_dflash.py if-possible "$@" || rc=$?
    [[ $rc == 3 ]] || exit "$rc"   # of missing devices alone
    echo "run.sh: running the demo instead (bash run.sh train insists on the devices above)"
    demo "$@"
}

mode=""
if [[ $# -gt 0 && $1 != *=* ]]; then mode=$1; shift; fi
case $mode in   # what is asked for is known before anything is installed
    help|-*) usage; exit 0 ;;
    "")    job=(either) ;;
    train) job=(run train_dflash.py) ;;
    node)  job=(node) ;;
    demo)  job=(demo) ;;
    test)  job=(tests) ;;
    lint)  job=(lint) ;;
    bench) job=(run dev/bench.py) ;;
    inspect|eval|generate|devices) job=(run train_dflash.py "$mode") ;;
    tools/*.py|dev/*.py)
        programs | grep -qx "$mode" || misused "$mode is no program; there are $(programs | paste -sd ' ')"
        job=(run "$mode") ;;
    *)     misused "mode '$mode' is unknown" ;;
esac
environment
"${job[@]}" "$@"
