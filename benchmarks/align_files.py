"""The engine files that benchmarks/align.py aligns, each made by the tool that it is named after.

The tools are optional: ``pip install --no-deps --target DIR onnxruntime-genai onnxsim`` and, with an older transformers
of its own, ``pip install --no-deps --target DIR2 optimum optimum-onnx 'transformers<5' 'huggingface_hub<1'
'tokenizers<0.23'``. ``DITTO_FOREIGN=DIR`` and ``DITTO_OPTIMUM=DIR2`` say where they are; what is missing is left out,
and said.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

HIDDEN = {"vocab_size": 300, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "initializer_range": 0.2}
DECODERS: Mapping[str, tuple[str, str, Mapping[str, Any]]] = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", {}),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", {}),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {"head_dim": 16}),
    "gemma2": ("Gemma2Config", "Gemma2ForCausalLM", {"head_dim": 16, "sliding_window": 8}),
    "phi3": ("Phi3Config", "Phi3ForCausalLM", {"pad_token_id": 0, "original_max_position_embeddings": 256}),
    "mistral": ("MistralConfig", "MistralForCausalLM", {"head_dim": 16, "sliding_window": 8}),
    "wired": ("LlamaConfig", "LlamaForCausalLM", {"vocab_size": 256, "hidden_size": 256, "intermediate_size": 128}),
}
ENCODERS = ("bert", "vit", "resnet")
TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")


def checkpoint(family: str, folder: Path) -> Path:
    """Save a random model of a family, with random norm weights and biases, and return its folder."""
    path = folder / "checkpoints" / family
    if not (path / "config.json").exists():
        torch.manual_seed(0)
        model = made(family)
        for name, parameter in model.named_parameters():
            if "norm" in name.lower() or "bias" in name:
                parameter.data += 0.1 * torch.randn(parameter.shape)
        model.save_pretrained(path)
        tokenizer(path)
    return path


def made(family: str) -> Any:
    """Return a random model of a family in float32."""
    import transformers as t

    if family in DECODERS:
        config, cls, extra = DECODERS[family]
        fields = {**HIDDEN, **HEADS, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, **extra}
        return getattr(t, cls)(getattr(t, config)(**fields)).eval()
    if family == "bert":
        sizes = {"vocab_size": 300, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3}
        return t.BertModel(t.BertConfig(**sizes, num_attention_heads=4, initializer_range=0.2)).eval()
    if family == "vit":
        sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4}
        return t.ViTModel(t.ViTConfig(**sizes, image_size=32, patch_size=8, initializer_range=0.2)).eval()
    config = t.ResNetConfig(embedding_size=16, hidden_sizes=[16, 32, 64, 64], depths=[1, 1, 1, 1], num_labels=5)
    return t.ResNetForImageClassification(config).eval()


def tokenizer(path: Path) -> None:
    """Save a small tokenizer: onnxruntime-genai's builder wants one."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": 0, "<s>": 1, "</s>": 2, "<unk>": 3, **{f"w{i}": i for i in range(4, 300)}}
    fast = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    fast.pre_tokenizer = pre_tokenizers.Whitespace()
    names = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
    PreTrainedTokenizerFast(tokenizer_object=fast, **names).save_pretrained(path)


