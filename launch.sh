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
# bash launch.sh logs   [--out DIR] [HOST|RANK]  watch a run to its end, or the output of a host or rank
# bash launch.sh status [--out DIR]              its state, and its processes on every host
# bash launch.sh attach [--out DIR] [HOST]       go into its tmux session; Ctrl-B D comes back
# bash launch.sh stop   [--out DIR] [--now]      let it save and stop; --now, or once more: at once, without saving
# bash launch.sh doctor [--hosts A,B,C] [flags]  check every machine, and the network between them
# bash launch.sh sync   [--hosts A,B,C]          copy code and environment to every machine's same path
# bash launch.sh top    [--out DIR]              status again and again, until Ctrl-C
# bash launch.sh recipes                         the named runs, one line each
# bash launch.sh setup                           only make the environment, here
# Without --out: the newest run in runs/. Relative paths are meant from the folder where you stand, on every machine.
# Status: 0 finished or stopped, 2 a user error, 1 anything else.

# On every machine a session `flatland-RUN-HASH` holds one torchrun; a run with a single process needs no torchrun.
# status.json has the outcome, because torchrun turns every end into status 1. launch/node.py acts on each machine;
# launch/cluster.py and launch/doctor.py run on this one.
# shellcheck disable=SC1091,SC2034,SC2154
set -euo pipefail
stand=$PWD
cd -- "$(dirname -- "${BASH_SOURCE[0]}")" >/dev/null
source launch/env.sh

# ---- Settings ----
default_args='@recipes/default.args'
ssh='-o BatchMode=yes -o ConnectTimeout=10 -o ServerAliveInterval=5 -o ServerAliveCountMax=3'
# Variables of this shell that reach all machines; they travel inside ssh, on no command line.
forward='HF_* HUGGING_FACE_* NCCL_* GLOO_* OMP_* KMP_* MKL_* MALLOC_* TORCH* PYTORCH_* TRITON_* CUDA_* FI_* UCX_* WANDB_*
  *_proxy *_PROXY LD_LIBRARY_PATH'
port=0                # of the rendezvous on the first machine; 0 = a free one. Behind a firewall: an open one
retries=3             # on several machines: relaunches without a newer checkpoint
retry_pause=5         # seconds before the first of them; doubles each time
host_wait=120         # seconds that each of them waits for a machine that does not answer; longer than a reboot
start_limit=60        # seconds for an agent to appear
join_timeout=120      # seconds for all agents to find each other
# Seconds that workers have to save when torchrun ends; longer than a save. (torch 2.11 has no flag for it.)
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-300}

settings=()
for name in default_args ssh forward port retries retry_pause host_wait start_limit join_timeout; do
  settings+=("$name=${!name}")
done

hand_over() {  # hand_over VERB [WORD ...]
  local root
  root=$(pwd -P)
  cd -- "$stand" && exec "$python" "$root/launch/cluster.py" "${settings[@]}" python="$python" -- "$@"
}

verbs='train setup recipes status logs attach stop doctor sync top'
verb=train
case ${1-@} in
  help | -h | --help) verb=help ;;
  @* | -*) ;;
  *)
    [[ " $verbs " == *" $1 "* ]] || complain 2 "'$1' is not a verb: $verbs. A recipe begins with @, a flag with --."
    verb=$1 && shift ;;
esac
[[ ${1-} != -h && ${1-} != --help ]] || verb=help
case $verb in
  help)
    sed -n '2,/^$/s/^# \{0,1\}//p' launch.sh ;;
  recipes)
    for file in recipes/*.args; do printf '@%-32s %s\n' "$file" "$(sed '/^#/!Q; s/^# //' "$file" | tr '\n' ' ' | sed 's/\. .*/./')"; done ;;
  setup)
    [[ ! $* ]] || complain 2 "setup takes no arguments, not $*"
    environment run
    echo "$("$python" -V) with torch $(torch_of "$python"): $python" ;;
  train | doctor | sync)
    environment run
    hand_over "$verb" "$@" ;;
  *)
    python=$PWD/.venv/bin/python
    [[ -x $python ]] || python=$(command -v python3) || complain 2 'There is no python3 here.'
    while [[ $verb == top ]]; do
      [[ ! -t 1 ]] || clear
      (hand_over status "$@") || exit
      sleep 2
    done
    hand_over "$verb" "$@" ;;
esac
