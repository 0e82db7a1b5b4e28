"""A tiny Qwen3 as a GGUF file, for llama.cpp."""

from __future__ import annotations

from pathlib import Path

import gguf
from transformers import PreTrainedModel, PreTrainedTokenizerBase

_BLOCK = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_OTHERS = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def write_gguf(path: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, context: int = 256) -> Path:
    """
    Writes a Qwen3 model and a tokenizer of single characters in float32.

    Args:
        path: the new file.
        model: a `Qwen3ForCausalLM` without adapters.
        tokenizer: its tokenizer; ids it does not have become unused tokens.
        context: tokens the model says it was trained for.

    Returns:
        `path`.
    """
    config = model.config
    writer = gguf.GGUFWriter(path, "qwen3")
    writer.add_context_length(context)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    _add_tokenizer(writer, tokenizer, config.vocab_size)
    for name, tensor in model.state_dict().items():
        writer.add_tensor(_renamed(name), tensor.float().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _renamed(name: str) -> str:
    stem, kind = name.rsplit(".", 1)
    if stem in _OTHERS:
        return f"{_OTHERS[stem]}.{kind}"
    _, _, block, rest = stem.split(".", 3)
    return f"blk.{block}.{_BLOCK[rest]}.{kind}"


def _add_tokenizer(writer: gguf.GGUFWriter, tokenizer: PreTrainedTokenizerBase, size: int) -> None:
    tokens, kinds = [], []
    special = set(tokenizer.all_special_tokens)
    for index in range(size):
        token = tokenizer.convert_ids_to_tokens(index) if index < len(tokenizer) else None
        if token is None:
            tokens.append(f"[PAD{index}]")
            kinds.append(gguf.TokenType.UNUSED)
        else:
            tokens.append(token.replace(" ", "Ġ"))  # as GPT-2 writes a space
            kinds.append(gguf.TokenType.CONTROL if token in special else gguf.TokenType.NORMAL)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(tokenizer.eos_token_id)
    writer.add_pad_token_id(tokenizer.pad_token_id)
    writer.add_add_bos_token(False)