def child(code: str, *folders: str) -> None:
    """Run code in a process that sees the packages in ``folders`` first. Raises with the end of what it printed."""
    paths = os.pathsep.join([*folders, os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError((done.stderr or done.stdout)[-800:])


def genai(source: Path, target: Path, precision: str = "fp32") -> Path:
    """onnxruntime-genai's model builder."""
    sizes = [
        "-i",
        str(source),
        "-m",
        "unused",
        "-o",
        str(target),
        "-p",
        precision,
        "-e",
        "cpu",
        "-c",
        str(target / "cache"),
    ]
    run = "runpy.run_module('onnxruntime_genai.models.builder', run_name='__main__')"
    child(f"import runpy, sys; sys.argv = ['builder', *{sizes!r}]; {run}", os.environ["DITTO_FOREIGN"])
    return target


def genai_int4(source: Path, target: Path) -> Path:
    """onnxruntime-genai's model builder, weights in 4 bits."""
    return genai(source, target, "int4")


def optimum(source: Path, target: Path) -> Path:
    """optimum-onnx, which exports with a transformers of its own."""
    task = {"resnet": "image-classification", "bert": "feature-extraction", "vit": "feature-extraction"}
    options = {"task": task.get(source.name, "text-generation-with-past"), "do_validation": False, "opset": 17}
    code = (
        f"from optimum.exporters.onnx import main_export\nmain_export({str(source)!r}, {str(target)!r}, **{options!r})"
    )
    child(code, os.environ["DITTO_OPTIMUM"])
    return target / "model.onnx"


def offline(file: Path, target: Path, level: str) -> Path:
    """ONNX Runtime's offline optimization of a file."""
    import onnxruntime

    target.mkdir(parents=True, exist_ok=True)
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, f"ORT_ENABLE_{level}")
    options.optimized_model_filepath = str(target / "model.onnx")
    options.log_severity_level = 3
    onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
    return target / "model.onnx"


def simplified(file: Path, target: Path) -> Path:
    """onnxsim of a file."""
    target.mkdir(parents=True, exist_ok=True)
    save = f"onnx.save(model, {str(target / 'model.onnx')!r})"
    child(
        f"import onnx, onnxsim; model, ok = onnxsim.simplify(onnx.load({str(file)!r})); {save}",
        os.environ["DITTO_FOREIGN"],
    )
    return target / "model.onnx"


def fused(file: Path, target: Path, heads: int = 4, hidden: int = 64, *, unpacked: bool = False) -> Path:
    """onnxruntime.transformers' optimizer of a file of BERT's or ViT's; ``unpacked``: to MultiHeadAttention."""
    from onnxruntime.transformers.fusion_options import FusionOptions
    from onnxruntime.transformers.optimizer import optimize_model

    target.mkdir(parents=True, exist_ok=True)
    kind = "vit" if "vit" in str(file) else "bert"
    options = FusionOptions(kind)
    options.use_multi_head_attention = unpacked
    sizes = {"num_heads": heads, "hidden_size": hidden, "optimization_options": options}
    model = optimize_model(str(file), model_type=kind, opt_level=0, **sizes)
    model.save_model_to_file(str(target / "model.onnx"))
    return target / "model.onnx"


def in_8_bits(file: Path, target: Path, form: str) -> Path:
    """onnxruntime's static quantization of an image model, calibrated on random images; ``form``: QDQ or QOperator."""
    import numpy as np
    from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static

    class Images(CalibrationDataReader):  # type: ignore[misc]
        """Eight batches of random images."""

        def __init__(self) -> None:
            draw = np.random.default_rng(0)
            self._left = [draw.normal(size=(4, 3, 32, 32)).astype(np.float32) for _ in range(8)]

        def get_next(self) -> Any:
            """Return the next batch, None after the last."""
            return {"pixel_values": self._left.pop()} if self._left else None

    target.mkdir(parents=True, exist_ok=True)
    options = {"quant_format": QuantFormat[form], "per_channel": True, "weight_type": QuantType.QInt8}
    quantize_static(file, target / "model.onnx", Images(), **options)
    return target / "model.onnx"


def dynamic(file: Path, target: Path) -> Path:
    """onnxruntime's dynamic quantization."""
    from onnxruntime.quantization import QuantType, quantize_dynamic

    target.mkdir(parents=True, exist_ok=True)
    quantize_dynamic(file, target / "model.onnx", per_channel=True, weight_type=QuantType.QInt8)
    return target / "model.onnx"


def ours(source: Path, target: Path) -> Path:
    """Our own export, without its taps."""
    from ditto_core.model.export import export
    from ditto_core.model.loading import load_model
    from ditto_core.spec import ModelSource

    target.mkdir(parents=True, exist_ok=True)
    export(load_model(ModelSource.of(str(source))), target)
    return target / "model.onnx"


Maker = Callable[[Path, Path], Path]


def files(folder: Path, skipped: Callable[[str], None]) -> Iterator[tuple[str, str, Path, Path]]:
    """Make every file below ``folder`` once; yield (exporter, family, checkpoint, file). What fails is ``skipped``."""
    for tool, family, make in plan(folder):
        source, target = checkpoint(family, folder), folder / tool / family
        found = sorted(target.glob("*.onnx"))
        try:
            yield tool, family, source, (found[0] if found else make(source, target))
        except Exception as error:  # noqa: BLE001 - whatever a tool raises, the others go on
            skipped(f"{tool} {family}: {str(error).strip().splitlines()[-1]}")


def plan(folder: Path) -> Iterator[tuple[str, str, Maker]]:
    """Yield (exporter, family, how it is made) of every file."""
    for family in DECODERS:
        yield "genai-fp32", family, genai
    for family in ("llama", "qwen2", "qwen3", "gemma2", "phi3", "wired"):
        yield "genai-int4", family, genai_int4
    for family in ("llama", "qwen2", *ENCODERS):
        yield "optimum", family, optimum
        origin = folder / "optimum" / family / "model.onnx"
        yield "onnxsim", family, lambda source, target, origin=origin: simplified(origin, target)  # type: ignore[misc]
        for level in ("EXTENDED", "ALL"):
            yield f"ort-{level.lower()}", family, lambda s, t, o=origin, v=level: offline(o, t, v)  # type: ignore[misc]
    for family in ("bert", "vit"):
        origin = folder / "optimum" / family / "model.onnx"
        yield "ort-transformers", family, lambda source, target, origin=origin: fused(origin, target)  # type: ignore[misc]
    origin = folder / "optimum" / "bert" / "model.onnx"
    yield "ort-mha", "bert", lambda source, target, origin=origin: fused(origin, target, unpacked=True)  # type: ignore[misc]
    for family, forms in (("resnet", ("QDQ", "QOperator")), ("vit", ("QDQ",))):
        origin = folder / "optimum" / family / "model.onnx"
        for form in forms:
            yield f"ort-8bit-{form}", family, lambda s, t, o=origin, f=form: in_8_bits(o, t, f)  # type: ignore[misc]
    for family in ("bert", "llama"):
        origin = folder / "optimum" / family / "model.onnx"
        yield "ort-8bit-dynamic", family, lambda source, target, origin=origin: dynamic(origin, target)  # type: ignore[misc]
    for family in ("llama", "qwen3", "gemma2", "bert", "vit", "resnet"):
        yield "ours", family, ours
