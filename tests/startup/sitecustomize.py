"""Every Python that a test starts imports this first, because `tests/conftest.py` has this folder in `PYTHONPATH`.

Imports of torch, transformers and Ray make millions of objects and no garbage. With Python's default thresholds, a
tenth of the processor time of all tests goes into looking for it.
"""

import gc

gc.set_threshold(20_000, 20, 50)
