"""The executor's plain classes: their fields come from the recorded signatures."""

from __future__ import annotations

import enum

from standin_trtllm import PlainEnum


class ModelType(PlainEnum):
    DECODER_ONLY = enum.Enum("ModelType", "DECODER_ONLY").DECODER_ONLY


NAMES = {"tensorrt_llm.bindings.executor.ModelType": ModelType}
