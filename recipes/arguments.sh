# The words of a recipe's command line. Read by recipes/common.sh and recipes/pairs.sh, with the words of their own.
#
# Sets root, name, smoke, words, python and out, and the function fail. HYBRIDRL_PYTHON sets the interpreter, OUT the
# output folder.
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"
fail() { printf '%s\n' "$*" >&2; exit 2; }
name=${1:?name of a recipe}
shift
[ -f "recipes/$name/$name.yaml" ] || fail "recipes: there is no recipe $name"
smoke=""
words=()
for word in "$@"; do
    case "$word" in
        --smoke) smoke=yes ;;
        -h | --help) sed -n '2,5s/^# \{0,1\}//p' "recipes/$name/run.sh"; exit 0 ;;
        -*) fail "unknown option $word; there are --smoke and settings KEY=VALUE" ;;
        *) words+=("$word") ;;
    esac
done
python=${HYBRIDRL_PYTHON:-${HYBRIDRL_VENV:-.venv}/bin/python}
command -v "$python" >/dev/null || fail "no interpreter $python; install with scripts/install.sh, or set HYBRIDRL_PYTHON"
out=${OUT:-outputs/recipes}
mkdir -p "$out"
