"""Downloads models, tokenizers and datasets from the Hugging Face hub and verifies every byte.

huggingface_hub transfers the files: HF_HOME's cache, Xet, retries, progress bars and all HF_* variables are its own.
It compares sizes only, so each file is hashed afterwards and compared with the hub's listing: sha256 for large files,
git's SHA-1 of a blob for the others. A damaged file is deleted and downloaded once more. A record next to the snapshot
keeps the listing; `local_path` in lib/hub.py reads it before a run uses the folder, and refuses a folder that is
incomplete or changed. After an interruption the same command continues: complete files are not downloaded again."""

import argparse
import shlex
import signal
import sys
from fnmatch import fnmatch
from pathlib import Path

from lib.errors import Failure, Parser, UserError, prepare_python, run_script
from lib.files import amount, read_json, write_json
from lib.hub import find_damage, guard_token, hub_errors, record_of, split_name

DEFAULT = "meta-llama/Llama-3.1-405B"
TEXT = "*.json *.jinja *.model *.model.v* merges.txt vocab.* LICENSE* USE_POLICY*"
WEIGHTS = "model.safetensors model-*.safetensors adapter_model.safetensors"  # the names that lib/weights.py reads
PICKLES = "*.pth *.pt *.ckpt *.pkl"


def download(args: argparse.Namespace, command: str) -> None:
    """Downloads the files that the command line selects, and verifies them."""
    from huggingface_hub import HfApi, constants, snapshot_download
    from huggingface_hub.utils import disable_progress_bars, filter_repo_objects

    if not sys.stderr.isatty():
        disable_progress_bars()
    guard_token()
    kind, repo = split_name(args.repo)
    info = HfApi().repo_info(repo, repo_type=kind, revision=args.revision, files_metadata=True)
    listing = {file.rfilename: file for file in info.siblings}
    allow, ignore = choose_patterns(args, kind, [*listing])
    files = [listing[name] for name in filter_repo_objects(listing, allow_patterns=allow, ignore_patterns=ignore)]
    if not files:
        raise UserError(f"{args.repo}: none of its {len(listing)} files is selected: {', '.join([*listing][:8])}")
    cache = Path(constants.HF_HUB_CACHE) / f"{kind}s--{repo.replace('/', '--')}"
    folder = Path(args.out).expanduser() if args.out else cache / "snapshots" / info.sha
    record, source = record_of(folder), f"{args.repo}@{args.revision}"
    old = read_json(record)
    if args.out and folder.exists() and any(folder.iterdir()) and old.get("source") != source:
        raise UserError(f"--out {args.out} is not empty and holds no download of {source}: name a new folder")
    print(f"{source}: {len(files)} files, {amount(sum(file.size for file in files))}", flush=True)
    hashes = {name: value for name, value in old.get("hashes", {}).items() if (folder / name).exists()}
    hashes |= {file.rfilename: file.lfs.sha256 if file.lfs else file.blob_id for file in files}
    record.parent.mkdir(parents=True, exist_ok=True)
    write_json(record, old | {"source": source, "command": command, "hashes": hashes})
    where = {"repo_type": kind, "revision": args.revision, "local_dir": args.out and folder or None}
    for _ in range(2):
        snapshot_download(repo, allow_patterns=allow, ignore_patterns=ignore, **where)
        damaged = find_damage(folder)
        if not damaged:
            print(f"Done: verified, in {folder}\nRevision {info.sha}")
            return
        for name in damaged:
            (folder / name).resolve().unlink(missing_ok=True)
    raise Failure(f"{repo}: {damaged[0]} arrives damaged, twice (its hash is not the hub's): try later")


def choose_patterns(args: argparse.Namespace, kind: str, names: list[str]) -> tuple[list[str] | None, list[str]]:
    """-> (patterns of the files to download, or None for all; patterns of the files to leave out)"""
    pickles, weights = PICKLES.split(), WEIGHTS.split()
    ignore = [*args.exclude, *(["*.safetensors*", "*.bin", *pickles] if args.skip_model else ())]
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
    flag("--out", default="", metavar="DIR", help="a folder for plain files (default: the cache in HF_HOME)")
    return parser


def main(argv: list[str]) -> None:
    args = make_parser().parse_args(argv)
    with hub_errors(args.repo):
        download(args, shlex.join(["python", "download.py", *argv]))


if __name__ == "__main__":
    prepare_python()
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # so that Ctrl-C also ends the transfer threads
    run_script(main)
