"""Qwen3 Coder 30B-A3B Instruct, Alibaba's chat model for code with 128 experts, 3B active."""

model = dict(path="Qwen/Qwen3-Coder-30B-A3B-Instruct")
architecture = dict(
    model_type="qwen3_moe",
    num_hidden_layers=48,
    hidden_size=2048,
    intermediate_size=5472,
    num_attention_heads=32,
    num_key_value_heads=4,
    head_dim=128,
    vocab_size=151936,
    tie_word_embeddings=False,
    max_position_embeddings=262144,
    num_experts=128,
    num_experts_per_tok=8,
    moe_intermediate_size=768,
)
