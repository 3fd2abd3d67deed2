#!/usr/bin/env bash
# bash launch.sh [train] [--detach] [--nproc N] [@recipe ...] [trainer flags]
#     trains here, on all visible GPUs or on the CPU; without arguments the default recipe
#     --detach     start, and return
#     --nproc N    processes to start (default: one for each visible GPU, or one on a CPU)
#     The first word that is neither goes to train.py with all that follow; python train.py --help lists its flags.
#     Ctrl-C ends the watching, with status 130, not the run.
# bash launch.sh logs   [--out DIR]    watch a run to its end
# bash launch.sh status [--out DIR]    what it is doing
# bash launch.sh stop   [--out DIR]    let it save and stop; once more: stop at once, without saving
# bash launch.sh setup                 only make the environment
# Without --out: the newest run in runs/. Paths are relative to the folder of launch.sh.
# Status: 0 finished or stopped, 2 a mistake in what was asked for, 1 anything else.

# train.py checks the flags first, outside torchrun. Then one agent (torchrun) starts in a session of its own, which no
# Ctrl-C or closed terminal reaches, and log.txt is followed. How the run ended stands in status.json: torchrun turns
# every end into status 1, and makes a failure of its own stop, so the workers are signalled, never the agent.
# shellcheck disable=SC1091,SC2012,SC2015,SC2016,SC2154,SC2317
set -euo pipefail
launch="bash $(printf %q "$0")"
cd -- "$(dirname -- "${BASH_SOURCE[0]}")" >/dev/null
source ./env.sh

# ---- Settings ----
default_args=(@recipes/default.args)
look_every=0.5        # seconds between two looks at a log or a process
start_limit=60        # seconds for the agent to appear
shutdown_timeout=300  # seconds that workers have to save when the agent itself is told to end; longer than a save
tail_lines=30         # of the failed worker's stderr
host=$(uname -n)

# ---- A run: its folder $out, its $log, and $logs with the files of the agent and the workers on this machine ----
use_run() {
  out=$1 log=$1/log.txt logs=$(cd -- "$1" && pwd -P)/logs/$host
  watch_it="Watch it: $launch logs --out $(printf %q "$1")" stop_it="Stop it: $launch stop --out $(printf %q "$1")"
}

pick_run() {  # the run of --out DIR; without it the newest, the one that last began or last wrote its status
  local dir
  case ${1-} in
    --out) dir=${2-} ;;
    --out=*) dir=${1#*=} ;;
    ?*) complain 2 "$verb takes --out DIR and nothing else, not $1" ;;
    *) dir=$(ls -td runs/*/status.json runs/*/logs/"$host"/agent.pid 2>/dev/null | sed -n 1p) || true
      dir=${dir:-$(ls -td runs/*/ 2>/dev/null | sed -n 1p)} ||
        complain 2 "There is no run in runs/ yet. Start one: $launch"
      dir=$(cut -d/ -f 1-2 <<<"$dir") ;;
  esac
  [[ -d $dir ]] || complain 2 "There is no run folder '$dir'. In runs/: $(ls -m runs 2>/dev/null || true)"
  use_run "${dir%/}"
}

workers() {  # the processes that torchrun gave an error file under $logs, not their children; also without their agent
  local pid all
  all=" $(grep -lsF "TORCHELASTIC_ERROR_FILE=$logs/" /proc/[0-9]*/environ | cut -d/ -f3 | tr '\n' ' ')" || true
  for pid in $all; do [[ $all == *" $(sed -n 's/^PPid:[[:space:]]*//p' "/proc/$pid/status") "* ]] || echo "$pid"; done
} 2>/dev/null

alive() {  # sets $agent, to a worker if it has left any behind
  agent=$(cat "$logs/agent.pid")
  # Its command line, empty for a zombie, tells it from another process that was given its number.
  [[ $agent && $(tr '\0' ' ' <"/proc/$agent/cmdline") == *"$logs"* ]] && return
  agent=$(workers | sed -n 1p)
  [[ $agent ]]
} 2>/dev/null

