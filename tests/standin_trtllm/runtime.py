"""Running: an imitation of the Python runtime. Hugging Face's model computes; the tensors get TensorRT-LLM's layout."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import SimpleNamespace

import torch

from standin_trtllm.bindings import ModelType

RENAMED = {  # written down by hand, independently of the adapter's table
    "input_layernorm": "input_layernorm",
    "self_attn": "attention",
    "self_attn.o_proj": "attention.dense",
    "post_attention_layernorm": "post_layernorm",
    "mlp": "mlp",
    "mlp.gate_proj": "mlp.fc",
    "mlp.up_proj": "mlp.gate",
    "mlp.down_proj": "mlp.proj",
    "": "",
}


def load(directory: str):
    """Load the Hugging Face model behind an engine."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()


def pack(tensor, real):
    """[batch, length, …] -> [tokens, …]."""
    return tensor[real]


def bookkeeping(ids, positions, real):
    """What upstream's debug buffer holds besides: the engine's inputs, packed where they go by token, and its cache."""
    lengths = real.sum(1).to(torch.int32)
    return {
        "input_ids": pack(ids, real).to(torch.int32),
        "position_ids": pack(positions, real).to(torch.int32),
        "context_lengths": lengths,
        "host_request_types": torch.zeros_like(lengths),
        "last_token_ids": lengths.cumsum(0).to(torch.int32),
        "past_key_value_0": torch.zeros(len(ids), 2, 2, 4, 16),
        "present_key_value_0": torch.zeros(len(ids), 2, 2, 4, 16),
    }


class Watcher:
    """Collects the tensors of one forward pass under TensorRT-LLM's names."""

    def __init__(self, model) -> None:
        self.found = {}
        modules = dict(model.named_modules())
        for i in range(model.config.num_hidden_layers):
            for theirs, ours in RENAMED.items():
                name = f"transformer.layers.{i}.{ours}".rstrip(".")
                self.watch(modules[f"model.layers.{i}.{theirs}".rstrip(".")], name)
            self.watch_qkv(modules[f"model.layers.{i}.self_attn"], f"transformer.layers.{i}.attention.qkv")
        self.watch(modules["model.norm"], "transformer.ln_f")
        self.watch(modules["lm_head"], "lm_head")

    def watch(self, module, name) -> None:
        def keep(_, args, kwargs, out):
            self.found[name] = out[0] if isinstance(out, tuple) else out
            given = kwargs.get("hidden_states", args[0] if args else None)
            self.found[f"{name}:in"] = given

        module.register_forward_hook(keep, with_kwargs=True)

    def watch_qkv(self, attention, name) -> None:
        parts = {}
        for which in "qkv":

            def keep(_, args, out, which=which):
                parts[which] = out
                if which == "v":
                    self.found[name] = torch.cat([parts["q"], parts["k"], parts["v"]], -1)

            getattr(attention, f"{which}_proj").register_forward_hook(keep)


class GenerationSession:
    def __init__(self, model_config, engine_buffer, mapping, debug_mode=False, **kwargs) -> None:
        self.debug_mode = debug_mode
        self.debug_buffer = {}
        self.debug_tensors = []
        self.dumped = []

    def dump_debug_buffers(self, step) -> None:
        self.dumped.append(step)


