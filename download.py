"""Downloads models, tokenizers and datasets from the Hugging Face hub and verifies every byte.

huggingface_hub transfers the files: HF_HOME's cache, Xet, retries, progress bars and all HF_* variables are its own. It
compares sizes while it downloads, so afterwards its verify_repo_checksums hashes each file and compares the hash with
the hub's listing: sha256 for large files, git's SHA-1 of a blob for the others. A damaged file is deleted and
downloaded once more. A record next to the snapshot keeps the hashes; `local_path` in lib/hub.py reads it before a run
uses the folder, and refuses a folder that is incomplete or changed. After an interruption the same command continues:
complete files are not downloaded again."""

import argparse
import contextlib
import os
import shlex
import signal
import sys
from fnmatch import fnmatch
from pathlib import Path

from lib.errors import Failure, Parser, UserError, prepare_python, run_script
from lib.files import amount, read_json, write_json, write_whole
from lib.hub import ask_hub, guard_token, hub_errors, record_of, refuse_names, split_name, state_of

DEFAULT = "meta-llama/Llama-3.1-405B"
TEXT = "*.json *.jinja *.model *.model.v* merges.txt vocab.* LICENSE* USE_POLICY*"
WEIGHTS = "model.safetensors model-*.safetensors adapter_model.safetensors"  # the names that lib/weights.py reads
PICKLES = "*.pth *.pt *.ckpt *.pkl"


def list_files(name: str, revision: str) -> tuple[str, dict]:
    """-> (commit, {file: (bytes, hash)}) of a repository on the hub"""
    from huggingface_hub import HfApi

    kind, repo = split_name(name)
    try:
        info = ask_hub(lambda: HfApi().repo_info(repo, repo_type=kind, revision=revision, files_metadata=True))
        files = {f.rfilename: (int(f.size), f.lfs.sha256 if f.lfs else str(f.blob_id)) for f in info.siblings}
        refuse_names([info.sha, *files], name)  # the commit is the name of a folder
    except (KeyError, TypeError) as e:
        raise Failure(f"{name}: HF_ENDPOINT does not answer as a hub does ({type(e).__name__}: {e})") from None
    return info.sha, files


def download(args: argparse.Namespace, command: str) -> None:
    """Downloads the files that the command line selects, and verifies all files of their folder. --verify: downloads
    nothing."""
    from huggingface_hub import constants, hf_hub_download

    kind, repo = split_name(args.repo)
    commit, files = list_files(args.repo, args.revision)
    cache = Path(constants.HF_HUB_CACHE) / f"{kind}s--{repo.replace('/', '--')}"
    folder = Path(args.out).expanduser() if args.out else cache / "snapshots" / commit
    source = {"repo_id": repo, "repo_type": kind, "revision": commit}
    target = {"local_dir": folder if args.out else None}
    if not args.verify:
        fetch(args, command, files, folder, source | target)
    elif not folder.is_dir():
        raise UserError(f"{args.revision} is {commit}, and there is no {folder}: name your commit as --revision")
    for again in (True, False):
        damaged = compare(folder, files, source)
        if not damaged:
            print(f"Done: verified, in {folder}\nRevision {commit}")
            return
        if args.verify:
            break
        for name in damaged:
            path = (folder / name).resolve()
            if again:
                hf_hub_download(filename=name, force_download=True, **source, **target)
            elif path.is_relative_to((folder if args.out else cache).resolve()):  # else a link led there
                path.unlink(missing_ok=True)
    raise Failure(
        f"{len(damaged)} files are missing or damaged in {folder} ({damaged[0]} ...): their hashes are not the hub's;"
        " download them again"
    )


