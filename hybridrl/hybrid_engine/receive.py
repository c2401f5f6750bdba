"""The receiving side of a weight update, inside each process of a generation engine."""

import mmap
from collections.abc import Callable, Iterable, Iterator

import torch

from hybridrl.hybrid_engine.buckets import Bucket, Checkpoint, RequiredSlices, ShardBucket, TransportKind
from hybridrl.hybrid_engine.delta import ReceivedPieces, arriving
from hybridrl.hybrid_engine.exchange import SliceValues
from hybridrl.hybrid_engine.record import LoadRecorder, LoadReplay
from hybridrl.layouts.slices import TensorSlice, TensorSlices
from hybridrl.utils import device as devices
from hybridrl.utils.distributed import StandaloneGroup

#: an engine's own loader: takes names and tensors of a checkpoint
Loader = Callable[[Iterable[tuple[str, torch.Tensor]]], object]


class WeightReceiver:
    """Opens buckets and yields the tensors in them.

    The sender overwrites a bucket once the receiver has acknowledged the bucket.

    Args:
        device: the device that this process computes on.
        rank: rank of this process within its replica.
        copies: whether to yield copies, for engines that keep references to the tensors they load.
    """

    def __init__(self, device: torch.device, rank: int = 0, copies: bool = True) -> None:
        self.device = device
        self.rank = rank
        self.copies = copies
        self._buffers: dict[str | bytes, torch.Tensor] = {}
        #: the bytes of the bucket that was opened last
        self.last: torch.Tensor | None = None
        self._groups: dict[TransportKind, tuple[tuple[str, int, int, str], StandaloneGroup]] = {}
        self._pieces = ReceivedPieces()

    def tensors(self, bucket: Bucket) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the name and value of each parameter.

        Without `copies` the values are views of the bucket, valid until the bucket is acknowledged. A
        bucket without entries means that the sender is about to free its memory, so the opened buffers are released.
        """
        if not bucket.entries:
            self.close()
            return
        size = max((entry.offset + entry.size for entry in bucket.entries), default=0)
        if bucket.transport == "shared_memory":
            data = self._from_shared_memory(bucket.where, size)
        elif bucket.transport == "cuda_ipc":
            data = self._from_cuda_ipc(bucket.where, size)
        else:
            data = self._from_broadcast(bucket.where, size)
        if self.copies:
            data = data.clone()
        self.last = data
        for entry in bucket.entries:
            values = data[entry.offset : entry.offset + entry.size]
            yield entry.name, values.view(getattr(torch, entry.dtype)).view(entry.shape)

    def bucket_of(self, bucket: ShardBucket) -> torch.Tensor:
        """Return the bytes of this process's bucket, valid until the bucket is acknowledged."""
        if bucket.transport == "shared_memory":
            return self._from_shared_memory(bucket.where[self.rank], bucket.size)
        if bucket.transport == "cuda_ipc":
            return self._from_cuda_ipc(bucket.where, bucket.size)
        data = torch.empty(bucket.size, dtype=torch.uint8, device=self.device)
        group, messages = self._join(bucket.transport, *bucket.where), bucket.messages[self.rank]
        if not bucket.changes:
            group.receive([(data[message.begin : message.end], message.source) for message in messages])
            return data
        changes = bucket.changes[self.rank]
        sizes = arriving(messages, changes)
        arrived = [torch.empty(size, dtype=torch.uint8, device=self.device) for size in sizes]
        pairs = list(zip(arrived, messages, strict=True))
        group.receive([(short, message.source) for short, message in pairs if short.numel()])
        for short, message in pairs:
            self._pieces.complete(message, changes[message.source], short, data)
        return data

    def end_transfer(self) -> None:
        """A planned transfer is complete."""
        self._pieces.end()

    def close(self) -> None:
        """Release the sender's memory. A broadcast group is kept for the next update."""
        self.last = None
        self._buffers.clear()
        devices.empty_cache()

    def _from_shared_memory(self, name: str, size: int) -> torch.Tensor:
        # Not multiprocessing's SharedMemory: it would track the segment here too, and unlink the sender's segment.
        if name not in self._buffers:
            with open(f"/dev/shm/{name}", "r+b") as file:
                self._buffers[name] = torch.frombuffer(mmap.mmap(file.fileno(), 0), dtype=torch.uint8)
        return self._buffers[name][:size].to(self.device)

    def _from_cuda_ipc(self, where: dict[str, bytes], size: int) -> torch.Tensor:
        handle = where[devices.uuid_of(self.device)]
        if handle not in self._buffers:
            self._buffers[handle] = devices.open_shared(handle, self.device)
        return self._buffers[handle][:size]

    def _from_broadcast(self, where: tuple[tuple[str, int, int, str], int], size: int) -> torch.Tensor:
        data = torch.empty(size, dtype=torch.uint8, device=self.device)
        self._join("broadcast", *where).broadcast(data, root=0)
        return data

    def _join(
        self, transport: TransportKind, membership: tuple[str, int, int, str], first_rank: int
    ) -> StandaloneGroup:
        """Return the group of a transport; a group of other members is left."""
        host, port, world_size, _ = membership
        if transport not in self._groups or self._groups[transport][0] != membership:
            group = StandaloneGroup(host, port, first_rank + self.rank, world_size, self.device)
            group.connect()
            self._groups[transport] = membership, group
        return self._groups[transport][1]


