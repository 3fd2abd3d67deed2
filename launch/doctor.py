"""`launch.sh doctor` and `launch.sh sync`: whether every machine is fit to train, and making their files the same.

doctor looks at all hosts at once, has every pair of them sum 8 MB, and draws a table: a row for each check, a column
for each host. Below it stands, for each red field, what was found and the command that mends it."""

import io
import json
import os
import re
import shlex
import subprocess
import sys
import tarfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import combinations
from pathlib import Path

import node
from cluster import (
    Host,
    Refused,
    Unreachable,
    call,
    call_all,
    forwarded,
    launcher_flags,
    line_for,
    mend,
    read_hosts,
    remote_command,
    settle_addresses,
)
from errors import ROOT, UserError

CLOCK = 2.0  # seconds that clocks may differ: more, and logs of several hosts cannot be read together
DISK, SHM, FILES = 20e9, 1e9, 4096  # free bytes, free bytes, open files that a run should find
PAIR_BYTES, PAIR_LIMIT = 8 * 2**20, 20  # what a pair sums, seconds it has
SLOW = 4  # a link this many times slower than the fastest is red
PORT_MARK = "runs/.seen-by-{}"  # tells whether another machine sees this folder


class Table:
    """Fields by (row, host); red ones have a line each that says what to do."""

    def __init__(self, hosts: list[Host]):
        self.hosts, self.rows, self.red = hosts, {}, []

    def put(self, row: str, host: Host, text: str, problem: str = "") -> None:
        self.rows.setdefault(row, {})[host.label] = (text, bool(problem))
        if problem:
            self.red.append(f"{host.label}: {row}: {problem}")

    def draw(self) -> str:
        colour = sys.stdout.isatty()
        widths = [
            max(len(h.label), *(len(r.get(h.label, ("-",))[0]) + 2 for r in self.rows.values())) for h in self.hosts
        ]
        first = max(map(len, self.rows)) + 2
        lines = [" " * first + "  ".join(h.label.ljust(w) for h, w in zip(self.hosts, widths, strict=True))]
        for row, fields in self.rows.items():
            line = row.ljust(first)
            for host, width in zip(self.hosts, widths, strict=True):
                text, bad = fields.get(host.label, ("", False))
                text = f"{'✗' if bad else '✓'} {text}".ljust(width) if host.label in fields else "".ljust(width)
                line += (f"\033[3{1 if bad else 2}m{text}\033[0m" if colour and host.label in fields else text) + "  "
            lines.append(line.rstrip())
        return "\n".join(lines)


def verb_doctor(words: list[str], settings: dict) -> int:
    flags, words = launcher_flags(words, settings)
    hosts = read_hosts(flags["hosts"])
    table = Table(hosts)
    env, ssh = forwarded(settings["forward"]), settings["ssh"]
    base = {"root": str(ROOT), "python": settings["python"], "env": env}
    answers = call_all(hosts, ssh, "probe", 60, base)
    there = []
    for host, answer in zip(hosts, answers, strict=True):
        if isinstance(answer, Exception):
            table.put("ssh", host, "no answer", mend(host, answer))
            continue
        table.put("ssh", host, "here" if host.local else "answers")
        host.facts = answer
        there.append(host)
    if there:
        settle_addresses(there)
        examine_all(table, there, base, settings)
        check_data(table, there, base, words or shlex.split(settings["default_args"]), settings)
        if len(there) > 1:
            check_links(table, there, base, settings)
    print(table.draw())
    if table.red:
        print("\n" + "\n".join(table.red))
    return 1 if table.red else 0


