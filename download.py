"""Downloads models, tokenizers and datasets from the Hugging Face hub and verifies every byte.

huggingface_hub transfers the files: HF_HOME's cache, Xet, retries, progress bars and all HF_* variables are its own. It
compares only sizes while it downloads, so afterwards each file is hashed and compared with the hub's listing: sha256
for large files, git's SHA-1 of a blob for the others. A damaged file is downloaded once more, and deleted if it is
damaged again. A record next to the snapshot keeps the hashes; `local_path` in lib/hub.py reads it before a run uses the
folder, and refuses a folder that is incomplete or changed. After an interruption the same command continues: complete
files are not downloaded again."""

import argparse
import os
import shlex
import signal
import sys
from fnmatch import fnmatch
from functools import partial
from pathlib import Path

from lib.errors import Failure, Parser, UserError, prepare_python, run_script
from lib.files import amount, read_json, retry
from lib.hub import find_damage, guard_token, hub_errors, is_busy, record_of, refuse_names, split_name, write_record

DEFAULT = "meta-llama/Llama-3.1-405B"
CONFIGURATION = [
    "*.json", "*.jinja", "*.model", "*.model.v*", "merges.txt", "vocab.*",
    "LICENSE*", "USE_POLICY*",
]  # fmt: skip
WEIGHTS = [  # the names that lib/folders.py reads
    "model.safetensors",
    "model-*.safetensors",
    "adapter_model.safetensors",
]
PICKLES = ["*.pth", "*.pt", "*.ckpt", "*.pkl"]


def list_files(name: str, revision: str) -> tuple[str, dict]:
    """-> (commit, {file: (bytes, hash)}) of a repository on the hub"""
    from huggingface_hub import HfApi

    try:
        ask = partial(HfApi().repo_info, **split_name(name), revision=revision, files_metadata=True)
        info = retry(ask, transient=is_busy)
        files = {f.rfilename: (int(f.size), f.lfs.sha256 if f.lfs else str(f.blob_id)) for f in info.siblings}
        refuse_names([info.sha, *files], name)  # the commit is the name of a folder
    except (KeyError, TypeError) as e:
        raise Failure(f"{name}: HF_ENDPOINT does not answer as a hub does ({type(e).__name__}: {e})") from None
    return info.sha, files


def download(args: argparse.Namespace, command: str) -> None:
    """Downloads the files that the command line selects, and verifies all files of their folder. --verify: downloads
    nothing."""
    from huggingface_hub import constants, hf_hub_download

    commit, files = list_files(args.repo, args.revision)
    source = split_name(args.repo)
    root = Path(constants.HF_HUB_CACHE) / f"{source['repo_type']}s--{source['repo_id'].replace('/', '--')}"
    folder = root / "snapshots" / commit
    if args.out:
        root = folder = source["local_dir"] = Path(args.out).expanduser()
    if not args.verify:
        fetch(args, command, files, folder, source)
    elif not folder.is_dir():
        raise UserError(f"{args.revision} is {commit}, and there is no {folder}: name your commit as --revision")
    damaged = compare(folder, files)
    if not args.verify:
        for name in damaged:
            hf_hub_download(filename=name, revision=commit, force_download=True, **source)
        damaged = compare(folder, files)
        for path in ((folder / name).resolve() for name in damaged):
            if path.is_relative_to(root.resolve()):  # else a link led there
                path.unlink(missing_ok=True)
    if damaged:
        raise Failure(f"{len(damaged)} files are missing or damaged in {folder} ({damaged[0]} ...): repeat the command")
    print(f"Done: verified, in {folder}\nRevision {commit}")


