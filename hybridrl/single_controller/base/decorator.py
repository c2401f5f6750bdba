"""Dispatch of a worker method's inputs over a group, and collection of its outputs: `register`, `Dispatch`, `Execute`.

A *dispatch mode* is a pair of functions:

    dispatch_fn(worker_group, *args, **kwargs) -> (args, kwargs)    every argument a list with one entry per rank
    collect_fn(worker_group, output) -> result                      `output`: the ranks' return values in rank order;
                                                                    of a call on rank 0 alone, its value

`collect_fn` of a non-blocking call gets a `PendingOutputs`, a list of references, in place of the values. If several
ranks get the same object as an argument, it is sent once.

| mode | dispatch | collect |
|---|---|---|
| RANK_ZERO | arguments as they are, to rank 0 alone | rank 0's value |
| ONE_TO_ALL | the same to every rank | list of all values |
| ALL_TO_ALL | nothing: lists of world_size entries go one to a rank, anything else to every rank | list of all values |
| DP_COMPUTE | the caller's lists, one entry per rank | list of all values |
| DP_COMPUTE_PROTO | `DataProto` rows split over all ranks, uneven batches padded | shards concatenated, unpadded |
| DP_COMPUTE_PROTO_WITH_FUNC | likewise, but the first argument, a function, goes to every rank | likewise |
| DP_COMPUTE_METRIC | like DP_COMPUTE_PROTO | list of all values |
| make_nd_compute_dataproto_dispatch_fn | rows split over a named mesh's data-parallel axis | one rank of each group |
| make_nd_compute_dispatch_fn | the caller's lists, one entry per data-parallel rank | one rank of each group |
| make_one_to_all_dispatch_fn | the same to every rank | one rank of each group |
"""

from __future__ import annotations

import enum
import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tensordict import TensorDict

from hybridrl.protocol import DataProto, DataProtoFuture, concat_tensordict
from hybridrl.protocol.fields import declare_stage, stages_by_field
from hybridrl.single_controller.base.padding import CollectUnpadded, Padding, pad_to_divisor, unpad_output

# Attribute of the function that holds how the method was registered.
MAGIC_ATTR = "_hybridrl_registered"
# A dispatch function that padded leaves its `Padding` under this key. The call removes it before anything is sent.
PADDING_KEY = "_hybridrl_padding"

DispatchFn = Callable[..., tuple[tuple[Any, ...], dict[str, Any]]]
CollectFn = Callable[[Any, Any], Any]


@dataclass(eq=False)
class DispatchMode:
    """Functions that split arguments over a worker group and collect its outputs.

    Attributes:
        name: the attribute of `Dispatch` that holds it; empty for the two functions of a `register` call.
        dispatch_fn, collect_fn: see the module's docstring.
    """

    name: str
    dispatch_fn: DispatchFn
    collect_fn: CollectFn

    def __post_init__(self) -> None:
        for name in ("dispatch_fn", "collect_fn"):
            if not callable(getattr(self, name)):
                raise TypeError(f"{name} is {getattr(self, name)!r}, which cannot be called")

    def __reduce__(self) -> tuple[Any, ...]:
        if self.name:  # one object per name and process
            return _restore_mode, (self.name,)
        return DispatchMode, ("", self.dispatch_fn, self.collect_fn)


def _restore_mode(name: str) -> DispatchMode:
    # A worker may receive a mode that only the controller has registered. It needs only the name.
    return vars(Dispatch).get(name) or Dispatch.register(name)


class Execute(enum.Enum):
    """Ranks that run the method: all, or rank 0 alone."""

    ALL = 0
    RANK_ZERO = 1


class PendingOutputs(list[Any]):
    """References to the outputs of a call that may still be running, in rank order.

    `collect_fn` gets it in place of the list of values. The back end defines what the references are.
    """

    def select(self, indices: Sequence[int]) -> PendingOutputs:
        """Return the outputs of some of the ranks."""
        raise NotImplementedError

    def concat(self) -> DataProtoFuture:
        """Concatenate the outputs, each a `DataProto`, to one future `DataProto`."""
        raise NotImplementedError

    def get(self) -> list[Any]:
        """Wait for the values."""
        raise NotImplementedError


# --- dispatch and collect functions ---------------------------------------------------------------------------------


