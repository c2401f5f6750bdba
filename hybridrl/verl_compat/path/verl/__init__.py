"""The package that `import verl` imports in a process started under the alias; it activates `hybridrl.verl_compat`."""

import importlib
import sys

from hybridrl.verl_compat.alias import activate

del sys.modules["verl"]
activate()
importlib.import_module("verl")
