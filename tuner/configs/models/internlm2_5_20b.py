"""InternLM2.5 20B, Shanghai AI Laboratory's larger base model of the second generation's update."""

model = dict(path="internlm/internlm2_5-20b", chat_template="internlm2")
architecture = "internlm2_20b"
