#!/usr/bin/env bash
# This script builds the planner's page into a folder that any web server serves:
#     bash results/lab/planner_page/build.sh build/page
#     python -m http.server --directory build/page
# It needs npm, node and pip, which download Python for browsers and its packages. Their hashes are
# pinned here and in requirements.txt.
set -euo pipefail
target=$(realpath -m "$1")
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$here/../../..
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"

npm --silent pack pyodide@314.0.7 >npm.txt
sha512sum --check --quiet <<'HASH'
d18bd7c4485f11da4b7dbfd790cd8114078c44eab488c517d9bcf31fda4eb6dc8c716930abe1db139bb2b860fcd8b37bcb6abe48dbe2ffa579244b0e943d91d4  pyodide-314.0.7.tgz
HASH
tar -xzf pyodide-314.0.7.tgz
mkdir -p page/runtime
mv package/{pyodide.mjs,pyodide.asm.mjs,pyodide.asm.wasm,pyodide-lock.json,python_stdlib.zip} page/runtime

python -m pip install --quiet --no-deps --no-compile --only-binary=:all: --require-hashes \
    --platform=pyemscripten_2026_0_wasm32 --python-version=3.14 --abi=cp314 \
    --requirement "$here/requirements.txt" --target planner
cp -r "$root"/{real_model_example.py,distributed_training,strategies,configs} planner
mkdir -p planner/results/lab/planner_page
cp "$here/traced.json" planner/results/lab/planner_page
cp "$here"/{index.html,page.css,page.js,worker.js,start.mjs,ask.py} page
(cd planner && python -m zipfile --create ../page/planner.zip ./*)
node "$here/pack.mjs" page

rm -rf "$target"
mkdir -p "$(dirname "$target")"
mv page "$target"
echo "Built $target. To see the page, run:"
echo "  python -m http.server --directory $(realpath --relative-to="$OLDPWD" "$target")"
