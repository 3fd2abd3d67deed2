# shellcheck shell=bash
# launch.sh and test.sh source this file. `environment NAME` sets `python` to the Python of .venv, which has the packages
# in requirements.txt and, if it exists, requirements-NAME.txt. It changes nothing outside .venv. If python3 has a
# supported torch, a new .venv imports python3's packages, and torch is not installed again. `.venv/flatland-NAME` lists
# what was installed for NAME, torch's version first. If the list changes, the packages are installed again.
python_versions='3.10 3.11 3.12 3.13 3.14'    # the pinned torch has wheels for these; torch 2.15 has none for 3.10
torch_versions='2.11 2.12 2.13 2.14 2.15'     # minor versions that are supported
torch_index=https://download.pytorch.org/whl  # its folders cpu and cu126 have wheels that PyPI (CUDA 13) lacks
complain() { printf '%s\n' "$1" >&2; exit 2; }
torch_of() { "$1" -c 'import importlib.metadata as m; print(m.version("torch"))' 2>/dev/null; }
# The content of .venv/flatland-NAME. It includes torch's version: .venv may use python3's torch, which can change.
stamp() { torch_of "$python" && printf '%s\n' "${needs[@]}"; }
is_complete() { [[ -f $file && $(stamp) == "$(<"$file")" ]]; }

supported_torch() {  # supported_torch PYTHON: prints its torch's version, if it is supported
  local torch
  torch=$(torch_of "$1") && [[ $torch =~ ^[0-9]+\.[0-9]+ && " $torch_versions " == *" ${BASH_REMATCH[0]} "* ]] &&
    echo "$torch"
}

make_venv() {
  local base version
  [[ -e .venv/pyvenv.cfg || ! $(ls -A .venv 2>/dev/null) ]] ||
    complain "$PWD/.venv is not a Python environment. Move it away and run the same command again."
  base=$(command -v python3) || complain "python3 was not found. On Debian and Ubuntu: sudo apt install python3-venv"
  version=$("$base" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
  [[ " $python_versions " == *" $version "* ]] ||  # otherwise pip would fail later
    complain "$base is Python $version, but torch needs Python ${python_versions// /, }.
Install one of these, for example python3.12, then run: python3.12 -m venv --clear .venv && bash launch.sh"
  echo "Creating $PWD/.venv with $base"
  "$base" -m venv --clear --without-pip .venv
  if supported_torch "$base" >/dev/null; then
    "$base" -c 'import sys; print(*[p for p in sys.path if p.endswith("-packages")], sep="\n")' \
      >".venv/lib/python$version/site-packages/outer-environment.pth"
  fi
}

install_torch() {  # the pinned torch: for CPUs, for an older driver, or PyPI's
  local build=cpu cuda
  if [[ $(nvidia-smi -L 2>/dev/null) == "GPU "* ]]; then
    cuda=$(nvidia-smi | sed -nE 's/.*CUDA [A-Z ]*Version: *([0-9]+)\..*/\1/p') || true
    ((${cuda:-13} < 13)) || return 0
    build=cu126
  fi
  echo "Installing torch from $torch_index/$build"
  # --no-deps: pip takes nothing but torch from this index
  "${pip[@]}" --no-deps --retries 1 --extra-index-url "$torch_index/$build" "${needs[0]}+$build" ||
    [[ $build == cpu ]] ||  # PyPI's torch works as well, but is larger
    complain "Torch for CUDA 12 cannot be installed: give pip access, or update the NVIDIA driver to CUDA 13."
}

make_complete() {  # its caller opens the checkout's folder as descriptor 9, for the lock
  local torch pip=("$python" -m pip install --no-input --disable-pip-version-check)
  flock 9  # another launch.sh or test.sh may be at work here
  ! is_complete || return 0
  "$python" -c '' 2>/dev/null || make_venv
  "$python" -m pip --version >/dev/null 2>&1 || "$python" -m ensurepip ||
    complain "$python has no pip and cannot add it. On Debian and Ubuntu: sudo apt install python3-venv"
  torch=torch==$(supported_torch "$python") || { torch=${needs[0]} && install_torch; }
  "${pip[@]}" "$torch" "${needs[@]:1}" ||
    complain "Installing the requirements failed, see above. Check the network, pip's index and proxy, and the free
space (torch needs 1 GB for CPUs, 8 GB with CUDA), and run the same command again."
  stamp >"$file"
}

environment() {  # environment NAME
  local needs file=.venv/flatland-$1
  python=$PWD/.venv/bin/python
  mapfile -t needs < <(sed 's/#.*//; s/[[:space:]]//g; /^$/d' requirements.txt "requirements-$1.txt" 2>/dev/null)
  is_complete || make_complete 9<.
}
