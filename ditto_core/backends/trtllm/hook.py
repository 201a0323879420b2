"""Given to ``trtllm-build --model_cls_file``: the class is imported, so that it can be sent to worker processes."""

from ditto_core.backends.trtllm.tapped import TappedModel

__all__ = ["TappedModel"]