def examine_all(table: Table, hosts: list[Host], base: dict, settings: dict) -> None:
    mark = ROOT / PORT_MARK.format(os.getpid())
    mark.parent.mkdir(exist_ok=True)
    mark.touch()
    names = [h.name.split("@")[-1] for h in hosts if not h.local]
    request = {
        **base,
        "names": names,
        "mark": str(mark.relative_to(ROOT)),
        "out": "runs",
        "port": int(settings["port"]),
    }
    sent = time.time()
    try:
        answers = call_all(hosts, settings["ssh"], "examine", 120, lambda h: {**request, "address": h.address})
    finally:
        mark.unlink()
    code = node.content_hash(ROOT)
    found = {h.label: a for h, a in zip(hosts, answers, strict=True) if isinstance(a, dict)}
    usual = {
        key: max(values := [json.dumps(a[key]) for a in found.values()], key=values.count)
        for key in ("python", "torch", "driver", "gpus")
        if found
    }
    sync = "bash launch.sh sync"
    for host, a in zip(hosts, answers, strict=True):
        if isinstance(a, Exception):
            table.put("ssh", host, "fails", mend(host, a))
            continue
        there = "" if host.local else f"ssh {f'-p {host.port} ' if host.port else ''}{host.name} "
        setup = f"{sync}, or {there}'cd {base['root']} && bash launch.sh setup'"

        def put(row: str, text: str, bad: bool = False, problem: str = "", host=host) -> None:
            table.put(row, host, text, problem if bad else "")

        def alike(row: str, key: str, text: str, mending: str, a=a, put=put) -> None:
            """Red where most hosts have another."""
            put(row, text, json.dumps(a[key]) != usual[key], f"{text}, others {usual[key]}; {mending}")

        # The own name may mean 127.0.1.1, as on Debian: the launcher passes addresses and interfaces, never that name.
        put("own name", a["names"][a["name"]][0][:20])
        unknown = [n for n in names if not re.match(r"[\d.]+$", a["names"][n][0])]
        wrong = [
            f"{other.name} is {a['names'][name][0]}"
            for name, other in zip(names, [h for h in hosts if not h.local], strict=True)
            if name not in unknown and other is not host and not other.address.startswith("127.")
            and other.address not in a["names"][name]
        ]  # fmt: skip
        advice = f"{', '.join(wrong)} there, not what this machine reaches; mend its /etc/hosts: {there}cat /etc/hosts"
        put("other names", f"{len(unknown)} unknown" if unknown else "known", bool(wrong), advice)
        put("reverse name", a["reverse"] or "none")
        ahead, behind = a["time"] - time.time(), sent - a["time"]
        off = max(ahead, behind)
        advice = (
            f"{off:.0f} s {'ahead of' if ahead > behind else 'behind'} this machine's; {there}sudo chronyc makestep"
        )
        put("clock", f"{off:.0f} s off" if off > CLOCK else "agrees", off > CLOCK, advice)
        alike("python", "python", a["python"], setup)
        if isinstance(a["torch"], str):
            put("torch", "no", True, f"{a['torch']}; {setup}")
        else:
            alike("torch", "torch", a["torch"][0], setup)
            if a["torch"][1]:
                put("cuda, nccl", f"{a['torch'][1]}, {'.'.join(map(str, a['torch'][2] or ['none']))}")
        alike("driver", "driver", a["driver"] or "none", f"install the same: {there}nvidia-smi")
        put(
            "code", a["code"] or "none", a["code"] != code, f"{a['code'] or 'nothing there'}, here it is {code}; {sync}"
        )
        put("folder", "shared" if a["shared"] else "its own")
        alike("GPUs", "gpus", str(a["gpus"]), f"{there}nvidia-smi; to use fewer on purpose: slots=N in hosts")
        used = [f"GPU {i} {m} MiB" for i, m in enumerate(a["gpu_memory"]) if m > 1000]
        busy = [f"{pid} ({run or 'torchrun'})" for pid, run in a["left"]]
        pids = " ".join(str(pid) for pid, _ in a["left"])
        advice = f"{', '.join(busy + used)}; if it is of no use: {there}{f'kill {pids}' if pids else 'nvidia-smi'}"
        put("left over", f"{len(busy)} processes" if busy else ", ".join(used) or "nothing", bool(used or busy), advice)
        for folder, limit in (("runs", DISK), ("/dev/shm", SHM)):
            free = a["free"][folder]
            place = folder if folder.startswith("/") else base["root"]
            advice = f"{free / 1e9:.1f} GB, at least {limit / 1e9:.0f} are wanted; {there}df -h {place}"
            put(f"free {folder}", f"{free / 1e9:.0f} GB", free < limit, advice)
        advice = f"{a['files']}, at least {FILES} are wanted: `* - nofile 65536` in its /etc/security/limits.conf"
        put("open files", str(a["files"]), a["files"] < FILES, advice)
        small = a["gpus"] > 0 and 0 <= a["locked"] < 2**30
        advice = "RDMA needs more: `* - memlock unlimited` in its /etc/security/limits.conf"
        put("locked memory", "unlimited" if a["locked"] < 0 else f"{a['locked'] // 1024} KB", small, advice)
        put("tmux", "there" if a["tmux"] else "none", not a["tmux"], f"{there}sudo apt install -y tmux")
        if host is hosts[0]:
            text = "a free one" if settings["port"] == "0" else settings["port"]
            put("port", text, not a["port"], f"{settings['port']} is taken; set another at the top of launch.sh")


