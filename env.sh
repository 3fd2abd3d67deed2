# shellcheck shell=bash
# Sourced by launch.sh and test.sh, with the checkout as the current directory:
#
#   environment NAME [REQUIREMENT ...]     sets `python` to one that has requirements.txt and the extra REQUIREMENTs
#
# In this order: a complete .venv; python3, if it has everything; python3 in a .venv that sees its torch, with the rest
# installed; a .venv with everything. What is there is never changed outside .venv, and a suitable torch is never
# replaced. `.venv/flatland-NAME` holds what was installed for NAME, so that another requirements.txt installs again;
# `.venv/flatland-incomplete` is there while something is being installed, so that an interrupted one is made anew.

python_versions='3.10 3.11 3.12 3.13 3.14'  # the Pythons for which there are wheels of the pinned torch
torch_versions='2.11 2.13'                  # the first and the last minor version of torch that we run on
cpu_index=https://download.pytorch.org/whl/cpu

complain() {  # complain STATUS MESSAGE
  printf '%s\n' "$2" >&2
  exit "$1"
}

# lacks PYTHON REQUIREMENT...: prints those that PYTHON does not meet, torch first. torch is imported, for a broken one
# is as good as none; of the others the installed version is looked up, against == and >=.
lacks() {
  "$1" - "$torch_versions" "${@:2}" 2>/dev/null <<'END' || printf '%s\n' "${@:2}"
import importlib.metadata, re, sys

sys.path = [folder for folder in sys.path if folder]  # not the checkout
numbers = lambda version: [int(n) for n in re.findall(r"\d+", version.split("+")[0])][:3]
oldest, newest = map(numbers, sys.argv[1].split())
lacking = []
for requirement in sys.argv[2:]:
    name = re.match(r"[\w.-]+", requirement).group()
    try:
        found = numbers(importlib.metadata.version(name))
        if name == "torch":
            import torch
            good = oldest <= numbers(torch.__version__)[:2] <= newest
        else:
            bounds = re.findall(r"(==|>=)([\d.]+)", requirement)
            good = all(found == numbers(v) or how == ">=" and found > numbers(v) for how, v in bounds)
    except Exception:
        good = False
    if not good:
        lacking.append(requirement)
print("\n".join(sorted(lacking, key=lambda requirement: not requirement.startswith("torch="))))
END
}

torch_of() { "$1" -c 'import importlib.metadata as m; print(m.version("torch"))' 2>/dev/null; }

# A Python that the pinned torch has no wheels for would only fail later, in pip's words.
check_version() {
  local version
  version=$("$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])') || complain 2 "$1 does not run."
  case " $python_versions " in *" $version "*) return ;; esac
  complain 2 "$1 is Python $version; torch runs on Python ${python_versions// /, }.
With one of these installed, say python3.12: python3.12 -m venv --clear .venv && bash launch.sh"
}