def dispatch_one_to_all(worker_group: Any, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Pass the same arguments to every rank."""
    count = worker_group.world_size
    return tuple([arg] * count for arg in args), {name: [arg] * count for name, arg in kwargs.items()}


def dispatch_all_to_all(worker_group: Any, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Pass the arguments as they are."""
    return args, kwargs


def collect_all_to_all(worker_group: Any, output: Any) -> Any:
    """Return the outputs as they are: a list in rank order."""
    return output


def dispatch_dp_compute(worker_group: Any, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Pass arguments that the caller has already split: each is a list or tuple with one entry per rank."""
    _check_lists(worker_group.world_size, "rank", args, kwargs)
    return args, kwargs


collect_dp_compute = collect_all_to_all


def dispatch_dp_compute_data_proto(
    worker_group: Any, *args: Any, **kwargs: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Split the rows of every `DataProto` (or future one) evenly over all ranks. Uneven batches are padded (see
    `padding`)."""
    return _split(worker_group.world_size, args, kwargs)


def dispatch_dp_compute_data_proto_with_func(
    worker_group: Any, *args: Any, **kwargs: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Pass the first argument, a function, to every rank, and split the others like those of DP_COMPUTE_PROTO."""
    if not args or not callable(args[0]):
        raise TypeError("DP_COMPUTE_PROTO_WITH_FUNC takes a function as its first argument")
    split_args, split_kwargs = _split(worker_group.world_size, args[1:], kwargs)
    return ([args[0]] * worker_group.world_size, *split_args), split_kwargs


def collect_dp_compute_data_proto(worker_group: Any, output: Any) -> Any:
    """Concatenate the ranks' `DataProto` (or `TensorDict`) outputs in rank order; a future if they are pending."""
    if isinstance(output, PendingOutputs):
        return output.concat()
    if output and all(isinstance(shard, TensorDict) for shard in output):
        return concat_tensordict(output)
    for rank, shard in enumerate(output):
        if not isinstance(shard, DataProto):
            raise TypeError(
                f"a method collected as DataProto returned {type(shard).__name__} on rank {rank}; return a DataProto "
                "there, or register the method with a mode that collects a list, e.g. Dispatch.DP_COMPUTE_METRIC"
            )
    return DataProto.concat(output)


def dispatch_nd_compute(
    dp_rank_mapping: list[int], dp_size: int, worker_group: Any, *args: Any, **kwargs: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Pass entry d of each list to every rank whose data-parallel rank is d.

    Args:
        dp_rank_mapping: the data-parallel rank of each rank.
        dp_size: number of entries in each list.
    """
    _check_lists(dp_size, "data-parallel rank", args, kwargs)
    return (
        tuple([arg[dp_rank] for dp_rank in dp_rank_mapping] for arg in args),
        {name: [arg[dp_rank] for dp_rank in dp_rank_mapping] for name, arg in kwargs.items()},
    )


def collect_nd_compute(collect_mask: list[bool], worker_group: Any, output: Any) -> Any:
    """Return the outputs of the ranks whose entry in `collect_mask` is true, in rank order."""
    ranks = [rank for rank, collected in enumerate(collect_mask) if collected]
    return output.select(ranks) if isinstance(output, PendingOutputs) else [output[rank] for rank in ranks]


def dispatch_nd_compute_dataproto(
    dp_rank_mapping: list[int], dp_size: int, worker_group: Any, *args: Any, **kwargs: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Split rows over data-parallel ranks. Ranks of one data-parallel group read the same shard."""
    split_args, split_kwargs = _split(dp_size, args, kwargs)
    padding = split_kwargs.pop(PADDING_KEY, None)
    split_args, split_kwargs = dispatch_nd_compute(dp_rank_mapping, dp_size, worker_group, *split_args, **split_kwargs)
    if padding is not None:
        split_kwargs[PADDING_KEY] = padding
    return split_args, split_kwargs


def collect_nd_compute_dataproto(
    collect_mask: list[bool], worker_group: Any, output: Any
) -> DataProto | DataProtoFuture:
    """Concatenate the `DataProto` outputs of the collecting ranks in rank order."""
    return collect_dp_compute_data_proto(worker_group, collect_nd_compute(collect_mask, worker_group, output))


class _Mesh:
    """Dispatch and collect over the mesh that the workers registered under `name` (`Worker.set_dispatch_collect`).

    The group asks its workers once, at the first call, and keeps the answer.
    """

    def __init__(self, name: str, as_data_proto: bool) -> None:
        self.name = name
        self.as_data_proto = as_data_proto

    def dispatch(self, worker_group: Any, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        dp_ranks, _ = worker_group.mesh_info(self.name)
        split = dispatch_nd_compute_dataproto if self.as_data_proto else dispatch_nd_compute
        return split(dp_ranks, max(dp_ranks) + 1, worker_group, *args, **kwargs)

    def collect(self, worker_group: Any, output: Any) -> Any:
        _, ranks = worker_group.mesh_info(self.name)
        collected = output.select(ranks) if isinstance(output, PendingOutputs) else [output[rank] for rank in ranks]
        return collect_dp_compute_data_proto(worker_group, collected) if self.as_data_proto else collected


def make_nd_compute_dataproto_dispatch_fn(mesh_name: str) -> dict[str, Callable[..., Any]]:
    """Return a dispatch mode over the named n-dimensional mesh.

    Rows are split over the mesh's data-parallel axis, and every rank of a data-parallel group gets the same rows.
    Outputs are collected from one rank of each group, in the order of the data-parallel ranks.
    """
    mesh = _Mesh(mesh_name, as_data_proto=True)
    return {"dispatch_fn": mesh.dispatch, "collect_fn": mesh.collect}


def make_nd_compute_dispatch_fn(mesh_name: str) -> dict[str, Callable[..., Any]]:
    """Like `make_nd_compute_dataproto_dispatch_fn`, but for lists with one entry per data-parallel rank. The outputs
    are also such a list."""
    mesh = _Mesh(mesh_name, as_data_proto=False)
    return {"dispatch_fn": mesh.dispatch, "collect_fn": mesh.collect}


def make_one_to_all_dispatch_fn(mesh_name: str) -> dict[str, Callable[..., Any]]:
    """Return a dispatch mode that passes the same arguments to every rank, and returns a list with the output of one
    rank of each group of the named mesh, e.g. of each pipeline stage."""
    return {"dispatch_fn": dispatch_one_to_all, "collect_fn": _Mesh(mesh_name, as_data_proto=False).collect}


def collect_order(mesh_name: str, dp_ranks: Sequence[int], collects: Sequence[bool]) -> list[int]:
    """Return the ranks to collect from, in the order of their data-parallel ranks.

    Raises:
        ValueError: a data-parallel rank is missing, or does not have exactly one collecting rank.
    """
    missing = sorted(set(range(max(dp_ranks) + 1)) - set(dp_ranks))
    if missing or min(dp_ranks) < 0:
        raise ValueError(
            f"mesh {mesh_name!r}: the workers registered data-parallel ranks {list(dp_ranks)}; expected 0..n "
            "without gaps"
        )
    collecting_rank: dict[int, int] = {}
    for rank, (dp_rank, collected) in enumerate(zip(dp_ranks, collects, strict=True)):
        if not collected:
            continue
        if dp_rank in collecting_rank:
            raise ValueError(
                f"mesh {mesh_name!r}: ranks {collecting_rank[dp_rank]} and {rank} both collect for data-parallel rank "
                f"{dp_rank}; its rows would come back twice. Set is_collect on one rank of each data-parallel group"
            )
        collecting_rank[dp_rank] = rank
    silent = sorted(set(dp_ranks) - set(collecting_rank))
    if silent:
        raise ValueError(
            f"mesh {mesh_name!r}: nobody collects for data-parallel ranks {silent}; their rows would be lost"
        )
    return [collecting_rank[dp_rank] for dp_rank in range(len(collecting_rank))]


def _split(chunks: int, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Split every argument's rows into `chunks`. A padded batch leaves its `Padding` under `PADDING_KEY`."""
    padding: Padding | None = None
    rows: int | None = None

    def shards(name: object, arg: Any) -> list[Any]:
        nonlocal padding, rows
        if isinstance(arg, DataProto):
            if rows is not None and len(arg) != rows:
                raise ValueError(
                    f"argument {name} has {len(arg)} rows and an earlier one {rows}; all must have the same rows"
                )
            rows = len(arg)
            arg, added = pad_to_divisor(arg, chunks)
            padding = added or padding
            return arg.chunk(chunks)
        if isinstance(arg, DataProtoFuture):
            return _future_shards(arg, chunks)
        if isinstance(arg, TensorDict):
            if arg.shape[0] % chunks:
                raise ValueError(
                    f"argument {name} is a TensorDict of {arg.shape[0]} rows, not divisible by {chunks} "
                    "ranks; only a DataProto is padded"
                )
            return list(arg.chunk(chunks))
        raise TypeError(
            f"argument {name} is a {type(arg).__name__}; this dispatch mode splits rows and takes DataProto, "
            "DataProtoFuture or TensorDict. Put settings into the batch's meta_info"
        )

    split_args = tuple(shards(index, arg) for index, arg in enumerate(args))
    split_kwargs: dict[str, Any] = {name: shards(repr(name), arg) for name, arg in kwargs.items()}
    if padding is not None:
        split_kwargs[PADDING_KEY] = padding
    return split_args, split_kwargs


def _future_shards(future: DataProtoFuture, chunks: int) -> list[Any]:
    # With as many shards as consumers, each consumer reads the shard it needs directly from the worker that made it.
    plain = future.dispatch_fn is None and not isinstance(future.collect_fn, CollectUnpadded)
    if plain and len(future.futures) == chunks:
        return [DataProtoFuture(future.collect_fn, [shard]) for shard in future.futures]
    return future.chunk(chunks)


def _check_lists(count: int, unit: str, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    for name, arg in [*enumerate(args), *kwargs.items()]:
        if not isinstance(arg, list | tuple) or len(arg) != count:
            actual = f"{len(arg)} entries" if isinstance(arg, list | tuple) else f"a {type(arg).__name__}"
            raise ValueError(
                f"argument {name!r} must be a list with one entry for each of the {count} {unit}s; got {actual}"
            )


def finish_output(output: Any, padding: Padding | None) -> Any:
    """Remove the padding from a collected output, at once or when a future output is fetched."""
    if padding is None:
        return output
    if isinstance(output, DataProtoFuture):
        output.collect_fn = CollectUnpadded(output.collect_fn, padding)
        return output
    return unpad_output(output, padding)


# --- modes ----------------------------------------------------------------------------------------------------------


class Dispatch:
    """The dispatch modes by name; see the table of the module. `register_dispatch_mode` adds one."""

    RANK_ZERO = DispatchMode("RANK_ZERO", dispatch_one_to_all, collect_all_to_all)
    ONE_TO_ALL = DispatchMode("ONE_TO_ALL", dispatch_one_to_all, collect_all_to_all)
    ALL_TO_ALL = DispatchMode("ALL_TO_ALL", dispatch_all_to_all, collect_all_to_all)
    DP_COMPUTE = DispatchMode("DP_COMPUTE", dispatch_dp_compute, collect_dp_compute)
    DP_COMPUTE_PROTO = DispatchMode("DP_COMPUTE_PROTO", dispatch_dp_compute_data_proto, collect_dp_compute_data_proto)
    DP_COMPUTE_PROTO_WITH_FUNC = DispatchMode(
        "DP_COMPUTE_PROTO_WITH_FUNC", dispatch_dp_compute_data_proto_with_func, collect_dp_compute_data_proto
    )
    DP_COMPUTE_METRIC = DispatchMode("DP_COMPUTE_METRIC", dispatch_dp_compute_data_proto, collect_dp_compute)

    if TYPE_CHECKING:  # modes added at run time

        def __getattr__(self, name: str) -> DispatchMode: ...

    @classmethod
    def names(cls) -> list[str]:
        """Return the names of all modes."""
        return [name for name, value in vars(cls).items() if isinstance(value, DispatchMode)]

    @classmethod
    def register(cls, name: str) -> DispatchMode:
        """Add a mode without functions, which `update_dispatch_mode` must set before it is used."""

        def missing(*args: Any, **kwargs: Any) -> Any:
            raise ValueError(f"Dispatch.{name.upper()} has no functions in this process; call update_dispatch_mode")

        return register_dispatch_mode(name, missing, missing)


def register_dispatch_mode(dispatch_mode_name: str, dispatch_fn: DispatchFn, collect_fn: CollectFn) -> DispatchMode:
    """Add a custom dispatch mode as `Dispatch.<NAME>` (upper case) and return it.

    Raises:
        ValueError: the name is not an identifier, or is taken (use `update_dispatch_mode` to replace its functions).
    """
    name = dispatch_mode_name.upper()
    if not name.isidentifier():
        raise ValueError(f"{name!r} cannot be a Dispatch name: letters, digits and underscores only")
    if name in Dispatch.names():
        raise ValueError(f"Dispatch.{name} exists already")
    mode = DispatchMode(name, dispatch_fn, collect_fn)
    setattr(Dispatch, name, mode)
    return mode


def update_dispatch_mode(dispatch_mode: DispatchMode, dispatch_fn: DispatchFn, collect_fn: CollectFn) -> None:
    """Replace the two functions of an existing mode. Groups created from now on use the new ones."""
    mode = DispatchMode(_checked_mode(dispatch_mode).name, dispatch_fn, collect_fn)
    dispatch_mode.dispatch_fn, dispatch_mode.collect_fn = mode.dispatch_fn, mode.collect_fn


def get_predefined_dispatch_fn(dispatch_mode: DispatchMode) -> dict[str, Callable[..., Any]]:
    """Return the mode's `{"dispatch_fn": ..., "collect_fn": ...}`."""
    mode = _checked_mode(dispatch_mode)
    return {"dispatch_fn": mode.dispatch_fn, "collect_fn": mode.collect_fn}


def _checked_mode(mode: Any) -> DispatchMode:
    """Return a mode, given as itself or as a dict of its functions."""
    if isinstance(mode, dict):
        missing = {"dispatch_fn", "collect_fn"} - mode.keys()
        if missing:
            raise ValueError(f"dispatch_mode lacks {', '.join(sorted(missing))}")
        return DispatchMode("", mode["dispatch_fn"], mode["collect_fn"])
    if not isinstance(mode, DispatchMode):
        raise ValueError(
            f"dispatch_mode is {mode!r}; allowed are {', '.join(Dispatch.names())}, or a dict of dispatch_fn and "
            "collect_fn"
        )
    return mode


def register(
    dispatch_mode: Any = Dispatch.ALL_TO_ALL,
    execute_mode: Any = Execute.ALL,
    blocking: bool = True,
    materialize_futures: bool = True,
    *,
    reads: Sequence[str] = (),
    writes: Sequence[str] = (),
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Make a worker method callable on the whole worker group.

    Args:
        dispatch_mode: a `Dispatch` member, or a dict with `dispatch_fn` and `collect_fn` (see the module's
            docstring).
        execute_mode: `Execute.ALL`, or `Execute.RANK_ZERO` to run on rank 0 alone.
        blocking: whether the group's method waits for the outputs. Otherwise it returns at once with a
            `DataProtoFuture`, or with a `PendingOutputs` if the mode collects a list. Both have `get()`.
        materialize_futures: whether a `DataProtoFuture` argument is fetched in the worker before the method runs.
        reads: fields that the first batch among the arguments must have. A call without one of them is refused before
            anything is sent (`MissingFieldError`), with the stage that should have written it.
        writes: all fields that the result may have.
    """
    mode = _checked_mode(dispatch_mode)
    if not isinstance(execute_mode, Execute):
        raise ValueError(f"execute_mode is {execute_mode!r}; allowed are {', '.join(map(str, Execute))}")
    if mode is Dispatch.RANK_ZERO:
        execute_mode = Execute.RANK_ZERO
    attributes = {"dispatch_mode": mode, "execute_mode": execute_mode, "blocking": blocking}
    attributes |= {"reads": tuple(reads), "writes": tuple(writes)}

    def decorator(func: Callable[..., Any]) -> Callable[..., Any]:
        declare_stage(func.__qualname__, [name for name in writes if name not in stages_by_field()])
        if inspect.iscoroutinefunction(func):

            @functools.wraps(func)
            async def method(*args: Any, **kwargs: Any) -> Any:
                if materialize_futures:
                    args, kwargs = _materialize(args, kwargs)
                return await func(*args, **kwargs)

        else:

            @functools.wraps(func)
            def method(*args: Any, **kwargs: Any) -> Any:
                if materialize_futures:
                    args, kwargs = _materialize(args, kwargs)
                return func(*args, **kwargs)

        setattr(method, MAGIC_ATTR, attributes)
        return method

    return decorator


def _materialize(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (
        tuple(arg.get() if isinstance(arg, DataProtoFuture) else arg for arg in args),
        {name: arg.get() if isinstance(arg, DataProtoFuture) else arg for name, arg in kwargs.items()},
    )
