# shellcheck shell=bash
# launch.sh and test.sh source this file. `environment NAME` sets `python` to the Python of .venv, which has the packages
# in requirements.txt and, if it exists, requirements-NAME.txt. It changes nothing outside .venv. If python3's system has
# a supported torch (2.11 to 2.15), a new .venv uses the system's packages, and torch is not installed again.
# `.venv/flatland-NAME` lists the installed requirements for NAME, torch's version first. If the list changes, the packages are
# installed again.
torch_index=https://download.pytorch.org/whl  # its folders cpu and cu126 have wheels that PyPI (CUDA 13) lacks
complain() { printf '%s\n' "$1" >&2; exit 2; }
torch_of() { "$1" -c 'import importlib.metadata as m; print(m.version("torch"))' 2>/dev/null; }
supported_torch() { torch_of "$1" | grep -E '^2\.1[1-5]\.'; }
# The content of .venv/flatland-NAME. It includes torch's version: .venv may use python3's torch, which can change.
stamp() { torch_of "$python" && printf '%s\n' "${needs[@]}"; }
is_complete() { [[ -f $file && $(stamp) == "$(<"$file")" ]]; }

install_torch() {  # the pinned torch: for CPUs, for an older driver, or PyPI's
  local build
  case $(nvidia-smi 2>/dev/null) in
    *'Version: '1[12].*) build=cu126 ;;
    *'Version: '*) return ;;
    *) build=cpu ;;
  esac
  # --no-deps: pip takes nothing but torch from this index
  "${pip[@]}" --no-deps --retries 1 --extra-index-url "$torch_index/$build" "${needs[0]}+$build" ||
    [[ $build == cpu ]] ||  # PyPI's torch works as well, but is larger
    complain "Torch for CUDA 12 cannot be installed: give pip access, or update the NVIDIA driver to CUDA 13."
}

make_complete() {  # its caller opens the checkout's folder as descriptor 9, for the lock
  local torch inherit=() pip=("$python" -m pip install --no-input --disable-pip-version-check)
  flock 9  # another launch.sh or test.sh may be at work here
  ! is_complete || return 0
  if ! "$python" -c '' 2>/dev/null; then
    ! supported_torch python3 >/dev/null || inherit=(--system-site-packages)
    python3 -m venv --clear "${inherit[@]}" .venv ||
      complain "$PWD/.venv cannot be made, see above. On Debian and Ubuntu: sudo apt install python3-venv"
  fi
  torch=torch==$(supported_torch "$python") || { torch=${needs[0]} && install_torch; }
  "${pip[@]}" "$torch" "${needs[@]:1}" ||
    complain "Installing the requirements failed, see above. Torch needs Python 3.10 to 3.14 and up to 8 GB."
  stamp >"$file"
}

environment() {  # environment NAME
  local needs file=.venv/flatland-$1
  python=$PWD/.venv/bin/python
  mapfile -t needs < <(sed 's/#.*//; s/[[:space:]]//g; /^$/d' requirements.txt "requirements-$1.txt" 2>/dev/null)
  is_complete || make_complete 9<.
}
