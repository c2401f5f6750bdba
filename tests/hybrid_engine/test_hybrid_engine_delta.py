"""What is left of a piece where only changes travel: the same bits on the other side, in the shortest form."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from raising import raises_with

from hybridrl.errors import RolloutError
from hybridrl.hybrid_engine.delta import WHOLE, DeltaForm, ReceivedPieces, SentPieces, decode, encode, size_of
from hybridrl.hybrid_engine.plan import plan_slices
from hybridrl.hybrid_engine.schedule import Message, TransferPiece, schedule
from hybridrl.layouts.slices import TensorSlice, TensorSlices, whole

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.uint8, torch.float8_e4m3fn)


def bytes_of(value: torch.Tensor) -> bytes:
    return value.contiguous().view(torch.uint8).numpy().tobytes()


@given(
    st.sampled_from(DTYPES),
    st.lists(st.integers(1, 40), min_size=1, max_size=3).map(tuple),
    st.one_of(st.just(0.0), st.just(1.0), st.floats(0, 1), st.floats(0, 0.02)),
    st.integers(0, 99),
)
def test_a_piece_arrives_bit_for_bit_in_the_shortest_form(dtype, shape, share, seed) -> None:
    generator = torch.Generator().manual_seed(seed)
    size = dtype.itemsize
    before = torch.randint(0, 256, (*shape[:-1], shape[-1] * size), generator=generator, dtype=torch.uint8)
    changed = torch.rand(shape, generator=generator) < share
    value = before.clone()
    value[changed.repeat_interleave(size, -1)] ^= 0x81  # also makes and unmakes NaN, and -0 of 0
    piece = TransferPiece("w", whole(shape), dtype, 0)
    change, data = encode(value.view(dtype), before.view(dtype), piece)
    arrived = before.clone()
    decode(arrived.view(dtype), change, data, piece)
    assert torch.equal(arrived, value)

    def padded(number: int) -> int:
        return (number + 7) // 8 * 8

    elements, count = changed.numel(), int(changed.sum())
    forms = {
        "index": padded(4 * count) + padded(size * count),
        "mask": padded((elements + 7) // 8) + padded(size * count),
        "whole": padded(size * elements),
    }
    best = min(forms.values()) if count else 0
    assert data.numel() == size_of(change, piece) == best
    assert (change.form == "same") == (count == 0) and (count == 0 or forms[change.form] == best)


def test_zero_and_minus_zero_differ_and_nan_equals_itself() -> None:
    before = torch.tensor([0.0, torch.nan, 1.0] * 40)
    value = torch.tensor([-0.0, torch.nan, 1.0] * 40)
    change, _ = encode(value, before, TransferPiece("w", whole((120,)), torch.float32, 0))
    assert change.changed == 40


SHAPES = {"embed": (14, 6), "frozen": (8, 8), "norm": (9,), "turned": (4, 6)}


def halves(rank: int) -> dict[str, TensorSlices]:
    """The upper or lower half of each tensor."""
    cuts = {name: (0, shape[0] // 2, shape[0])[rank : rank + 2] for name, shape in SHAPES.items()}
    return {
        name: (TensorSlice((a, *(0 for _ in shape[1:])), (b, *shape[1:])),)
        for (name, shape), (a, b) in zip(SHAPES.items(), cuts.values(), strict=True)
    }


def needs(half: int) -> dict[str, TensorSlices]:
    """An engine's process needs half of the columns of matrices, and all of the rest."""
    found = {}
    for name, shape in SHAPES.items():
        columns = shape[1] // 2 if len(shape) > 1 else 0
        start = (0, half * columns) if columns else (0,)
        found[name] = (TensorSlice(start, (shape[0], (half + 1) * columns) if columns else shape),)
    return found


