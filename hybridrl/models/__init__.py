"""Models and tokenizers: building and loading."""

import logging

# transformers and peft import torchao wherever it is installed. What it then warns about, its kernels for GPUs and how
# it registers its own classes, is nothing that a user of this library can change.
for _name in ("torchao", "torch.utils._pytree"):
    logging.getLogger(_name).setLevel(logging.ERROR)
