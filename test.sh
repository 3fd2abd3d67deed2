#!/usr/bin/env bash
# Runs ruff's checks, then the tests: bash test.sh [pytest arguments], as in `bash test.sh -k launch` or `-m slow`.
# Makes the environment first, with what only the tests need on top of requirements.txt.
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")" >/dev/null

test_requirements=('pytest>=8' 'pytest-xdist>=3.5' 'transformers>=5' 'tokenizers>=0.21' 'ruff==0.17.6' 'codespell>=2.4')
test_requirements+=('peft>=0.17')  # 3 MB, the oracle of test_lora.py: it loads what is exported, and its adapters are trained on
test_requirements+=('tensorboard>=2.16' 'wandb>=0.19')  # 150 MB, for test_log.py, which skips what it lacks

source launch/env.sh
environment test "${test_requirements[@]}"
"$python" -m ruff check .
"$python" -m ruff format --check .
# Two at a time, with a thread each: nearly twice as fast on two cores. A -m or -n among the arguments comes later and wins.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
exec "$python" -m pytest -q -n 2 --dist worksteal -m 'not gpu and not slow' "$@"
