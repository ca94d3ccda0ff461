#!/usr/bin/env bash
# Install the tools that `python -m bench` compares tuner with, each into an environment of its own:
#
#     bash bench/peers.sh [trl] [llamafactory] [axolotl]     without a name: all three
#
# bench/peers/NAME.txt pins what goes into build/peers/NAME; bench/peers/NAME-alone.txt is installed without what it
# asks for, because that cannot be had beside torch 2.13.0. A peer whose pins have not changed is left as it is. One that
# does not install is told at the end and is a row "not installed" in the tables; the others go on.
# PYTHON (default: .venv/bin/python) makes the environments; PEERS (default: build/peers) is where they are.
set -uo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-.venv/bin/python}
PEERS=${PEERS:-build/peers}

install() {
    local pins=bench/peers/$1.txt alone=bench/peers/$1-alone.txt home=$PEERS/$1
    local wanted installed
    wanted=$(cat "$pins" "$alone" 2>/dev/null | sha256sum)
    installed=$(cat "$home/.installed" 2>/dev/null)
    [ "$wanted" = "$installed" ] && { echo "$1: installed"; return 0; }
    "$PYTHON" -m venv --clear "$home" &&
        "$home/bin/pip" install --quiet --requirement "$pins" &&
        { [ ! -f "$alone" ] || "$home/bin/pip" install --quiet --no-deps --requirement "$alone"; } &&
        stand_in "$1" &&
        echo "$wanted" > "$home/.installed" && echo "$1: installed now"
}

# LLaMA-Factory imports torchaudio, for sound alone; its last wheel, 2.11, does not load beside torch 2.13.
stand_in() {
    [ "$1" != llamafactory ] || touch "$(echo "$PEERS"/llamafactory/lib/python3*/site-packages)/torchaudio.py"
}

failed=()
for peer in "${@:-trl llamafactory axolotl}"; do
    for one in $peer; do install "$one" || failed+=("$one"); done
done
if [ ${#failed[@]} -gt 0 ]; then
    echo "does not install beside torch 2.13.0: ${failed[*]}; pip's message is above" >&2
    exit 1
fi
