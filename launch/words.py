"""Looks at the words of a launch before anything is installed: `python launch/words.py NAME=SETTING ... -- VERB WORDS`.

Any Python will do: installing torch takes minutes, and no flag depends on it. Status 2: a mistake; 3: help was asked
for, and printed."""

import shlex
import sys
from importlib.machinery import ModuleSpec


class StandIn(type):
    """Stands in for a package that is not installed, and for all that it would define. What it computes means
    nothing."""

    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return cls

    def __call__(cls, *args, **kwargs):
        return cls

    __or__ = __ror__ = __getitem__ = __call__
    __iter__ = None


class NotInstalled:
    """Finds, as the last of sys.meta_path, what nobody else has found."""

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] not in sys.stdlib_module_names:  # another system's
            return ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        return StandIn(spec.name, (), {})

    def exec_module(self, module):
        pass


def look(words, settings):
    flags, words = read_flags(words, *LAUNCH_FLAGS)
    read_hosts(flags["--hosts"])
    try:
        import config

        config.parse_args(words or shlex.split(settings["default_args"]))
    except UserError:
        raise
    except SystemExit:  # it was --help
        return 3
    except Exception:  # it met a stand-in: train.py's own check will tell
        return 0


if __name__ == "__main__":
    sys.meta_path.append(NotInstalled())
    from cluster import LAUNCH_FLAGS, read_flags, read_hosts, run_verb
    from doctor import hosts_to_sync
    from errors import UserError

    run_verb(train=look, doctor=look, sync=lambda words, _: hosts_to_sync(words) and 0)
