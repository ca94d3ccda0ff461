"""DeepSeek V4 Flash 284B, DeepSeek's base model with 256 experts and compressed attention; 8-bit weights."""

model = dict(path="deepseek-ai/DeepSeek-V4-Flash-Base")
architecture = dict(
    model_type="deepseek_v4",
    num_hidden_layers=43,
    hidden_size=4096,
    num_attention_heads=64,
    num_key_value_heads=1,
    head_dim=512,
    vocab_size=129280,
    tie_word_embeddings=False,
    max_position_embeddings=1048576,
    num_experts_per_tok=6,
    moe_intermediate_size=2048,
    q_lora_rank=1024,
    n_routed_experts=256,
    n_shared_experts=1,
)
