"""DeepSeek V2 Lite 16B, DeepSeek's base model with 64 experts, 2.4B active."""

model = dict(path="deepseek-ai/DeepSeek-V2-Lite", chat_template="deepseek")
architecture = dict(
    _base_="deepseek_v2_chat",
    num_hidden_layers=27,
    hidden_size=2048,
    intermediate_size=10944,
    num_attention_heads=16,
    num_key_value_heads=16,
    moe_intermediate_size=1408,
    q_lora_rank=None,
    n_routed_experts=64,
)
