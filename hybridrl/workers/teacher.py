"""Worker of the teachers: it computes their log-probabilities of the policy's tokens, or their most likely tokens."""

import contextlib
from collections.abc import Iterator

import torch

from hybridrl.config.entry_settings import engine_settings
from hybridrl.config.teachers import LOG_PROBS, TEACHER_INDEX, TOP_IDS, TOP_LOG_PROBS, Teachers
from hybridrl.engine.logits_functions import TopTokens
from hybridrl.engine.train_engine import Engine, MicroBatching, create_train_engine
from hybridrl.protocol import DataProto
from hybridrl.registry import import_external_lib
from hybridrl.single_controller import Dispatch, make_nd_compute_dataproto_dispatch_fn, register
from hybridrl.workers.distillation import computing
from hybridrl.workers.model_worker import COLLECTIVE_TIMEOUT_S, SEQUENCE_FIELDS, ModelWorker, as_output

_NAMES = {"log_probs": LOG_PROBS, "top_log_probs": TOP_LOG_PROBS, "top_ids": TOP_IDS}


class TeacherWorker(ModelWorker):
    """One rank of all teachers. Each is spread over all ranks, and they compute one after the other.

    So every rank has the same work, however the rows are divided among the teachers.

    Args:
        config: the teachers and the settings that they share.
        timeout_s: how long a collective may wait for other ranks.
    """

    metric_prefix = "teacher"

    def __init__(self, config: Teachers, timeout_s: float = COLLECTIVE_TIMEOUT_S) -> None:
        super().__init__(timeout_s)
        self.config = config
        self.engines: list[Engine] = []

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self, steps: int | None = None, updates_per_step: int = 1) -> None:
        """Build and shard every teacher."""
        import_external_lib(self.config.external_lib)
        for teacher in self.config.teachers:
            settings = engine_settings(self.config.distillation, self.config.external_lib)
            dtype = teacher.settings.inference.dtype
            engine = create_train_engine(
                "language_model",
                self.config.distillation.strategy,
                model=teacher.model,
                engine=settings if dtype is None else settings.changed(dtype=dtype),
            )
            engine.initialize()
            self.engines.append(engine)
        self.engine = self.engines[0]  # whose geometry is that of all
        self.place_in_mesh("teacher")

    @contextlib.contextmanager
    def _loaded(self, number: int) -> Iterator[Engine]:
        self.engine = self.engines[number]  # whose peak of memory is recorded
        with self.loaded("compute_teacher"):
            yield self.engine

    @register(
        dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="teacher"),
        blocking=False,
        reads=SEQUENCE_FIELDS,
        writes=("teacher_log_probs", "teacher_topk_ids", "teacher_topk_log_probs"),
    )
    def compute_teacher(self, batch: DataProto) -> DataProto:
        """Compute log-probabilities of each row under its teacher, number `teacher_index` [B]; without it the first.

        Returns:
            `teacher_log_probs` [B, T] of the sampled tokens; for a loss over the teacher's most likely tokens also
            `teacher_topk_log_probs` [B, T, K] and `teacher_topk_ids` [B, T, K].
        """
        fields: dict[str, torch.Tensor] = {}
        numbers = batch.batch.get(TEACHER_INDEX, torch.zeros(len(batch), dtype=torch.int64))
        for number in range(len(self.engines)):
            part = self._of_teacher(batch, number, numbers == number)
            rows = (numbers == number).nonzero()[:, 0]
            for name, values in part.items():
                whole = fields.setdefault(name, torch.zeros_like(values))
                whole[rows] = values[rows]
        return as_output(fields, **_NAMES)

    def _of_teacher(self, batch: DataProto, number: int, rows: torch.Tensor) -> dict[str, torch.Tensor]:
        """Compute one teacher's outputs for its rows. All ranks call it together, also one that has no such row."""
        settings, inference = self.config.distillation, self.config.teachers[number].settings.inference
        own_rows = DataProto(
            batch=batch.batch.clone(recurse=False), non_tensor_batch=batch.non_tensor_batch, meta_info=batch.meta_info
        )
        # A row without response tokens is in no micro-batch.
        own_rows.batch["response_mask"] = batch.batch["response_mask"] * rows[:, None]
        key = f"{self.config.teachers[number].where}.inference.max_num_batched_tokens"
        micro = MicroBatching(size=inference.max_num_seqs, max_tokens=inference.max_num_batched_tokens, key=key)
        temperature = inference.temperature or float(batch.meta_info.get("temperature", 1.0))
        function = TopTokens(settings.distillation_loss.topk) if settings.reads == "top" else None
        outputs = ("log_probs", *(() if function is None else function.outputs))
        with self._loaded(number) as engine, computing(engine, function):
            return engine.infer(own_rows, micro, temperature, outputs=outputs)
