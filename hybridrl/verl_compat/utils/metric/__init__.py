"""`verl.utils.metric`."""

from hybridrl.verl_compat.utils.metric.utils import AggregationType, Metric, reduce_metrics

__all__ = ["AggregationType", "Metric", "reduce_metrics"]
