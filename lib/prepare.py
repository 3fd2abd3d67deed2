"""Token shards: text to shards, in parallel and resumable; reading and verifying them.

A folder of shards holds train-00000.bin ... and val-00000.bin ... with llm.c's header (256 int32: magic 20240520,
version 1, uint16 tokens; or magic 20240801, version 7, uint32), token_sizes.npy (text bytes per id) and index.json
(sources, tokenizer, hashes). Tokens of conversations are uint32 with the bits TRAINED and BEGINS of text.py. Shards
hold the rows in their order, for any number of processes. After each finished shard, progress.npz records the position
and the tokens that are in no shard yet; an interrupted `prepare` resumes there."""

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path

from lib.errors import (
    Parser,
    UserError,
    listed,
    printable,
    read_object,
    write_whole,
)  # first: it finds the Python that has numpy

import numpy as np  # isort: skip

from lib.text import (
    BEGINS,
    FORMATS,
    ID,
    STDIN,
    VAL_EVERY,
    Damaged,
    Encoder,
    TextFile,
    cores,
    encode_rows,
    find_files,
    find_text,
    group_rows,
    in_order,
    log,
    read_chat_fields,
    start_workers,
)
from lib.tokenizer import load_tokenizer, token_sizes

HEADER = 1024  # bytes
SIZES, PROGRESS = "token_sizes.npy", "progress.npz"
SPLITS, NO_TOKENS = ("train", "val"), np.zeros(0, np.uint32)
MAGICS = {  # version, dtype, the token before a document
    20240520: (1, np.uint16, 50256),
    20240801: (7, np.uint32, 128000),
}
SHARD_TOKENS = 100_000_000
BATCH = 2**20  # bytes of text that a worker encodes at a time


# ---- the format


