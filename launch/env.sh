# shellcheck shell=bash
# launch.sh and test.sh source this file. `environment NAME [REQUIREMENT ...]` sets `python` to a Python that has the
# packages in requirements.txt and the REQUIREMENTs. It uses the first of these that works:
#   1. .venv, if it is complete;
#   2. python3, if it has all packages;
#   3. a new .venv that uses python3's torch and has the other packages installed;
#   4. a new .venv with all packages installed.
# It changes nothing outside .venv, and it never replaces a torch that is supported and suits the NVIDIA driver.
# `.venv/flatland-NAME` lists the requirements that were installed for NAME. If the list changes, they are installed
# again. While an installation runs, .venv contains `flatland-incomplete`; if the file is left over, .venv is made anew.
python_versions='3.10 3.11 3.12 3.13 3.14'  # the pinned torch has wheels for these; torch 2.15 has none for 3.10
torch_versions='2.11 2.15'                  # the oldest and the newest supported minor version of torch
torch_index=https://download.pytorch.org/whl  # its folders cpu and cu126 have wheels that PyPI (CUDA 13) lacks
complain() { printf '%s\n' "$2" >&2; exit "$1"; }  # complain STATUS MESSAGE
torch_of() { "$1" -c 'import importlib.metadata as m; print(m.version("torch"))' 2>/dev/null; }
# The content of .venv/flatland-NAME. It includes torch's version: .venv may use python3's torch, which can change.
stamp() { torch_of "$python" && printf '%s\n' "${needs[@]}"; }
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
            torch = import_module(name)
            oldest, newest, driver = map(numbers, sys.argv[1].split())
            suits = numbers(torch.version.cuda or "0")[:1] <= driver
            meets = suits and oldest <= numbers(torch.__version__)[:2] <= newest
        else:
            meets = numbers(metadata.version(name)) >= numbers(least)
    except Exception:
        meets = False
    if not meets:
        print(requirement)'