class ModelRunner:
    """Generates with a model; fails like upstream where upstream would."""

    @classmethod
    def from_dir(cls, engine_dir, rank=0, debug_mode=False):
        runner = object.__new__(importlib.import_module("tensorrt_llm.runtime.model_runner").ModelRunner)
        directory = Path(engine_dir)
        runner.names = json.loads((directory / f"outputs{rank}.json").read_text())
        config = json.loads((directory / "config.json").read_text())["pretrained_config"]
        runner.model = load(config["standin_model"])
        runner.watcher = Watcher(runner.model)
        runner.sources = json.loads((directory / "ditto" / f"taps.rank{rank}.json").read_text())["outputs"]
        if set(runner.names) - {"logits"} and not debug_mode:
            raise RuntimeError("Tensor names in engine are not the same as expected")
        runner.session = importlib.import_module("tensorrt_llm.runtime.generation").GenerationSession(
            None, None, None, debug_mode=debug_mode
        )
        runner.session.debug_tensors = [name for name in runner.names if name != "logits"]
        return runner

    def generate(self, batch_input_ids, stopping_criteria=None, logits_processor=None, **settings):
        """Generate one token after another on left-padded rows; a step's tensors are packed."""
        from transformers.cache_utils import DynamicCache

        assert all(row.dtype == torch.int32 for row in batch_input_ids)
        longest = max(map(len, batch_input_ids))
        mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in batch_input_ids])
        ids = torch.stack([torch.cat([row.new_zeros(longest - len(row)), row]) for row in batch_input_ids]).long()
        cache = DynamicCache()
        done = []
        for step in range(settings["max_new_tokens"]):
            scores = self._forward(ids, mask, cache)
            if logits_processor is not None:
                scores = logits_processor(step, torch.stack(done, 1) if done else ids, scores)
            done.append(scores.argmax(-1))
            if settings["end_id"] >= 0 and bool((done[-1] == settings["end_id"]).all()):
                break
            if stopping_criteria is not None and stopping_criteria(step, torch.stack(done, 1), scores):
                break
            self.session.dump_debug_buffers(step)
            ids = done[-1][:, None]
            mask = torch.cat([mask, torch.ones_like(ids)], 1)
        return torch.stack(done, 1)

    def _forward(self, ids, mask, cache):
        real = mask[:, -ids.shape[1] :].bool()
        positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        self.watcher.found = {}
        with torch.inference_mode():
            out = self.model(input_ids=ids, attention_mask=mask, position_ids=positions, past_key_values=cache)
        tensors = {"logits": out.logits, **self.watcher.found}
        sources = {name: tensors.get(self.sources[name]["source"]) for name in self.names if name != "logits"}
        self.session.debug_buffer = {
            **bookkeeping(ids, positions, real),
            **{name: pack(t, real) for name, t in {**sources, "logits": out.logits}.items() if t is not None},
        }
        return out.logits[:, -1]


class Executor:
    """Remembers how it was made and answers with what the facts say that the real one answers."""

    def __init__(self, model_path, model_type, executor_config) -> None:
        assert model_type is ModelType.DECODER_ONLY
        self.config = executor_config
        self.requests = []

    def enqueue_requests(self, requests):
        self.requests += requests
        return list(range(len(self.requests) - len(requests), len(self.requests)))

    def await_responses(self, ids):
        return [[SimpleNamespace(result=self._result(self.requests[i]))] for i in ids]

    def _result(self, request):
        limit = getattr(request, "max_tokens", None) or request.max_new_tokens
        wanted = getattr(request.output_config, "additional_model_outputs", None) or []
        length = len(request.input_token_ids)
        outputs = [SimpleNamespace(name=f"context_{w.name}", output=torch.zeros(length, 3)) for w in wanted]
        return SimpleNamespace(is_final=True, output_token_ids=[[7] * limit], additional_outputs=outputs)

    def get_latest_debug_tensors(self):
        debug = self.config.debug_config
        names = debug.debug_tensor_names or ["logits"]
        steps = range(debug.debug_tensors_max_iterations)
        made = [SimpleNamespace(iter=i, debug_tensors={n: torch.full((2,), float(i)) for n in names}) for i in steps]
        return made[::-1]

    def shutdown(self) -> None:
        self.requests = []


NAMES = {
    "tensorrt_llm.runtime.generation.GenerationSession": GenerationSession,
    "tensorrt_llm.runtime.model_runner.ModelRunner": ModelRunner,
    "tensorrt_llm.bindings.executor.Executor": Executor,
}
