#!/usr/bin/env bash
# Put a headless Chromium into the environment (.venv/browser), for the tests of pages: 70 MB to fetch, 220 MB on disk, some seconds.
#
#   bash scripts/browser.sh
#
# It is the one of the npm package @sparticuz/chromium, which carries the program and the libraries that it needs, so nothing is
# installed on the machine. It needs npm and node to fetch and unpack it. A machine of another kind than Linux on x86-64 needs a
# Chromium of its own: HYBRIDRL_BROWSER=/path/to/chromium, or chromium or google-chrome on the PATH.
#
# Environment: HYBRIDRL_VENV     the environment's folder; .venv by default
#              HYBRIDRL_BROWSER  a browser to use instead; then nothing is fetched
set -euo pipefail
cd "$(dirname "$0")/.."
version=153.0.0
digest=20e5656fcdcf4118ede85edfb9d6bb9cc1bbb7ffb8b75622fffbcf36a835c3c0

[ "${1:-}" != --help ] || { sed -n '2,11s/^# \{0,1\}//p' "$0"; exit 0; }
[ -z "${HYBRIDRL_BROWSER:-}" ] || exit 0
folder=${HYBRIDRL_VENV:-.venv}/browser
[ "$(cat "$folder/version" 2>/dev/null)" != "$version" ] || exit 0
fail() { printf 'browser.sh: %s\n' "$*" >&2; exit 1; }
if [ "$(uname -sm)" != "Linux x86_64" ] || ! command -v npm >/dev/null || ! command -v node >/dev/null; then
    for name in chromium chromium-browser google-chrome chrome-headless-shell; do
        ! command -v "$name" >/dev/null || exit 0
    done
    fail "npm and node on Linux x86_64, or an installed Chromium, are needed for the tests of pages (HYBRIDRL_BROWSER=/path/to/it)."
fi

printf 'installing Chromium for the tests of pages into %s\n' "$folder"
mkdir -p "$folder"
work=$(mktemp -d "$folder/.new.XXXXXX")
trap 'rm -rf "$work"' EXIT
folder=$PWD/$folder
case ${HYBRIDRL_VENV:-.venv} in /*) folder=${HYBRIDRL_VENV}/browser ;; esac
cd "$work"
npm pack --silent "@sparticuz/chromium@$version" >/dev/null || fail "npm could not fetch @sparticuz/chromium@$version."
archive=$(echo ./*.tgz)
echo "$digest  $archive" | sha256sum --check --quiet || fail "$archive is not the file that is expected."
tar xzf "$archive"
node - <<'JAVASCRIPT'
const fs = require("fs"), zlib = require("zlib"), { pipeline } = require("stream");
for (const name of ["chromium", "al2023.tar", "fonts.tar"])
  pipeline(fs.createReadStream(`package/bin/${name}.br`), zlib.createBrotliDecompress(), fs.createWriteStream(name),
           error => { if (error) { console.error(error); process.exit(1); } });
JAVASCRIPT
chmod +x chromium
tar xf al2023.tar # lib/: NSS and expat
tar xf fonts.tar
rm -rf package "$archive" ./*.tar
echo "$version" >version
for name in *; do rm -rf "${folder:?}/$name"; mv "$name" "$folder/"; done
