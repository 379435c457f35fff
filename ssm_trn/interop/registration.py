"""Makes transformers' AutoConfig and AutoModelForCausalLM know the folders of ssm_trn.

transformers takes seconds to import, and has no list of plug-ins that it reads by itself. So `import ssm_trn` does not
import it; if transformers is there already it is told of our config at once, else Python's import machinery is asked to
do so when transformers' table of configs is imported.
"""

import sys
from importlib import import_module
from importlib.machinery import PathFinder

_TABLE_OF_CONFIGS = "transformers.models.auto.configuration_auto"


def register_with_transformers() -> None:
    """Now, or when transformers is imported; nothing where it never is."""
    if _TABLE_OF_CONFIGS in sys.modules:
        _register()
    elif not any(isinstance(finder, _WhenImported) for finder in sys.meta_path):
        sys.meta_path.insert(0, _WhenImported())


class _WhenImported:
    """A finder for sys.meta_path that knows one module: it has `_register` run after that module's own code."""

    def find_spec(self, fullname, path, target=None):
        if fullname != _TABLE_OF_CONFIGS:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_register(module):
                execute(module)
                sys.meta_path.remove(self)
                _register()

            spec.loader.exec_module = execute_and_register
        return spec


def _register() -> None:
    try:
        import_module("ssm_trn.interop.auto_config")
    except ImportError:  # of an older transformers, which goes on as if ssm_trn was not there
        return
