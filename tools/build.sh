#!/usr/bin/env bash
# Builds a wheel and a source archive into a folder: tools/build.sh FOLDER. The same commit always gives the same bytes.
set -euo pipefail
cd "$(dirname "$0")/.."
folder=${1:?expected a folder for the packages}
python=${PYTHON:-.venv/bin/python}
# The time of the files in the archives: that of the commit, whenever and wherever it is built.
SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct)} "$python" -m hatchling build --directory "$folder"
