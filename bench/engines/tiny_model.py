#!/usr/bin/env python3
"""Writes a tiny random-weight llama model for llama.cpp: real kernels, real KV cache, no sense.

usage: tiny_model.py OUT.gguf TEXT [TEXT ...]     the tokenizer is trained on the TEXTs

The same texts give the same model, byte for byte. Sizes are chosen so that prefill is slow enough to be
measured on one core (about 5,000 tokens/s) and everything is ready in under a second.
"""
import json
import sys

import gguf
import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

VOCABULARY, CONTEXT = 4096, 8192
HIDDEN, LAYERS, HEADS, FEED_FORWARD = 256, 4, 4, 704
BOS, EOS, UNKNOWN, TURN, END = SPECIAL = ["<s>", "</s>", "<unk>", "<|turn|>", "<|end|>"]
CHAT = (
    "{% for m in messages %}<|turn|>{{ m['role'] }}\n{{ m['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"
)


def train(texts):
    """A byte-level BPE tokenizer: any text has tokens, about four bytes each."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=SPECIAL,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    model = json.loads(tokenizer.to_str())["model"]
    merges = [m if isinstance(m, str) else " ".join(m) for m in model["merges"]]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    return tokens, merges


def describe(out, tokens, merges):
    out.add_name("tiny-random")
    out.add_context_length(CONTEXT)
    out.add_embedding_length(HIDDEN)
    out.add_block_count(LAYERS)
    out.add_head_count(HEADS)
    out.add_head_count_kv(HEADS)
    out.add_feed_forward_length(FEED_FORWARD)
    out.add_rope_dimension_count(HIDDEN // HEADS)
    out.add_rope_freq_base(10_000.0)
    out.add_layer_norm_rms_eps(1e-5)
    out.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
    out.add_vocab_size(len(tokens))
    out.add_tokenizer_model("gpt2")
    out.add_tokenizer_pre("gpt-2")
    out.add_token_list(tokens)
    kinds = [gguf.TokenType.CONTROL if t in SPECIAL else gguf.TokenType.NORMAL for t in tokens]
    out.add_token_types(kinds)
    out.add_token_merges(merges)
    out.add_bos_token_id(tokens.index(BOS))
    out.add_eos_token_id(tokens.index(END))
    out.add_unk_token_id(tokens.index(UNKNOWN))
    out.add_add_bos_token(False)
    out.add_chat_template(CHAT)


def weigh(out, vocabulary):
    random = np.random.default_rng(seed=7)

    def matrix(name, rows, columns):
        weights = random.standard_normal((rows, columns), dtype=np.float32)
        out.add_tensor(f"{name}.weight", (weights / np.sqrt(columns)).astype(np.float16))

    def norm(name):
        out.add_tensor(f"{name}.weight", np.ones(HIDDEN, dtype=np.float32))

    matrix("token_embd", vocabulary, HIDDEN)
    norm("output_norm")
    matrix("output", vocabulary, HIDDEN)
    for layer in range(LAYERS):
        block = f"blk.{layer}"
        norm(f"{block}.attn_norm")
        for part in ("attn_q", "attn_k", "attn_v", "attn_output"):
            matrix(f"{block}.{part}", HIDDEN, HIDDEN)
        norm(f"{block}.ffn_norm")
        matrix(f"{block}.ffn_gate", FEED_FORWARD, HIDDEN)
        matrix(f"{block}.ffn_up", FEED_FORWARD, HIDDEN)
        matrix(f"{block}.ffn_down", HIDDEN, FEED_FORWARD)


def main(path, *texts):
    contents = [open(text, encoding="utf-8").read() for text in texts]
    tokens, merges = train(contents)
    out = gguf.GGUFWriter(path, "llama")
    describe(out, tokens, merges)
    weigh(out, len(tokens))
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    main(*sys.argv[1:])
