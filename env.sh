# shellcheck shell=bash
# Sourced by launch.sh and test.sh, with the checkout as the current directory:
#
#   environment NAME [REQUIREMENT ...]     sets `python` to one that has requirements.txt and the extra REQUIREMENTs
#
# In this order: a complete .venv; python3, if it has everything; python3 in a .venv that sees its torch, with the rest
# installed; a .venv with everything. Nothing outside .venv is changed, and a suitable torch is never replaced.
# `.venv/flatland-NAME` holds what was installed for NAME, so that another requirements.txt installs again;
# `.venv/flatland-incomplete` is there while something is being installed: an interrupted .venv is made anew.
# A function `before_installing PYTHON` of the caller's is called before anything is made or installed.

python_versions='3.10 3.11 3.12 3.13 3.14'  # the Pythons for which there are wheels of the pinned torch
torch_versions='2.11 2.13'                  # the first and the last minor version of torch that we run on
cpu_index=https://download.pytorch.org/whl/cpu

complain() { printf '%s\n' "$2" >&2; exit "$1"; }  # complain STATUS MESSAGE
torch_of() { "$1" -c 'import importlib.metadata as m; print(m.version("torch"))' 2>/dev/null; }
stamp() { torch_of "$python" && printf '%s\n' "${needs[@]}"; }  # with torch: a .venv may see that of the system
is_complete() { [[ ! -e .venv/flatland-incomplete && -f $file && $(<"$file") == "$(stamp)" ]]; }

# examine PYTHON REQUIREMENT...: sets `version` to its version, and `missing` to those that it does not meet. torch is
# imported, for a broken one is as good as none.
examine() {
  mapfile -t missing < <("$1" - "$torch_versions" "${@:2}" 2>/dev/null <<'END' || printf '%s\n' "${@:2}"
import re, sys
print("%d.%d" % sys.version_info[:2])
sys.stdout.flush()
sys.path = [folder for folder in sys.path if folder]  # not the checkout
numbers = lambda version: [int(n) for n in re.findall(r"\d+", version.split("+")[0])]
oldest, newest = map(numbers, sys.argv[1].split())
for requirement in sys.argv[2:]:
    name, _, least = re.match(r"([\w.-]+)(>=|==)?(.*)", requirement).groups()
    try:
        import importlib.metadata
        good = numbers(importlib.metadata.version(name)) >= numbers(least)
        if name == "torch":
            import torch
            good = oldest <= numbers(torch.__version__)[:2] <= newest
    except Exception:
        good = False
    if not good:
        print(requirement)
END
  )
  version=${missing[0]-} missing=("${missing[@]:1}")
}

# run COMMAND...: everything it says goes to .venv/pip.log and into `said`; big downloads are shown as they begin.
run() {
  said=$("$@" 2>&1 | tee -a .venv/pip.log 2>/dev/null |
    tee >(sed -unE 's/^ *(Downloading )(.*\/)?([^/]* \(([5-9][0-9]\.[0-9] M|[0-9]{3,}\.[0-9] M|[0-9.]+ G)B\))$/  \1\3/p' >&2))
}

failed() {  # failed WHAT: one message from what `run` heard
  local last
  last=$(grep -E '^ERROR|[Ee]rror:|No space left|No module|apt' <<<"$said" | tail -n 1) || last='no reason was given'
  [[ $said != *'No space left'* && $said != *'Disk quota exceeded'* ]] ||
    complain 1 "$1: the disk is full ($PWD/.venv, or the temporary folder ${TMPDIR:-/tmp}): $last
Free some space (torch needs about 1 GB for CPUs, 8 GB with CUDA) and type the same again."
  complain 2 "$1: $last
All that was said is in $PWD/.venv/pip.log. Check the network, or pip's proxy and index, and type the same again."
}

