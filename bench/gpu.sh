#!/usr/bin/env bash
# What only a GPU can tell, unattended: installs without a network, then runs bench/gpu.py.
#
#     bash bench/gpu.sh            one call of under ten minutes; exit code 75: run it again, 0: all is done
#     bash bench/gpu.sh all        calls itself until all is done, about forty minutes on one GPU of 80 GB or more
#
# Before, where there is a network, with the GPU machine's system and Python, a folder of wheels:
#
#     pip wheel --wheel-dir wheels --requirement requirements.txt "setuptools>=77" wheel
#     pip wheel --wheel-dir wheels --no-deps --requirement requirements-gpu.txt
#
# WHEELS (default: wheels) is that folder; OUT (bench/gpu.jsonl) gets a line for each result, and beside it a file with
# tables; FOR (540) is a call's seconds;
# PYTHON (python3) makes the environment build/gpu, in which TRL's command line is measured too: the same versions.
# HOME_OF_TUNER, an environment that has everything already, takes the installation's place.
#
# Where there is no git, COMMIT names the commit. This script was not run on a GPU so far; which parts of bench/gpu.py
# were, its top says. The folder of wheels was made with torch's for CPUs; installing from it was not run.
set -euo pipefail
cd "$(dirname "$0")/.."
WHEELS=${WHEELS:-wheels}
OUT=${OUT:-bench/gpu.jsonl}
FOR=${FOR:-540}
PYTHON=${PYTHON:-python3}
HOME_OF_TUNER=${HOME_OF_TUNER:-build/gpu}
began=$SECONDS

install() {
    "$PYTHON" -m venv build/gpu
    build/gpu/bin/pip install --quiet --no-index --find-links "$WHEELS" "setuptools>=77" wheel
    build/gpu/bin/pip install --quiet --no-index --find-links "$WHEELS" --requirement requirements.txt
    build/gpu/bin/pip install --quiet --no-index --no-deps --find-links "$WHEELS" --requirement requirements-gpu.txt
    build/gpu/bin/pip install --quiet --no-index --no-deps --no-build-isolation --editable .
    touch build/gpu/.installed
}

if [ "${1:-}" = all ]; then
    status=75
    while [ $status -eq 75 ]; do
        status=0
        bash "$0" || status=$?
    done
    exit $status
fi

[ "$HOME_OF_TUNER" != build/gpu ] || [ -f build/gpu/.installed ] || install

# The peers' folder of this machine holds TRL alone, in the same environment.
export PEERS=$PWD/build/gpu-peers
mkdir -p "$PEERS"
if [ ! -e "$PEERS/trl/.installed" ]; then
    mkdir -p "$PEERS/trl"
    for part in bin lib pyvenv.cfg; do ln -sfn "$(cd "$HOME_OF_TUNER" && pwd)/$part" "$PEERS/trl/$part"; done
    touch "$PEERS/trl/.installed"
fi

export HF_HUB_OFFLINE=1 PYTHONPATH="$PWD"
exec "$HOME_OF_TUNER/bin/python" -m bench.gpu --out "$OUT" --for "$((FOR - (SECONDS - began)))"
