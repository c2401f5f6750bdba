"""Stand-ins for packages of a GPU, and counters: for the tests of hybridrl, and for SGLang on machines without a GPU.

`GPU_PACKAGES` holds replacements for packages that SGLang and vLLM import and that are built for GPUs only, and
`counters` counts the bytes that a process receives and allocates.
"""

from pathlib import Path

#: a folder for `sys.path` with the packages `sgl_kernel` and `torchvision`
GPU_PACKAGES = Path(__file__).parent / "gpu_packages"