def check_data(table: Table, hosts: list[Host], base: dict, words: list[str], settings: dict) -> None:
    """train.py's own check of flags, data and weights, once on each machine."""
    machines = {h.address: h for h in reversed(hosts)}.values()
    total = sum(h.slots or len(h.facts["gpus"]) or 1 for h in hosts)

    def one(host: Host):
        here = {"LOCAL_WORLD_SIZE": str(host.slots or len(host.facts["gpus"]) or 1)}
        command = [base["python"], "train.py", *words, "--check", str(total)]
        request = {"root": base["root"], "env": {**base["env"], **here}, "command": command, "limit": 1800}
        try:
            return call(host, settings["ssh"], "run", 1830, request)
        except (Unreachable, Refused) as e:
            return {"exit": 1, "err": str(e)}

    with ThreadPoolExecutor(len(hosts)) as pool:
        for host, done in zip(machines, pool.map(one, machines), strict=True):
            said = (done["err"].strip().splitlines() or [""])[-1].removeprefix("error: ")
            table.put("data, weights", host, "there" if not done["exit"] else "no", said if done["exit"] else "")


# ---- links


def check_links(table: Table, hosts: list[Host], base: dict, settings: dict) -> None:
    """An all-reduce of every pair, as many pairs at once as there are hosts for."""
    talkers = {h.label: Talker(h, base, settings) for h in hosts}
    ready = {label: t.read(90) for label, t in talkers.items()}
    speeds, faults = {}, {}
    for round_ in tournament([h for h in hosts if ready[h.label]]):
        with ThreadPoolExecutor(len(round_)) as pool:
            for (a, b), answer in zip(round_, pool.map(lambda p: meet(talkers, *p), round_), strict=True):
                if "mb_per_s" in answer:
                    speeds[a.label, b.label] = answer["mb_per_s"]
                else:
                    faults[a.label, b.label] = answer["error"]
    address = {h.label: h.address for h in hosts}
    # Between nodes of one machine no network is used: the fastest is looked for among the others.
    fastest = max([s for (a, b), s in speeds.items() if address[a] != address[b]], default=0.0)
    by_label = {h.label: h for h in hosts}
    for pair, speed in speeds.items():
        if speed * SLOW < fastest:  # once more, with nobody else on the network
            speeds[pair] = max(speed, meet(talkers, *(by_label[x] for x in pair)).get("mb_per_s", 0.0))
    for talker in talkers.values():
        talker.close()
    slow = {
        p: f"{s:.0f} MB/s, the fastest has {fastest:.0f}"
        for p, s in speeds.items()
        if s * SLOW < fastest and address[p[0]] != address[p[1]]
    }
    bad = {**slow, **faults}
    links = {h.label: [p for p in bad if h.label in p] for h in hosts}
    met = {h.label: [p for p in [*speeds, *faults] if h.label in p] for h in hosts}
    culprits = [label for label in links if len(links[label]) == len(met[label]) > 1]
    for host in hosts:
        if not ready[host.label]:
            table.put("links", host, "none", "torch does not come up there; see the row torch")
            continue
        mine = [p for p in links[host.label] if host.label in culprits or not set(p) & set(culprits)]
        shown = f"{min([s for p, s in speeds.items() if host.label in p], default=0.0):.0f} MB/s"
        problem = ""
        if mine:
            others = ", ".join(label for p in mine for label in p if label != host.label)
            which = "every link of this host" if host.label in culprits else f"the link to {others}"
            what = "is broken" if mine[0] in faults else "is slow"
            problem = (
                f"{which} {what} ({bad[mine[0]]}); see its cable, firewall and the errors that `ip -s link` counts"
            )
        table.put("links", host, shown, problem)


def tournament(hosts: list[Host]) -> list:
    """Rounds of pairs: every two hosts meet once, nobody twice in a round."""
    left, rounds = list(combinations(hosts, 2)), []
    while left:
        busy, now = set(), []
        for a, b in left:
            if a.label not in busy and b.label not in busy:
                now.append((a, b))
                busy |= {a.label, b.label}
        rounds.append(now)
        left = [p for p in left if p not in now]
    return rounds


class Talker:
    """A process on a host that sums with others when told to."""

    def __init__(self, host: Host, base: dict, settings: dict):
        command = remote_command(host, settings["ssh"], base["python"])
        self.host, self.lines, self.more = host, [], threading.Condition()
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd=ROOT
        )
        request = {"address": host.address, "limit": PAIR_LIMIT, "bytes": PAIR_BYTES, "env": base["env"]}
        self.process.stdin.write(line_for("pairs", request))
        self.process.stdin.flush()
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        for line in self.process.stdout:
            if line.startswith(b"{"):
                with self.more:
                    self.lines.append(json.loads(line))
                    self.more.notify()
        with self.more:
            self.lines.append(None)
            self.more.notify()

    def tell(self, **order) -> None:
        try:
            self.process.stdin.write(json.dumps(order).encode() + b"\n")
            self.process.stdin.flush()
        except OSError:
            pass

    def read(self, limit: float) -> dict | None:
        with self.more:
            self.more.wait_for(lambda: self.lines, limit)
            return self.lines.pop(0) if self.lines else None

    def close(self) -> None:
        try:
            self.process.stdin.close()
            self.process.wait(10)
        except (OSError, subprocess.TimeoutExpired):
            self.process.kill()


