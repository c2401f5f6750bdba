"""DataProto: the batch that the controller and the workers exchange.

A `DataProto` holds one batch of B rows in three parts: `batch`, a TensorDict of tensors whose first dimension is B;
`non_tensor_batch`, NumPy arrays of length B (dtype object for Python values); and `meta_info`, a dict that belongs to
the batch as a whole. `DataProtoFuture` is a batch that workers are still computing.

    data.py       the class and its methods           functions.py  padding, folding, gathering
    rows.py       choosing and joining rows           merge.py      equality, union, merging of meta_info
    transport.py  pickling without copies             storage.py    safe files
    future.py     results that are still being computed
"""

from hybridrl.protocol.dataproto import DataProto, DataProtoConfig, DataProtoItem
from hybridrl.protocol.functions import (
    all_gather_data_proto,
    collate_fn,
    concat_tensordict,
    fold_batch_dim,
    pad_dataproto_to_divisor,
    unfold_batch_dim,
    unpad_dataproto,
)
from hybridrl.protocol.future import DataProtoFuture
from hybridrl.protocol.rows import object_array
from hybridrl.protocol.union import union_numpy_dict, union_tensor_dict

__all__ = [
    "DataProto",
    "DataProtoConfig",
    "DataProtoFuture",
    "DataProtoItem",
    "all_gather_data_proto",
    "collate_fn",
    "concat_tensordict",
    "fold_batch_dim",
    "object_array",
    "pad_dataproto_to_divisor",
    "unfold_batch_dim",
    "union_numpy_dict",
    "union_tensor_dict",
    "unpad_dataproto",
]