def fetch(args: argparse.Namespace, command: str, files: dict, folder: Path, source: dict) -> None:
    """Downloads the files that the command line selects, and records which these are."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils import filter_repo_objects

    patterns = choose_patterns(args, source["repo_type"], [*files])
    selected = {name: files[name] for name in filter_repo_objects(files, **patterns)}
    if not selected:
        raise UserError(f"{args.repo}: none of its {len(files)} files is selected: {', '.join([*files][:8])}")
    record, name = read_json(record_of(folder)), f"{args.repo}@{args.revision}"
    if args.out and folder.exists() and any(folder.iterdir()) and record.get("source") != name:
        raise UserError(f"--out {args.out} is not empty and holds no download of {name}: name a new folder")
    print(f"{name}: {len(selected)} files, {amount(sum(size for size, _ in selected.values()))}", flush=True)
    hashes = {file: value for file, (_, value) in selected.items()}
    write_record(folder, record | {"source": name, "command": command, "hashes": hashes})
    snapshot_download(revision=args.revision, **patterns, **source)


def compare(folder: Path, files: dict) -> list[str]:
    """Hashes a folder's files, and records the right ones -> names of the files that are missing or not the hub's"""
    record = read_json(record_of(folder))
    known = record.get("hashes", {})
    hashes = {name: files[name][1] for name in files if name in known or os.path.lexists(folder / name)}
    return find_damage(folder, record | {"hashes": hashes, "verified": {}})


def choose_patterns(args: argparse.Namespace, kind: str, names: list[str]) -> dict[str, list[str] | None]:
    """huggingface_hub's arguments for the files to download (None: all) and the files to leave out."""
    allow, ignore = args.include or None, [".cache/*", *args.exclude]
    if args.skip_model:
        ignore += ["*.safetensors*", "*.bin", *PICKLES]
    if not allow and kind == "dataset":
        ignore += [*PICKLES, ".git*", "*.md", "*.py"]
    elif not allow:
        others = [name for name in names if Path(name).suffix in (".safetensors", ".bin", ".pth", ".pt")]
        if others and not args.skip_model and not any(fnmatch(name, known) for name in names for known in WEIGHTS):
            raise UserError(
                f"{args.repo} has weights only as {others[0]} and the like, but {', '.join(WEIGHTS)} can be loaded:"
                " --skip_model downloads the other files"
            )
        allow = CONFIGURATION + WEIGHTS
        ignore.append("*/*")
    return {"allow_patterns": allow, "ignore_patterns": ignore}


FLAGS = {
    "repo": dict(nargs="?", default=DEFAULT, metavar="REPO", help="ORG/NAME or datasets/ORG/NAME (%(default)s)"),
    "--revision": dict(default="main", metavar="R", help="branch, tag or commit (%(default)s)"),
    "--skip_model --skip-model": dict(action="store_true", help="configuration and tokenizer only"),
    "--include": dict(
        action="append",
        default=[],
        metavar="PATTERN",
        help="only files whose path matches (* is anything); may be repeated",
    ),
    "--exclude": dict(action="append", default=[], metavar="PATTERN", help="leave these files out; may be repeated"),
    "--verify": dict(action="store_true", help="download nothing: hash the files that exist"),
    "--out": dict(default="", metavar="DIR", help="a folder for plain files (default: the cache)"),
}
ABOUT = {
    "prog": "python download.py",
    "description": "Downloads weights, tokenizers and data from the Hugging Face hub and verifies them.",
    "epilog": "After an interruption the same command continues. Gated repositories need a token: hf auth login, or"
    " HF_TOKEN. HF_HOME sets the place of the cache, HF_ENDPOINT the hub.",
}


def main(argv: list[str]) -> None:
    args = Parser(FLAGS, **ABOUT).parse_args(argv)
    from huggingface_hub.utils import disable_progress_bars

    if args.verify and (args.include or args.exclude or args.skip_model):
        raise UserError("--verify hashes all files: give no --include, --exclude or --skip_model with it")
    if not sys.stderr.isatty():
        disable_progress_bars()
    guard_token()
    with hub_errors(args.repo):
        download(args, shlex.join(["python", "download.py", *argv]))


if __name__ == "__main__":
    prepare_python()
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # so that Ctrl-C also ends the transfer threads
    run_script(main)
