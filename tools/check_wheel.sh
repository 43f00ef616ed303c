#!/usr/bin/env bash
# Installs a wheel into a clean environment of each Python that is at hand from 3.11 on, and tries it:
# tools/check_wheel.sh WHEEL. PYTHONS="python3.11 /opt/python3.12" names them instead.
#
# torch is left out, because it is large: the version, the command line and the server's front end work without it.
set -euo pipefail
cd "$(dirname "$0")/.."
wheel=$(realpath "${1:?expected a wheel}")
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

pythons=${PYTHONS:-}
if [ -z "$pythons" ]; then
    for minor in 11 12 13 14; do
        for found in "$(command -v "python3.$minor" || true)" "$HOME"/.pyenv/versions/"3.$minor".*/bin/python; do
            # A shim of pyenv may be on the path and yet start nothing.
            if [ -n "$found" ] && "$found" -c '' 2>/dev/null; then
                pythons+=" $found"
                break
            fi
        done
    done
fi
[ -n "$pythons" ] || { echo "expected a Python from 3.11 on, got none; name one in PYTHONS" >&2; exit 1; }

grep '^Requires-Dist:' <(unzip -p "$wheel" '*.dist-info/METADATA') | grep -v 'extra ==' | sed 's/^Requires-Dist: //' \
    | grep -v '^torch' > "$scratch/needed.txt"
for python in $pythons; do
    environment=$scratch/$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
    "$python" -m venv "$environment"
    pip=("$environment/bin/python" -m pip --disable-pip-version-check install --quiet --no-compile)
    "${pip[@]}" --requirement "$scratch/needed.txt"
    "${pip[@]}" --no-deps "$wheel"
    # From another folder, so that nothing is imported from this one.
    (
        cd "$scratch"
        unset PYTHONPATH
        imported=$("$environment/bin/python" -c 'import sightline; print(sightline.__version__)')
        told=$("$environment/bin/sightline" --version)
        [[ $told == *"$imported"* ]] || { echo "expected version $imported, got: $told" >&2; exit 1; }
        "$environment/bin/sightline" serve --help > help.txt
        grep -q -- --port help.txt
        "$environment/bin/python" -c 'from sightline.server.serve import Server'
        echo "ok: $("$environment/bin/python" --version), sightline $imported"
    )
done