def fetch(args: argparse.Namespace, command: str, files: dict, folder: Path, where: dict) -> None:
    """Downloads the files that the command line selects, and records which these are."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils import filter_repo_objects

    allow, ignore = choose_patterns(args, where["repo_type"], [*files])
    selected = [*filter_repo_objects(files, allow_patterns=allow, ignore_patterns=ignore)]
    if not selected:
        raise UserError(f"{args.repo}: none of its {len(files)} files is selected: {', '.join([*files][:8])}")
    record, source = read_json(record_of(folder)), f"{args.repo}@{args.revision}"
    if args.out and folder.exists() and any(folder.iterdir()) and record.get("source") != source:
        raise UserError(f"--out {args.out} is not empty and holds no download of {source}: name a new folder")
    print(f"{source}: {len(selected)} files, {amount(sum(files[name][0] for name in selected))}", flush=True)
    hashes = {name: files[name][1] for name in selected}
    write_record(folder, record | {"source": source, "command": command, "hashes": hashes})
    if not args.out and args.revision != where["revision"]:
        # huggingface_hub writes this file only if it looks up the commit itself.
        reference = folder.parents[1] / "refs" / args.revision
        reference.parent.mkdir(parents=True, exist_ok=True)
        write_whole(reference, where["revision"])
    snapshot_download(allow_patterns=allow, ignore_patterns=ignore, **where)


def compare(folder: Path, files: dict, source: dict) -> list[str]:
    """Hashes a folder's files, and records the right ones -> names of the files that are missing or not the hub's"""
    from huggingface_hub import HfApi

    record = read_json(record_of(folder))
    known = record.get("hashes", {})
    hashes = {name: files[name][1] for name in files if name in known or os.path.lexists(folder / name)}
    states = {name: state_of(folder / name, value) for name, value in hashes.items()}
    result = HfApi().verify_repo_checksums(**source, local_dir=folder)
    wrong = {*result.missing_paths, *(mismatch["path"] for mismatch in result.mismatches)} & hashes.keys()
    verified = {name: states[name] for name in hashes.keys() - wrong}
    with contextlib.suppress(OSError):  # a cache that only others may write
        write_record(folder, record | {"hashes": hashes, "verified": verified})
    return sorted(wrong)


def write_record(folder: Path, record: dict) -> None:
    record_of(folder).parent.mkdir(parents=True, exist_ok=True)
    write_json(record_of(folder), record)


def choose_patterns(args: argparse.Namespace, kind: str, names: list[str]) -> tuple[list[str] | None, list[str]]:
    """-> (patterns of the files to download, or None for all; patterns of the files to leave out)"""
    pickles, weights = PICKLES.split(), WEIGHTS.split()
    ignore = [".cache/*", *args.exclude, *(["*.safetensors*", "*.bin", *pickles] if args.skip_model else ())]
    if args.include:
        return args.include, ignore
    if kind == "dataset":
        return None, [*pickles, ".git*", "*.md", "*.py", *ignore]
    others = [name for name in names if Path(name).suffix in (".safetensors", ".bin", ".pth", ".pt")]
    if others and not args.skip_model and not any(fnmatch(name, pattern) for name in names for pattern in weights):
        raise UserError(
            f"{args.repo} has weights only as {others[0]} and the like; {WEIGHTS} can be loaded, and pickles could run"
            " code: --skip_model downloads the other files"
        )
    return [*TEXT.split(), *weights], ["*/*", *ignore]


def make_parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="python download.py",
        description="Downloads weights, tokenizers and data from the Hugging Face hub and verifies them.",
        epilog="After an interruption the same command continues. Gated repositories need a token: hf auth login, or"
        " HF_TOKEN. HF_HOME sets the place of the cache, HF_ENDPOINT the hub.",
    )
    flag = parser.add_argument
    flag("repo", nargs="?", default=DEFAULT, metavar="REPO", help=f"ORG/NAME or datasets/ORG/NAME (default: {DEFAULT})")
    flag("--revision", default="main", metavar="R", help="branch, tag or commit (default: main)")
    flag("--skip_model", "--skip-model", action="store_true", help="configuration and tokenizer only, no weights")
    several = {"action": "append", "default": [], "metavar": "PATTERN"}
    flag("--include", **several, help="only files whose path matches (* is anything); may be repeated")
    flag("--exclude", **several, help="leave these files out; may be repeated")
    flag("--verify", action="store_true", help="download nothing: hash the files that are there")
    flag("--out", default="", metavar="DIR", help="a folder for plain files (default: the cache in HF_HOME)")
    return parser


def main(argv: list[str]) -> None:
    args = make_parser().parse_args(argv)
    from huggingface_hub.utils import disable_progress_bars

    if args.verify and (args.include or args.exclude or args.skip_model):
        raise UserError("--verify hashes all files of a download: give no --include, --exclude or --skip_model with it")
    if not sys.stderr.isatty():
        disable_progress_bars()
    guard_token()
    with hub_errors(args.repo):
        download(args, shlex.join(["python", "download.py", *argv]))


if __name__ == "__main__":
    prepare_python()
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # so that Ctrl-C also ends the transfer threads
    run_script(main)