make_venv() {  # make_venv PYTHON [--system-site-packages]
  [[ ! -e .venv || -e .venv/flatland-incomplete || -e .venv/pyvenv.cfg || ! $(ls -A .venv) ]] ||
    complain 2 "$PWD/.venv is there but holds no Python environment. Move it away and type the same again."
  mkdir -p .venv && : >.venv/flatland-incomplete
  find .venv -mindepth 1 ! -name flatland-incomplete -delete
  echo "Making $PWD/.venv with $1"
  run "$1" -m venv "${@:2}" .venv || failed "making .venv"
  # That flag shows what the system's Python has; what python3 has may be in an environment of its own.
  local folders='import sysconfig as s; print(s.get_path("purelib"), s.get_path("platlib"), sep="\n")'
  [[ ! ${2-} ]] || "$1" -c "$folders" >"$("$python" -c "$folders" | tail -n 1)/outer-environment.pth"
}

install() {  # install REQUIREMENT...: into .venv; never another torch where a suitable one is
  local pip=("$python" -u -m pip --disable-pip-version-check install --no-input --progress-bar off) why
  "$python" -m pip --version >/dev/null 2>&1 || run "$python" -m ensurepip || failed "$PWD/.venv has no pip"
  echo "Installing" "${@%%[=>]*}" "(some minutes; pip's own words go to .venv/pip.log)"
  if [[ $1 != torch==* ]]; then
    set -- "torch==$(torch_of "$python")" "$@"
  elif [[ $(uname) != Darwin && $(nvidia-smi -L 2>/dev/null) != "GPU "* ]]; then
    echo "  no NVIDIA GPU here: trying torch for CPUs only, about 200 MB"
    # Without dependencies, so that nothing but torch is looked up in this index, which may be out of reach.
    if ! run "${pip[@]}" --no-deps --retries 1 --timeout 15 --extra-index-url "$cpu_index" "$1+cpu"; then
      [[ $said != *'No space left'* && $said != *'Disk quota exceeded'* ]] || failed "Installing $1+cpu"
      why="has no $1+cpu for Python $version that pip can install"
      [[ $said != *Retrying*/whl/cpu/* ]] || why='cannot be reached'
      echo "  $cpu_index $why (see .venv/pip.log): taking torch with CUDA, some GB"
    fi
  fi
  run "${pip[@]}" "$@" || failed "Installing the requirements"
}

make_complete() {  # with .venv's lock on descriptor 9
  local missing base='' version ours=yes
  if command -v flock >/dev/null && ! flock -n 9; then
    echo "Another launch.sh or test.sh is at the environment: waiting for it"
    flock 9
  fi
  ! is_complete || return 0
  if [[ -e .venv/flatland-incomplete ]] || ! "$python" -c '' 2>/dev/null; then
    base=$(command -v python3) || complain 2 "There is no python3 here (it may be ${python_versions// /, }).
On Debian and Ubuntu: sudo apt install python3 python3-venv"
  elif ! compgen -G '.venv/flatland-*' >/dev/null; then
    ours=''  # the user's own: what it lacks is installed, but it is never made anew
  fi
  examine "${base:-$python}" "${needs[@]}"
  # A Python that the pinned torch has no wheels for would only fail later, in pip's words.
  [[ $version == [0-9]* ]] || complain 2 "${base:-$python} does not run."
  [[ " $python_versions " == *" $version "* ]] ||
    complain 2 "${base:-$python} is Python $version; torch runs on Python ${python_versions// /, }.
With one of these installed, say python3.12: python3.12 -m venv --clear .venv && bash launch.sh"
  if ((${#missing[@]})); then
    [[ ! $(type -t before_installing) ]] || before_installing "${base:-$python}"
    if [[ $base && ${missing[0]} == torch==* ]]; then
      make_venv "$base"
      missing=("${needs[@]}")
    elif [[ $base ]]; then
      make_venv "$base" --system-site-packages
    fi
    [[ ! $ours ]] || : >.venv/flatland-incomplete
    install "${missing[@]}"
    "$python" -c 'import torch' 2>/dev/null ||
      complain 1 "torch is installed, but not usable. See: $python -c 'import torch'"
    echo "Installed."
  elif [[ $base ]]; then
    python=$base
    return
  fi
  if [[ $ours ]]; then
    stamp >"$file"
    rm -f .venv/flatland-incomplete
  fi
}

environment() {
  local needs file=.venv/flatland-$1
  python=$PWD/.venv/bin/python
  mapfile -t needs < <(sed 's/#.*//; s/[[:space:]]//g; /^$/d' requirements.txt)
  needs+=("${@:2}")
  is_complete || make_complete 9<.
}
