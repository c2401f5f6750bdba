"""The factors of the cost model, fitted to published step times (`python benchmarks/plan_errors.py --fit`)."""

from hybridrl.plan.seconds import CostFactors

FITTED = CostFactors(
    mfu=0.491,
    layer_s=0.0011,
    expert_layer_s=0.00266,
    all_to_all=0.938,
    tensor=0.938,
    decode_flops=0.504,
    decode_memory=0.689,
    decode_layer_s=6.08e-05,
    decode_expert_layer_s=8.49e-05,
    reduce_s=1.07e-05,
    network_reduce_s=0.000142,
    sequence_s=4.79e-05,
    sigma=1.27,
    imbalance=1.15,
    refit_bytes_s=22.3e9,
    fixed_s=3.79,
    pass_factor=0.722,
    host_adam_s=7.17e-10,
)
#: by which a step's predicted seconds may be off: the median error for a model that is not among the rows
STEP_ERROR = 0.2
