"""Placements and layouts of a run, with predicted seconds and bytes, before a GPU is owned (`hybridrl plan`).

`devices` has data sheets and `shapes` the sizes of models. `seconds` and `model_bytes` predict phases in closed form,
with the `factors` that `published` fits to published step times. `layout_options` lists the ways to run each role,
`search` is HybridFlow's Algorithm 1 over them, `run_plan` applies both to the settings of a run, and `overrides` writes
a plan in the words of the run.
"""