def meet(talkers: dict, a: Host, b: Host) -> dict:
    first, second = talkers[a.label], talkers[b.label]
    first.tell(role=0, address=a.address, port=0)
    answer = first.read(PAIR_LIMIT + 5) or {"error": "no answer"}
    if "port" not in answer:
        return answer
    second.tell(role=1, address=a.address, port=answer["port"])
    answers = [t.read(4 * PAIR_LIMIT) or {"error": f"no answer from {t.host.label}"} for t in (second, first)]
    return next((x for x in answers if "error" in x), answers[0])


# ---- sync


def refuse_words(words: list[str]) -> None:
    if words:
        raise UserError(f"sync takes --hosts and nothing else, not {words[0]}")


def verb_sync(words: list[str], settings: dict) -> int:
    flags, words = launcher_flags(words, settings)
    refuse_words(words)
    hosts = [h for h in read_hosts(flags["hosts"]) if not h.local]
    if not hosts:
        print("No host but this machine: nothing to copy")
        return 0
    mark = ROOT / PORT_MARK.format(os.getpid())
    mark.parent.mkdir(exist_ok=True)
    mark.touch()
    extra = [n for n in ("hosts", "README.md", "BENCHMARKS.md", "LICENSE", ".gitignore") if (ROOT / n).exists()]
    files = {n: [(ROOT / n).stat().st_mode & 0o777, (ROOT / n).read_text()] for n in [*node.own_files(ROOT), *extra]}
    request = {"root": str(ROOT), "mark": str(mark.relative_to(ROOT)), "files": files}
    try:
        answers = call_all(hosts, settings["ssh"], "unpack", 300, request)
    finally:
        mark.unlink()
    code, environment, problems = node.content_hash(ROOT), node.tree_hash(ROOT / ".venv"), []

    def finish(pair) -> str:
        host, answer = pair
        if isinstance(answer, Exception):
            problems.append(mend(host, answer))
            return ""
        if answer["shared"]:
            return f"{host.label}: sees this very folder; nothing to copy"
        if answer["code"] != code:
            problems.append(
                f"{host.label}: the files differ after copying ({answer['code']}, here {code}): is its disk full?"
            )
            return ""
        said = f"{host.label}: {len(files)} files, verified ({code})"
        if environment and answer["environment"] != environment:
            try:
                found = send_environment(host, settings["ssh"])
            except (Unreachable, Refused) as e:
                problems.append(mend(host, e))
                return ""
            if found != environment:
                problems.append(f"{host.label}: .venv differs after copying: is its disk full?")
                return ""
            said += ", .venv copied"
        else:
            said += ", .venv the same" if environment else ""
        try:
            check = [settings["python"], "-c", "import torch"]
            done = call(host, settings["ssh"], "run", 120, {**request, "env": {}, "command": check, "limit": 100})
            wrong = done["err"].strip().splitlines()[-1] if done["exit"] else ""
        except (Unreachable, Refused) as e:
            wrong = str(e)
        if wrong:
            base = os.path.realpath(settings["python"])
            problems.append(
                f"{host.label}: {settings['python']} does not run there: {wrong}. It needs {base}, or an environment"
                f" of its own: ssh {host.name} 'cd {shlex.quote(str(ROOT))} && bash launch.sh setup'"
            )
            return ""
        return said

    with ThreadPoolExecutor(len(hosts)) as pool:
        for said in pool.map(finish, zip(hosts, answers, strict=True)):
            if said:
                print(said)
    if problems:
        print("\n".join(problems), file=sys.stderr)
        return 1
    return 0


def send_environment(host: Host, ssh: str) -> str:
    """Streams .venv to a host -> the hash of what has arrived there."""
    process = subprocess.Popen(
        remote_command(host, ssh), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT
    )
    try:
        process.stdin.write(line_for("unpack_environment", {"root": str(ROOT)}))
        with tarfile.open(fileobj=process.stdin, mode="w|", bufsize=2**20) as archive:
            top = Path(os.path.realpath(ROOT / ".venv"))
            for path in sorted(top.iterdir()):
                archive.add(path, path.name, filter=lambda i: None if "__pycache__" in i.name else i)
        process.stdin.close()
    except OSError:
        pass  # what it says tells why
    out, err = io.BytesIO(process.stdout.read()), process.stderr.read().decode(errors="replace").strip()
    process.wait()
    for line in out:
        if line.startswith(b"{"):
            answer = json.loads(line)
            if "refused" in answer:
                raise Refused(answer["refused"])
            return answer["environment"]
    raise Unreachable(err.splitlines()[-1] if err else "the connection broke")
