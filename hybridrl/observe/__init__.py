"""Everything that a run reports: metrics, tracking back ends, dumps of samples, the run folder and the report.

Nothing is imported here, so that each module needs only its own dependencies: `metrics` and `validation` need NumPy
and torch, `tracking` needs rich, `report` needs matplotlib, and a back end is imported only when it is requested.
"""
