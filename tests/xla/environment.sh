#!/usr/bin/env bash
# Makes the environment of the tests that need torch-xla, unless it is there, and prints the path of its Python.
#
#     tests/xla/environment.sh [PYTHON]
#
# It takes 7 GB with PyPI's build of torch, and its own place: torch-xla 2.9 loads with torch 2.9 alone. So it is kept in
# ~/.cache/ssm_trn, under a name that changes with what is to be installed. TORCH_INDEX means what it does in Makefile.
set -euo pipefail
cd "$(dirname "$0")/../.."
unset PYTHONPATH
python=${1:-python3}
if ! "$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))'; then
    echo "torch-xla 2.9 has no wheel for $("$python" --version): name Python 3.11 to 3.13, as in make PYTHON=python3.12" >&2
    exit 1
fi

# The requirements without the package: the tests run what is checked out.
requirements=$("$python" - <<'END'
import tomllib

with open("pyproject.toml", "rb") as file:
    project = tomllib.load(file)["project"]
extras = project["optional-dependencies"]
tools = [requirement for requirement in extras["dev"] if requirement.startswith("pytest")]
print(*project["dependencies"], *extras["xla-cpu"], *extras["hf"], *tools, sep="\n")
END
)
cache=${XDG_CACHE_HOME:-$HOME/.cache}/ssm_trn
version=$(cat constraints/xla-cpu.txt - <<<"$requirements $("$python" --version)" | sha256sum | cut -c1-12)
environment=$cache/xla-$version

mkdir -p "$cache"
exec 9>"$cache/lock"
flock 9
if [ ! -d "$environment" ]; then
    echo "installing torch-xla and what goes with it into $environment: some minutes, once" >&2
    rm -rf "$cache"/xla-*.unfinished
    "$python" -m venv "$environment.unfinished"
    install=("$environment.unfinished/bin/python" -m pip install --quiet --disable-pip-version-check)
    if [ -n "${TORCH_INDEX:-}" ]; then
        "${install[@]}" --index-url "$TORCH_INDEX" "$(grep '^torch==' constraints/xla-cpu.txt)" >&2
    fi
    "${install[@]}" -c constraints/xla-cpu.txt -r <(echo "$requirements") >&2
    mv "$environment.unfinished" "$environment" # a whole one, however the last attempt ended
fi
echo "$environment/bin/python"
