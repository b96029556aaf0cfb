#!/usr/bin/env bash
# Installs a wheel in a bare environment beside PyPI's `schema`, and uses it there from another folder.
# `make wheel` calls it: VENV=.venv tests/packaging/try_wheel.sh dist/pygraphd-*.whl; VENV names the torch to take.
set -euo pipefail

wheel=$(realpath "$1")
repository=$(cd "$(dirname "$0")/../.." && pwd)
torch=$("$VENV/bin/python" -c 'import importlib.metadata as m; print(m.version("torch").split("+")[0])')
work=$(mktemp -d)
export PYGRAPHD_HOME="$work/home" TORCHINDUCTOR_CACHE_DIR="$work/inductor" TRITON_CACHE_DIR="$work/triton" TORCHINDUCTOR_VEC_ISA_OK=1 # see tests/conftest.py

finish() {
    "$work/venv/bin/pygraphd" stop >/dev/null 2>&1 || true
    rm -rf "$work"
}
trap finish EXIT

"$VENV/bin/python" -m venv "$work/venv"
"$VENV/bin/python" "$repository/tests/packaging/copy_pinned.py" \
    "$("$work/venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')" "$repository"/requirements/{runtime,torch}.txt
"$work/venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-compile \
    --constraint "$repository/requirements/runtime.txt" --constraint "$repository/requirements/torch.txt" \
    schema==0.7.8 numpy "torch==$torch" "$wheel"

cp "$repository/tests/packaging/use_installed.py" "$repository/examples/quickstart.py" "$work"
cd "$work"
venv/bin/pip check
venv/bin/pygraphd --version
venv/bin/python use_installed.py
installed=$(venv/bin/python -c 'import pathlib, pygraphd; print(pathlib.Path(pygraphd.__file__).parent)')
# Each file of the package, those behind its links too: what package-data leaves out is missing for everybody but us.
(cd "$repository/pygraphd" && find -L . -type f ! -path '*/__pycache__/*') | while read -r file; do
    cmp "$repository/pygraphd/$file" "$installed/$file"
done
for run in first second; do
    echo "quick start with the wheel, $run run:"
    PYGRAPH=1 PYGRAPHD_AUTOSTART=1 PYGRAPH_SUMMARY="$work/$run.json" venv/bin/python quickstart.py
done
venv/bin/python use_installed.py second.json
