"""Several roles in one process per slot: they share the device and take turns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hybridrl.single_controller.base.decorator import MAGIC_ATTR
from hybridrl.single_controller.base.worker import Worker
from hybridrl.single_controller.base.worker_group import registered_methods
from hybridrl.single_controller.ray.worker_group import RayClassWithInitArgs


class ColocatedWorker(Worker):
    """A worker that holds one worker for each role in its process. `create_colocated_worker_cls` builds it.

    Args:
        roles: class, arguments and keyword arguments of each role's worker.
    """

    def __init__(self, roles: dict[str, tuple[type, tuple[Any, ...], dict[str, Any]]]) -> None:
        super().__init__()
        self.worker_dict: dict[str, Any] = {}
        for role, (cls, args, kwargs) in roles.items():
            self.worker_dict[role] = cls(*args, **kwargs)
        for worker in self.worker_dict.values():
            worker.fused_worker_dict = self.worker_dict


def create_colocated_worker_cls(class_dict: dict[str, RayClassWithInitArgs]) -> RayClassWithInitArgs:
    """Build one worker class that hosts several roles in each process.

    A group of this class has each role's registered methods, prefixed with the role's name
    (`group.actor_update_actor(batch)`). `RayWorkerGroup.spawn` makes a group for each role, in which the methods have
    their own names.

    Args:
        class_dict: each role's worker class with its arguments.

    Raises:
        ValueError: there are no roles, or two roles' methods would get the same name.
    """
    if not class_dict:
        raise ValueError("create_colocated_worker_cls needs at least one role")
    methods: dict[str, Any] = {}
    for role, entry in class_dict.items():
        if not issubclass(entry.cls, Worker):
            raise TypeError(f"role {role!r}: {entry.cls.__name__} is no subclass of Worker")
        for name in registered_methods(entry.cls):
            bound = f"{role}_{name}"
            if bound in methods:
                raise ValueError(f"the method name {bound!r} arises twice; rename a role or a method")
            methods[bound] = _forwarding(role, name, getattr(entry.cls, name))
    title = "Colocated_" + "_".join(class_dict)
    cls = type(title, (ColocatedWorker,), {"__doc__": f"Roles {', '.join(class_dict)} in one process.", **methods})
    colocated = RayClassWithInitArgs(
        cls, roles={role: (entry.cls, entry.args, entry.kwargs) for role, entry in class_dict.items()}
    )
    colocated.role_classes = {role: entry.cls for role, entry in class_dict.items()}
    for role, entry in class_dict.items():
        _merge_options(colocated, role, entry)
    return colocated


def create_colocated_worker_raw_cls(class_dict: dict[str, RayClassWithInitArgs]) -> type:
    """Build a class that hosts several roles in each process, to derive from.

    A method of the derived class reaches each role's worker under the role's name (`self.actor.add(x)`), and so does
    the controller after `group.fuse(roles)` (`group.actor.add(x)`). Ray options of the roles have no effect: give them
    to the derived class.

    Args:
        class_dict: each role's worker class with its arguments.

    Raises:
        ValueError: there are no roles, or a role has a name that every worker uses.
    """
    reserved = sorted(role for role in class_dict if hasattr(ColocatedWorker, role))
    if not class_dict or reserved:
        raise ValueError(
            f"create_colocated_worker_raw_cls needs roles with names of their own; found {reserved or 'none'}"
        )
    roles = {role: (entry.cls, entry.args, entry.kwargs) for role, entry in class_dict.items()}

    def build(self: ColocatedWorker) -> None:
        ColocatedWorker.__init__(self, roles)
        self.__dict__.update(self.worker_dict)

    members = {"__init__": build, "role_classes": {role: entry.cls for role, entry in class_dict.items()}}
    return type("FusedWorker", (ColocatedWorker,), members)


#: Colocated roles always share one process, which is what verl's fused variant asks for.
create_colocated_worker_cls_fused = create_colocated_worker_cls


def _forwarding(role: str, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    def forward(self: ColocatedWorker, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.worker_dict[role], name)(*args, **kwargs)

    forward.__name__ = forward.__qualname__ = f"{role}_{name}"
    forward.__doc__ = method.__doc__
    setattr(forward, MAGIC_ATTR, getattr(method, MAGIC_ATTR))
    return forward


def _merge_options(colocated: RayClassWithInitArgs, role: str, entry: RayClassWithInitArgs) -> None:
    for key, value in entry.options.items():
        present = colocated.options.get(key, value)
        if present != value:
            raise ValueError(
                f"roles of one process ask for different Ray options: {key} is {value!r} for {role!r} and "
                f"{present!r} before"
            )
        colocated.update_options({key: value})
    colocated.additional_resource.update(entry.additional_resource)