@given(
    st.lists(
        st.tuples(st.sets(st.sampled_from("abc"), min_size=1), st.sets(st.sampled_from("abc")), st.floats(0, 0.5)),
        min_size=2,
        max_size=6,
    ),
    st.booleans(),
    st.integers(0, 99),
)
def test_two_ranks_fill_engines_as_a_full_transfer_does_whatever_happened_before(transfers, copies, seed) -> None:
    """Engines a and c need the same half. Each transfer reaches some of the engines; some were restarted before it.

    With copies, each rank holds everything, and who sends what depends on the engines that are reached.
    """
    everything = {name: (whole(shape),) for name, shape in SHAPES.items()}
    generator = torch.Generator().manual_seed(seed)
    state = {name: torch.randn(shape, generator=generator).bfloat16() for name, shape in SHAPES.items()}
    ranks, starts = [SentPieces(), SentPieces()], dict.fromkeys("abc", 0)
    engines = {name: ReceivedPieces() for name in "abc"}
    for reached, restarted, share in transfers:
        for name in restarted:
            starts[name] += 1
            engines[name] = ReceivedPieces()
        for name in ("embed", "norm", "turned"):
            changed = torch.rand(SHAPES[name], generator=generator) < share
            state[name] = torch.where(changed, torch.randn(SHAPES[name], generator=generator).bfloat16(), state[name])
        who = sorted(reached)
        held: list[dict[str, TensorSlices]] = [everything] * 2 if copies else [halves(0), halves(1)]
        held += [{} for _ in who]
        needed: list[dict[str, TensorSlices]] = [{}, {}, *(needs(1 if name == "b" else 0) for name in who)]
        made = plan_slices(SHAPES, held, needed)
        for sent in ranks:
            sent.begin()
        for now in schedule(made, held, needed, dict.fromkeys(SHAPES, torch.bfloat16), bucket_bytes=100):
            for sent in ranks:
                sent.begin_round()
            for message in now.messages:
                full = torch.zeros(now.bucket, dtype=torch.uint8)
                for piece in message.pieces:
                    piece.view(full).copy_(state[piece.name][piece.slice.within(whole(SHAPES[piece.name]))])
                name = who[message.target - 2]
                changes, short = ranks[message.source].encode(
                    message, full[message.begin : message.end], (f"{name}-{starts[name]}", 0)
                )
                bucket = torch.full_like(full, 255)
                engines[name].complete(message, changes, short, bucket)
                assert torch.equal(bucket[message.begin : message.end], full[message.begin : message.end])
        for sent in ranks:
            sent.end([f"{name}-{starts[name]}" for name in who])
        for name in who:
            engines[name].end()


def message_of(*sizes: int) -> tuple[Message, int]:
    pieces, offset = [], 0
    for number, size in enumerate(sizes):
        pieces.append(TransferPiece(f"w{number}", whole((size,)), torch.bfloat16, offset))
        offset += pieces[-1].size
    return Message(0, 1, 0, offset, tuple(pieces)), offset


def test_a_process_that_lacks_the_former_value_gets_all_of_it_or_says_so() -> None:
    message, size = message_of(640, 8)
    data = torch.arange(size, dtype=torch.uint8)
    sent, received = SentPieces(), ReceivedPieces()

    def transfer(to: str) -> list[DeltaForm]:
        sent.begin()
        sent.begin_round()
        changes, short = sent.encode(message, data, (to, 0))
        bucket = torch.zeros_like(data)
        received.complete(message, changes, short, bucket)
        assert bytes_of(bucket) == bytes_of(data)
        received.end()
        sent.end([to])
        return changes

    assert transfer("a") == [WHOLE, WHOLE]
    data = data.clone()
    data[4] ^= 1
    assert transfer("a") == [DeltaForm("index", 1), DeltaForm("same")]
    assert transfer("another start of it") == [WHOLE, WHOLE]
    with raises_with(RolloutError, "w0", "checkpoint_engine.delta=false"):
        ReceivedPieces().complete(message, [DeltaForm("same")] * 2, data[:0], torch.zeros_like(data))


def test_a_piece_that_another_rank_has_sent_meanwhile_comes_whole() -> None:
    message, size = message_of(640)
    ranks, received = [SentPieces(), SentPieces()], ReceivedPieces()
    forms = []
    for step, sender in enumerate((0, 0, 1, 0, 0)):
        data = torch.zeros(size, dtype=torch.uint8)
        data[step] = 1
        for rank in ranks:
            rank.begin()
            rank.begin_round()
        (change,), short = ranks[sender].encode(message, data, ("a", 0))
        bucket = torch.full_like(data, 255)
        received.complete(message, [change], short, bucket)
        assert torch.equal(bucket, data)
        received.end()
        for rank in ranks:
            rank.end(["a"])
        forms.append(change.form)
    assert forms == ["whole", "index", "whole", "whole", "index"]


def test_what_no_replica_has_any_more_is_not_kept() -> None:
    message, size = message_of(64)
    data = torch.zeros(size, dtype=torch.uint8)
    sent = SentPieces()
    for number in range(20):
        sent.begin()
        sent.begin_round()
        sent.encode(message_of(64 + number)[0], torch.zeros(2 * (64 + number), dtype=torch.uint8), (f"{number}", 0))
        sent.end([f"{number}"])
    assert len(sent._sent) == len(sent._last) == 8
    assert message.size == data.numel()
