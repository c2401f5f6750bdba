"""What `import verl` finds in a process that was started under the alias: it hands over to `hybridrl.verl_compat`."""

import importlib
import sys

from hybridrl.verl_compat.alias import activate

del sys.modules["verl"]
activate()
importlib.import_module("verl")
