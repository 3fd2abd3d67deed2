"""What launch.sh calls: `python launcher.py NAME=SETTING ... -- VERB WORDS` -> one function, and its exit status.

`python launcher.py --before-installing NAME=SETTING ... -- VERB WORDS` only looks at the words, with any Python: torch
takes minutes to install, and no flag depends on it. Status 2: a mistake; 3: help was asked for, and printed."""

import importlib.abc
import importlib.machinery
import os
import shlex
import sys
import types
from pathlib import Path

sys.path.insert(1, str(Path(__file__).parents[1]))


class StandIn(type):
    """Stands in for what a package that is not installed yet would define. A result of it is good for nothing."""

    def __getattr__(cls, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        return cls

    def __call__(cls, *args, **kwargs):
        return cls

    __or__ = __ror__ = __getitem__ = __call__
    __iter__ = None


class NotInstalled(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds what nobody else has found."""

    def find_spec(self, name, path=None, target=None):
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        module, anything = types.ModuleType(spec.name), StandIn("StandIn", (), {})
        module.__getattr__ = lambda name: getattr(anything, name)
        return module

    def exec_module(self, module) -> None:
        pass


def main(argv: list[str]) -> int:
    before_installing = argv[0] == "--before-installing"
    if before_installing:
        sys.meta_path.append(NotInstalled())
    import cluster
    import doctor
    import top
    from errors import UserError

    split = argv.index("--")
    settings, (verb, *words) = dict(s.split("=", 1) for s in argv[before_installing:split]), argv[split + 1 :]
    try:
        if before_installing:
            return look_at_words(verb, words, settings)
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


def look_at_words(verb: str, words: list[str], settings: dict) -> int:
    import cluster
    import config
    import doctor
    from errors import UserError

    flags, words = cluster.launcher_flags(words, settings)
    cluster.read_hosts(flags["hosts"])
    if verb == "sync":
        doctor.refuse_words(words)
        return 0
    try:
        config.parse_args(words or shlex.split(settings["default_args"]))
    except UserError:
        raise
    except SystemExit:  # it was --help
        return 3
    except Exception:  # it met a stand-in: train.py's own check will tell
        pass
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