read_status() {  # sets state, step and message from status.json; empty where this start has not written it
  local any_python=.venv/bin/python
  [[ -x $any_python ]] || any_python=python3
  state='' step='' message=''
  [[ $out/status.json -nt $logs/agent.pid ]] || return 0
  { read -r state && read -r step && message=$(cat); } < <("$any_python" 2>/dev/null -c 'import json, sys
status = json.load(open(sys.argv[1]))
print(status["state"], status.get("step") or 0, status.get("message") or "", sep="\n")' "$out/status.json") ||
    state=unreadable
  [[ $state != running ]] || alive || state=dead  # killed, or crashed before it could say so
}

# ---- Watching it to its end ----
log_size() { if [[ -e $log ]]; then wc -c <"$log"; else echo 0; fi; }

follow() {  # shows log.txt from byte $first on, until the agent is gone
  local size shown=$first gone='' shorten=(cat)
  [[ ! -t 1 ]] || shorten=(sed -E 's/^[0-9-]{10} [0-9:]{8} [A-Z] \[[^]]*\] //')
  until [[ $gone ]]; do
    alive || gone=yes  # asked before reading, so that nothing written to the end is missed
    size=$(log_size)
    ((size <= shown)) || tail -c +$((shown + 1)) -- "$log" | head -c $((size - shown)) | "${shorten[@]}" || true
    shown=$size
    [[ $gone ]] || sleep "$look_every"
  done
}

on_interrupt() {  # on_interrupt MESSAGE: from now on Ctrl-C and the like end the launcher with it, and nothing else
  farewell=$1
  trap 'trap "" INT TERM HUP; printf "\n%s\n" "$farewell" || true; exit 130' INT TERM HUP
}

tell() {  # tell PREFIX: status.json's message, unless it has just been shown
  [[ ! $message || $told == *"${message%%$'\n'*}"* ]] || printf '%s\n' "$1$message" >&2
}

conclude() {  # the agent is gone: says how the run ended, and exits with its status
  local told tail rank file best=$logs/agent.stderr.log
  read_status
  told=$(tail -c +$((first + 1)) -- "$log" 2>/dev/null) || true
  case $state in
    finished | stopped) tell '' && echo "$out: $state at step $step" && exit 0 ;;
    error) tell 'error: ' && exit 2 ;;
    '') [[ ! $logs/stopping -nt $logs/agent.pid ]] || { echo "$out: stopped before it had begun" && exit 0; } ;;
  esac
  # It failed. The log that tells most is that of the worker that torchrun saw failing first.
  rank=$(sed -n '/Root Cause/,$s/.*(local_rank: \([0-9]*\)).*/\1/p' "$best" 2>/dev/null | sed -n 1p) || true
  for file in "$logs"/*/attempt_*/"${rank:-0}"/stderr.log; do
    [[ ! -s $file || ! $file -nt $logs/agent.pid ]] || best=$file
  done
  tail=$(tail -n "$tail_lines" -- "$best" 2>/dev/null) || true
  printf -- '---- the end of %s\n%s\n----\n' "$best" "$tail" >&2
  told+=$tail
  tell ''
  echo "$out: failed${step:+ at step $step}${rank:+, first in local rank $rank}" >&2
  exit 1
}

