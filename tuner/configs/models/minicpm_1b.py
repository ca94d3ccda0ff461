"""MiniCPM 1B, OpenBMB's small chat model; remote code only."""

model = dict(path="openbmb/MiniCPM-1B-sft-bf16", remote_code=True)
