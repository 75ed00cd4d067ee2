"""What a run says about itself: metrics.jsonl always, TensorBoard where installed, a console line or a progress bar."""

from moetrain.observe.hardware import peak_flops
from moetrain.observe.log import RunLog, Value

__all__ = ["RunLog", "Value", "peak_flops"]
