"""MiniCPM3 4B, OpenBMB's chat model with latent attention."""

model = dict(path="openbmb/MiniCPM3-4B")
architecture = dict(
    model_type="minicpm3",
    num_hidden_layers=62,
    hidden_size=2560,
    intermediate_size=6400,
    num_attention_heads=40,
    num_key_value_heads=40,
    vocab_size=73448,
    tie_word_embeddings=True,
    max_position_embeddings=32768,
    q_lora_rank=768,
    kv_lora_rank=256,
    qk_nope_head_dim=64,
    qk_rope_head_dim=32,
    v_head_dim=64,
)
