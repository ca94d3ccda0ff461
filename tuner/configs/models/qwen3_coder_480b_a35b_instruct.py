"""Qwen3 Coder 480B-A35B Instruct, Alibaba's chat model for code with 160 experts, 35B active."""

model = dict(path="Qwen/Qwen3-Coder-480B-A35B-Instruct")
architecture = dict(
    model_type="qwen3_moe",
    num_hidden_layers=62,
    hidden_size=6144,
    intermediate_size=8192,
    num_attention_heads=96,
    num_key_value_heads=8,
    head_dim=128,
    vocab_size=151936,
    tie_word_embeddings=False,
    max_position_embeddings=262144,
    num_experts=160,
    num_experts_per_tok=8,
    moe_intermediate_size=2560,
)
