#!/usr/bin/env bash
# bash launch.sh [train] [launcher flags] [@recipe ...] [trainer flags]
#     trains on the machines that the file hosts lists, on all their visible GPUs or on their CPUs; without arguments
#     it trains the default recipe. Launcher flags:
#     --detach        start and return; this is the default without a terminal on several machines
#     --hosts A,B,C   these machines instead of the file's; localhost,localhost rehearses two nodes here
#     --nproc N       processes on each machine (default: slots=N in hosts, else as many as visible GPUs, or 1 on a CPU)
#     --retries N     relaunches without progress before giving up (default: 3 on several machines, 0 on one)
#     All other arguments go to train.py; python train.py --help lists its flags.
#     Ctrl-C ends the following of the log, with status 130; the run continues.
# bash launch.sh logs   [--out DIR] [HOST]       watch a run to its end, or show the output of a host
# bash launch.sh status [--out DIR]              its state, and its processes on every host
# bash launch.sh attach [--out DIR] [HOST]       go into its tmux session; Ctrl-B D comes back
# bash launch.sh stop   [--out DIR] [--now]      let it save and stop; --now, or once more: at once, without saving
# bash launch.sh doctor [--hosts A,B,C] [flags]  check every machine, and the network between them
# bash launch.sh sync   [--hosts A,B,C]          copy code and environment to every machine's same path
# bash launch.sh top    [--out DIR]              status again and again, until Ctrl-C
# bash launch.sh recipes                         the named runs, one line each
# bash launch.sh setup                           only make the environment, here
# Without --out: the newest run in runs/. Relative paths are meant from the folder where you stand, on every machine.
# Status: 0 finished or stopped, 2 a user error, 1 anything else. Settings: launch/settings.py.

# On every machine a session `flatland-RUN-ATTEMPT-NODE` holds one torchrun. launch/node.py acts on each machine;
# launch/cluster.py and launch/doctor.py run on this one.
# shellcheck disable=SC1091,SC2154
set -euo pipefail
stand=$PWD
cd -- "$(dirname -- "${BASH_SOURCE[0]}")" >/dev/null
source launch/env.sh

verbs='train setup recipes status logs attach stop doctor sync top'
verb=train
case ${1-@} in
  help | @* | -*) ;;
  *)
    [[ " $verbs " == *" $1 "* ]] || complain "'$1' is not a verb: $verbs. A recipe begins with @, a flag with --."
    verb=$1 && shift ;;
esac
[[ ! ${1-} =~ ^(help|-h|--help)$ ]] || verb=help
[[ ! $verb =~ ^(recipes|setup)$ || ! $* ]] || complain "$verb takes no arguments, not $*"
case $verb in
  help)
    sed -n '2,/^$/s/^# \{0,1\}//p' launch.sh
    exit ;;
  recipes)  # the first line of each
    grep -m1 '^# ' recipes/*.args | sed 's/^/@/; s/:#/ /'
    exit ;;
  setup)
    environment run
    echo "$("$python" -V) with torch $(torch_of "$python"): $python"
    exit ;;
  train | doctor | sync)
    environment run ;;
  *)
    python=$PWD/.venv/bin/python
    [[ -x $python ]] || python=$(command -v python3) || complain 'python3 was not found: bash launch.sh setup' ;;
esac
cluster=$(pwd -P)/launch/cluster.py
cd -- "$stand"
while [[ $verb == top ]]; do
  [[ ! -t 1 ]] || clear
  "$python" "$cluster" status "$@"
  sleep 2
done
exec "$python" "$cluster" "$verb" "$@"
