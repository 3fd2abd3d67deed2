"""Downloads models, tokenizers and datasets from the Hugging Face hub and verifies every byte.

huggingface_hub transfers the files: HF_HOME's cache, Xet, retries, progress bars and all HF_* variables are its own. It
compares only sizes while it downloads, so afterwards each file is hashed and compared with the hub's listing: sha256
for large files, git's SHA-1 of a blob for the others. A damaged file is downloaded once more, and deleted if it is
damaged again. Until all files are verified, a mark in the folder makes `local_path` in lib/hub.py refuse it. After an
interruption the same command continues: complete files are not downloaded again. Two commands for one folder work one
after the other."""

import argparse
import os
import re
import shlex
import signal
import sys
from fnmatch import fnmatch
from functools import partial
from pathlib import Path

from lib.errors import Failure, Parser, UserError, prepare_python, run_script
from lib.files import amount, plural, retry
from lib.hub import UNFINISHED, guard_token, hub_errors, is_busy, sizes_of, split_name

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
# Names that could lead out of a folder: with a part that is empty, . or .., a drive of Windows, a control character.
BAD_NAME = re.compile(r"(^|[/\\])(\.{0,2}([/\\]|$)|[a-zA-Z]:)|[\0-\x1f\x7f]")


def list_files(name: str, revision: str) -> tuple[str, dict]:
    """-> (commit, {file: (bytes, hash)}) of a repository on the hub"""
    from huggingface_hub import HfApi

    ask = partial(HfApi().repo_info, **split_name(name), revision=revision, files_metadata=True)
    info = retry(ask, transient=is_busy)
    try:
        files = {f.rfilename: (int(f.size), str(f.lfs.sha256 if f.lfs else f.blob_id)) for f in info.siblings}
        bad = [file for file in (info.sha, *files) if BAD_NAME.search(file)]  # the commit is the name of a folder
    except (TypeError, ValueError, OverflowError) as e:
        raise Failure(f"{name}: HF_ENDPOINT does not answer as a hub does ({e})") from None
    if bad:
        raise UserError(f"{name} lists a file {bad[0]!r}, which leads out of a folder")
    return info.sha, files


def download(args: argparse.Namespace, command: str) -> None:
    """Downloads and verifies the files that the command line selects, and deletes files that are damaged twice.
    --verify: only verifies the files that exist."""
    from huggingface_hub import constants, hf_hub_download, snapshot_download
    from huggingface_hub.utils import WeakFileLock

    commit, files = list_files(args.repo, args.revision)
    repo = split_name(args.repo)
    root = Path(constants.HF_HUB_CACHE) / f"{repo['repo_type']}s--{repo['repo_id'].replace('/', '--')}"
    folder = root / "snapshots" / commit
    if args.out:
        root = folder = repo["local_dir"] = Path(args.out).expanduser()
        others = {*os.listdir(folder)} - {".cache"} if folder.exists() else ()
        if others and not sizes_of(args.repo, revision=commit, local_dir=folder):
            raise UserError(f"--out {folder} is not empty and holds no download of {commit}: name a new folder")
    mark = folder / UNFINISHED
    if args.verify and (mark.exists() or not folder.is_dir()):
        raise UserError(f"{args.revision} is {commit}, and no complete {folder} exists: name your commit as --revision")
    if args.verify:
        damaged = find_damaged(folder, {name: files[name] for name in files if os.path.lexists(folder / name)})
    else:
        patterns, selected = select(args, repo["repo_type"], files)
        mark.parent.mkdir(parents=True, exist_ok=True)
        with WeakFileLock(f"{mark}.lock"):  # the library would download a file twice into --out
            mark.write_text(command)
            snapshot_download(revision=args.revision, **patterns, **repo)
            damaged = find_damaged(folder, selected)
            for name in damaged:
                hf_hub_download(filename=name, revision=commit, force_download=True, **repo)
            damaged = find_damaged(folder, {name: files[name] for name in damaged})
            for path in ((folder / name).resolve() for name in damaged):
                if path.is_relative_to(root.resolve()):  # else a link led there
                    path.unlink(missing_ok=True)
            if not damaged:
                mark.unlink()
    if damaged:
        raise Failure(f"{plural(len(damaged), 'file')} missing or damaged in {folder} ({damaged[0]} ...): try again")
    print(f"Done: verified, in {folder}\nRevision {commit}")


def find_damaged(folder: Path, files: dict) -> list[str]:
    """Names of files that are missing or have another hash than the hub's, by reading all of them."""
    from huggingface_hub.utils import sha, tqdm

    def is_right(name: str) -> bool:
        expected = files[name][1]
        with open(folder / name, "rb") as file:
            return expected == (sha.sha_fileobj(file).hex() if len(expected) == 64 else sha.git_hash(file.read()))

    rows = tqdm(files, "Verifying", unit=" files")
    return [name for name in rows if not ((folder / name).is_file() and is_right(name))]


def select(args: argparse.Namespace, kind: str, files: dict) -> tuple[dict[str, list[str] | None], dict]:
    """-> (huggingface_hub's arguments for the files to download (None: all) and to leave out, the selected files)"""
    from huggingface_hub.utils import filter_repo_objects

    allow, ignore = args.include or None, [".cache/*", *args.exclude]
    if args.skip_model:
        ignore += ["*.safetensors*", "*.bin", *PICKLES]
    if not allow and kind == "dataset":
        ignore += [*PICKLES, ".git*", "*.md", "*.py"]
    elif not allow:
        allow = CONFIGURATION + WEIGHTS
        ignore.append("*/*")
        others = [name for name in files if name.endswith((".safetensors", ".bin", ".pth", ".pt"))]
        if others and not (args.skip_model or any(fnmatch(name, known) for name in others for known in WEIGHTS)):
            raise UserError(f"{args.repo} has weights only as {others[0]}, which is not read: give --skip_model")
    patterns = {"allow_patterns": allow, "ignore_patterns": ignore}
    selected = {name: files[name] for name in filter_repo_objects(files, **patterns)}
    if not selected:
        raise UserError(f"{args.repo}: none of its {len(files)} files is selected: {', '.join([*files][:8])}")
    size = amount(sum(size for size, _ in selected.values()))
    print(f"{args.repo}@{args.revision}: {plural(len(selected), 'file')}, {size}", flush=True)
    return patterns, selected


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
