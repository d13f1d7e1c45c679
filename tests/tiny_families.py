"""Tiny models of many families, with tied weights where the family has them, as in a hub folder.

Windows and chunks are a few tokens wide, so that they take effect, and weights are large enough that caps, scales and
sinks do. A family is its `model_type`; `FAMILIES` has the differences from `COMMON` (`...`: no such setting). Heads are
32 wide, the least that vLLM supports on CPUs.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from streamrl.config.routers import SELECTION_BIASES
from tests.tiny_models import make_tokenizer

COMMON: Mapping[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 4096,
}
_FEW_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_ALTERNATING = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}
_GEMMA = {**_ALTERNATING, "final_logit_softcapping": 3.0, "query_pre_attn_scalar": 32}
_LATENT = {  # multi-head latent attention
    "q_lora_rank": 16,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "head_dim": 16,
    "num_key_value_heads": 2,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
}
_OLD = {"n_embd": 64, "n_layer": 2, "n_head": 2, "n_positions": 4096}
_MAMBA2 = {
    "mamba_n_heads": 4,
    "mamba_d_head": 32,
    "mamba_n_groups": 1,
    "mamba_d_state": 16,
    "mamba_chunk_size": 4,
    "mamba_expand": 2,
    "mamba_d_conv": 4,
}
_LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "layer_types": ["linear_attention", "full_attention"],
}

FAMILIES: Mapping[str, Mapping[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "qwen2_moe": {**_EXPERTS, "shared_expert_intermediate_size": 32},
    "qwen3_moe": _EXPERTS,
    "qwen3_next": {**_EXPERTS, **_LINEAR, "shared_expert_intermediate_size": 32},
    "mistral": {"sliding_window": 4},
    "mixtral": {**_FEW_EXPERTS, "sliding_window": None, "router_jitter_noise": 0.1},
    "gemma": {},
    "gemma2": {
        **_ALTERNATING,
        "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": 3.0,
        "query_pre_attn_scalar": 32,
    },
    "gemma3_text": {**_ALTERNATING, "final_logit_softcapping": 3.0, "query_pre_attn_scalar": 32},
    "phi": {"num_key_value_heads": 2},
    "phi3": {"sliding_window": 4, "pad_token_id": 0},
    "granite": {"logits_scaling": 5.0, "attention_multiplier": 0.1, "embedding_multiplier": 3.0},
    "granitemoe": {**_FEW_EXPERTS, "logits_scaling": 5.0, "attention_multiplier": 0.1},
    "granitemoehybrid": {
        **_FEW_EXPERTS,
        **_MAMBA2,
        "logits_scaling": 5.0,
        "shared_intermediate_size": 32,
        "layer_types": ["linear_attention", "full_attention"],
    },
    "cohere": {"logit_scale": 0.25},
    "cohere2": {**_ALTERNATING, "logit_scale": 0.25},
    "gpt2": _OLD,
    "gpt_bigcode": _OLD,
    "gpt_neox": {},
    "gpt_neo": {"num_layers": 2, "num_heads": 2, "attention_types": [[["global", "local"], 1]], "window_size": 4},
    "gptj": {**_OLD, "rotary_dim": 16},
    "codegen": {**_OLD, "hidden_size": 128, "n_embd": 128, "n_head": 4, "num_attention_heads": 4, "rotary_dim": 16},
    "opt": {"ffn_dim": 96, "word_embed_proj_dim": 64},
    "bloom": {"n_layer": 2, "n_head": 2},
    "falcon": {"new_decoder_architecture": False, "multi_query": True, "head_dim": ...},
    "mpt": {"d_model": 64, "n_heads": 2, "n_layers": 2, "max_seq_len": 4096},
    "mamba": {"state_size": 8},
    "mamba2": {
        "intermediate_size": ...,
        "num_heads": 4,
        "head_dim": 32,
        "n_groups": 1,
        "state_size": 16,
        "chunk_size": 4,
    },
    "falcon_mamba": {"state_size": 8},
    "lfm2": {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False},
    "gpt_oss": {**_FEW_EXPERTS, **_ALTERNATING},
    "olmo": {},
    "olmo2": {},
    "olmo3": _ALTERNATING,
    "olmoe": _FEW_EXPERTS,
    "smollm3": {"no_rope_layers": [1, 0], "pad_token_id": 0},
    "stablelm": {},
    "starcoder2": {"sliding_window": 4},
    "glm": {},
    "glm4": {},
    "glm4_moe": {**_EXPERTS, "n_routed_experts": 4, "first_k_dense_replace": 1},
    "afmoe": {**_EXPERTS, "num_shared_experts": 1, "layer_types": ["sliding_attention", "full_attention"]},
    "ernie4_5_moe": {
        "moe_num_experts": 4,
        "moe_k": 2,
        "moe_num_shared_experts": 1,
        "moe_intermediate_size": 32,
        "moe_layer_start_index": 1,
    },
    "hy_v3": {**_EXPERTS, "mlp_layer_types": ["dense", "sparse"]},
    "laguna": {
        **_EXPERTS,
        **_ALTERNATING,
        "shared_expert_intermediate_size": 32,
        "mlp_layer_types": ["dense", "sparse"],
        "num_attention_heads_per_layer": [2, 2],
    },
    "lfm2_moe": {**_EXPERTS, "num_dense_layers": 1, "layer_types": ["conv", "full_attention"]},
    "minimax_m2": {**_FEW_EXPERTS, "rotary_dim": 32},
    "deepseek_v2": _LATENT,
    "deepseek_v3": _LATENT,
    "ernie4_5": {},
    "exaone4": _ALTERNATING,
    "nemotron": {},
    "seed_oss": {},
    "helium": {},
    "llama4_text": {
        **_FEW_EXPERTS,
        "attention_chunk_size": 4,
        "layer_types": ["chunked_attention", "full_attention"],
        "intermediate_size_mlp": 96,
    },
    "falcon_h1": {**_MAMBA2, "lm_head_multiplier": 0.25, "mamba_d_ssm": 128},
    "jamba": {
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "num_experts": 4,
        "use_mamba_kernels": False,
        "mamba_d_state": 8,
        "mamba_dt_rank": 4,
    },
    "bamba": {**_MAMBA2, "attn_layer_indices": [1]},
    "zamba2": {
        "num_hidden_layers": 3,
        "layers_block_type": ["mamba", "hybrid", "mamba"],
        "num_mem_blocks": 1,
        "mamba_d_state": 16,
        "mamba_headdim": 32,
        "n_mamba_heads": 4,
        "chunk_size": 4,
        "use_mamba_kernels": False,
        "num_key_value_heads": 2,
        "adapter_rank": 8,
        "head_dim": ...,
    },
    "recurrent_gemma": {
        "num_hidden_layers": 3,
        "attention_window_size": 4,
        "logits_soft_cap": 3.0,
        "lru_width": 64,
        "block_types": ["recurrent", "recurrent", "attention"],
    },
    "minimax": {**_FEW_EXPERTS, "layer_types": ["linear_attention", "full_attention"], "block_size": 4},
    "nanochat": {"final_logit_softcapping": 3.0},
}


def make_family(folder: Path, family: str, *, seed: int = 0, scale: float = 0.15, **changes: Any) -> Path:
    """Make a model with random weights of this spread, and norms that are not all one."""
    tokenizer = make_tokenizer()
    settings = {
        **COMMON,
        **FAMILIES[family],
        "vocab_size": len(tokenizer),
        "initializer_range": scale,
        "eos_token_id": tokenizer.eos_token_id,
        "bos_token_id": None,
        **changes,
    }
    settings.setdefault("pad_token_id", tokenizer.pad_token_id)
    config = CONFIG_MAPPING[family](**{name: value for name, value in settings.items() if value is not ...})
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.ndim >= 2 and "A_log" not in name:
                    parameter.normal_(0, scale)
                else:
                    parameter += scale * torch.randn_like(parameter)
            for name, bias in (*model.named_parameters(), *model.named_buffers()):
                if name.endswith(SELECTION_BIASES):
                    # So that bfloat16 would be too coarse.
                    bias.copy_(4 + scale * torch.randn_like(bias))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
