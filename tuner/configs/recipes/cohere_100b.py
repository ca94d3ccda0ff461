"""Command R+ on alpaca in two languages, which XTuner calls cohere_100b_128k_sp32."""

_base_ = "command_r_plus_full_alpaca_enzh_e3"

param_scheduler = dict(warmup_ratio=0.05)
