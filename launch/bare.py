"""What launch.sh and env.sh ask of any Python before anything is installed, which takes minutes:

python launch/bare.py NAME=SETTING ... -- VERB WORDS      are these words right? 2: a mistake; 3: help was printed
python launch/bare.py lacks VERSIONS REQUIREMENT ...      prints those that it does not meet"""

import re
import sys
from importlib import import_module, metadata
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
    _, _, job = read_job(words, settings)
    try:
        import config

        config.parse_args(job["words"])
    except UserError:
        raise
    except SystemExit:  # it was --help
        return 3
    except Exception:  # it met a stand-in: train.py's own check will tell
        return 0


def numbers(version):
    return [int(number) for number in re.findall(r"\d+", version.split("+")[0])]


def meets(requirement, torch_versions):
    name, least = re.split(">=|==", requirement)
    try:
        if name != "torch":
            return numbers(metadata.version(name)) >= numbers(least)
        oldest, newest = map(numbers, torch_versions.split())
        return oldest <= numbers(import_module(name).__version__)[:2] <= newest
    except Exception:  # a torch that cannot be imported is as good as none
        return False


if __name__ == "__main__":
    if sys.argv[1] == "lacks":
        print(*(r for r in sys.argv[3:] if not meets(r, sys.argv[2])), sep="\n")
        sys.exit()
    sys.meta_path.append(NotInstalled())
    from cluster import read_job, run_verb
    from doctor import hosts_to_sync
    from lib.errors import UserError

    run_verb(train=look, doctor=look, sync=lambda words, _: hosts_to_sync(words) and 0)
