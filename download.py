"""Downloads models, tokenizers and datasets from the Hugging Face hub and verifies every byte.

huggingface_hub transfers the files: HF_HOME's cache, Xet, retries, progress bars and all HF_* variables are its own. It
compares only sizes while it downloads, so afterwards each file is hashed and compared with the hub's listing: sha256
for large files, git's SHA-1 of a blob for the others. A damaged file is downloaded once more. Until all files are
verified, a mark in the folder makes `local_path` in base/hub.py refuse it. After an interruption the same command
continues: complete files are not downloaded again. Two commands for one folder work one after the other."""

import argparse
import os
import re
import shlex
import signal
import sys
from functools import partial
from pathlib import Path

from base.disk import amount, plural, retry
from base.errors import Failure, Parser, UserError, prepare_python, run_script
from base.hub import UNFINISHED, guard_token, hub_errors, is_busy, sizes_of, split_name

DEFAULT = "meta-llama/Llama-3.1-405B"
# Names that could lead out of a folder: with a part that is empty, . or .., a drive of Windows, a control character.
BAD_NAME = re.compile(r"(^|[/\\])(\.{0,2}([/\\]|$)|[a-zA-Z]:)|[\0-\x1f\x7f]")
# huggingface_hub's arguments: the files to download (None: all), and to leave out.
PATTERNS = {
    "model": {
        "allow_patterns": [
            "*.json", "*.jinja", "*.model", "*.model.v*", "merges.txt", "vocab.*", "LICENSE*", "USE_POLICY*",
            "model.safetensors", "model-*.safetensors", "adapter_model.safetensors",
        ],
        "ignore_patterns": ["*/*"],
    },
    "dataset": {
        "allow_patterns": None,
        "ignore_patterns": ["*.pth", "*.pt", "*.ckpt", "*.pkl", ".git*", ".cache/*", "*.md", "*.py"],
    },
}  # fmt: skip
WEIGHTS = [
    "*.safetensors*", "*.bin",
    "*.pth", "*.pt", "*.ckpt", "*.pkl",
]  # fmt: skip


def list_repo(name: str, revision: str) -> tuple[str, dict]:
    """-> (commit, {file: (bytes, hash)}) of a repository on the hub"""
    from huggingface_hub import HfApi

    ask = partial(HfApi().repo_info, **split_name(name), revision=revision, files_metadata=True)
    info = retry(ask, transient=is_busy)
    files = {f.rfilename: (f.size, f.lfs.sha256 if f.lfs else f.blob_id) for f in info.siblings}
    for file in (info.sha, *files):  # the commit is the name of a folder
        if BAD_NAME.search(file):
            raise UserError(f"{name} lists a file {file!r}, which leads out of a folder")
    return info.sha, files


def download(args: argparse.Namespace, command: str) -> None:
    """Downloads and verifies the files that the command line selects. --verify: only verifies the files that exist."""
    from huggingface_hub import constants, hf_hub_download, snapshot_download
    from huggingface_hub.file_download import repo_folder_name
    from huggingface_hub.utils import WeakFileLock, filter_repo_objects

    repo = split_name(args.repo)
    commit, files = list_repo(args.repo, args.revision)
    patterns = PATTERNS[repo["repo_type"]]
    if args.skip_model:
        patterns = patterns | {"ignore_patterns": [*patterns["ignore_patterns"], *WEIGHTS]}
    selected = {name: files[name] for name in filter_repo_objects(files, **patterns)}
    if not selected:
        raise UserError(f"{args.repo}: none of its files is selected: {', '.join([*files][:8])}")
    folder = Path(constants.HF_HUB_CACHE, repo_folder_name(**repo), "snapshots", commit)
    if args.out:
        folder = repo["local_dir"] = Path(args.out).expanduser()
        others = {*os.listdir(folder)} - {".cache"} if folder.exists() else ()
        if others and not sizes_of(args.repo, revision=commit, local_dir=folder):
            raise UserError(f"--out {folder} is not empty and holds no download of {commit}: name a new folder")
    mark = folder / UNFINISHED
    if args.verify:
        if mark.exists() or not folder.is_dir():
            raise UserError(f"{folder} does not hold a complete download: name your commit as --revision")
        damaged = find_damaged(folder, {name: selected[name] for name in selected if os.path.lexists(folder / name)})
    else:
        size = amount(sum(size for size, _ in selected.values()))
        print(f"{args.repo}@{args.revision}: {plural(len(selected), 'file')}, {size}", flush=True)
        mark.parent.mkdir(parents=True, exist_ok=True)
        with WeakFileLock(f"{mark}.lock"):  # the library would download a file twice into --out
            mark.write_text(command)
            snapshot_download(revision=args.revision, **patterns, **repo)
            damaged = find_damaged(folder, selected)
            for name in damaged:
                hf_hub_download(filename=name, revision=commit, force_download=True, **repo)
            damaged = find_damaged(folder, {name: files[name] for name in damaged})
            if not damaged:
                mark.unlink()
    if damaged:
        raise Failure(f"{plural(len(damaged), 'file')} missing or damaged in {folder} ({damaged[0]} ...): try again")
    print(f"Done: verified, in {folder}\nRevision {commit}")


def find_damaged(folder: Path, files: dict) -> list[str]:
    """Names of files that are missing or have another hash than the hub's, by reading all of them."""
    from huggingface_hub.utils import sha, tqdm

    damaged = []
    for name in tqdm(files, "Verifying", unit=" files"):
        (_, expected), path = files[name], folder / name
        if path.is_file():
            with open(path, "rb") as file:
                actual = sha.sha_fileobj(file).hex() if len(expected) == 64 else sha.git_hash(file.read())
        if not path.is_file() or actual != expected:
            damaged.append(name)
    return damaged


FLAGS = {
    "repo": dict(nargs="?", default=DEFAULT, metavar="REPO", help="ORG/NAME or datasets/ORG/NAME (%(default)s)"),
    "--revision": dict(default="main", metavar="R", help="branch, tag or commit (%(default)s)"),
    "--skip_model --skip-model": dict(action="store_true", help="configuration and tokenizer only"),
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

    if not sys.stderr.isatty():
        disable_progress_bars()
    guard_token()
    with hub_errors(args.repo):
        download(args, shlex.join(["python", "download.py", *argv]))


if __name__ == "__main__":
    prepare_python()
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # so that Ctrl-C also ends the transfer threads
    run_script(main)
