# shellcheck shell=bash
# Sourced by launch.sh and test.sh. `environment NAME [REQUIREMENT ...]` sets `python` to a Python with the packages of
# requirements.txt and the REQUIREMENTs. It takes the first of: a complete .venv; python3, if it has all packages; python3
# in a .venv that sees its torch, with the rest installed; a .venv with all packages. Nothing outside .venv changes, and a
# suitable torch is never replaced. `.venv/flatland-NAME` lists the requirements that were installed for NAME; if they
# change, they are installed again. An interrupted .venv contains `flatland-incomplete` and is created again.
python_versions='3.10 3.11 3.12 3.13 3.14'  # the pinned torch has wheels for these Pythons
torch_versions='2.11 2.13'                  # the oldest and the newest supported minor version of torch
torch_index=https://download.pytorch.org/whl  # its folders cpu and cu126 have wheels that PyPI (CUDA 13) lacks
complain() { printf '%s\n' "$2" >&2; exit "$1"; }  # complain STATUS MESSAGE
torch_of() { "$1" -c 'import importlib.metadata as m; print(m.version("torch"))' 2>/dev/null; }
stamp() { torch_of "$python" && printf '%s\n' "${needs[@]}"; }  # with torch, because a .venv may see the system's torch
is_complete() { [[ ! -e .venv/flatland-incomplete && -f $file && $(<"$file") == "$(stamp)" ]]; }

lacks='
import re, sys
from importlib import import_module, metadata
def numbers(version):
    return [int(number) for number in re.findall(r"\d+", version.split("+")[0])]
for requirement in sys.argv[2:]:
    name, least = re.split(">=|==", requirement)
    try:
        if name == "torch":  # a torch that cannot be imported counts as missing
            oldest, newest = map(numbers, sys.argv[1].split())
            meets = oldest <= numbers(import_module(name).__version__)[:2] <= newest
        else:
            meets = numbers(metadata.version(name)) >= numbers(least)
    except Exception:
        meets = False
    if not meets:
        print(requirement)'