def write_shard(path: Path, tokens: np.ndarray, vocab_size: int) -> None:
    """Writes tokens with the header and the dtype that fit the vocabulary."""
    magic = 20240520 if vocab_size <= 2**16 else 20240801
    version, dtype, _ = MAGICS[magic]
    header = np.zeros(HEADER // 4, dtype="<i4")
    header[:3] = magic, version, len(tokens)
    path.write_bytes(header.tobytes() + tokens.astype(dtype).tobytes())


def open_shard(path: Path, data_dtype: str = "") -> tuple[np.ndarray, int | None]:
    """Memory-maps a shard -> (its tokens, the id that its format puts before each document, if it has one)."""
    size = path.stat().st_size
    if size == 0:
        raise UserError(f"{path} is empty")
    magic, version, count = np.fromfile(path, "<i4", 3) if size >= HEADER else (0, 0, 0)
    if magic in MAGICS:
        expected, dtype, delimiter = MAGICS[magic]
        promised = int(count) * np.dtype(dtype).itemsize
        if (version, size - HEADER) != (expected, promised):
            raise UserError(
                f"{path}: shard version {version} and {size - HEADER} bytes of tokens; with magic {magic} it must"
                f" be version {expected}, and its header says {count} tokens = {promised} bytes: the file is damaged or"
                " cut short; write it again"
            )
        return np.memmap(path, dtype, "r", HEADER), delimiter
    if not data_dtype:
        raise UserError(
            f"{path} has no token-shard header (magic {' or '.join(map(str, MAGICS))}); for headerless tokens,"
            " as nanoGPT writes them, say --data_dtype uint16 or uint32"
        )
    if size % np.dtype(data_dtype).itemsize:
        raise UserError(f"{path}: {size} bytes are not a whole number of {data_dtype} tokens")
    return np.memmap(path, data_dtype, "r"), None


def find_shards(spec: str, flag: str) -> list[Path]:
    """The files that an entry of --data names: files of shards or text, or a folder of .bin shards."""
    if (Path(spec).expanduser() / PROGRESS).exists():
        raise UserError(f"{flag} {spec} is not prepared to its end: run its `python data.py prepare` again")
    return find_files(spec, flag, (".bin",))


def read_index(folder: Path) -> dict:
    """index.json of a folder that `prepare` made; {} for shards from other tools."""
    path = folder / "index.json"
    index = read_object(path) if path.exists() else {}
    return index if "fingerprint" in index else {}


def sha256_of(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(2**22):
            digest.update(chunk)
    return digest.hexdigest()


# ---- text -> shards


def batches(sources: list[TextFile], encoder: Encoder, position: list[int], val_every: int) -> Iterator[tuple]:
    """Jobs for encode_rows, of about BATCH bytes each, for the rows after `position` = (source, row). Label: (source,
    its rows as (number, held out))."""
    start, first = position
    for i, source in enumerate(sources[start:], start):
        for rows in group_rows(source.rows(encoder.fields, first, val_every), BATCH):
            yield (i, [(row.number, row.val) for row in rows]), encoder, str(source), rows
        first = 0


def build(
    sources: list[TextFile],
    encoder: Encoder,
    folder: Path,
    progress: dict,
    shard_tokens: int,
    val_every: int,
    processes: int = 0,
    skip_bad: int = 0,
) -> dict:
    """Tokenises sources into shards -> the content of index.json. progress: {} or the progress of an interrupted call;
    it is updated, and saved after each shard. UserError after more than skip_bad bad rows."""
    from tqdm import tqdm

    tokenizer = load_tokenizer(encoder.tokenizer)
    fresh = {"position": [0, 0], "skipped": 0, "kind": "", "files": {}} | {split: [NO_TOKENS] for split in SPLITS}
    progress.update(fresh | progress)
    _save_progress(folder, progress)
    jobs = batches(sources, encoder, progress["position"], val_every)
    bar = tqdm(total=len(sources), unit=" files", disable=None if processes else True)
    with bar, start_workers(processes) if processes else contextlib.nullcontext() as pool:
        for (source, places), results in in_order(encode_rows, jobs, pool, 2 * processes):
            _collect(progress, places, results, str(sources[source]), skip_bad)
            progress["position"] = [source, places[-1][0]]
            bar.set_postfix(rows=places[-1][0], refresh=False)
            bar.update(source - bar.n)
            if max(sum(map(len, progress[split])) for split in SPLITS) >= shard_tokens:
                _write_shards(folder, progress, shard_tokens, shard_tokens, tokenizer.vocab_size)
                _save_progress(folder, progress)
    if val_every and not any(name.startswith("val") for name in progress["files"]):
        _hold_one_out(progress, tokenizer.bos_id)
    _write_shards(folder, progress, shard_tokens, 1, tokenizer.vocab_size)
    return {
        "key": progress.get("key"),
        "tokenizer": encoder.tokenizer,
        "fingerprint": tokenizer.fingerprint,
        "vocab_size": tokenizer.vocab_size,
        "delimiter": tokenizer.bos_id,
        "kind": progress["kind"],
        "sources": [str(s) for s in sources],
        "files": dict(sorted(progress["files"].items())),
    }


def _collect(progress, places, results, source, skip_bad):
    """Adds the tokens of a job's rows to their splits."""
    tokens = {split: [] for split in SPLITS}
    for (number, val), (ids, kind) in zip(places, results, strict=True):
        if kind == "bad":
            progress["skipped"] += 1
            if progress["skipped"] > skip_bad:
                count = f" (bad row {progress['skipped']} of --skip_bad {skip_bad})" if skip_bad else ""
                raise UserError(f"{ids}{count}; --skip_bad N skips up to N bad rows")
            log.warning(f"skipped: {printable(ids)}")
            continue
        if progress["kind"] not in ("", kind):
            raise UserError(
                f"{source}, row {number}: documents and conversations together (the rows before are"
                f" {progress['kind']}): separate them, and give each its weight, as in A:0.5 B:0.5"
            )
        progress["kind"] = kind
        tokens["val" if val else "train"].append(np.frombuffer(ids, np.uint32))
    for split in SPLITS:
        progress[split].append(np.concatenate([NO_TOKENS, *tokens[split]]))


def _hold_one_out(progress, bos_id):
    """Holds out the last document or conversation if there are two or more, but too few for val_every."""
    tokens = np.concatenate(progress["train"])
    starts = np.flatnonzero(tokens >= BEGINS if progress["kind"] == "chat" else tokens == bos_id)
    if len(starts) > 1 and not len(np.concatenate(progress["val"])):
        progress["train"], progress["val"] = [tokens[: starts[-1]]], [tokens[starts[-1] :]]


def _write_shards(folder, progress, shard_tokens, least, vocab_size):
    """Writes the tokens collected for each split as shards, while there are at least `least`."""
    files = progress["files"]
    for split in SPLITS:
        tokens = np.concatenate(progress[split])
        while len(tokens) >= least:
            path = folder / f"{split}-{sum(name.startswith(split) for name in files):05}.bin"
            shard, tokens = tokens[:shard_tokens], tokens[shard_tokens:]
            write_shard(path, shard, vocab_size if progress["kind"] == "text" else 2**32)
            files[path.name] = {"tokens": len(shard), "sha256": sha256_of(path)}
        progress[split] = [tokens]


def _save_progress(folder, progress):
    temporary, arrays = folder / f"{PROGRESS}.tmp", {split: np.concatenate(progress[split]) for split in SPLITS}
    with open(temporary, "wb") as file:
        np.savez(file, rest=json.dumps({name: progress[name] for name in progress.keys() - arrays.keys()}), **arrays)
        os.fsync(file.fileno())
    os.replace(temporary, folder / PROGRESS)


def _load_progress(folder):
    try:
        with np.load(folder / PROGRESS) as saved:
            return json.loads(str(saved["rest"])) | {split: [saved[split]] for split in SPLITS}
    except FileNotFoundError:
        return {}


def key_of(sources: list[TextFile], encoder: Encoder, *options: int) -> str:
    """A hash of everything that prepared tokens depend on."""
    made_with = [s.identity for s in sources], encoder[1:], load_tokenizer(encoder.tokenizer).fingerprint, options
    return hashlib.sha256(json.dumps(made_with).encode()).hexdigest()[:16]


def prepare(
    sources: list[TextFile],
    encoder: Encoder,
    out: Path,
    shard_tokens: int = SHARD_TOKENS,
    val_every: int = VAL_EVERY,
    **options: int,
) -> dict:
    """Tokenises sources into a new folder -> index.json. Resumes an interrupted call, and waits while another process
    prepares the same folder. options: processes and skip_bad, as in `build`."""
    from filelock import FileLock

    key, is_piped = key_of(sources, encoder, shard_tokens, val_every), STDIN in map(str, sources)
    out.mkdir(parents=True, exist_ok=True)
    with FileLock(out / ".lock"):  # the file stays: removing it would let a third process in while a second one waits
        index, progress = read_index(out), _load_progress(out)
        _check_out(out, key, index or progress)
        if index and is_piped:
            raise UserError(f"--out {out} is finished, and standard input may differ now: name another folder")
        if index:
            return index
        progress = {"key": key} if is_piped else progress | {"key": key}  # a pipe cannot be read from its middle
        try:
            index = build(sources, encoder, out, progress, shard_tokens, val_every, **options)
            if not index["files"]:
                raise UserError(f"{', '.join(map(str, sources[:3]))}: no rows are left, so there is nothing to prepare")
        except Exception as e:
            if isinstance(e, Damaged) or not progress["files"]:
                for file in (out / PROGRESS, *out.glob("*.bin")):
                    file.unlink(missing_ok=True)
            raise
        np.save(out / SIZES, np.array(token_sizes(load_tokenizer(encoder.tokenizer)), np.uint16))
        write_whole(out / "index.json", json.dumps(index, indent=1), sync=True)
        (out / PROGRESS).unlink()
    return index


def _check_out(out, key, made):
    """Refuses a folder with other content. made: its index or its progress, or {}."""
    if made.get("key", key) != key:
        raise UserError(
            f"--out {out} holds other shards, or a part of some (input, tokenizer or flags differ): name another"
            " folder, or empty it"
        )
    foreign = sorted({p.name for p in out.iterdir()} - {".lock"})
    if foreign and not made:
        raise UserError(f"--out {out} is not empty ({listed(foreign[:3])}): name another folder")


def verify(path: Path, vocab_size: int = 0, data_dtype: str = "") -> Iterator[str]:
    """Yields a message for each defect of a shard, or of a folder of shards: checksums, headers, every id."""
    folder = path if path.is_dir() else path.parent
    index, files = read_index(folder), find_shards(str(path), "verify")
    known, vocab_size = index.get("files", {}), vocab_size or index.get("vocab_size", 0)
    files += [folder / name for name in known if path.is_dir()]
    for file in dict.fromkeys(files):
        if not file.exists():
            yield f"{file} is missing"
            continue
        if index and file.name not in known:
            yield f"{file} is not in index.json"
        elif index and sha256_of(file) != known[file.name]["sha256"]:
            yield f"{file} has changed since it was prepared (sha256): prepare the text again"
        try:
            tokens, _ = open_shard(file, data_dtype)
        except UserError as e:
            yield str(e)
            continue
        for start in range(0, len(tokens) if vocab_size else 0, 2**24):
            ids = tokens[start : start + 2**24].astype(np.int64) & (ID if index.get("kind") == "chat" else -1)
            wrong = np.flatnonzero(ids >= vocab_size)
            if len(wrong):
                at = wrong[0]
                yield f"{file} at token {start + at}: id {ids[at]}, beyond the {vocab_size} of the vocabulary"
                break


# ---- the command line


def main(argv: list[str]) -> None:
    """argv: prepare or verify, and its flags."""
    commands = {"prepare": _run_prepare, "verify": _run_verify}
    if not argv or argv[0] not in commands:
        raise UserError(f"expected python data.py {'|'.join(commands)}|show ... (each has --help)")
    commands[argv[0]](argv[1:])


def _run_prepare(argv):
    parser = Parser(prog="data.py prepare", description="Text -> token shards.", allow_abbrev=False)
    add = parser.add_argument
    inputs = f"files, globs, hf:// or - (standard input): {FORMATS}"
    add("--input", nargs="+", required=True, metavar="FILE", help=inputs)
    add("--tokenizer", required=True, help="bytes, a file, a folder or a hub id")
    out = "folder for the shards; after an interruption the same command resumes at the last finished shard"
    add("--out", type=Path, required=True, metavar="DIR", help=out)
    add("--text_field", default="text", help="field or column of the text (default: text)")
    numbers = {
        "shard_tokens": (SHARD_TOKENS, "tokens per shard"),
        "val_every": (100, "one document in N is held out for validation; 0 = none"),
        "processes": (cores(), "worker processes"),
        "skip_bad": (0, "bad rows to skip; the next one ends the command"),
    }
    for name, (default, help_text) in numbers.items():
        add(f"--{name}", type=int, default=default, metavar="N", help=f"{help_text} (default: {default})")
    add("--chat_fields", nargs="+", default=(), metavar="NAME", help="as for train.py: question,answer")
    add("--chat", default="llama", choices=("llama", "mixtral"), help="format, if the tokenizer has none")
    args = parser.parse_args(argv)
    values = {name: getattr(args, name) for name in numbers}
    if min(values.values()) < 0 or not args.shard_tokens:
        raise UserError("--shard_tokens must be at least 1; --val_every, --processes and --skip_bad at least 0")
    sources = [file for spec in args.input for file in find_text(spec, "--input")]
    encoder = Encoder(args.tokenizer, args.text_field, args.chat, read_chat_fields(args.chat_fields))
    files = prepare(sources, encoder, args.out, **values)["files"].items()
    train, val = (sum(f["tokens"] for name, f in files if name.startswith(split)) for split in SPLITS)
    print(f"{args.out}: {train} tokens and {val} for validation")
    print(f"Use it: --data {args.out} --tokenizer {args.tokenizer}")


def _run_verify(argv):
    parser = Parser(prog="data.py verify", description="Checks token shards.", allow_abbrev=False)
    parser.add_argument("path", nargs="+", type=Path, help="folders or .bin files")
    parser.add_argument("--vocab_size", type=int, default=0, help="ids must be below it (default: the index's)")
    parser.add_argument("--data_dtype", default="", choices=("uint16", "uint32"), help="of headerless files")
    args = parser.parse_args(argv)
    wrong = [line for path in args.path for line in verify(path, args.vocab_size, args.data_dtype)]
    if wrong:
        raise UserError("\n".join(wrong))
    print(f"{', '.join(map(str, args.path))}: all is as it should be")