class ShardReceiver:
    """Loads the slices of tensors that this process needs, with the engine's own loader.

    Args:
        receiver: opens buckets.
        load: the engine's loader.
        settle: makes what was loaded the weights that generate; None: nothing is left to do after loading.
        forget: drops what was loaded and is not settled; None: the loader keeps nothing.
    """

    def __init__(
        self,
        receiver: WeightReceiver,
        load: Loader,
        settle: Callable[[], None] | None = None,
        forget: Callable[[], None] | None = None,
    ) -> None:
        self.receiver = receiver
        self._load = load
        self._settle = settle or (lambda: None)
        self._forget = forget or (lambda: None)
        self._checkpoint: Checkpoint | None = None
        self._required: RequiredSlices | None = None
        self._replay: LoadReplay | None = None

    def require(self, checkpoint: Checkpoint) -> RequiredSlices:
        """Return what this process needs of a checkpoint, found by running the loader without weights."""
        recorder = LoadRecorder(None, checkpoint.shapes, checkpoint.dtypes)
        try:
            with recorder:
                self._load(recorder.sources())
                self._settle()
        except Exception as error:  # the engine's own code, with tensors that it does not expect
            reason = f"the engine's loader fails without weights: {error!r}"
            self._forget()
            try:
                with recorder:  # where nothing could be dropped, layers still hold tensors without memory
                    self._settle()
            except Exception as again:
                reason += f", and what it had loaded could not be dropped: {again!r}"
            whole = dict.fromkeys(checkpoint.shapes, reason)
        else:
            whole = dict(recorder.unplanned)
        recorded = recorder.required()
        slices: dict[str, TensorSlices] = {}
        for name, shape in checkpoint.shapes.items():
            if name in recorded and not shape:
                whole[name] = "it has no dimensions"
            if name in whole:
                slices[name] = (TensorSlice((0,) * max(len(shape), 1), shape or (1,)),)
            elif name in recorded:
                slices[name] = recorded[name]
        self._checkpoint, self._required = checkpoint, RequiredSlices(slices, recorder.uses, whole)
        return self._required

    def load(self, bucket: ShardBucket) -> None:
        """Load a round of the transfer. When this returns, the sender may overwrite the bucket."""
        replay = self._begun()
        data = self.receiver.bucket_of(bucket)
        pieces: dict[str, list[SliceValues]] = {}
        for message in bucket.messages[self.receiver.rank]:
            for piece in message.pieces:
                pieces.setdefault(piece.name, []).append((piece.slice, piece.view(data)))
        digests: dict[str, dict[TensorSlice, int]] = {}
        if bucket.digests:
            for (name, tensor_slice), value in bucket.digests[self.receiver.rank].items():
                digests.setdefault(name, {})[tensor_slice] = value
        for name, arrived in pieces.items():
            replay.arrive(name, arrived, digests.get(name))
        with replay:
            self._load((name, replay.tensor(name)) for name in bucket.names if name in pieces)
        replay.keep_the_rest()

    def finish(self) -> list[str]:
        """Finish the load after the last round. Returns the faults of the load (`LoadReplay.faults`)."""
        if self._replay is None:
            return []
        replay, self._replay = self._replay, None
        with replay:
            self._settle()
        self.receiver.end_transfer()
        return replay.faults()

    @property
    def began(self) -> bool:
        """Whether a planned transfer has begun and is not finished."""
        return self._replay is not None

    def _begun(self) -> LoadReplay:
        if self._replay is None:
            assert self._checkpoint is not None and self._required is not None, "weights came before the question"
            checkpoint, required = self._checkpoint, self._required
            self._replay = LoadReplay(checkpoint.shapes, checkpoint.dtypes, required.uses, required.whole)
        return self._replay
