"""Settings of profiles: `global_profiler` of a run, and `profiler` of a role."""

from dataclasses import dataclass

from hybridrl.config.schema.conditions import PartNeed, among, any_of, is_set, off, on
from hybridrl.config.schema.node import ConfigNode, group, key

TOOLS = ("torch", "torch_memory", "nsys")

#: a rank of some role is profiled
_A_RANK = PartNeed(
    "profiled",
    "no role has profiler.enable",
    "let ranks of a role be profiled (profiler.enable=True, profiler.all_ranks=True)",
)


@dataclass
class MemoryToolConfig(ConfigNode):
    """`global_profiler.global_tool_config.torch_memory`."""

    trace_alloc_max_entries: int = key(
        100_000, "allocations that a snapshot remembers", gt=0, needs=among("global_profiler.tool", "torch_memory")
    )


@dataclass
class ToolsConfig(ConfigNode):
    """`global_profiler.global_tool_config`."""

    torch_memory: MemoryToolConfig = group(MemoryToolConfig)


@dataclass
class GlobalProfilerConfig(ConfigNode):
    """`global_profiler`: what is recorded, in which steps."""

    tool: str | None = key(
        None,
        "torch: traces of operations; torch_memory: snapshots of GPU memory; nsys: ranges for Nsight Systems",
        choices=TOOLS,
        later=("npu", "precision_debugger"),
        needs=(is_set(".steps"), _A_RANK),
    )
    steps: list[int] | None = key(None, "steps that are profiled, from 1", needs=is_set(".tool"))
    save_path: str = key(
        "outputs/profile", "folder for the files, step_<N>/<role>_rank_<R>", needs=is_set(".tool"), place="output"
    )
    global_tool_config: ToolsConfig = group(ToolsConfig)


@dataclass
class RoleProfilerConfig(ConfigNode):
    """`profiler` of the policy, the critic, a role of your own, and the model of supervised training.

    It says which of its ranks are profiled.
    """

    enable: bool = key(
        False,
        "profile this role in global_profiler.steps",
        needs=(is_set("global_profiler.tool"), any_of(on(".all_ranks"), is_set(".ranks"))),
    )
    all_ranks: bool = key(False, "profile every rank", needs=on(".enable"))
    ranks: list[int] = key(
        [], "ranks that are profiled; empty without all_ranks: none", needs=(on(".enable"), off(".all_ranks"))
    )