examine() {  # examine PYTHON: sets `version` to its version and `missing` to the needs that it does not meet
  version=$("$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null) || version='that does not run'
  missing=$("$1" -c "$lacks" "$torch_versions" "${needs[@]}" 2>/dev/null) || missing=${needs[*]}
  read -ra missing -d '' <<<"$missing" || true
}

run() {  # run WHAT COMMAND...: the output goes to .venv/pip.log and to `said`; big downloads are shown when they begin
  local status=0 big='^ *(Downloading )(.*\/)?([^/]* \(([5-9][0-9]\.[0-9] M|[0-9]{3,}\.[0-9] M|[0-9.]+ G)B\))$'
  said=$("${@:2}" 2>&1 | tee -a .venv/pip.log 2>/dev/null | tee >(sed -unE "s/$big/  \1\3/p" >&2)) || status=$?
  last=$(grep -E '^ERROR|[Ee]rror:|No space left|No module|apt' <<<"$said" | tail -n 1) || last='no reason was given'
  [[ $status == 0 || ($said != *'No space left'* && $said != *'Disk quota exceeded'*) ]] ||
    complain 1 "$1: the disk is full ($PWD/.venv, or the temporary folder ${TMPDIR:-/tmp}): $last
Free some space (torch needs about 1 GB for CPUs, 8 GB with CUDA) and type the same again."
  return "$status"
}
must_run() { run "$@" || complain 2 "$1: $last
The whole output is in $PWD/.venv/pip.log. Check the network, or pip's proxy and index, and type the same again."; }

make_venv() {  # make_venv PYTHON [inherit]: inherit: it sees the packages that PYTHON sees
  [[ ! -e .venv || -e .venv/flatland-incomplete || -e .venv/pyvenv.cfg || ! $(ls -A .venv) ]] ||
    complain 2 "$PWD/.venv is there but holds no Python environment. Move it away and type the same again."
  mkdir -p .venv && : >.venv/flatland-incomplete
  find .venv -mindepth 1 ! -name flatland-incomplete -delete
  echo "Making $PWD/.venv with $1"
  must_run 'making .venv' "$1" -m venv .venv
  [[ ! ${2-} ]] || "$1" -c 'import sys; print(*[p for p in sys.path if p.endswith("-packages")], sep="\n")' \
    >"$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/outer-environment.pth"
}

install() {  # install REQUIREMENT...: into .venv; never another torch where a suitable one is
  local pip=("$python" -u -m pip --disable-pip-version-check install --no-input --progress-bar off) why build='' cuda
  "$python" -m pip --version >/dev/null 2>&1 || must_run "$PWD/.venv has no pip" "$python" -m ensurepip
  echo "Installing" "${@%%[=>]*}" "(some minutes; pip's own words go to .venv/pip.log)"
  cuda=$(nvidia-smi 2>/dev/null | sed -nE 's/.*CUDA [A-Z ]*Version: *([0-9]+)\..*/\1/p') || true
  if [[ $1 != torch==* ]]; then
    set -- "torch==$(torch_of "$python")" "$@"
  elif [[ $(nvidia-smi -L 2>/dev/null) != "GPU "* ]]; then
    build=cpu && echo "  no NVIDIA GPU here: trying torch for CPUs only, about 200 MB"
  elif ((${cuda:-13} < 13)); then
    build=cu126 && echo "  the NVIDIA driver here is one for CUDA $cuda: taking torch for CUDA 12.6, some GB"
    ((cuda == 12)) || complain 2 "torch needs an NVIDIA driver for CUDA 12 or newer, this one is for $cuda: update it."
  fi
  local index=$torch_index/$build once=(--no-deps --retries 1)  # nothing but torch is looked up in this index
  [[ ! $build ]] || run "Installing $1+$build" "${pip[@]}" "${once[@]}" --extra-index-url "$index" "$1+$build" || {
    why="$index has no $1+$build for Python $version that pip can install"
    [[ $said != *Retrying*/whl/$build/* ]] || why="$index cannot be reached"
    [[ $build == cpu ]] || complain 2 "$why (see .venv/pip.log). Mend that, or update the driver to one for CUDA 13."
    echo "  $why (see .venv/pip.log): taking torch with CUDA, some GB"
  }
  must_run 'Installing the requirements' "${pip[@]}" "$@"
}

make_complete() {  # with .venv's lock on descriptor 9
  local missing base='' version ours=yes inherit=yes
  flock -n 9 || { echo "Another launch.sh or test.sh is at the environment: waiting for it" && flock 9; }
  ! is_complete || return 0
  if [[ -e .venv/flatland-incomplete ]] || ! "$python" -c '' 2>/dev/null; then
    base=$(command -v python3) || complain 2 "There is no python3 here (it may be ${python_versions// /, }).
On Debian and Ubuntu: sudo apt install python3 python3-venv"
  else  # the user's own .venv: missing packages are installed, but it is never created again
    compgen -G '.venv/flatland-*' >/dev/null || ours=''
  fi
  examine "${base:-$python}"
  [[ " $python_versions " == *" $version "* ]] ||  # pip would fail, later
    complain 2 "${base:-$python} is Python $version; torch runs on Python ${python_versions// /, }.
With one of these installed, say python3.12: python3.12 -m venv --clear .venv && bash launch.sh"
  [[ ${missing[*]} || ! $base ]] || { python=$base && return; }
  if [[ ${missing[*]} ]]; then
    [[ ! $base || ${missing[0]} != torch==* ]] || { missing=("${needs[@]}") && inherit=''; }
    [[ ! $base ]] || make_venv "$base" "$inherit"
    [[ ! $ours ]] || : >.venv/flatland-incomplete
    install "${missing[@]}"
    "$python" -c 'import torch' 2>/dev/null || complain 1 "The torch installed is not usable: $python -c 'import torch'"
    echo "Installed."
  fi
  [[ ! $ours ]] || stamp >"$file"
  rm -f .venv/flatland-incomplete
}
environment() {
  local needs file=.venv/flatland-$1
  python=$PWD/.venv/bin/python
  mapfile -t needs < <(sed 's/#.*//; s/[[:space:]]//g; /^$/d' requirements.txt)
  needs+=("${@:2}")
  is_complete || make_complete 9<.
}
