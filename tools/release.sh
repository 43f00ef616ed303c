#!/usr/bin/env bash
# Prepares a release. Without --tag it changes nothing: it checks the tree, the version and the changelog, builds the
# packages twice, compares them, and tries the wheel in clean environments. With --tag it then tags the commit. It
# publishes nothing: the packages are in dist/, and pushing the tag and uploading them is up to you.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}

fail() { echo "release: $1" >&2; exit 1; }

case ${1:-} in
    '' | --tag) ;;
    *) fail "expected nothing or --tag, got $1" ;;
esac

version=$("$python" -c 'import runpy; print(runpy.run_path("src/sightline/version.py")["__version__"])')
[[ $version =~ ^[0-9]+\.[0-9]+\.[0-9]+$ ]] || fail "expected a version of three numbers in src/sightline/version.py, got $version"
[ -z "$(git status --porcelain)" ] || fail "expected a clean tree, got changes; commit or stash them"
grep -q "^## \[$version\] - [0-9-]*$" CHANGELOG.md || fail "expected an entry '## [$version] - DATE' in CHANGELOG.md"
! git rev-parse -q --verify "refs/tags/v$version" > /dev/null || fail "expected a new version, got $version, which has a tag"

rm -rf dist build/again
PYTHON=$python tools/build.sh dist
PYTHON=$python tools/build.sh build/again
for built in dist/*; do
    cmp "$built" "build/again/$(basename "$built")" || fail "expected the same bytes of two builds, got two of $(basename "$built")"
done
tools/check_wheel.sh dist/*.whl
sha256sum dist/*

if [ "${1:-}" = --tag ]; then
    git tag --annotate "v$version" --message "Sightline $version"
    echo "tagged v$version; next: git push origin v$version, and upload dist/"
else
    echo "everything is in order for v$version; run tools/release.sh --tag to tag it"
fi
