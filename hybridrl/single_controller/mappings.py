"""Reader of the arguments of `ray.init`."""

import inspect
import re
from collections.abc import Iterator

from hybridrl.config.mappings import Entries, reads_mapping


@reads_mapping("ray-arguments")
def check_ray_init(entries: Entries) -> Iterator[str]:
    """Check `ray_kwargs.ray_init` against the parameters of `ray.init`, and those that it takes without naming them."""
    if not entries.values.keys() - {"num_cpus", "address"} or "://" in str(entries.values.get("address")):
        return
    import ray

    named = inspect.signature(ray.init).parameters
    hidden = re.findall(r"kwargs\.pop\(\s*\"(\w+)\"", inspect.getsource(inspect.unwrap(ray.init)))
    yield from entries.unknown({*named, *hidden} - {"kwargs"}, "ray.init")
