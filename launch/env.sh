# shellcheck shell=bash
# launch.sh and test.sh source this file. `environment NAME` sets `python` to the Python of .venv, which has the packages
# in requirements.txt and, if it exists, requirements-NAME.txt. It changes nothing outside .venv. If python3 has a torch
# that is supported and suits the NVIDIA driver, a new .venv imports python3's packages, and torch is not installed again.
# `.venv/flatland-NAME` lists the requirements that were installed for NAME. If the list changes, they are installed
# again. While .venv is made, it contains `flatland-incomplete`; if the file is left over, .venv is made anew.
python_versions='3.10 3.11 3.12 3.13 3.14'  # the pinned torch has wheels for these; torch 2.15 has none for 3.10
torch_versions='2.11 2.15'                  # the oldest and the newest supported minor version of torch
torch_index=https://download.pytorch.org/whl  # its folders cpu and cu126 have wheels that PyPI (CUDA 13) lacks
complain() { printf '%s\n' "$1" >&2; exit 2; }
torch_of() { "$1" -c 'import importlib.metadata as m; print(m.version("torch"))' 2>/dev/null; }
# The content of .venv/flatland-NAME. It includes torch's version: .venv may use python3's torch, which can change.
stamp() { torch_of "$python" && printf '%s\n' "${needs[@]}"; }
is_complete() { [[ ! -e .venv/flatland-incomplete && -f $file && $(stamp) == "$(<"$file")" ]]; }

# has_torch PYTHON: whether it has a supported torch. `cuda`: the newest CUDA of the NVIDIA driver; empty without one
has_torch() {
  # shellcheck disable=SC2086
  "$1" -c '
import re, sys, torch
def numbers(version):
    return [int(number) for number in re.findall(r"\d+", version)[:2]]
oldest, newest, driver = map(numbers, sys.argv[1:])
suits = numbers(torch.version.cuda or "0")[:1] <= driver
sys.exit(not (suits and oldest <= numbers(torch.__version__) <= newest))' $torch_versions "${cuda:-99}" 2>/dev/null
}

make_venv() {  # make_venv PYTHON
  [[ -e .venv/flatland-incomplete || -e .venv/pyvenv.cfg || ! $(ls -A .venv 2>/dev/null) ]] ||
    complain "$PWD/.venv is not a Python environment. Move it away and run the same command again."
  echo "Creating $PWD/.venv with $1"
  rm -rf .venv && mkdir .venv && : >.venv/flatland-incomplete
  "$1" -m venv --without-pip .venv
  if has_torch "$1"; then
    "$1" -c 'import sys; print(*[p for p in sys.path if p.endswith("-packages")], sep="\n")' \
      >".venv/lib/python$version/site-packages/outer-environment.pth"
  fi
}

install_torch() {  # the pinned torch: for CPUs, for an older driver, or PyPI's
  local build=cpu
  if [[ $(nvidia-smi -L 2>/dev/null) != "GPU "* ]]; then
    echo 'nvidia-smi shows no GPU: trying torch for CPUs, about 200 MB'
  elif ((${cuda:-13} < 13)); then
    build=cu126
    echo "The NVIDIA driver is for CUDA $cuda: installing torch for CUDA 12.6, some GB"
    ((cuda == 12)) || complain "torch needs an NVIDIA driver for CUDA 12 or newer: update it."
  else
    return 0
  fi
  local index=$torch_index/$build
  # --no-deps: pip takes nothing but torch from this index
  "${pip[@]}" --no-deps --retries 1 --extra-index-url "$index" "$torch+$build" || {
    [[ $build == cpu ]] ||
      complain "pip cannot get $torch+$build from $index. Give it access, or update the NVIDIA driver to CUDA 13."
    echo "pip cannot get $torch+$build from $index: installing torch with CUDA, some GB"
  }
}

make_complete() {  # its caller opens the checkout's folder as descriptor 9, for the lock
  local base='' version cuda installed torch=${needs[0]}
  local pip=("$python" -m pip install --no-input --disable-pip-version-check)
  flock -n 9 || { echo "Waiting for another launch.sh or test.sh to finish its work on the environment" && flock 9; }
  ! is_complete || return 0
  cuda=$(nvidia-smi 2>/dev/null | sed -nE 's/.*CUDA [A-Z ]*Version: *([0-9]+)\..*/\1/p') || true
  if [[ -e .venv/flatland-incomplete ]] || ! "$python" -c '' 2>/dev/null; then
    base=$(command -v python3) || complain "python3 was not found; Python ${python_versions// /, } will do.
On Debian and Ubuntu: sudo apt install python3 python3-venv"
  fi
  version=$("${base:-$python}" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
  [[ " $python_versions " == *" $version "* ]] ||  # otherwise pip would fail later
    complain "${base:-$python} is Python $version, but torch needs Python ${python_versions// /, }.
Install one of these, for example python3.12, then run: python3.12 -m venv --clear .venv && bash launch.sh"
  [[ ! $base ]] || make_venv "$base"
  "$python" -m pip --version >/dev/null 2>&1 || "$python" -m ensurepip ||
    complain "$python has no pip and cannot add it. On Debian and Ubuntu: sudo apt install python3-venv"
  if has_torch "$python"; then
    torch=torch==$(torch_of "$python")
  else
    ! installed=$(torch_of "${base:-$python}") ||
      echo "${base:-$python} has torch $installed; supported: ${torch_versions/ / to }${cuda:+, CUDA $cuda or older}"
    install_torch
  fi
  "${pip[@]}" "$torch" "${needs[@]:1}" ||
    complain "Installing the requirements failed, see above. Check the network, pip's index and proxy, and the free
space (torch needs 1 GB for CPUs, 8 GB with CUDA), and run the same command again."
  stamp >"$file"
  rm -f .venv/flatland-incomplete
}

environment() {  # environment NAME
  local needs file=.venv/flatland-$1
  python=$PWD/.venv/bin/python
  mapfile -t needs < <(sed 's/#.*//; s/[[:space:]]//g; /^$/d' requirements.txt "requirements-$1.txt" 2>/dev/null)
  is_complete || make_complete 9<.
}
