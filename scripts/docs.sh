#!/usr/bin/env bash
# Build the documentation site into build/docs, or show it while you write:
#
#   bash scripts/docs.sh            # build; a broken link, anchor or page missing from the navigation is an error
#   bash scripts/docs.sh serve      # build, serve on http://127.0.0.1:8000, and rebuild on every change
#
# Installs MkDocs into .venv-docs (10 s, once), at the versions of constraints/docs.txt. The build needs no network, and
# build/docs/index.html opens from disk (its search works when served).
#
# Environment: PYTHON            the Python (>= 3.11) to build the environment with
#              HYBRIDRL_DOCS_VENV the environment's folder; .venv-docs by default
set -euo pipefail
cd "$(dirname "$0")/.."
fail() { printf 'docs.sh: %s\n' "$*" >&2; exit 1; }

command=${1:-build}
case "$command" in
    build | serve) ;;
    -h | --help) sed -n '2,11s/^# \{0,1\}//p' "$0"; exit 0 ;;
    *) fail "unknown command '$command': build or serve" ;;
esac

venv=${HYBRIDRL_DOCS_VENV:-.venv-docs}
stamp=$venv/installed.txt
if ! cmp -s constraints/docs.txt "$stamp"; then
    [ -x "$venv/bin/python" ] || "${PYTHON:-python3}" -m venv "$venv" || fail "cannot create $venv; name a Python 3.11 or newer: PYTHON=..."
    "$venv/bin/python" -m pip --disable-pip-version-check --no-input install --quiet -r constraints/docs.txt
    cp constraints/docs.txt "$stamp"
fi

# The pages under their own paths, as links, so that a relative link means the same in the repository and on the site.
tree=build/docs_tree
rm -rf "$tree"
mkdir -p "$tree"
for part in README.md CONTRIBUTING.md CHANGELOG.md LICENSE configs docs examples recipes; do
    ln -s "$PWD/$part" "$tree/$part"
done
mkdir "$tree/tests"
ln -s "$PWD/tests/README.md" "$tree/tests/README.md"

export NO_MKDOCS_2_WARNING=1 # about a future release; the version is pinned
exec "$venv/bin/mkdocs" "$command"
