"""Qwen3.6 27B, Alibaba's chat model with linear attention; its text half."""

model = dict(path="Qwen/Qwen3.6-27B")
architecture = dict(
    model_type="qwen3_5_text",
    num_hidden_layers=64,
    hidden_size=5120,
    intermediate_size=17408,
    num_attention_heads=24,
    num_key_value_heads=4,
    head_dim=256,
    vocab_size=248320,
    tie_word_embeddings=False,
    max_position_embeddings=262144,
    linear_conv_kernel_dim=4,
    linear_key_head_dim=128,
    linear_value_head_dim=128,
    linear_num_key_heads=16,
    linear_num_value_heads=48,
)