# ---- Starting ----
start() {  # start COMMAND...: the agent, in a tmux session where there is tmux, else in the background
  local script session tries
  session=flatland-$(basename -- "$out")
  session=${session//[^a-zA-Z0-9_-]/_}
  if command -v flock >/dev/null; then exec 9<"$logs" && flock 9 2>/dev/null || true; fi  # of two starts, one wins
  ! alive || complain 2 "$out is being trained already. $watch_it   $stop_it"
  rm -f "$logs/agent.pid" "$logs/stopping"

  # The agent gets this shell's environment, not that of a tmux server started long ago. It travels in a script that
  # only its owner can read and that deletes itself, for HF_TOKEN belongs on no command line and in no run folder.
  script=$(mktemp)
  {
    export -p
    printf 'rm -f "$0"; umask %s; cd %q || exit\n' "$(umask)" "$PWD"
    printf 'echo %q\n' "flatland trains $out; its log is $log in $PWD"
    printf 'exec >"$1/agent.stdout.log" 2>"$1/agent.stderr.log"\n'  # not stdin: tmux closes a pane that nobody holds
    printf 'echo "$2" >"$1/agent.place" && echo $$ >"$1/agent.pid" && exec'
    printf ' %q' "$@"
  } >"$script"
  on_interrupt "$out goes on. $watch_it   $stop_it"
  # A tmux server that begins here would keep the token in its environment.
  if command -v tmux >/dev/null && env -u HF_TOKEN -u HUGGING_FACE_HUB_TOKEN tmux new-session -d -s "$session" \
    env -i "$BASH" "$script" "$logs" "tmux session $session" 9<&- 2>"$logs/tmux.stderr.log"; then
    tmux set-window-option -t "$session" remain-on-exit off >/dev/null 2>&1 || true
  else
    "$(command -v setsid || echo nohup)" env -i "$BASH" "$script" "$logs" background </dev/null >/dev/null 2>&1 9<&- &
  fi
  for ((tries = 10 * start_limit; tries > 0; tries--)); do [[ ! -s $logs/agent.pid ]] || break; sleep 0.1; done
  rm -f "$script"
  exec 9<&-
  [[ -s $logs/agent.pid ]] || complain 1 "torchrun did not start within $start_limit s; see $logs/agent.stderr.log"
  echo "Started $out: $(<"$logs/agent.place"), process $(<"$logs/agent.pid"); log in $log"
}

verb_train() {
  local detach='' processes='' names answer cores arg
  while (($#)); do
    case $1 in
      --detach) detach=yes ;;
      --nproc=*) set -- --nproc "${1#*=}" "${@:2}" && continue ;;
      --nproc) [[ ${2-} =~ ^[1-9][0-9]*$ ]] || complain 2 "--nproc takes a number of processes, not '${2-}'"
        processes=$2 && shift ;;
      -h | --help) usage ;;
      *) break ;;
    esac
    shift
  done
  (($#)) || set -- "${default_args[@]}"
  names=$(sed 's/#.*//; s/[[:space:]]//g; /^$/d' hosts 2>/dev/null) || true  # a carriage return is a space, too
  [[ ${names:-localhost} == localhost ]] ||
    complain 2 "hosts lists ${names//$'\n'/, }; this launcher trains on one machine: one line, localhost"
  environment run

  # What is not key=value in the answer is for the user; a mistake has been told on stderr.
  { answer=$("$python" train.py "$@" --check ${processes:+"$processes"} |
    awk '/^[a-z_]+=/ { print; next } { print >"/dev/stderr" }' 2>&3) || exit; } 3>&1
  answered() { sed -n "s/^$1=//p" <<<"$answer"; }
  out=$(answered out) processes=${processes:-$(answered processes)}
  [[ $out && $(answered state) != finished ]] || exit 0  # no folder: it was asked for --help
  for arg; do [[ $arg != --check && $arg != --check=* ]] || exit 0; done

  export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-$shutdown_timeout}  # 2.11 has no flag for it
  if [[ $(answered device) == cpu ]] && ((processes > 1)); then  # each its share of the cores
    cores=$(nproc 2>/dev/null || getconf _NPROCESSORS_ONLN)
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((cores > processes ? cores / processes : 1))}
  fi
  mkdir -p -- "$out/logs/$host"
  use_run "$out"
  first=$(log_size)
  start "$python" -m torch.distributed.run --standalone --local-addr 127.0.0.1 --nproc-per-node "$processes" \
    --max-restarts 0 --redirects 3 --log-dir "$logs" train.py "$@"
  [[ ! $detach ]] || exit 0
  follow
  conclude
}

# ---- The other verbs ----
verb_logs() {
  pick_run "$@"
  on_interrupt "$out goes on. $watch_it   $stop_it"
  first=$(log_size)
  ((first == 0)) || first=$((first - $(tail -n 50 -- "$log" | wc -c)))
  follow
  conclude
}

verb_status() {
  local place=none age=''
  pick_run "$@"
  read_status
  ! alive || place="$(<"$logs/agent.place"), process $agent"
  [[ ! -e $log ]] || age="$(($(date +%s) - $(date -r "$log" +%s))) s ago"
  printf '%-10s %s\n' run "$out" state "${state:-not known yet}" step "$step" message "$message" agent "$place" \
    'last line' "$age" 'last batch' "$(grep -o 'Batch [0-9]* Loss.*' "$log" 2>/dev/null | tail -n 1 || true)"
}

verb_stop() {
  local pid told=' '
  pick_run "$@"
  if ! alive; then read_status; echo "$out is not running${state:+: $state}"; exit 0; fi
  if [[ -e $logs/stopping ]]; then echo "Stopping $out at once, without saving"
  else echo "Stopping $out: it ends its step and saves. The same once more stops it at once, without saving."; fi
  touch "$logs/stopping"
  on_interrupt "$out is still stopping. $watch_it"
  first=$(log_size)
  while alive; do  # the workers may come up only now
    for pid in $(workers); do
      [[ $told == *" $pid "* ]] || { kill -TERM "$pid" 2>/dev/null && told+="$pid "; } || true
    done
    sleep "$look_every"
  done
  conclude
}

verb_setup() {
  (($# == 0)) || complain 2 "setup takes no arguments, not $1"
  environment run
  echo "$("$python" -V) with torch $(torch_of "$python"): $python"
}

usage() { sed -n '2,/^$/s/^# \{0,1\}//p' launch.sh && exit 0; }

verb=train
case ${1-@} in
  train | setup | status | logs | stop) verb=$1 && shift ;;
  help | -h | --help) usage ;;
  @* | -*) ;;
  *) complain 2 "There is no verb '$1': it is train (the default), setup, status, logs or stop." ;;
esac
"verb_$verb" "$@"; exit  # on one line: bash has read all it needs, and this file may change while a run is followed
