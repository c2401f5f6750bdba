"""Table 2 of the paper (HybridFlow, arXiv 2409.19256): what a transition moves."""

from __future__ import annotations


def paper_fraction(tp: int, generation_tp: int) -> float:
    """Return the part of the model that each device receives by the paper's Table 2.

    That is (tp - t_g p_g) / (t_g p_g t p).

    Args:
        tp: t * p, the model parallel size of training.
        generation_tp: t_g * p_g, that of generation.
    """
    return (tp - generation_tp) / (generation_tp * tp)