# run_quietly COMMAND...: everything it says goes to the log and into `said`; big downloads are shown as they begin.
run_quietly() {
  said=$("$@" 2>&1 | tee -a .venv/pip.log 2>/dev/null | awk '
    /^ *Downloading .*\([0-9.]+ [MG]B\)/ && ($(NF) == "GB)" || substr($(NF - 1), 2) + 0 >= 50) {
      file = $2; sub(/.*\//, "", file); print "  downloading", file, $(NF - 1), $NF >"/dev/stderr"
      fflush("/dev/stderr") }
    { print }')
}

install_failed() {  # install_failed WHAT: one message from what pip or venv said
  local last
  last=$(grep -E '^ERROR|[Ee]rror:|No space left' <<<"$said" | tail -n 1) || true
  if [[ $said == *'No space left'* || $said == *'Disk quota exceeded'* ]]; then
    complain 1 "$1: the disk is full ($PWD/.venv, or the temporary folder ${TMPDIR:-/tmp}): ${last:-no space left}
Free some space (torch needs about 1 GB for CPUs, 8 GB with CUDA) and type the same again."
  fi
  complain 2 "$1: ${last:-no reason was given}
All that was said is in $PWD/.venv/pip.log. Check the network, or pip's proxy and index, and type the same again."
}

make_venv() {  # make_venv PYTHON [--system-site-packages]
  "$1" -c 'import venv, ensurepip' 2>/dev/null ||
    complain 2 "$1 has no venv module to make an environment with. On Debian and Ubuntu: sudo apt install python3-venv"
  if [[ -e .venv && ! -e .venv/flatland-incomplete && ! -e .venv/pyvenv.cfg && -n $(ls -A .venv) ]]; then
    complain 2 "$PWD/.venv is there but holds no Python environment. Move it away and type the same again."
  fi
  mkdir -p .venv
  : >.venv/flatland-incomplete
  find .venv -mindepth 1 ! -name flatland-incomplete -delete
  echo "Making $PWD/.venv with $1"
  run_quietly "$1" -m venv "${@:2}" .venv || install_failed "making .venv"
  # --system-site-packages shows what the system's Python has. Where python3 is itself in an environment, show that too.
  if [[ ${2-} ]] && "$1" -c 'import sys; sys.exit(sys.prefix == sys.base_prefix)'; then
    "$1" -c 'import sysconfig as s; print(s.get_path("purelib"), s.get_path("platlib"), sep="\n")' \
      >"$(.venv/bin/python -c 'import sysconfig as s; print(s.get_path("purelib"))')/outer-environment.pth"
  fi
}

install_requirements() {  # install_requirements REQUIREMENT...: into .venv; never another torch where a suitable one is
  local pip=(.venv/bin/python -u -m pip --disable-pip-version-check install --no-input --progress-bar off)
  local keep=() first=$1
  .venv/bin/python -m pip --version >/dev/null 2>&1 || run_quietly .venv/bin/python -m ensurepip ||
    complain 2 "$PWD/.venv has no pip and no ensurepip. On Debian and Ubuntu: sudo apt install python3-venv"
  echo "Installing" "${@%%[=>]*}" "(some minutes; pip's own words go to .venv/pip.log)"
  if [[ $first != torch==* ]]; then
    echo "torch==$(torch_of .venv/bin/python)" >.venv/flatland-constraints
    keep=(--constraint .venv/flatland-constraints)
  elif [[ $(uname) != Darwin && $(nvidia-smi -L 2>/dev/null) != "GPU "* ]]; then
    echo "  no NVIDIA GPU here: trying torch for CPUs only, about 200 MB"
    # Without dependencies, so that nothing but torch is looked up in this index, which may be out of reach.
    if ! run_quietly "${pip[@]}" --no-deps --retries 1 --timeout 15 --extra-index-url "$cpu_index" "$first+cpu"; then
      [[ $said != *'No space left'* ]] || install_failed "Installing $first+cpu"
      echo "  not to be had: taking torch with CUDA, some GB"
    fi
  fi
  run_quietly "${pip[@]}" ${keep[@]+"${keep[@]}"} "$@" || install_failed "Installing the requirements"
}

environment() {
  local needs stamp missing found of_ours=yes
  mapfile -t needs < <(sed 's/#.*//; s/[[:space:]]//g; /^$/d' requirements.txt)
  needs+=("${@:2}")
  if command -v flock >/dev/null; then  # one installation at a time; the lock ends with the descriptor
    exec 9<.
    flock -n -E 75 9 2>/dev/null || if (($? == 75)); then
      echo "Another launch.sh or test.sh is at the environment: waiting for it"
      flock 9
    fi
  fi

  # The stamp begins with torch's version, for a .venv that sees the system's Python must notice another torch there.
  stamp=.venv/flatland-$1
  python=$PWD/.venv/bin/python
  if [[ ! -e .venv/flatland-incomplete && -f $stamp &&
    $(<"$stamp") == "$(torch_of "$python"; printf '%s\n' "${needs[@]}")" ]]; then
    exec 9<&-
    return
  fi

  if [[ -e .venv/flatland-incomplete ]] || ! "$python" -c '' 2>/dev/null; then
    found=$(command -v python3) || complain 2 "There is no python3 here (it may be ${python_versions// /, }).
On Debian and Ubuntu: sudo apt install python3 python3-venv"
    check_version "$found"
    mapfile -t missing < <(lacks "$found" "${needs[@]}")
    if [[ ${#missing[@]} == 0 || ! ${missing[0]} ]]; then
      python=$found
      exec 9<&-
      return
    fi
    if [[ ${missing[0]} == torch==* ]]; then make_venv "$found"; else make_venv "$found" --system-site-packages; fi
  else
    # A .venv without a stamp is the user's own: what it lacks is installed, but it is never made anew.
    compgen -G '.venv/flatland-*' >/dev/null || of_ours=
    check_version "$python"
  fi
  mapfile -t missing < <(lacks "$python" "${needs[@]}")
  if [[ ${missing[0]-} ]]; then
    [[ ! $of_ours ]] || : >.venv/flatland-incomplete
    install_requirements "${missing[@]}"
    [[ ! $(lacks "$python" torch) ]] ||
      complain 1 "torch is installed, but not usable. See: $python -c 'import torch'"
    echo "Installed."
  fi
  if [[ $of_ours ]]; then
    { torch_of "$python"; printf '%s\n' "${needs[@]}"; } >"$stamp"
    rm -f .venv/flatland-incomplete
  fi
  exec 9<&-
}
