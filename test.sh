#!/usr/bin/env bash
# Runs ruff's checks, then the tests: bash test.sh [pytest arguments], as in `bash test.sh -k launch` or `-m slow`.
# First creates the environment: requirements.txt and the packages that only the tests need.
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")" >/dev/null

test_requirements=('pytest>=8' 'pytest-xdist>=3.5' 'transformers>=5' 'tokenizers>=0.22.1' 'ruff==0.17.6' 'codespell>=2.4')
test_requirements+=('peft>=0.17')  # 3 MB, the oracle of test_lora.py: it loads our adapters, and we load its adapters
test_requirements+=('tensorboard>=2.16' 'wandb>=0.19')  # 150 MB, for test_log.py, which skips the tests of a missing tracker

source launch/env.sh
environment test "${test_requirements[@]}"
"$python" -m ruff check .
"$python" -m ruff format --check .
# Two tests at a time with one thread each are nearly twice as fast on two cores. A -m or -n among the arguments wins.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
exec "$python" -m pytest -q -n 2 --dist worksteal -m 'not gpu and not slow' "$@"
