#!/usr/bin/env bash
# Runs ruff's checks, then the tests: bash test.sh [pytest arguments], as in `bash test.sh -k launch` or `-m slow`.
# First creates the environment: requirements.txt and requirements-test.txt.
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")" >/dev/null
source launch/env.sh
environment test
"$python" -m ruff check .
"$python" -m ruff format --check .
# Two tests at a time with one thread each are nearly twice as fast on two cores. A -m or -n among the arguments wins.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
exec "$python" -m pytest -q -n 2 --dist worksteal -m 'not gpu and not slow' "$@"
