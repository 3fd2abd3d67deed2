"""What launch.sh calls: `python launcher.py NAME=SETTING ... -- VERB WORDS` -> one function, and its exit status."""

import os
import sys

import cluster
import doctor
import top
from errors import UserError


def main(argv: list[str]) -> int:
    split = argv.index("--")
    settings, (verb, *words) = dict(s.split("=", 1) for s in argv[:split]), argv[split + 1 :]
    try:
        module = {"doctor": doctor, "sync": doctor, "top": top}.get(verb, cluster)
        return getattr(module, f"verb_{verb}")(words, settings)
    except UserError as e:
        print(e, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # | head
        os._exit(0)
    except OSError as e:  # a disk that is full, or fails
        print(f"{verb}: {e}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
