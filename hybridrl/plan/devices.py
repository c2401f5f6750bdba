"""The accelerators that a plan can be made for: their data sheets, and clusters of them.

Units: TFLOPs are 1e12 floating-point operations per second in bfloat16 without sparsity; GB and TB are 1e9 and 1e12
bytes; rates are per second and in one direction.
"""

import difflib
import re
from dataclasses import dataclass

from hybridrl.errors import PlacementError


@dataclass(frozen=True)
class DeviceSheet:
    """The data sheet of a device.

    Attributes:
        name: as in `devices=64xH100`.
        tflops: dense bfloat16 products, in 1e12 FLOPs per second.
        hbm_tb_s: bandwidth of its memory, in 1e12 bytes per second.
        memory_gb: size of its memory, in 1e9 bytes.
        link_gb_s: bandwidth to devices of its fast domain, one way, in 1e9 bytes per second.
        domain: devices of a fast domain.
        network_gb_s: bandwidth to devices beyond the domain, one way and per device. It belongs to the machine and not
            to the device: 50 is one 400 Gb/s adapter per device.
        host_gb_s: bandwidth between the device and its machine's memory, one way.
        source: where the figures are from.
    """

    name: str
    tflops: float
    hbm_tb_s: float
    memory_gb: float
    link_gb_s: float
    domain: int
    network_gb_s: float
    host_gb_s: float
    source: str


_ADAPTER = "network: one 400 Gb/s adapter per device, assumed"
_SHEETS = (
    DeviceSheet(
        "A100",
        *(312, 2.04, 80, 300, 8, 3.1, 25),
        "NVIDIA A100 80GB SXM data sheet; network: 200 Gb/s per machine of eight, arXiv 2409.19256 section 8",
    ),
    DeviceSheet("H100", *(989, 3.35, 80, 450, 8, 50, 50), f"NVIDIA H100 SXM data sheet; {_ADAPTER}"),
    DeviceSheet("H200", *(989, 4.8, 141, 450, 8, 50, 50), f"NVIDIA H200 SXM data sheet; {_ADAPTER}"),
    DeviceSheet(
        "H800", *(989, 3.35, 80, 200, 8, 50, 50), f"H100 SXM with NVLink of 400 GB/s, no public data sheet; {_ADAPTER}"
    ),
    DeviceSheet("H20", *(148, 4.0, 96, 450, 8, 50, 50), f"reports of the press, no public data sheet; {_ADAPTER}"),
    DeviceSheet("B200", *(2250, 8.0, 180, 900, 8, 50, 50), f"NVIDIA HGX B200 data sheet; {_ADAPTER}"),
    DeviceSheet("GB200", *(2500, 8.0, 186, 900, 72, 50, 200), f"NVIDIA GB200 NVL72 data sheet; {_ADAPTER}"),
    DeviceSheet("MI300X", *(1307, 5.3, 192, 448, 8, 50, 50), f"AMD Instinct MI300X data sheet; {_ADAPTER}"),
)
#: by name
DEVICES = {sheet.name: sheet for sheet in _SHEETS}


@dataclass(frozen=True)
class Cluster:
    """Machines with the same devices.

    Attributes:
        device: the data sheet.
        count: devices in all.
        machine: devices per machine.
    """

    device: DeviceSheet
    count: int
    machine: int

    @property
    def machines(self) -> int:
        """Number of machines."""
        return self.count // self.machine

    @property
    def sizes(self) -> list[int]:
        """Numbers of devices that a pool may have: powers of two within a machine, then whole machines.

        Above eight machines only every so many are listed, so that there are about twelve to eighteen sizes.
        """
        inside = [size for size in (1, 2, 4) if size < min(self.count, self.machine)]
        step = max(1, self.machines // 8)
        whole = {self.machine * number for number in range(step, self.machines + 1, step)}
        power = 1
        while power < self.machines:
            whole.add(self.machine * power)
            power *= 2
        return [*inside, *sorted(whole | {self.count})]

    def shape_of(self, size: int) -> list[int]:
        """Processes on each machine of a pool of `size` devices."""
        return [size] if size < self.machine else [self.machine] * (size // self.machine)


def device_named(name: str) -> DeviceSheet:
    """Return the data sheet of a device.

    Raises:
        PlacementError: there is none of that name.
    """
    sheet = {title.lower(): sheet for title, sheet in DEVICES.items()}.get(name.lower())
    if sheet is None:
        near = difflib.get_close_matches(name.upper(), DEVICES, 1, 0)
        raise PlacementError(f"devices={name}: no data sheet; choose from {', '.join(DEVICES)} (nearest: {near[0]})")
    return sheet


def device_called(name: str) -> DeviceSheet | None:
    """Return the data sheet of a device by the name that its driver reports, such as `NVIDIA H100 80GB HBM3`.

    None if there is none: a PCIe variant has other rates than the sheet's.
    """
    words = re.findall(r"[A-Za-z]+\d+[A-Za-z]?", name)
    if "PCIe" in name or " NVL" in name:
        return None
    return next((DEVICES[word] for word in words if word in DEVICES), None)


def devices_here() -> Cluster | None:
    """Return this machine's GPUs; None if there are none, or if their kind has no data sheet here."""
    from hybridrl.utils import device

    if not device.is_gpu():
        return None
    names = device.device_names()
    sheet = device_called(names[0]) if names else None
    return None if sheet is None else Cluster(sheet, len(names), len(names))


def read_devices(text: str, machine: int | None = None) -> Cluster:
    """Read `64xH100`.

    Args:
        text: number of devices, `x`, and the device's name.
        machine: devices per machine; None: 4 for GB200, and 8 for the others, or all of them if there are fewer.

    Raises:
        PlacementError: the text, the name or the number does not fit.
    """
    parts = re.fullmatch(r"(\d+)x(\w+)", text.strip(), re.IGNORECASE)
    if parts is None or int(parts[1]) < 1:
        raise PlacementError(f"devices={text}: write the number and the device's name, for example devices=64xH100")
    count, sheet = int(parts[1]), device_named(parts[2])
    machine = min(count, 4 if sheet.domain > 8 else 8) if machine is None else machine
    if machine < 1 or count % machine:
        raise PlacementError(
            f"devices={text} with machine={machine}: machines have the same number of devices; give a multiple of "
            f"{max(machine, 1)} devices, or set machine="
        )
    return Cluster(sheet, count, machine)