# examine PYTHON: sets `version` to its version, `missing` to the requirements that it lacks, and `cuda` to the newest
# major version of CUDA that the NVIDIA driver supports (empty without a driver)
examine() {
  cuda=$(nvidia-smi 2>/dev/null | sed -nE 's/.*CUDA [A-Z ]*Version: *([0-9]+)\..*/\1/p') || true
  version=$("$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null) || version='(it does not run)'
  missing=$("$1" -c "$lacks" "$torch_versions ${cuda:-99}" "${needs[@]}" 2>/dev/null) || missing=${needs[*]}
  read -ra missing -d '' <<<"$missing" || true
}

# run WHAT COMMAND...: runs COMMAND and returns its status. Its output goes to .venv/pip.log and into `output`; `last`
# gets its last error. The name of a big download is printed when the download begins. If the disk is full, the script
# ends with a message that begins with WHAT.
run() {
  local status=0 big='^ *(Downloading )(.*\/)?([^/]* \(([5-9][0-9]\.[0-9] M|[0-9]{3,}\.[0-9] M|[0-9.]+ G)B\))$'
  output=$("${@:2}" 2>&1 | tee -a .venv/pip.log 2>/dev/null | tee >(sed -unE "s/$big/  \1\3/p" >&2)) || status=$?
  last=$(grep -E '^ERROR|[Ee]rror:|No space left|No module|apt' <<<"$output" | tail -n 1) || last='no reason was given'
  [[ $status == 0 || ($output != *'No space left'* && $output != *'Disk quota exceeded'*) ]] ||
    complain 1 "$1: the disk is full ($PWD/.venv, or the temporary folder ${TMPDIR:-/tmp}): $last
Free some space (torch needs about 1 GB for CPUs, 8 GB with CUDA) and run the same command again."
  return "$status"
}
must_run() {
  run "$@" || complain 2 "$1: $last
The whole output is in $PWD/.venv/pip.log. Check the network and pip's proxy and index, and run the same command again."
}

make_venv() {  # make_venv PYTHON [inherit]: creates .venv; with `inherit`, it can also import the packages of PYTHON
  [[ ! -e .venv || -e .venv/flatland-incomplete || -e .venv/pyvenv.cfg || ! $(ls -A .venv) ]] ||
    complain 2 "$PWD/.venv exists, but it is not a Python environment. Move it away and run the same command again."
  mkdir -p .venv && : >.venv/flatland-incomplete
  find .venv -mindepth 1 ! -name flatland-incomplete -delete
  echo "Creating $PWD/.venv with $1"
  must_run 'Creating .venv' "$1" -m venv .venv
  [[ ! ${2-} ]] || "$1" -c 'import sys; print(*[p for p in sys.path if p.endswith("-packages")], sep="\n")' \
    >"$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/outer-environment.pth"
}

install() {  # install REQUIREMENT...: installs them into .venv. Unless torch is one of them, the torch there is kept
  local pip=("$python" -u -m pip --disable-pip-version-check install --no-input --progress-bar off) why build=''
  "$python" -m pip --version >/dev/null 2>&1 || must_run "Adding pip to $PWD/.venv" "$python" -m ensurepip
  echo "Installing" "${@%%[=>]*}" "(this takes some minutes; the output of pip goes to .venv/pip.log)"
  if [[ $1 != torch==* ]]; then
    set -- "torch==$(torch_of "$python")" "$@"
  elif [[ $(nvidia-smi -L 2>/dev/null) != "GPU "* ]]; then
    build=cpu && echo "  nvidia-smi shows no GPU: trying torch for CPUs, about 200 MB"
  elif ((${cuda:-13} < 13)); then
    build=cu126 && echo "  the NVIDIA driver is for CUDA $cuda: installing torch for CUDA 12.6, some GB"
    ((cuda == 12)) || complain 2 "torch needs an NVIDIA driver for CUDA 12 or newer, this one is for $cuda: update it."
  fi
  local index=$torch_index/$build once=(--no-deps --retries 1)  # pip looks for nothing but torch in this index
  [[ ! $build ]] || run "Installing $1+$build" "${pip[@]}" "${once[@]}" --extra-index-url "$index" "$1+$build" || {
    why="$index has no $1+$build for Python $version that pip can install"
    [[ $output != *Retrying*/whl/$build/* ]] || why="$index cannot be reached"
    why+='; .venv/pip.log has the details'
    [[ $build == cpu ]] || complain 2 "$why. Give pip access to it, or update the NVIDIA driver to one for CUDA 13."
    echo "  $why. Installing torch with CUDA, some GB"
  }
  must_run 'Installing the requirements' "${pip[@]}" "$@"
}

make_complete() {  # its caller opens the checkout's folder as descriptor 9, for the lock
  local missing base='' version cuda output last installed ours=yes inherit=yes
  flock -n 9 || { echo "Waiting for another launch.sh or test.sh to finish its work on the environment" && flock 9; }
  ! is_complete || return 0
  if [[ -e .venv/flatland-incomplete ]] || ! "$python" -c '' 2>/dev/null; then
    base=$(command -v python3) || complain 2 "python3 was not found; Python ${python_versions// /, } will do.
On Debian and Ubuntu: sudo apt install python3 python3-venv"
  else  # if the user made this .venv, missing packages are installed, but it is never created again
    compgen -G '.venv/flatland-*' >/dev/null || ours=''
  fi
  examine "${base:-$python}"
  [[ " $python_versions " == *" $version "* ]] ||  # otherwise pip would fail later
    complain 2 "${base:-$python} is Python $version, but torch needs Python ${python_versions// /, }.
Install one of these, for example python3.12, then run: python3.12 -m venv --clear .venv && bash launch.sh"
  [[ ${missing[*]} || ! $base ]] || { python=$base && return; }
  if [[ ${missing[*]} ]]; then
    [[ ${missing[0]} != torch==* ]] || ! installed=$(torch_of "${base:-$python}") ||
      echo "${base:-$python} has torch $installed; supported: ${torch_versions/ / to }${cuda:+, CUDA $cuda or older}"
    [[ ! $base || ${missing[0]} != torch==* ]] || { missing=("${needs[@]}") && inherit=''; }
    [[ ! $base ]] || make_venv "$base" "$inherit"
    [[ ! $ours ]] || : >.venv/flatland-incomplete
    install "${missing[@]}"
    "$python" -c 'import torch' 2>/dev/null || complain 1 "The new torch cannot be imported: $python -c 'import torch'"
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
