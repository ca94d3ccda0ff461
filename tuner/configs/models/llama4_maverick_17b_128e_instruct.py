"""Llama 4 Maverick Instruct, Meta's chat model of 402B with 128 experts, 17B active; its text half."""

model = dict(path="meta-llama/Llama-4-Maverick-17B-128E-Instruct")
architecture = dict(
    model_type="llama4_text",
    num_hidden_layers=48,
    hidden_size=5120,
    intermediate_size=8192,
    num_attention_heads=40,
    num_key_value_heads=8,
    head_dim=128,
    vocab_size=202048,
    tie_word_embeddings=False,
    max_position_embeddings=1048576,
    num_experts_per_tok=1,
    intermediate_size_mlp=16384,
    num_local_experts=128,
    interleave_moe_layer_step=2,
)
