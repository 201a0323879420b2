"""Tiny random models of transformers' families: text, vision, audio, detection, mixtures of experts, state spaces."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from tests.zoo_inputs import VOCABULARY, described, patched, pictured, points, tiled, typed

IDS: Mapping[str, Any] = {"vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": 2}
USUAL: Mapping[str, Any] = {
    **IDS,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "initializer_range": 0.2,
}
FULL: Mapping[str, Any] = {name: value for name, value in USUAL.items() if name != "num_key_value_heads"}
OF_GPT: Mapping[str, Any] = {
    **IDS,
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 128,
    "initializer_range": 0.2,
}
SCANNED: Mapping[str, Any] = {
    **IDS, "hidden_size": 64, "num_hidden_layers": 2, "state_size": 8, "initializer_range": 0.2, "pad_token_id": 0
}  # fmt: skip
EXPERTS: Mapping[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
ROUTED: Mapping[str, Any] = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
MAMBA: Mapping[str, Any] = {
    "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_d_state": 8, "mamba_chunk_size": 8
}  # fmt: skip
ENCODER: Mapping[str, Any] = {**FULL, "max_position_embeddings": 64}
SEQ2SEQ: Mapping[str, Any] = {
    **IDS, "d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "init_std": 0.2,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 96, "decoder_ffn_dim": 96, "pad_token_id": 0,
}  # fmt: skip
VISION: Mapping[str, Any] = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 32,
    "patch_size": 8, "initializer_range": 0.2,
}  # fmt: skip
STAGES: Mapping[str, Any] = {"embedding_size": 16, "hidden_sizes": [16, 32], "depths": [1, 1], "layer_type": "basic"}
AUDIO: Mapping[str, Any] = {
    "vocab_size": 32, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "conv_dim": [32, 32, 32], "conv_stride": [5, 4, 2], "conv_kernel": [10, 4, 2], "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4, "initializer_range": 0.2,
}  # fmt: skip


SAM_VISION: Mapping[str, Any] = {
    "hidden_size": 32, "output_channels": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 32,
    "patch_size": 8, "mlp_dim": 64, "window_size": 2, "global_attn_indexes": [1], "num_pos_feats": 8,
}  # fmt: skip
SAM_PROMPT: Mapping[str, Any] = {"hidden_size": 16, "image_size": 32, "patch_size": 8, "mask_input_channels": 4}
SAM_DECODER: Mapping[str, Any] = {
    "hidden_size": 16, "mlp_dim": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "iou_head_hidden_dim": 16
}  # fmt: skip
QWEN_VISION: Mapping[str, Any] = {
    "depth": 2, "embed_dim": 64, "hidden_size": 64, "num_heads": 4, "mlp_ratio": 2, "patch_size": 4,
    "spatial_merge_size": 2, "temporal_patch_size": 2,
}  # fmt: skip
QWEN_WINDOWS: Mapping[str, Any] = {
    "depth": 2, "hidden_size": 64, "out_hidden_size": 64, "num_heads": 4, "intermediate_size": 96, "patch_size": 4,
    "spatial_merge_size": 2, "temporal_patch_size": 2, "window_size": 8, "fullatt_block_indexes": [1],
}  # fmt: skip
MULTIMODAL: Mapping[str, Any] = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}


@dataclass(frozen=True)
class Family:
    """One family: its configuration's class and fields, its model's class. ``eager``: it takes an attention function.

    ``decoder``: it is stepped with a cache; others run once on inputs that are made from the configuration, or on
    ``examples``.
    """

    config: str
    model: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    decoder: bool = True
    eager: bool = True
    examples: Callable[[], Mapping[str, torch.Tensor]] | None = None

    def __call__(self) -> Any:
        """Make the model. Norms and biases are random too, so that a wrong one is visible."""
        import transformers

        torch.manual_seed(0)
        implementation = {"attn_implementation": "eager"} if self.eager else {}
        config = getattr(transformers, self.config)(**self.fields, **implementation)
        model = getattr(transformers, self.model)(config).eval().requires_grad_(False)
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1 and ("norm" in name or "ln" in name):
                parameter.add_(0.1 * torch.randn(parameter.shape))
        return model


def causal(name: str, base: Mapping[str, Any] = USUAL, model: str = "", **fields: Any) -> Family:
    """Describe a decoder: ``Llama`` is LlamaConfig and LlamaForCausalLM."""
    return Family(f"{name}Config", model or f"{name.removesuffix('Text')}ForCausalLM", {**base, **fields})


def plain(
    name: str,
    model: str,
    base: Mapping[str, Any],
    *,
    eager: bool = True,
    examples: Callable[[], Mapping[str, torch.Tensor]] | None = None,
    **fields: Any,
) -> Family:
    """Describe a model that runs once."""
    return Family(f"{name}Config", model, {**base, **fields}, decoder=False, eager=eager, examples=examples)


DECODERS: Mapping[str, Family] = {
    "llama": causal("Llama"),
    "llama4": causal(
        "Llama4Text", head_dim=16, num_local_experts=4, intermediate_size_mlp=96, attention_chunk_size=8,
        interleave_moe_layer_step=1,
    ),
    "mistral": causal("Mistral", head_dim=16, sliding_window=8),
    "ministral": causal("Ministral", head_dim=16, sliding_window=8),
    "mixtral": causal("Mixtral", num_local_experts=4, num_experts_per_tok=2),
    "qwen2": causal("Qwen2"),
    "qwen3": causal("Qwen3", head_dim=16),
    "qwen2_moe": causal("Qwen2Moe", shared_expert_intermediate_size=32, **EXPERTS),
    "qwen3_moe": causal("Qwen3Moe", head_dim=16, **EXPERTS),
    "gemma": causal("Gemma", head_dim=16),
    "gemma2": causal("Gemma2", head_dim=16, sliding_window=8, query_pre_attn_scalar=16),
    "gemma3": causal(
        "Gemma3Text", head_dim=16, sliding_window=8, query_pre_attn_scalar=16,
        layer_types=["sliding_attention", "full_attention"],
    ),
    "gemma3n": causal(
        "Gemma3nText", {**USUAL, "num_hidden_layers": 4}, head_dim=16, sliding_window=8, num_kv_shared_layers=2,
        layer_types=["sliding_attention", "full_attention"] * 2, vocab_size_per_layer_input=VOCABULARY,
        hidden_size_per_layer_input=16, laurel_rank=8, activation_sparsity_pattern=[0.0] * 4,
    ),
    "phi": causal("Phi"),
    "phi3": causal("Phi3"),
    "gpt2": causal("GPT2", OF_GPT, "GPT2LMHeadModel"),
    "gpt_neo": causal(
        "GPTNeo", {**IDS, "hidden_size": 64, "num_layers": 2, "num_heads": 4, "intermediate_size": 96},
        attention_types=[[["global", "local"], 1]], window_size=8, max_position_embeddings=128, initializer_range=0.2,
    ),
    "gpt_neox": causal("GPTNeoX", FULL),
    "gptj": causal("GPTJ", OF_GPT, rotary_dim=8),
    "codegen": causal("CodeGen", OF_GPT, rotary_dim=8),
    "gpt_bigcode": causal("GPTBigCode", OF_GPT, n_inner=96, multi_query=True),
    "opt": causal(
        "OPT", {**IDS, "hidden_size": 64, "ffn_dim": 96, "num_hidden_layers": 2, "num_attention_heads": 4},
        max_position_embeddings=128, word_embed_proj_dim=64, init_std=0.2, pad_token_id=0,
    ),
    "xglm": causal(
        "XGLM", {**IDS, "d_model": 64, "ffn_dim": 96, "num_layers": 2, "attention_heads": 4},
        max_position_embeddings=128, init_std=0.2, pad_token_id=0,
    ),
    "bloom": causal("Bloom", {**IDS, "hidden_size": 64, "n_layer": 2, "n_head": 4}, initializer_range=0.2),
    "falcon": causal("Falcon", FULL, multi_query=True, new_decoder_architecture=False),
    "falcon_new": causal("Falcon", FULL, num_kv_heads=2, new_decoder_architecture=True),
    "mpt": causal("Mpt", {**IDS, "d_model": 64, "n_layers": 2, "n_heads": 4, "max_seq_len": 128}),
    "starcoder2": causal("Starcoder2", sliding_window=8),
    "stablelm": causal("StableLm"),
    "olmo": causal("Olmo"),
    "olmo2": causal("Olmo2"),
    "olmo3": causal("Olmo3", sliding_window=8),
    "olmoe": causal("Olmoe", num_experts=4, num_experts_per_tok=2),
    "cohere": causal("Cohere"),
    "cohere2": causal("Cohere2", sliding_window=8),
    "granite": causal("Granite"),
    "granitemoe": causal("GraniteMoe", num_local_experts=4, num_experts_per_tok=2),
    "deepseek_v2": causal(
        "DeepseekV2", {**USUAL, "num_key_value_heads": 4}, q_lora_rank=16, kv_lora_rank=16, qk_nope_head_dim=8,
        qk_rope_head_dim=8, v_head_dim=16, n_shared_experts=1, first_k_dense_replace=1, n_group=1, topk_group=1,
        topk_method="greedy", **ROUTED,
    ),
    "gpt_oss": causal(
        "GptOss", head_dim=16, num_local_experts=4, num_experts_per_tok=2, sliding_window=8,
        layer_types=["sliding_attention", "full_attention"],
    ),
    "smollm3": causal("SmolLM3", no_rope_layers=[1, 0]),
    "glm": causal("Glm", head_dim=16),
    "glm4": causal("Glm4", head_dim=16),
    "glm4_moe": causal("Glm4Moe", head_dim=16, first_k_dense_replace=1, n_group=1, topk_group=1, **ROUTED),
    "ernie4_5": causal("Ernie4_5", head_dim=16),
    "nemotron": causal("Nemotron"),
    "arcee": causal("Arcee"),
    "helium": causal("Helium", head_dim=16),
    "exaone4": causal("Exaone4", sliding_window=8),
    "seed_oss": causal("SeedOss", head_dim=16),
    "hunyuan_v1": causal("HunYuanDenseV1", head_dim=16),
    "biogpt": causal("BioGpt", FULL),
    "persimmon": causal("Persimmon", FULL),
    "bert_decoder": causal("Bert", FULL, "BertLMHeadModel", is_decoder=True),
    "mamba2": causal("Mamba2", SCANNED, num_heads=8, head_dim=16, n_groups=1, expand=2, chunk_size=8),
    "lfm2": causal("Lfm2", layer_types=["conv", "full_attention"], conv_L_cache=3, block_auto_adjust_ff_dim=False),
    "granitemoehybrid": causal(
        "GraniteMoeHybrid", num_local_experts=2, num_experts_per_tok=1, layer_types=["mamba", "attention"],
        shared_intermediate_size=32, **MAMBA,
    ),
}  # fmt: skip

MODULES: Mapping[str, Family] = {
    "mamba": plain("Mamba", "MambaForCausalLM", SCANNED, eager=False),
    "falcon_mamba": plain("FalconMamba", "FalconMambaForCausalLM", SCANNED, eager=False),
    "bamba": plain("Bamba", "BambaForCausalLM", USUAL, attn_layer_indices=[1], **MAMBA),
    "zamba": plain(
        "Zamba", "ZambaForCausalLM", USUAL, num_hidden_layers=5, attn_layer_period=2, attn_layer_offset=1,
        use_mamba_kernels=False, mamba_d_state=8, mamba_dt_rank=4, n_mamba_heads=2, attention_hidden_size=128,
        num_key_value_heads=4,
    ),
    "qwen3_next": plain(
        "Qwen3Next", "Qwen3NextForCausalLM", USUAL, head_dim=16, shared_expert_intermediate_size=32,
        linear_num_value_heads=4, linear_num_key_heads=2, linear_key_head_dim=16, linear_value_head_dim=16,
        layer_types=["linear_attention", "full_attention"], **EXPERTS,
    ),
    "rwkv": plain(
        "Rwkv", "RwkvForCausalLM", {**IDS, "hidden_size": 64, "num_hidden_layers": 2, "context_length": 64},
        eager=False, attention_hidden_size=64, intermediate_size=96,
    ),
    "recurrent_gemma": plain(
        "RecurrentGemma", "RecurrentGemmaForCausalLM", {**USUAL, "num_hidden_layers": 3, "num_key_value_heads": 1},
        lru_width=64, attention_window_size=8, block_types=["recurrent", "recurrent", "attention"],
        w_init_variance_scale=0.1,
    ),
    "bert": plain("Bert", "BertModel", ENCODER),
    "bert_mlm": plain("Bert", "BertForMaskedLM", ENCODER),
    "roberta": plain("Roberta", "RobertaForSequenceClassification", ENCODER),
    "deberta_v2": plain(
        "DebertaV2", "DebertaV2Model", ENCODER, eager=False, relative_attention=True, pos_att_type=["p2c", "c2p"],
        max_relative_positions=16, position_buckets=8, norm_rel_ebd="layer_norm",
    ),
    "distilbert": plain(
        "DistilBert", "DistilBertForSequenceClassification", {"vocab_size": VOCABULARY, "dim": 64, "hidden_dim": 96},
        n_layers=2, n_heads=4, max_position_embeddings=64, initializer_range=0.2,
    ),
    "electra": plain("Electra", "ElectraModel", ENCODER, embedding_size=32),
    "modernbert": plain(
        "ModernBert", "ModernBertModel", ENCODER, local_attention=8, global_attn_every_n_layers=2, cls_token_id=1,
        sep_token_id=2,
    ),
    "albert": plain("Albert", "AlbertModel", ENCODER, embedding_size=32),
    "mpnet": plain("MPNet", "MPNetModel", ENCODER),
    "t5": plain(
        "T5", "T5ForConditionalGeneration", {"vocab_size": VOCABULARY, "d_model": 64, "d_kv": 16, "d_ff": 96},
        eager=False, num_layers=2, num_heads=4, pad_token_id=0, decoder_start_token_id=0,
    ),
    "bart": plain("Bart", "BartForConditionalGeneration", SEQ2SEQ, max_position_embeddings=64),
    "marian": plain("Marian", "MarianMTModel", SEQ2SEQ, max_position_embeddings=64, decoder_start_token_id=2),
    "whisper": plain(
        "Whisper", "WhisperForConditionalGeneration", SEQ2SEQ, num_mel_bins=16, max_source_positions=30,
        max_target_positions=32, decoder_start_token_id=1, suppress_tokens=None, begin_suppress_tokens=None,
    ),
    "whisper_tiny": plain("Whisper", "WhisperForConditionalGeneration", {}),  # the configuration's own sizes
    "vit": plain("ViT", "ViTForImageClassification", VISION),
    "deit": plain("DeiT", "DeiTModel", VISION),
    "beit": plain("Beit", "BeitModel", VISION),
    "dinov2": plain("Dinov2", "Dinov2Model", {k: v for k, v in VISION.items() if k != "intermediate_size"}),
    "convnext": plain(
        "ConvNext", "ConvNextForImageClassification", {"hidden_sizes": [16, 32], "depths": [1, 1]}, eager=False,
        num_stages=2, image_size=32,
    ),
    "resnet": plain("ResNet", "ResNetForImageClassification", STAGES, eager=False),
    "resnet50": plain("ResNet", "ResNetForImageClassification", {}, eager=False),  # the configuration's own sizes
    "regnet": plain("RegNet", "RegNetForImageClassification", STAGES, eager=False, layer_type="x", groups_width=8),
    "mobilenet_v2": plain(
        "MobileNetV2", "MobileNetV2ForImageClassification", {"depth_multiplier": 0.25, "image_size": 32}, eager=False
    ),
    "segformer": plain(
        "Segformer", "SegformerForSemanticSegmentation", {"num_encoder_blocks": 2, "depths": [1, 1]}, eager=False,
        sr_ratios=[4, 2], hidden_sizes=[16, 32], patch_sizes=[7, 3], strides=[4, 2], num_attention_heads=[1, 2],
        mlp_ratios=[2, 2], decoder_hidden_size=32, initializer_range=0.2, image_size=64,
    ),
    "swin": plain(
        "Swin", "SwinForImageClassification", {"image_size": 32, "patch_size": 4, "embed_dim": 16, "depths": [1, 1]},
        num_heads=[2, 4], window_size=4,
    ),
    "clip": plain(
        "CLIP", "CLIPModel", {"text_config": {**ENCODER}, "vision_config": {**VISION}}, projection_dim=32
    ),
    "siglip": plain("Siglip", "SiglipModel", {"text_config": {**ENCODER}, "vision_config": {**VISION}}),
    "wav2vec2": plain("Wav2Vec2", "Wav2Vec2ForCTC", AUDIO),
    "hubert": plain("Hubert", "HubertModel", AUDIO),
    "wavlm": plain("WavLM", "WavLMModel", AUDIO, eager=False),
    "detr": plain(
        "Detr", "DetrForObjectDetection", SEQ2SEQ, backbone=None, use_timm_backbone=False, num_queries=5,
        use_pretrained_backbone=False, backbone_config={"model_type": "resnet", "out_features": ["stage2"], **STAGES},
    ),
    "yolos": plain(
        "Yolos", "YolosForObjectDetection", {**VISION, "image_size": [32, 32]}, num_detection_tokens=5,
    ),
    "dinov3": plain("DINOv3ViT", "DINOv3ViTModel", VISION),
    "mobilenet_v1": plain(
        "MobileNetV1", "MobileNetV1ForImageClassification", {"depth_multiplier": 0.25, "image_size": 32}, eager=False
    ),
    "mobilevit": plain(
        "MobileViT", "MobileViTForImageClassification", {"image_size": 64, "hidden_sizes": [16, 24, 32]}, eager=False,
        neck_hidden_sizes=[8, 8, 16, 16, 16, 16, 32],
    ),
    "videomae": plain("VideoMAE", "VideoMAEModel", VISION, num_frames=4),
    "wav2vec2_conformer": plain("Wav2Vec2Conformer", "Wav2Vec2ConformerForCTC", AUDIO, eager=False),
    "ast": plain(
        "AST", "ASTForAudioClassification", {**VISION, "patch_size": 16}, max_length=64, num_mel_bins=16,
    ),
    "dac": plain(
        "Dac", "DacModel", {"encoder_hidden_size": 8, "decoder_hidden_size": 16, "codebook_size": 32}, eager=False,
        downsampling_ratios=[2, 2], upsampling_ratios=[2, 2], codebook_dim=4, n_codebooks=2,
    ),
    "patchtst": plain(
        "PatchTST", "PatchTSTForPrediction", {"d_model": 32, "ffn_dim": 64, "num_hidden_layers": 2}, eager=False,
        num_attention_heads=4, num_input_channels=2, context_length=32, patch_length=8, patch_stride=8,
        prediction_length=8,
    ),
    "sam": plain(
        "Sam", "SamModel", {"vision_config": SAM_VISION}, examples=points, prompt_encoder_config=SAM_PROMPT,
        mask_decoder_config=SAM_DECODER,
    ),
    "blip": plain(
        "Blip", "BlipForConditionalGeneration", {"vision_config": {**VISION}, "projection_dim": 32},
        text_config={**ENCODER, "encoder_hidden_size": 64, "projection_dim": 32}, examples=described,
    ),
    "llava": plain(
        "Llava", "LlavaForConditionalGeneration", {"text_config": {"model_type": "llama", **USUAL}},
        vision_config={"model_type": "clip_vision_model", **VISION, "projection_dim": 32}, image_token_index=5,
        image_token_id=5, vision_feature_layer=-1, examples=pictured,
    ),
    "llava_siglip": plain(
        "Llava", "LlavaForConditionalGeneration", {"text_config": {"model_type": "qwen2", **USUAL}},
        vision_config={"model_type": "siglip_vision_model", **VISION}, image_token_index=5, image_token_id=5,
        vision_feature_layer=-1, vision_feature_select_strategy="full", examples=pictured,
    ),
    "paligemma": plain(
        "PaliGemma", "PaliGemmaForConditionalGeneration", {"image_token_index": 5, "image_token_id": 5},
        text_config={"model_type": "gemma", **USUAL, "head_dim": 16},
        vision_config={"model_type": "siglip_vision_model", **VISION},
        projection_dim=64, examples=typed,
    ),
    "gemma3_vl": plain(
        "Gemma3", "Gemma3ForConditionalGeneration",
        {"text_config": {"head_dim": 16, "sliding_window": 8, "query_pre_attn_scalar": 16, **USUAL}},
        vision_config={"model_type": "siglip_vision_model", **VISION}, image_token_index=5, image_token_id=5,
        mm_tokens_per_image=16, examples=typed,
    ),
    "smolvlm": plain(
        "SmolVLM", "SmolVLMForConditionalGeneration", {"text_config": {"model_type": "llama", **USUAL}},
        vision_config={**VISION}, image_token_id=5, scale_factor=2, pad_token_id=0, examples=tiled,
    ),
    "qwen2_5_vl": plain(
        "Qwen2_5_VL", "Qwen2_5_VLForConditionalGeneration", {"vision_config": QWEN_WINDOWS},
        text_config={**USUAL, "rope_parameters": MULTIMODAL}, image_token_id=5, video_token_id=6,
        vision_start_token_id=7, vision_end_token_id=8, examples=patched,
    ),
    "qwen2_vl": plain(
        "Qwen2VL", "Qwen2VLForConditionalGeneration", {"vision_config": QWEN_VISION},
        text_config={**USUAL, "rope_parameters": MULTIMODAL}, image_token_id=5, video_token_id=6,
        vision_start_token_id=7, vision_end_token_id=8, examples=patched,
    ),
}  # fmt: skip
FAMILIES: Mapping[str, Family] = {**DECODERS, **MODULES}
MAIN = ("llama", "mistral", "qwen3", "gemma3", "gpt2", "mixtral", "bert", "t5", "whisper", "vit", "resnet", "wav2vec2")
"""Families that are also run in float16, and from a directory."""


def factory(name: str) -> Callable[[], Any]:
    """Return a function that makes a family's model, with its examples if it has some, called like the family."""
    family = FAMILIES[name]
    make = partial(family) if family.examples is None else lambda: (family(), dict(family.examples()))
    make.__name__ = name  # type: ignore[attr-defined]
    return make
