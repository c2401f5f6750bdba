"""Benchmark suites: published data sets as rows that are generated for, scored, and validated on.

`suite:NAME`, or `suite:NAME@PLACE` for a local copy, is an entry of `data.path` and `data.val_files`.
"""

from hybridrl.data.suites.suite_rows import SuiteRow, read_suite, register_suite

__all__ = ["SuiteRow", "read_suite", "register_suite"]
