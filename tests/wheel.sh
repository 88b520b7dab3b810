#!/usr/bin/env bash
# Builds the wheel, installs it into a new environment, and makes data, pre-trains, reports and exports from an empty folder
# that knows nothing of the checkout. The new environment sees the libraries of PYTHON's, so that nothing is downloaded.
#
#   PYTHON=.venv/bin/python tests/wheel.sh
set -euo pipefail

checkout=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=$(command -v "${PYTHON:-python}")
case $python in /*) ;; *) python=$PWD/$python ;; esac
unset PYTHONPATH
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT

# In a copy: setuptools leaves build/ and *.egg-info where it builds. Only what git knows of, and what it would take.
mkdir "$place/source" "$place/empty"
git -C "$checkout" ls-files -z --cached --others --exclude-standard |
    (cd "$checkout" && while IFS= read -r -d '' file; do [[ ! -e $file && ! -L $file ]] || printf '%s\0' "$file"; done) |
    tar -C "$checkout" --null --files-from=- --create | tar -C "$place/source" --extract
"$python" -m pip wheel --quiet --disable-pip-version-check --no-deps --no-build-isolation --wheel-dir "$place" "$place/source"

"$python" -m venv --without-pip "$place/venv"
bin=$place/venv/bin
# As a line in a .pth the libraries come after the wheel, and the checkout's editable installation is not followed.
site=$("$bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
"$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > "$site/libraries.pth"
"$python" -m pip --python "$bin/python" install --quiet --disable-pip-version-check --no-deps --no-index --force-reinstall "$place"/*.whl

cd "$place/empty"
export PATH=$bin:$PATH HOME=$place/empty OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
python - "$site" <<'END'
import sys
from importlib.metadata import version
from pathlib import Path

import trp_scale

assert Path(trp_scale.__file__).is_relative_to(sys.argv[1]), f"{trp_scale.__file__} is not the wheel's"
assert trp_scale.__version__ == version("trp-scale"), (trp_scale.__version__, version("trp-scale"))
END
trp-scale --version
mkdir books
python -c 'print("The quick brown fox often jumps over the lazy dog, and she never looks back at him.\n\n" * 400)' > books/fox.txt
trp-scale shard-text --inputs books --documents blank_lines --output data --length 32 --vocab_size 200 --rows_per_block 8 \
    --tagger textblob --processes 1
trp-scale verify data
trp-scale pretrain --recipe pos_bert_tiny --data.path data --run_dir run --training.steps 3 --training.precision fp32 \
    --model.layers 1 --model.hidden_size 32 --model.heads 2 --model.intermediate_size 64 --batch.global_size 8 --batch.micro_size 8
trp-scale report --run run | grep "steps 3 (finished)"
[[ -s run/report.html ]]
trp-scale export --run run --to hf --output exported
python -c 'from transformers import BertForPreTraining; BertForPreTraining.from_pretrained("exported")'
trp-scale launch-files here
diff -r "$checkout/ds_configs" here/ds_configs
diff -r --exclude __pycache__ "$checkout/launch" here/launch
python here/launch/pretrain.py --help > /dev/null
python -m trp_scale recipes | grep pos_bert_base
echo "the wheel works outside the checkout"
